"""Figures of KV memory, counted by hand on small traces, and held against brute force on random ones."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.analysis import memory
from tracer.analysis.reuse import Touches, hit_curve
from tracer.blocks import Blocks, DenseIds
from tracer.schema import SCHEMA, Footer, Request

SECOND = 1_000_000_000


def touches_of(lists: list[list[int]], lookup: list[int] | None = None) -> Touches:
    blocks = Blocks.from_lists(lists)
    limits = blocks.lengths if lookup is None else np.array(lookup, dtype=np.int64)
    return Touches(
        blocks=blocks,
        units=np.ones(len(blocks.ids), dtype=np.int64),
        lookup_units=limits,
        prompt_tokens=blocks.lengths * 16,
        unit_tokens=16,
    )


@st.composite
def requests(draw: st.DrawFn) -> tuple[Touches, np.ndarray, np.ndarray, np.ndarray]:
    """Touches, arrivals, sessions (-1: none) and a depth of global units that any prefix of the path may have."""
    ids: DenseIds[tuple[int, ...]] = DenseIds()
    words: list[list[int]] = []
    for _ in range(draw(st.integers(1, 20))):
        base = draw(st.sampled_from(words)) if words and draw(st.booleans()) else []
        words.append(base[: draw(st.integers(0, len(base)))] + draw(st.lists(st.integers(0, 2), max_size=4)))
    lists = [[ids[tuple(word[: k + 1])] for k in range(len(word))] for word in words]
    touches = touches_of(lists, [draw(st.integers(0, len(word))) for word in words])
    count = len(words)
    arrivals = np.cumsum(draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))) * SECOND
    sessions = np.array(draw(st.lists(st.integers(-1, 3), min_size=count, max_size=count)), dtype=np.int64)
    depth = draw(st.integers(0, 3))
    return touches, arrivals, sessions, np.full(count, depth, dtype=np.int64)


def brute_force_by_cause(touches: Touches, common: np.ndarray, session: np.ndarray, size: int, first: int) -> list[int]:
    """Global, own and group hits of an LRU list that is searched from its end."""
    recent: list[int] = []
    touched_by: dict[int, set[int]] = {}
    found = [0, 0, 0]
    for request, path in enumerate(touches.blocks):
        kept, leading = set(recent[-size:] if size else []), True
        for depth, block in enumerate(path.tolist()[: int(touches.lookup_units[request])]):
            leading = leading and block in kept
            if leading and request >= first:
                own = session[request] >= 0 and int(session[request]) in touched_by[block]
                found[0 if depth < common[request] else 1 if own else 2] += 1
        for block in reversed(path.tolist()):
            if block in recent:
                recent.remove(block)
            recent.append(block)
            touched_by.setdefault(block, set()).add(int(session[request]))
    return found


@given(requests())
@settings(max_examples=80, deadline=None)
def test_the_split_by_cause_equals_brute_force_and_sums_to_the_hit_rate(seen) -> None:
    touches, _, sessions, common = seen
    warm_from = int(0.2 * len(touches.blocks))

    curve = hit_curve(touches)
    causes = memory.hits_by_cause(touches, memory.touched_runs(touches), curve, common, sessions)

    for points, first in ((causes.cold, 0), (causes.warm, warm_from)):
        total = max(int(touches.prompt_tokens[first:].sum()), 1)
        for point in points:
            size = point.cache_tokens // 16
            wanted = brute_force_by_cause(touches, common, sessions, size, first)
            shares = [point.global_prefix, point.own_session, point.sharing_group]
            assert shares == pytest.approx([hits * 16 / total for hits in wanted])
            if not first:
                assert point.hit_rate == pytest.approx(curve.hit_rate_at(size))


@given(requests(), st.integers(0, 30))
@settings(max_examples=80, deadline=None)
def test_reuse_times_are_what_a_cache_with_a_time_to_live_keeps(seen, seconds: int) -> None:
    touches, arrivals, _, _ = seen
    runs = memory.touched_runs(touches)
    last: dict[int, int] = {}
    hits, possible = 0, 0
    for request, path in enumerate(touches.blocks):
        leading = True
        for block in path.tolist()[: int(touches.lookup_units[request])]:
            possible += block in last
            leading = leading and block in last and int(arrivals[request]) - last[block] <= seconds * SECOND
            hits += leading
        last.update(dict.fromkeys(path.tolist(), int(arrivals[request])))

    old = runs.before >= 0
    gaps = arrivals[runs.request[old]] - arrivals[runs.before[old]]

    assert int(runs.looked_up[old].sum()) == possible == hit_curve(touches).hits_infinite
    assert int(runs.looked_up[old][gaps <= seconds * SECOND].sum()) == hits
    found = memory.reuse_time(runs, arrivals)
    if found is not None:
        assert sum(one.share for one in found.histogram) == pytest.approx(1.0)


@given(requests(), st.sampled_from([60.0, 3.0]))
@settings(max_examples=60, deadline=None)
def test_footprint_and_working_sets_count_distinct_tokens(seen, window: float) -> None:
    touches, arrivals, _, _ = seen
    runs = memory.touched_runs(touches)

    growth = memory.footprint_growth(runs, touches)

    for point in growth:
        assert point.tokens == 16 * len({block for path in list(touches.blocks)[: point.requests] for block in path.tolist()})
    start = arrivals / 1e9
    at = np.unique(start) + 0.5
    before = np.where(runs.before >= 0, start[runs.before], -np.inf)
    touched = start[runs.request]
    seen_in_window = memory.active_at(at, np.maximum(touched, before + window), touched + window, runs.units)
    for moment, tokens in zip(at, seen_in_window, strict=True):
        inside = [path.tolist() for path, t in zip(touches.blocks, start, strict=True) if moment - window < t <= moment]
        assert tokens == len({block for path in inside for block in path})


def test_reuse_by_hand() -> None:
    touches = touches_of([[0, 1, 2], [0, 1, 3], [0], [0, 1, 2]])
    runs = memory.touched_runs(touches)
    arrivals = np.array([0, 10, 20, 50]) * SECOND

    assert runs.request.tolist() == [1, 2, 3, 3, 3, 0, 1]
    assert runs.before.tolist() == [0, 1, 2, 1, 0, -1, -1]
    assert runs.units.tolist() == [2, 1, 1, 1, 1, 3, 1]
    assert runs.depth.tolist() == [0, 0, 0, 1, 2, 0, 2]
    found = memory.reuse_time(runs, arrivals)
    assert found is not None  # gaps of 10, 10, 10, 30, 40 and 50 s
    assert (found.p50_s, found.p90_s, found.p99_s) == (10.0, 50.0, 50.0)
    distance = memory.reuse_distance(hit_curve(touches))
    assert distance is not None and distance.p99_tokens == 4 * 16  # block 2 is found again below 0, 1, 3


def test_blocks_of_no_units_are_in_no_cache() -> None:
    touches = replace(touches_of([[0, 1, 2], [0, 1, 2]]), units=np.array([1, 0, 2, 1, 0, 2]), lookup_units=np.array([3, 2]))

    runs = memory.touched_runs(touches)

    assert (runs.request.tolist(), runs.before.tolist(), runs.units.tolist()) == ([1, 0], [0, -1], [3, 3])
    assert runs.looked_up.tolist() == [2, 3]


def test_nothing_reused_has_no_reuse_time() -> None:
    touches = touches_of([[0], [1], []])

    assert memory.reuse_time(memory.touched_runs(touches), np.zeros(3, dtype=np.int64)) is None
    assert memory.reuse_distance(hit_curve(touches)) is None
    assert [point.tokens for point in memory.footprint_growth(memory.touched_runs(touches), touches)] == [16, 32, 32]


def test_ten_gb_buy_as_many_tokens_as_fit() -> None:
    lists = [list(range(0, 100)), list(range(100, 200)), list(range(0, 100))]
    curve = hit_curve(touches_of(lists))  # the first is found again by a cache of 200 blocks, half of it by one of 150
    bytes_per_token = 10e9 / (50 * 16)

    assert memory.ten_gb_more(curve, 100, bytes_per_token) == pytest.approx(50 / 300)
    (last,) = [point for point in memory.marginal_value(curve, bytes_per_token) if point.cache_tokens == 200 * 16]
    assert (
        last.hit_rate == pytest.approx(100 / 300)
        and last.gain_of_ten_gb == last.gain_of_half_more == last.gain_per_million_tokens == 0.0
    )


def test_demand_by_hand() -> None:
    touches = touches_of([[0, 1], [0, 2]])
    runs = memory.touched_runs(touches)
    arrivals, ends = np.array([0, 30]) * SECOND, np.array([40, -1]) * SECOND

    found = memory.demand(runs, 16, arrivals, np.where(ends < 0, -1, ends), np.array([32, 5000]), np.array([8, 300]))

    assert found.assumed_ends == 1  # 1 s of prefill, 10 s of decode: ends at 41 s
    assert found.at_s[-1] == 41.0
    assert found.running_peak_tokens == 40 + 5300
    assert found.running_mean_tokens == pytest.approx((40 * 40 + 5300 * 11) / 41)
    assert found.running_tokens[0] == 40 and found.running_tokens[-2] == 5300
    assert found.working_set_60s_tokens[0] == 32 and found.working_set_60s_tokens[-1] == 48


def test_a_whole_trace_through_its_columns() -> None:
    rows: list[Request] = [
        {"request_id": k, "arrival_ns": k * SECOND, "session_id": k % 2, "turn": k // 2, "input_tokens": 33, "output_tokens": 15}
        | {"input_blocks": [0, 1 + k % 2], "end_ns": SECOND}
        for k in range(10)
    ]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)

    found = memory.describe(table, Footer(block_tokens=16), kv_bytes_per_token=1e6)

    assert found.causes.sessions_known
    last = found.causes.cold[-1]
    assert last.global_prefix == pytest.approx(9 * 16 / 330)
    assert last.own_session == pytest.approx(8 * 16 / 330) and last.sharing_group == 0.0
    assert found.footprint[-1].tokens == 16 * (3 + 10)  # and a page of each answer, unique to it
    assert found.demand.running_peak_tokens == 48
