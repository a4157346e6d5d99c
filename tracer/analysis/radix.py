"""Stack distances of prefix-tree paths, run by run instead of block by block. Pure.

A node of the tree is a run of blocks with one time stamp; it splits only when its upper part alone is touched. A
Fenwick tree over time stamps holds how many units were touched last at each. So the cost follows the branches that a
path crosses, not its length.
"""

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracer.blocks import Blocks

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseSegments:
    """Segment i: `counts[i]` looked-up units whose stack distances are distances[i] + 1, + 2, ... Both [segments]."""

    distances: Ints
    counts: Ints
    request_hits: Ints  # [requests], units seen before, however long ago
    unique: int  # distinct units touched


def reuse_segments(blocks: Blocks, units: Ints, lookup_units: Ints) -> ReuseSegments:
    """Ids must be chained and dense from 0, units positive and constant for an id; requests in order of arrival."""
    tree = _RunTree(blocks, units)
    recency = _Recency(len(blocks))
    distances, counts = array("q"), array("q")
    request_hits = np.zeros(len(blocks), dtype=np.int64)
    resident = 0
    for request, (path_units, limit) in enumerate(zip(tree.path_units(), lookup_units.tolist(), strict=True)):
        depth = 0
        for stamp, width in tree.touch(request):
            if depth < limit:
                distances.append(resident - recency.up_to(stamp))
                counts.append(min(width, limit - depth))
            recency.add(stamp, -width)
            depth += width
        recency.add(request, path_units)
        resident += path_units - depth
        request_hits[request] = min(depth, limit)
    return ReuseSegments(
        distances=np.frombuffer(distances, dtype=np.int64),
        counts=np.frombuffer(counts, dtype=np.int64),
        request_hits=request_hits,
        unique=resident,
    )


class _Recency:
    """Units by the request that touched them last, with prefix sums in log time (a Fenwick tree)."""

    def __init__(self, requests: int) -> None:
        self._sums = [0] * (requests + 1)

    def up_to(self, request: int) -> int:
        """Units last touched by `request` or an earlier one."""
        sums, i, total = self._sums, request + 1, 0
        while i:
            total += sums[i]
            i &= i - 1
        return total

    def add(self, request: int, units: int) -> None:
        sums, i = self._sums, request + 1
        end = len(sums)
        while i < end:
            sums[i] += units
            i += i & -i


class _RunTree:
    """Prefix tree whose nodes are runs `ids[start : start + length]` of the flat reference list."""

    def __init__(self, blocks: Blocks, units: Ints) -> None:
        ids = np.ascontiguousarray(blocks.ids)
        before = np.zeros(len(ids) + 1, dtype=np.int64)
        np.cumsum(units, out=before[1:])
        self._ids = memoryview(ids)
        self._units_before = memoryview(before)
        self._offsets: list[int] = blocks.offsets.tolist()
        self._node_at = array("q", [-1]) * (int(ids.max(initial=-1)) + 1)  # by the first id of a run
        self._start: list[int] = []
        self._length: list[int] = []
        self._stamp: list[int] = []
        self._children: list[int] = []

    def path_units(self) -> list[int]:
        """Units of each request's whole path."""
        before = np.asarray(self._units_before)
        return list(np.diff(before[np.asarray(self._offsets)]).tolist())

    def touch(self, request: int) -> list[tuple[int, int]]:
        """Stamp the request's path, adding what is new; return (old stamp, units) of its known part, from the root."""
        ids, units_before = self._ids, self._units_before
        at, end = self._offsets[request], self._offsets[request + 1]
        above = -1
        known: list[tuple[int, int]] = []
        while at < end:
            node = self._node_at[ids[at]]
            if node < 0:
                self._append(above, at, end - at, request)
                break
            matched = self._matched(node, at, end)
            if matched < self._length[node]:
                self._split(node, matched)
            units, stamp = units_before[at + matched] - units_before[at], self._stamp[node]
            if known and known[-1][0] == stamp:
                units += known.pop()[1]
            known.append((stamp, units))
            above = self._restamp(above, node, at, request)
            at += matched
        return known

    def _matched(self, node: int, at: int, end: int) -> int:
        """How many blocks of the node the path follows: ids are chained, so one equal id means equal up to there."""
        ids, start = self._ids, self._start[node]
        same, differ = 1, min(self._length[node], end - at) + 1
        if ids[start + differ - 2] == ids[at + differ - 2]:
            return differ - 1
        while differ - same > 1:
            middle = (same + differ) // 2
            if ids[start + middle - 1] == ids[at + middle - 1]:
                same = middle
            else:
                differ = middle
        return same

    def _split(self, node: int, length: int) -> None:
        lower = self._add(self._start[node] + length, self._length[node] - length, self._stamp[node])
        self._children[lower] = self._children[node]
        self._children[node] = 1
        self._length[node] = length

    def _append(self, above: int, at: int, length: int, request: int) -> None:
        if above >= 0 and self._children[above] == 0:  # a leaf grows: its run and the new one are one stretch of path
            self._start[above] = at - self._length[above]
            self._length[above] += length
            return
        self._add(at, length, request)
        if above >= 0:
            self._children[above] += 1

    def _restamp(self, above: int, node: int, at: int, request: int) -> int:
        """Stamp a node whose path starts at `at`; an only child joins its parent. Returns the node it is in now."""
        if above >= 0 and self._children[above] == 1:
            self._start[above] = at - self._length[above]
            self._length[above] += self._length[node]
            self._children[above] = self._children[node]
            self._node_at[self._ids[at]] = -1
            return above
        self._stamp[node] = request
        return node

    def _add(self, start: int, length: int, stamp: int) -> int:
        node = len(self._start)
        self._start.append(start)
        self._length.append(length)
        self._stamp.append(stamp)
        self._children.append(0)
        self._node_at[self._ids[start]] = node
        return node
