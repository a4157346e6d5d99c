"""Hits of a prefix cache that evicts first in, first out, and of the best one that there can be, at chosen sizes. Pure.

As for the LRU curve, a request looks up all its blocks first: hits are the leading run of resident units.

FIFO: then the units that are not resident go in, deepest first; one that is resident keeps its place. The queue drops
descendants that came in together with their ancestors before these, but an ancestor that came in earlier goes earlier, and
what is still resident below it is no hit until it is back.

Optimal (Belady, "A study of replacement algorithms for a virtual-storage computer", 1966), with bypass: after each request
the cache keeps, of what it had and what the request touched, the units whose next look-up is nearest, ancestors first
among equals; units that are not looked up the next time they are touched need not be kept at all. No policy has more hits:
a unit kept from one touch to the next is worth one hit, and dropping the one that ends last is the best way to keep at most
C such spans at any time. An ancestor's next look-up is never after its descendants', so what it keeps is found in full.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from tracer.analysis.reuse import HitCurve, Touches, require_chained

Ints = NDArray[np.int64]
Policy = Literal["fifo", "optimal"]
NEVER = 2**62
SHARES_OF_POSSIBLE_HITS = (0.25, 0.5, 0.75, 0.9)
MAX_RUNS = 3_000_000  # each size goes run by run, a second for a million of them


class EvictionPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Hit rates, as shares of prompt tokens. What lies between LRU and optimal is all that better eviction could win."""

    cache_tokens: int
    fifo: float
    lru: float
    optimal: float


