"""Shared prefixes: the runs of the prefix tree that save most when they are cached. Pure."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from tracer.blocks import Blocks

Ints = NDArray[np.int64]


class SharedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A run of blocks that the same requests share. `depth_tokens` is where it ends, `own_tokens` how long it is."""

    last_block: int  # names the run: a chained id stands for its whole prefix
    requests: int
    depth_tokens: int
    own_tokens: int
    reusable_tokens: int  # (requests - 1) * own_tokens: what an endless cache saves with this run alone


def top_prefixes(blocks: Blocks, block_tokens: int, count: int) -> list[SharedPrefix]:
    """The `count` runs with the most reusable tokens. Ids must be chained: an id has one depth, one predecessor."""
    if not len(blocks.ids):
        return []
    visits = np.bincount(blocks.ids)
    depth = np.zeros(len(visits), dtype=np.int64)
    above = np.full(len(visits), -1, dtype=np.int64)
    place = np.arange(len(blocks.ids)) - np.repeat(blocks.offsets[:-1], blocks.lengths)
    depth[blocks.ids] = place + 1
    before = np.concatenate([[-1], blocks.ids[:-1]])
    above[blocks.ids] = np.where(place == 0, -1, before)

    shared = np.flatnonzero(visits > 1)
    # A run ends where no child has as many visitors; it begins after the nearest ancestor that more requests visit.
    goes_on = np.zeros(len(visits), dtype=bool)
    has_parent = shared[above[shared] >= 0]
    goes_on[above[has_parent][visits[above[has_parent]] == visits[has_parent]]] = True
    ends = shared[~goes_on[shared]]
    starts = _starts(ends, above, visits)
    own = depth[ends] - depth[starts] + 1
    saved = (visits[ends] - 1) * own * block_tokens
    best = _largest(saved, count)
    return [
        SharedPrefix(
            last_block=int(ends[i]),
            requests=int(visits[ends[i]]),
            depth_tokens=int(depth[ends[i]]) * block_tokens,
            own_tokens=int(own[i]) * block_tokens,
            reusable_tokens=int(saved[i]),
        )
        for i in best
    ]


def _largest(saved: Ints, count: int) -> list[int]:
    """Places of the largest values, largest first, the earlier one first among equals."""
    return [int(i) for i in np.argsort(-saved, kind="stable")[:count]]


def _starts(ends: Ints, above: Ints, visits: Ints) -> Ints:
    """First block of each run: climb while the block above has as many visitors, all runs a step at a time."""
    starts = ends.copy()
    climbing = np.arange(len(ends))
    while len(climbing):
        parents = above[starts[climbing]]
        same = (parents >= 0) & (visits[parents] == visits[starts[climbing]])
        climbing = climbing[same]
        starts[climbing] = above[starts[climbing]]
    return starts
