"""FIFO and optimal eviction equal plain caches, unit by unit, and no policy beats the optimal one."""

import json
from collections import OrderedDict
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.analysis.policies import eviction, policy_hits, request_hits
from tracer.analysis.reuse import Touches, hit_curve
from tracer.blocks import Blocks, DenseIds
from tracer.errors import TraceError

MOONCAKE = Path(__file__).resolve().parents[4] / "shared/traces/mooncake/conversation_trace.head.jsonl"
Unit = tuple[int, int]


def unit_paths(touches: Touches) -> list[list[Unit]]:
    units, at = [], 0
    for path in touches.blocks:
        widths = touches.units[at : at + len(path)].tolist()
        at += len(path)
        units.append([(block, unit) for block, width in zip(path.tolist(), widths, strict=True) for unit in range(width)])
    return units


def leading(path: list[Unit], limit: int, resident: object) -> int:
    hits = 0
    for unit in path[:limit]:
        if unit not in resident:  # type: ignore[operator]
            break
        hits += 1
    return hits


def fifo_hits(touches: Touches, capacity: int) -> list[int]:
    """The obvious cache: an ordered dict, first in first out."""
    queue: OrderedDict[Unit, None] = OrderedDict()
    hits = []
    for path, limit in zip(unit_paths(touches), touches.lookup_units.tolist(), strict=True):
        hits.append(leading(path, limit, queue))
        for unit in reversed(path):
            if unit not in queue:
                queue[unit] = None
                if len(queue) > capacity:
                    queue.popitem(last=False)
    return hits


def optimal_hits(touches: Touches, capacity: int) -> list[int]:
    """Belady's rule by looking ahead for every unit; of equals, the deepest goes."""
    paths, limits = unit_paths(touches), touches.lookup_units.tolist()
    depth = {unit: at for path in paths for at, unit in enumerate(path)}

    def next_use(unit: Unit, now: int) -> float:
        later = next((i for i in range(now + 1, len(paths)) if unit in paths[i]), None)
        return later if later is not None and depth[unit] < limits[later] else float("inf")

    resident: set[Unit] = set()
    hits = []
    for now, (path, limit) in enumerate(zip(paths, limits, strict=True)):
        hits.append(leading(path, limit, resident))
        ranked = sorted(resident | set(path), key=lambda unit: (next_use(unit, now), depth[unit]))
        resident = set(ranked[:capacity])
    return hits


def best_possible(touches: Touches, capacity: int) -> int:
    """Every choice of what to keep after every request."""
    paths, limits = unit_paths(touches), touches.lookup_units.tolist()

    @cache
    def best(now: int, resident: frozenset[Unit]) -> int:
        if now == len(paths):
            return 0
        pool = resident | frozenset(paths[now])
        size = min(capacity, len(pool))
        later = max(best(now + 1, frozenset(kept)) for kept in combinations(sorted(pool), size))
        return leading(paths[now], limits[now], resident) + later

    return best(0, frozenset())


@st.composite
def chained(draw: st.DrawFn, requests: int, length: int, width: int) -> Touches:
    """Requests that extend, cut or branch off earlier ones."""
    ids: DenseIds[tuple[int, ...]] = DenseIds()
    words: list[list[int]] = []
    for _ in range(draw(st.integers(0, requests))):
        base = draw(st.sampled_from(words)) if words and draw(st.booleans()) else []
        kept = base[: draw(st.integers(0, len(base)))]
        words.append(kept + draw(st.lists(st.integers(0, 2), max_size=max(0, length - len(kept)))))
    lists = [[ids[tuple(word[: k + 1])] for k in range(len(word))] for word in words]
    widths = draw(st.lists(st.integers(0, width), min_size=len(ids), max_size=len(ids)))
    totals = [sum(widths[block] for block in path) for path in lists]
    limits = [draw(st.integers(0, total)) if draw(st.booleans()) else total for total in totals]
    blocks = Blocks.from_lists(lists)
    return Touches(
        blocks=blocks,
        units=np.array([widths[block] for block in blocks.ids], dtype=np.int64),
        lookup_units=np.array(limits, dtype=np.int64),
        prompt_tokens=np.array(totals, dtype=np.int64) * 16,
        unit_tokens=16,
    )


def sizes(touches: Touches) -> list[int]:
    return list(range(len({unit for path in unit_paths(touches) for unit in path}) + 2))