def eviction(touches: Touches, curve: HitCurve) -> list[EvictionPoint]:
    """At the sizes where LRU gives `SHARES_OF_POSSIBLE_HITS`, and at a quarter and half of the first.

    Empty where nothing is hit, or a trace has too many runs.
    """
    sizes = sorted({size for share in SHARES_OF_POSSIBLE_HITS if (size := curve.capacity_for(share))})
    if not sizes or len(runs_of(touches).names) > MAX_RUNS:
        return []
    sizes = sorted({max(sizes[0] // 4, 1), max(sizes[0] // 2, 1), *sizes})
    scale = touches.unit_tokens / max(curve.prompt_tokens, 1)
    fifo, optimal = (policy_hits(touches, policy, sizes) for policy in ("fifo", "optimal"))
    return [
        EvictionPoint(
            cache_tokens=size * touches.unit_tokens, fifo=first * scale, lru=curve.hit_rate_at(size), optimal=best * scale
        )
        for size, first, best in zip(sizes, fifo, optimal, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Each request's path as stretches of blocks with the same visitors, which are always touched together.

    Request i has visits `offsets[i]:offsets[i + 1]`, root first. All but offsets are [visits].
    """

    offsets: Ints
    names: Ints  # dense from 0; one per run
    units: Ints  # always the same for one run
    depths: Ints  # units above the run in its path


def policy_hits(touches: Touches, policy: Policy, capacities_units: Sequence[int]) -> list[int]:
    """Hit units in all, at each size in turn."""
    return [int(total) for total in request_hits(touches, policy, capacities_units).sum(axis=1)]


def request_hits(touches: Touches, policy: Policy, capacities_units: Sequence[int]) -> Ints:
    """Hit units of each request at each size: [sizes, requests]. Raises `TraceError` if ids are not chained."""
    runs = runs_of(touches)
    at_size = _fifo(runs, touches.lookup_units) if policy == "fifo" else _optimal(runs, touches.lookup_units)
    hits = np.zeros((len(capacities_units), len(touches.blocks)), dtype=np.int64)
    for row, capacity in zip(hits, capacities_units, strict=True):
        row[:] = at_size(max(capacity, 0))
    return hits


def runs_of(touches: Touches) -> Runs:
    """Along a chained path, blocks of equally many visits have the same visitors. Raises `TraceError` if not chained."""
    require_chained(touches.blocks)
    ids, offsets = touches.blocks.ids, touches.blocks.offsets
    visits = np.bincount(ids).astype(np.int32)[ids]
    begins = np.ones(len(ids), dtype=bool)
    np.not_equal(visits[1:], visits[:-1], out=begins[1:])
    begins[offsets[:-1][touches.blocks.lengths > 0]] = True
    starts = np.flatnonzero(begins)
    at = np.searchsorted(starts, offsets)
    units = np.add.reduceat(touches.units, starts, dtype=np.int64) if len(starts) else starts
    above = np.concatenate([[0], np.cumsum(units)])
    return Runs(
        offsets=at,
        names=np.unique(ids[starts], return_inverse=True)[1],
        units=units,
        depths=above[:-1] - np.repeat(above[at[:-1]], np.diff(at)),
    )


def _fifo(runs: Runs, lookup_units: Ints) -> Callable[[int], list[int]]:
    """A unit that went in as number s is resident while no more than C have gone in since, itself included.

    A run's deepest unit goes in first, and if that one has to go in again, so have all above it: each finds one more unit
    gone in and is itself one younger. So a run goes in whole or not at all, and one number says where it is.
    """
    paths = _paths(runs)
    limits = lookup_units.tolist()
    count = int(runs.names.max(initial=-1)) + 1

    def at_size(capacity: int) -> list[int]:
        behind = [-NEVER] * count  # units that had gone in when the run, deepest unit first, was about to
        gone_in = 0
        hits = []
        for path, limit in zip(paths, limits, strict=True):
            oldest = gone_in - capacity
            found = 0
            for name, units in path:
                resident = behind[name] + units - oldest
                if resident < units:
                    if resident > 0:
                        found += resident
                    break
                found += units
            hits.append(found if found < limit else limit)
            for name, units in reversed(path):
                if behind[name] < gone_in - capacity:
                    behind[name] = gone_in
                    gone_in += units
        return hits

    return at_size


def _optimal(runs: Runs, lookup_units: Ints) -> Callable[[int], list[int]]:
    """Units that are looked up next by one request are alike: it is enough to know how many of them are kept."""
    by_request = _kept_for(runs, lookup_units)

    def at_size(capacity: int) -> list[int]:
        kept = [0] * len(by_request)  # units, by the request that looks them up next
        latest: list[int] = []  # those requests, negative, so that the last one is on top
        occupied = 0
        hits = []
        for request, wanted in enumerate(by_request):
            found = kept[request]
            hits.append(found)
            occupied -= found
            kept[request] = 0
            for then, units in wanted:
                if not kept[then]:
                    heapq.heappush(latest, -then)
                kept[then] += units
                occupied += units
            while occupied > capacity:
                then = -latest[0]
                dropped = min(kept[then], occupied - capacity)
                kept[then] -= dropped
                occupied -= dropped
                if not kept[then]:
                    heapq.heappop(latest)
        return hits

    return at_size


def _kept_for(runs: Runs, lookup_units: Ints) -> list[list[tuple[int, int]]]:
    """For each request, (a later request, units of this one's path that it is the next to touch, and looks up)."""
    request = np.repeat(np.arange(len(runs.offsets) - 1), np.diff(runs.offsets))
    order = np.argsort(runs.names, kind="stable")
    again = np.flatnonzero(np.diff(runs.names[order]) == 0)
    earlier, later = order[again], order[again + 1]
    looked_up = np.minimum(runs.units[later], lookup_units[request[later]] - runs.depths[later])
    worth = looked_up > 0
    pairs, where = np.unique(request[earlier[worth]] << 32 | request[later[worth]], return_inverse=True)
    units = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(units, where, looked_up[worth])
    found: list[list[tuple[int, int]]] = [[] for _ in range(len(lookup_units))]
    for pair, size in zip(pairs.tolist(), units.tolist(), strict=True):
        found[pair >> 32].append((pair & 0xFFFFFFFF, size))
    return found


def _paths(runs: Runs) -> list[list[tuple[int, int]]]:
    """(name, units) of each request's runs, root first; those that occupy nothing left out."""
    visits = list(zip(runs.names.tolist(), runs.units.tolist(), strict=True))
    bounds = runs.offsets.tolist()
    return [[visit for visit in visits[a:b] if visit[1]] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
