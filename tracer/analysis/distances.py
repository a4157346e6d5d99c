"""Stack distances of prefix-tree paths for a whole trace at once, run by run instead of block by block. Pure.

A run is a stretch of blocks with the same visitors: along a chained path, blocks of equally many visits. It is touched
whole or not at all, so one distance says all about it, and the work after the first look at the ids follows the runs.

The distance of a run that request p touched last, seen by request i, is what the requests between the two touched: all
their units, less the units that one of them had touched before within that span. The latter are pairs in time of which
the earlier one has the later predecessor, summed for all runs together in log2(requests) passes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tracer.blocks import Blocks

Ints = NDArray[np.int64]
# Requests' blocks and the units of each reference, piece by piece in order of time; asked for anew for each look at them, so
# that no copy as large as the trace is needed.
Pieces = Callable[[], Iterable[tuple[Blocks, Ints]]]
PIECE_REFERENCES = 1 << 19


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseSegments:
    """Segment i: `counts[i]` looked-up units whose stack distances are distances[i] + 1, + 2, ... All [segments]."""

    distances: Ints
    counts: Ints
    requests: Ints  # who looked them up
    predecessors: Ints  # who touched them last before
    depths: Ints  # units above the segment in the request's path
    request_hits: Ints  # [requests], units seen before, however long ago
    unique: int  # distinct units touched


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """All [runs], in the order of the references."""

    first_block: NDArray[np.int32]
    request: Ints
    units: Ints
    depth: Ints  # units above it in the path
    is_first: NDArray[np.bool_]  # of its request


def reuse_segments(blocks: Blocks, units: Ints, lookup_units: Ints) -> ReuseSegments:
    """Ids must be chained, units positive and constant for an id; requests in order of arrival."""
    return segments_of(lambda: [(blocks, units)], int(blocks.ids.max(initial=-1)) + 1, lookup_units)


def segments_of(pieces: Pieces, names: int, lookup_units: Ints) -> ReuseSegments:
    """`reuse_segments` of requests that are given piece by piece, with ids below `names`."""
    runs, predecessor = _runs_of(pieces, names)
    fresh = predecessor < 0
    begins = runs.is_first.copy()
    begins[1:] |= predecessor[1:] != predecessor[:-1]
    starts = np.flatnonzero(begins)
    width = np.add.reduceat(runs.units, starts) if len(starts) else starts
    known = ~fresh[starts]
    starts, width = starts[known], width[known]
    request, predecessor, depth = runs.request[starts], predecessor[starts], runs.depth[starts]

    requests = len(lookup_units)
    touched = np.zeros(requests + 1, dtype=np.int64)  # units of all requests before
    np.add.at(touched, runs.request + 1, runs.units)
    np.cumsum(touched, out=touched)
    again = _heavier_before(predecessor, width) - depth  # less the request's own upper part, more recent throughout
    distance = touched[request] - touched[predecessor + 1] - again

    seen = np.zeros(requests, dtype=np.int64)
    np.maximum.at(seen, request, depth + width)
    looked_up = depth < lookup_units[request]
    return ReuseSegments(
        distances=distance[looked_up],
        counts=np.minimum(width, lookup_units[request] - depth)[looked_up],
        requests=request[looked_up],
        predecessors=predecessor[looked_up],
        depths=depth[looked_up],
        request_hits=np.minimum(seen, lookup_units),
        unique=int(runs.units[fresh].sum()),
    )


def spans(offsets: Ints) -> list[tuple[int, int]]:
    """First request and the one after the last of pieces of about `PIECE_REFERENCES` references each; at least one piece."""
    cuts = np.searchsorted(offsets[:-1], np.arange(0, int(offsets[-1]), PIECE_REFERENCES))
    return list(pairwise(np.unique([0, *cuts, len(offsets) - 1]).tolist())) or [(0, 0)]


def _runs_of(pieces: Pieces, names: int) -> tuple[_Runs, Ints]:
    """All runs, and the request that touched each of them last before; -1: none."""
    visits = np.zeros(names, dtype=np.int32)
    for blocks, _ in pieces():
        np.add.at(visits, blocks.ids, np.int32(1))  # of its own type: else many times slower
    parts, request = [], 0
    for blocks, units in pieces():
        parts.append(_runs(blocks, units, visits, request))
        request += len(blocks)
    joined = {name: np.concatenate([getattr(one, name) for one in parts]) for name in _Runs.__dataclass_fields__}
    runs = _Runs(**joined)
    return runs, _last_request(runs.first_block, visits, runs.request)


def _runs(blocks: Blocks, units: Ints, visits: NDArray[np.int32], first_request: int) -> _Runs:
    ids, lengths = blocks.ids, blocks.lengths
    of_reference = visits[ids]
    begins = np.empty(len(ids), dtype=bool)
    np.not_equal(of_reference[1:], of_reference[:-1], out=begins[1:])
    begins[blocks.offsets[:-1][lengths > 0]] = True
    starts = np.flatnonzero(begins)
    at = np.searchsorted(starts, blocks.offsets)
    request = np.repeat(np.arange(len(blocks)), np.diff(at))
    width = np.add.reduceat(units, starts, dtype=np.int64) if len(starts) else starts
    above = np.zeros(len(starts) + 1, dtype=np.int64)
    np.cumsum(width, out=above[1:])
    is_first = np.zeros(len(starts), dtype=bool)
    is_first[at[:-1][lengths > 0]] = True
    return _Runs(
        first_block=ids[starts],
        request=first_request + request,
        units=width,
        depth=above[:-1] - above[at[:-1]][request],
        is_first=is_first,
    )


def _last_request(first_block: NDArray[np.int32], visits: NDArray[np.int32], request: Ints) -> Ints:
    """Who touched each run last before; -1: nobody. A run is named by its first block."""
    predecessor = np.full(len(request), -1, dtype=np.int64)
    shared = np.flatnonzero(visits[first_block] > 1)
    keys = first_block[shared].astype(np.int64) << 32 | np.arange(len(shared))
    keys.sort()
    place = shared[keys & 0xFFFFFFFF]
    again = np.flatnonzero(keys[1:] >> 32 == keys[:-1] >> 32) + 1
    predecessor[place[again]] = request[place[again - 1]]
    return predecessor


def _heavier_before(values: Ints, weights: Ints) -> Ints:
    """For each element, the weights of all earlier ones with a greater value.

    Bit by bit from the highest: elements stay in groups of equal upper bits, in their order inside each. One with a 0 adds
    what the 1s before it in its group weigh; then the group's 0s go before its 1s.
    """
    found = np.zeros(len(values), dtype=np.int64)
    value, weight, place = values.astype(np.int32), weights, np.arange(len(values), dtype=np.int32)
    for bit in reversed(range(int(values.max(initial=0)).bit_length())):
        is_one = (value >> bit & 1).astype(bool)
        is_zero = ~is_one
        heavier = np.cumsum(np.where(is_one, weight, 0))
        group = value >> (bit + 1)
        first = np.concatenate([[0], np.flatnonzero(group[1:] != group[:-1]) + 1, [len(group)]])
        size = np.diff(first)
        base = np.concatenate([[0], heavier])[first[:-1]]
        found[place[is_zero]] += (heavier - np.repeat(base, size))[is_zero]

        zeros_before = np.concatenate([[0], np.cumsum(is_zero)])
        zeros = np.diff(zeros_before[first])
        start, group_zeros_before = np.repeat(first[:-1], size), np.repeat(zeros_before[first[:-1]], size)
        zeros_rank = zeros_before[:-1] - group_zeros_before
        ones_rank = np.arange(len(value)) - start - zeros_rank
        target = start + np.where(is_one, np.repeat(zeros, size) + ones_rank, zeros_rank)
        arranged = np.empty_like(target)
        arranged[target] = np.arange(len(value))
        value, weight, place = value[arranged], weight[arranged], place[arranged]
    return found