@given(chained(25, 8, 4))
@settings(max_examples=150, deadline=None)
def test_fifo_equals_a_plain_queue_at_every_size_for_every_request(seen: Touches) -> None:
    found = request_hits(seen, "fifo", sizes(seen))

    assert found.tolist() == [fifo_hits(seen, size) for size in sizes(seen)]


@given(chained(14, 6, 3))
@settings(max_examples=100, deadline=None)
def test_optimal_equals_beladys_rule_at_every_size_for_every_request(seen: Touches) -> None:
    found = request_hits(seen, "optimal", sizes(seen))

    assert found.tolist() == [optimal_hits(seen, size) for size in sizes(seen)]


@given(chained(5, 3, 2), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_no_choice_of_what_to_keep_has_more_hits_than_optimal(seen: Touches, size: int) -> None:
    assert policy_hits(seen, "optimal", [size]) == [best_possible(seen, size)]


@given(chained(40, 10, 4))
@settings(max_examples=150, deadline=None)
def test_optimal_is_at_least_lru_and_fifo_at_every_size_and_all_agree_at_both_ends(seen: Touches) -> None:
    curve = hit_curve(seen)
    lru = [curve.hits_at(size) for size in sizes(seen)]

    fifo, optimal = (policy_hits(seen, policy, sizes(seen)) for policy in ("fifo", "optimal"))

    assert all(best >= other for best, other in zip(optimal, lru, strict=True))
    assert all(best >= other for best, other in zip(optimal, fifo, strict=True))
    assert optimal == sorted(optimal)
    assert fifo[0] == optimal[0] == 0
    assert fifo[-1] == optimal[-1] == curve.hits_infinite


def test_a_shared_root_that_went_in_first_is_first_out_and_hides_what_is_below_it() -> None:
    blocks = Blocks.from_lists([[0, 1], [0, 2], [3, 4], [0, 2], [0, 2]])
    seen = Touches(
        blocks=blocks,
        units=np.ones(10, dtype=np.int64),
        lookup_units=blocks.lengths,
        prompt_tokens=blocks.lengths,
        unit_tokens=1,
    )

    assert request_hits(seen, "fifo", [3]).tolist() == [[0, 1, 0, 0, 1]]  # 4 drops 1, 3 drops 0; 2 is still there
    assert request_hits(seen, "optimal", [3, -1]).tolist() == [[0, 1, 0, 2, 2], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("policy", ["fifo", "optimal"])
def test_ids_with_two_predecessors_are_refused(policy: str) -> None:
    blocks = Blocks.from_lists([[0, 1], [2, 1]])
    ones = np.ones(4, dtype=np.int64)
    seen = Touches(blocks=blocks, units=ones, lookup_units=blocks.lengths, prompt_tokens=ones[:2], unit_tokens=16)

    with pytest.raises(TraceError, match="not chained"):
        policy_hits(seen, policy, [3])  # type: ignore[arg-type]


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the public Mooncake trace is not beside this checkout")
def test_fifo_on_the_mooncake_head_equals_a_plain_queue_and_optimal_is_above_lru() -> None:
    blocks = Blocks.from_lists([json.loads(line)["hash_ids"] for line in MOONCAKE.read_text().splitlines()])
    ones = np.ones(len(blocks.ids), dtype=np.int64)
    seen = Touches(blocks=blocks, units=ones, lookup_units=blocks.lengths, prompt_tokens=blocks.lengths, unit_tokens=1)
    curve = hit_curve(seen)

    assert request_hits(seen, "fifo", [1_000, 20_000]).tolist() == [fifo_hits(seen, 1_000), fifo_hits(seen, 20_000)]
    for size, best in zip(
        (1_000, 20_000, curve.unique), policy_hits(seen, "optimal", [1_000, 20_000, curve.unique]), strict=True
    ):
        assert curve.hits_at(size) <= best <= curve.hits_infinite


@given(chained(14, 6, 3))
@settings(max_examples=60, deadline=None)
def test_eviction_points_lie_in_order_and_lru_is_the_curve(touches: Touches) -> None:
    curve = hit_curve(touches)

    for one in eviction(touches, curve):
        assert one.fifo <= one.optimal + 1e-12 and one.lru <= one.optimal + 1e-12
        assert one.lru == curve.hit_rate_at(one.cache_tokens // touches.unit_tokens)
