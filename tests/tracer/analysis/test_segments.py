"""Reuse by parts of prompts, counted by hand."""

import pyarrow as pa
import pytest

from tracer.analysis.segments import segment_reuse
from tracer.schema import SCHEMA


def table(*requests: list[tuple[int, int]] | None) -> pa.Table:
    """Each request as (content id, tokens) pairs."""
    rows = []
    for number, parts in enumerate(requests):
        segments = (
            None if parts is None else [{"role": "user", "kind": "passage", "tokens": n, "content_id": c} for c, n in parts]
        )
        rows.append({"request_id": number, "arrival_ns": number, "segments": segments})
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def test_order_decides_what_a_prefix_cache_can_use() -> None:
    found = segment_reuse(table([(0, 10), (1, 5), (2, 3)], None, [(1, 5), (0, 10)], [(1, 5), (0, 10), (3, 7)]))

    assert found is not None
    assert found.segment_tokens == 18 + 15 + 22
    assert found.as_sent == pytest.approx(15 / 55)  # the third begins as the second did
    assert found.popular_first == pytest.approx(30 / 55)  # all three begin with 0, 1
    assert found.in_any_order == pytest.approx(30 / 55)


def test_content_twice_in_one_prompt_counts_the_second_time() -> None:
    found = segment_reuse(table([(0, 4), (0, 4)]))

    assert found is not None and found.in_any_order == 0.5 and found.as_sent == 0.0


def test_without_segments_there_is_nothing_to_say() -> None:
    assert segment_reuse(table(None, [])) is None
