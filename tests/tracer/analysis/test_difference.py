"""Two traces side by side."""

import pyarrow as pa
import pytest

from tracer.analysis.difference import differences, hit_rate_at
from tracer.analysis.summary import Analysis, CurvePoint, EngineSharing, analyze
from tracer.schema import SCHEMA, Footer


def trace(prompts: list[list[int]], gap_ns: int = 10**9) -> Analysis:
    rows = [
        {"request_id": k, "arrival_ns": k * gap_ns, "input_tokens": 16 * len(ids) + 1, "output_tokens": 5, "input_blocks": ids}
        for k, ids in enumerate(prompts)
    ]
    return analyze(pa.Table.from_pylist(rows, schema=SCHEMA), Footer(), "t")


def test_a_trace_differs_from_itself_in_nothing() -> None:
    one = trace([[0, 1], [0, 2], [0, 1, 3]])

    assert all(row.first == row.second for row in differences(one, one))
    assert {row.ratio for row in differences(one, one)} <= {1.0, None}


def test_what_changed_is_told_and_what_neither_knows_is_not() -> None:
    shared, apart = trace([[0, 1], [0, 1], [0, 1]]), trace([[0, 1], [2, 3], [4, 5]], gap_ns=2 * 10**9)

    found = {row.name: row for row in differences(shared, apart)}

    assert found["span, s"].ratio == 2.0
    assert found["hit rate, endless cache"].first == pytest.approx(64 / 99) and found["hit rate, endless cache"].second == 0
    assert found["distinct tokens"].ratio == 3.0
    assert found["hit rate at 32 tokens"].second == 0.0
    assert not {"sessions", "think time, s, mean"} & found.keys()


def test_between_the_points_of_a_curve_lies_a_straight_line() -> None:
    curve = [CurvePoint(cache_tokens=100, hit_rate=0.2), CurvePoint(cache_tokens=200, hit_rate=0.4)]
    sharing = EngineSharing(
        page_tokens=16, footprint_tokens=200, hit_rate_infinite=0.4, curve=curve, cache_tokens_for_90_percent=200
    )

    assert [hit_rate_at(sharing, size) for size in (0, 50, 150, 999)] == pytest.approx([0.0, 0.1, 0.3, 0.4])
