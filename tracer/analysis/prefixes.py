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
    ids, visits = blocks.ids, np.bincount(blocks.ids)
    reference = np.arange(len(ids))
    place = reference - np.repeat(blocks.offsets[:-1], blocks.lengths)
    depth, own = np.zeros(len(visits), dtype=np.int64), np.zeros(len(visits), dtype=np.int64)
    depth[ids] = place + 1

    # A run begins where the block above has more visitors, and ends where no block below has as many.
    follows = np.zeros(len(ids), dtype=bool)
    follows[1:] = (place[1:] > 0) & (visits[ids[1:]] == visits[ids[:-1]])
    own[ids] = reference - np.maximum.accumulate(np.where(follows, 0, reference)) + 1
    goes_on = np.zeros(len(visits), dtype=bool)
    goes_on[ids[:-1][follows[1:]]] = True
    ends = np.flatnonzero((visits > 1) & ~goes_on)
    saved = (visits[ends] - 1) * own[ends] * block_tokens
    return [
        SharedPrefix(
            last_block=int(ends[i]),
            requests=int(visits[ends[i]]),
            depth_tokens=int(depth[ends[i]]) * block_tokens,
            own_tokens=int(own[ends[i]]) * block_tokens,
            reusable_tokens=int(saved[i]),
        )
        for i in np.argsort(-saved, kind="stable")[:count]
    ]
