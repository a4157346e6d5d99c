"""Replicas: one is the plain curve, and what a rule keeps together is found again."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.analysis import routing
from tracer.analysis.reuse import Touches, hit_curve
from tracer.blocks import Blocks, DenseIds
from tracer.schema import SCHEMA, Footer


def touches_of(lists: list[list[int]]) -> Touches:
    blocks = Blocks.from_lists(lists)
    ones = np.ones(len(blocks.ids), dtype=np.int64)
    return Touches(blocks=blocks, units=ones, lookup_units=blocks.lengths, prompt_tokens=blocks.lengths * 16, unit_tokens=16)


@st.composite
def traffic(draw: st.DrawFn) -> tuple[Touches, np.ndarray]:
    ids: DenseIds[tuple[int, ...]] = DenseIds()
    words: list[list[int]] = []
    for _ in range(draw(st.integers(1, 20))):
        base = draw(st.sampled_from(words)) if words and draw(st.booleans()) else []
        words.append(base[: draw(st.integers(0, len(base)))] + draw(st.lists(st.integers(0, 2), max_size=4)))
    lists = [[ids[tuple(word[: k + 1])] for k in range(len(word))] for word in words]
    sessions = draw(st.lists(st.integers(-1, 3), min_size=len(words), max_size=len(words)))
    return touches_of(lists), np.array(sessions, dtype=np.int64)


@given(traffic(), st.sampled_from(routing.RULES))
@settings(max_examples=80, deadline=None)
def test_one_replica_equals_the_plain_curve(seen, rule: routing.Rule) -> None:
    touches, session = seen
    curve = hit_curve(touches)

    found = routing.replica_curves(touches, routing.ROUTES[rule](touches, session, 1), 1)

    for size in range(curve.unique + 2):
        assert found.hit_rate_at(size) == curve.hit_rate_at(size)


@given(traffic(), st.sampled_from(routing.RULES), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_replicas_share_out_all_requests_and_never_find_more_than_one_endless_cache(
    seen, rule: routing.Rule, replicas: int
) -> None:
    touches, session = seen

    found = routing.replica_curves(touches, routing.ROUTES[rule](touches, session, replicas), replicas)

    assert sum(one.references for one in found.curves) == int(touches.lookup_units.sum())
    assert found.hit_rate_at(10**9) <= hit_curve(touches).hit_rate_infinite + 1e-12


def test_two_conversations_in_turn_fit_two_replicas() -> None:
    touches = touches_of([[0, 1], [10, 11], [10, 11, 12], [0, 1, 2], [0, 1, 2, 3]])
    session = np.array([0, 1, 1, 0, 0])

    assert routing.round_robin(touches, session, 2).tolist() == [0, 1, 0, 1, 0]
    assert routing.session_sticky(touches, session, 2).tolist() == [0, 1, 1, 0, 0]
    assert routing.prefix_aware(touches, session, 2).tolist() == [0, 1, 1, 0, 0]
    sticky = routing.replica_curves(touches, np.array([0, 1, 1, 0, 0]), 2)
    assert sticky.hit_rate_at(10) == pytest.approx((2 + 2 + 3) / 14)
    assert routing.replica_curves(touches, np.array([0, 1, 0, 1, 0]), 2).hit_rate_at(10) == pytest.approx(2 / 14)


def test_one_prefix_for_all_does_not_flood_one_replica() -> None:
    touches = touches_of([[0, 1, 2]] * 40)

    route = routing.prefix_aware(touches, np.full(40, -1), 4)

    assert np.bincount(route, minlength=4).max() <= 16


def test_a_part_keeps_widths_and_limits() -> None:
    touches = replace(touches_of([[0, 1], [2, 3], [2, 4]]), lookup_units=np.array([1, 2, 1]))

    part = routing.part_of(touches, np.array([False, True, True]))

    assert [path.tolist() for path in part.blocks] == [[0, 1], [0, 2]]
    assert part.lookup_units.tolist() == [2, 1] and part.prompt_tokens.tolist() == [32, 32]


def test_described_at_the_sizes_asked_for() -> None:
    rows = [
        {"request_id": k, "arrival_ns": k, "session_id": k % 2, "input_tokens": 33, "output_tokens": 0, "input_blocks": [0, 1]}
        for k in range(8)
    ]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)

    found = routing.describe(table, Footer(block_tokens=16), 2, [160])

    assert [one.rule for one in found] == list(routing.RULES)
    (point,) = [point for point in found[0].curve if point.cache_tokens_per_replica == 160]
    assert point.hit_rate == pytest.approx(6 * 32 / (8 * 33)) and found[0].heaviest_share == 0.5


def test_without_sessions_nothing_is_called_sticky() -> None:
    rows = [{"request_id": k, "arrival_ns": k, "input_tokens": 17, "output_tokens": 0, "input_blocks": [0]} for k in range(4)]

    found = routing.describe(pa.Table.from_pylist(rows, schema=SCHEMA), Footer(block_tokens=16), 2)

    assert [one.rule for one in found] == ["round_robin", "prefix_aware"]
