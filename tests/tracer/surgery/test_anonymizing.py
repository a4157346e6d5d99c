"""What goes, and that the cache sees the same traffic."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.analysis.reuse import hit_curve, touches_as_engine, touches_as_in_source
from tracer.errors import TraceError
from tracer.formats.ids import ChainedIds
from tracer.schema import Footer, HashScheme, Request
from tracer.surgery.anonymizing import anonymize_trace
from tracer.tracefile import iter_requests, read_footer, read_table, write_trace


@st.composite
def traces(draw: st.DrawFn, block_tokens: int = 16) -> list[Request]:
    chained = ChainedIds()
    rows: list[Request] = []
    for number in range(draw(st.integers(1, 15))):
        words = draw(st.lists(st.integers(0, 2), max_size=4))
        rest = draw(st.integers(0, block_tokens - 1))
        answered = draw(st.integers(0, 40))
        total = len(words) * block_tokens + rest + answered
        path = chained.path([*words, *[number + 5] * (total // block_tokens - len(words))])
        row: Request = {"request_id": number, "arrival_ns": number * 700, "input_tokens": len(words) * block_tokens + rest}
        row |= {"output_tokens": answered, "input_blocks": path[: len(words)], "output_blocks": path[len(words) :]}
        row["source_extra"] = '{"user":"somebody"}'
        rows.append(row)
    return rows


@given(traces(), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_cache_serves_the_same(tmp_path_factory: pytest.TempPathFactory, rows: list[Request], seed: int) -> None:
    folder = tmp_path_factory.mktemp("anonymous")
    write_trace(folder / "a.parquet", rows, Footer(epoch_ns=5, notes={"source": "x"}))

    found = anonymize_trace(folder / "a.parquet", folder / "b.parquet", round_ns=1000, at_least=1, seed=seed)

    before, after = (hit_curve(touches_as_engine(read_table(folder / name), Footer())) for name in ("a.parquet", "b.parquet"))
    assert found.requests == len(rows)
    assert before.curve() == after.curve() or before.prompt_tokens != after.prompt_tokens
    assert before.hits_infinite == after.hits_infinite and before.unique == after.unique
    again = list(iter_requests(folder / "b.parquet"))
    for row, new in zip(rows, again, strict=True):
        assert new["arrival_ns"] == row["arrival_ns"] // 1000 * 1000
        assert new["input_tokens"] // 16 == row["input_tokens"] // 16
        assert (new["output_tokens"] == 0) == (row["output_tokens"] == 0)
        assert new["source_extra"] is None


def test_equal_tails_stay_equal_and_blocks_as_the_source_has_them_too(tmp_path: Path) -> None:
    rows: list[Request] = [
        {"request_id": k, "arrival_ns": k, "input_tokens": 512 + 100, "input_blocks": [0], "input_tail_id": 1} for k in range(3)
    ]
    footer = Footer(block_tokens=512, tail_rule="ceil")
    write_trace(tmp_path / "a.parquet", rows, footer)

    anonymize_trace(tmp_path / "a.parquet", tmp_path / "b.parquet", at_least=1)

    lengths = [row["input_tokens"] for row in iter_requests(tmp_path / "b.parquet")]
    assert len(set(lengths)) == 1 and 608 < lengths[0] < 624
    assert hit_curve(touches_as_in_source(read_table(tmp_path / "b.parquet"), footer)).hits_infinite == 4


def test_few_are_hidden_among_many_and_nothing_names_the_source(tmp_path: Path) -> None:
    rows: list[Request] = [
        {
            "request_id": k,
            "arrival_ns": k,
            "client_id": k % 3 if k < 9 else k,
            "model": "big" if k else "our-secret-tune",
            "adapter": "l" if k else "rare-adapter",
            "upstream": "http://10.0.0.1",
            "bytes_in": 5,
            "chunk_delta_us": [1],
            "end_ns": 1_500_000_000,
        }
        for k in range(12)
    ]
    footer = Footer(epoch_ns=1, source_sha256="s", notes={"path": "p"}, hashes=HashScheme(key_id="k"))
    write_trace(tmp_path / "a.parquet", rows, footer)

    found = anonymize_trace(tmp_path / "a.parquet", tmp_path / "b.parquet", at_least=3)

    new = list(iter_requests(tmp_path / "b.parquet"))
    assert [row["client_id"] for row in new] == [0, 1, 2] * 3 + [3] * 3
    assert (found.rare_clients, found.rare_models) == (3, ["our-secret-tune"])
    assert [row["model"] for row in new] == [None] + ["big"] * 11 and new[0]["adapter"] is None
    assert {row["end_ns"] for row in new} == {10**9}
    raw = (tmp_path / "b.parquet").read_bytes()
    assert b"secret" not in raw and b"10.0.0.1" not in raw and b"rare-adapter" not in raw
    left = read_footer(tmp_path / "b.parquet")
    assert (left.epoch_ns, left.source_sha256, left.notes, left.hashes.key_id) == (None, None, {}, None)
    assert left.time_grid_ns == 10**9


def test_too_few_even_together_have_no_client(tmp_path: Path) -> None:
    rows: list[Request] = [{"request_id": k, "arrival_ns": k, "client_id": int(k == 5)} for k in range(6)]
    write_trace(tmp_path / "a.parquet", rows, Footer())

    anonymize_trace(tmp_path / "a.parquet", tmp_path / "b.parquet", at_least=2)

    assert [row["client_id"] for row in iter_requests(tmp_path / "b.parquet")] == [0] * 5 + [None]
    with pytest.raises(TraceError, match="same file"):
        anonymize_trace(tmp_path / "a.parquet", tmp_path / "a.parquet")
    with pytest.raises(TraceError, match="1 or more"):
        anonymize_trace(tmp_path / "a.parquet", tmp_path / "c.parquet", at_least=0)
