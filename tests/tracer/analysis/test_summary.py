"""The whole analysis: published figures of real traces, and what it says in words."""

import io
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from rich.console import Console

from tracer.analysis.summary import COLUMNS, Analysis, analyze, rank_correlation
from tracer.analysis.text import in_words, print_analysis
from tracer.errors import TraceError
from tracer.importing import import_trace
from tracer.schema import SCHEMA, Footer, Request
from tracer.tracefile import read_footer, read_table

TRACES = Path(__file__).resolve().parents[4] / "shared/traces"
MOONCAKE = TRACES / "mooncake/conversation_trace.head.jsonl"
AZURE = TRACES / "azure2023/AzureLLMInferenceTrace_conv.csv"


def analysis_of(path: Path) -> Analysis:
    return analyze(read_table(path, COLUMNS), read_footer(path), path.name)


def table(rows: list[Request]) -> pa.Table:
    numbered: list[dict[str, Any]] = [{"request_id": k, **row} for k, row in enumerate(rows)]
    return pa.Table.from_pylist(numbered, schema=SCHEMA)


def printed(found: Analysis) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_analysis(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the public Mooncake trace is not beside this checkout")
def test_mooncake_head_has_every_published_figure(tmp_path: Path) -> None:
    import_trace(MOONCAKE, tmp_path / "m.parquet")

    found = analysis_of(tmp_path / "m.parquet")

    sharing = found.source_sharing
    assert sharing is not None
    assert (sharing.references, sharing.unique, sharing.hits_infinite) == (197_084, 128_076, 69_008)
    assert sharing.lru_hits == {"1000": 8_704, "2000": 10_643, "5000": 21_987, "10000": 40_584, "20000": 55_457}
    assert round(sharing.block_hit_rate, 6) == 0.350145
    assert round(sharing.token_hit_rate, 6) == 0.356860
    assert round(sharing.mean_request_hit_rate, 6) == 0.371328
    assert found.lengths.input_tokens is not None and found.lengths.input_tokens.sum == 98_974_652
    assert found.lengths.output_tokens is not None and found.lengths.output_tokens.sum == 2_772_953
    assert found.top_prefixes[0].requests == found.requests == 7_980  # block 0 is in every request
    assert found.arrivals.grid_s == 3.0
    assert found.arrivals.gap_cv == pytest.approx(1.0, abs=0.05)
    assert found.arrivals.gap_cv_as_recorded is not None and found.arrivals.gap_cv_as_recorded > 2.5
    text = printed(found)
    assert "time stamps lie on a grid of 3 s" in text and "90 % of those hits need 14.8 M tokens of KV memory" in text


@pytest.mark.skipif(not AZURE.exists(), reason="the public Azure trace is not beside this checkout")
def test_azure_conversations_have_every_published_figure(tmp_path: Path) -> None:
    import_trace(AZURE, tmp_path / "a.parquet")

    found = analysis_of(tmp_path / "a.parquet")

    assert found.lengths.input_tokens is not None and found.lengths.input_tokens.sum == 22_361_870
    assert found.lengths.output_tokens is not None and found.lengths.output_tokens.sum == 4_088_665
    assert round(found.arrivals.span_s, 1) == 3501.7
    assert found.arrivals.gap_cv is not None and round(found.arrivals.gap_cv, 2) == 1.09
    rounded = {window: round(value or 0, 2) for window, value in found.arrivals.dispersion.items()}
    assert rounded == {"1s": 1.39, "10s": 4.00, "60s": 20.55}
    assert found.source_sharing is None and found.engine_sharing is None and found.sharing_groups is None
    assert "names no prefix blocks" in printed(found)


def conversation() -> list[Request]:
    """Two sessions, one of two turns, under one system block of 16 tokens; one request failed."""
    return [
        {"arrival_ns": 0, "session_id": 0, "input_tokens": 40, "output_tokens": 24, "input_blocks": [0, 1]},
        {"arrival_ns": 10**9, "session_id": 1, "input_tokens": 33, "output_tokens": 2, "input_blocks": [0, 2]},
        {
            "arrival_ns": 5 * 10**9,
            "session_id": 0,
            "think_ns": 2 * 10**9,
            "input_tokens": 64,
            "output_tokens": 1,
            "input_blocks": [0, 1, 3, 4],
        },
        {"arrival_ns": 6 * 10**9, "session_id": 2, "input_blocks": [0], "error_kind": "timeout"},
    ]


def test_a_small_trace_is_counted_by_hand() -> None:
    found = analyze(table(conversation()), Footer(), "small", sizes_blocks=[1, 2])

    assert (found.requests, found.failed) == (4, 1)
    assert found.sessions is not None and found.sessions.count == 3
    assert found.sessions.turns is not None and found.sessions.turns.max == 2
    assert found.sessions.think_s is not None and (found.sessions.think_s.count, found.sessions.think_s.p50) == (1, 2.0)
    assert found.source_sharing is not None
    # looks up [0 1], [0 2], [0 1 3 4], [0]: hits 0, 1, 2, 1
    assert (found.source_sharing.references, found.source_sharing.unique) == (9, 5)
    assert (found.source_sharing.hits_infinite, found.source_sharing.lru_hits) == (4, {"1": 3, "2": 3})
    assert found.source_sharing.mean_request_hit_rate == pytest.approx((0 + 1 / 2 + 2 / 4 + 1) / 4)
    # the failed request has one block, so an engine recomputes all of it: 16 + 32 of 40 + 33 + 64 + 16 tokens
    assert found.engine_sharing is not None
    assert found.engine_sharing.hit_rate_infinite == pytest.approx(48 / 153)
    assert found.lengths.input_tokens is not None and found.lengths.input_tokens.count == 3
    assert "3 sessions" in printed(found)


def test_the_analysis_survives_json() -> None:
    found = analyze(table(conversation()), Footer(), "small")

    assert msgspec.json.decode(msgspec.json.encode(found), type=Analysis) == found


def test_lengths_below_one_block_still_share_their_tails() -> None:
    rows: list[Request] = [{"arrival_ns": k, "input_tokens": 100, "input_tail_id": 0} for k in range(3)]

    found = analyze(table(rows), Footer(block_tokens=512), "tails")

    assert found.source_sharing is not None and found.source_sharing.hits_infinite == 2
    assert found.engine_sharing is not None
    assert found.engine_sharing.hit_rate_infinite == pytest.approx(2 * 96 / 300)  # six full pages of 16


def test_lengths_of_nothing_at_all_do_not_divide_by_zero() -> None:
    found = analyze(table([{"arrival_ns": 0, "input_tokens": 0, "input_tail_id": 0}]), Footer(), "zero")

    assert found.source_sharing is not None and found.source_sharing.token_hit_rate == 0.0
    assert in_words(found)[0].startswith("1 request")


def test_an_empty_trace_is_a_user_error() -> None:
    with pytest.raises(TraceError, match="nothing.parquet: the trace has no requests"):
        analyze(table([]), Footer(), "nothing.parquet")


def test_rank_correlation_shares_ranks_between_ties() -> None:
    a, b = pa.array([1, 2, 2, 9]).to_numpy(), pa.array([10, 20, 30, 40]).to_numpy()

    # ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4
    assert rank_correlation(a, b) == pytest.approx(4.5 / (4.5 * 5.0) ** 0.5)
    assert rank_correlation(a, a * 0) is None
