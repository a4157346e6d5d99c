"""A trace through the engine without HTTP, in virtual time."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from replay.sim.offline import COLUMNS, Moment, simulate
from replay.sim.presets import PRESETS
from tracer.analysis.reuse import hit_curve, touches_as_engine
from tracer.schema import Footer, Request
from tracer.tracefile import read_footer, read_table, write_trace

SERVER = PRESETS["h100-llama3-8b"]
GAP_NS = 60_000_000_000  # long enough for every answer to be complete before the next request


def row(number: int, gap_ns: int, prompt: list[int], answer: list[int], input_tokens: int, output_tokens: int) -> Request:
    return {
        "request_id": number,
        "arrival_ns": number * gap_ns,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "input_blocks": prompt,
        "output_blocks": answer,
    }


def conversation(folder: Path, gap_ns: int = GAP_NS) -> Path:
    """Two turns of one session, and a stranger with the same system prompt of two blocks."""
    rows = [
        row(0, gap_ns, [0, 1, 2], [3, 4], 56, 24),
        row(1, gap_ns, [0, 1, 2, 3, 4, 5], [6], 100, 20),
        row(2, gap_ns, [0, 1, 7], [8], 50, 20),
    ]
    write_trace(folder / "t.parquet", rows, Footer(producer="test", block_tokens=16))
    return folder / "t.parquet"


def run(path: Path, kv_tokens: int) -> list[Moment]:
    return list(simulate(read_table(path, COLUMNS), read_footer(path), replace(SERVER, kv_tokens=kv_tokens)))


def test_hits_of_the_engine_are_those_of_the_analysis_where_requests_do_not_overlap(tmp_path: Path) -> None:
    path = conversation(tmp_path)

    last = run(path, 10_000)[-1]

    curve = hit_curve(touches_as_engine(read_table(path), read_footer(path)))
    assert last.cached_tokens == curve.hits_infinite * 16 - 16  # the last token of an answer is sampled but never computed
    assert (last.prompt_tokens, last.preemptions, last.waiting, last.kv_usage) == (206, 0, 0, 0.0)


def test_time_and_counters_only_grow_and_requests_wait_for_their_time(tmp_path: Path) -> None:
    found = run(conversation(tmp_path), 10_000)

    for before, after in pairwise(found):
        assert before.end_s < after.end_s
        assert before.prompt_tokens <= after.prompt_tokens and before.cached_tokens <= after.cached_tokens
    assert found[-1].end_s == pytest.approx(120, abs=5)
    assert all(0 <= one.kv_usage <= 1 for one in found)


def test_what_never_fits_is_left_out(tmp_path: Path) -> None:
    last = run(conversation(tmp_path), 96)[-1]

    assert last.prompt_tokens == 56 + 50
