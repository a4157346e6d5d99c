"""Sharing groups: which requests must be copied, kept or dropped together, because they share a private prefix. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracer.blocks import Blocks

Ints = NDArray[np.int64]
MAX_SHARE = 0.05
ENOUGH_VISITS = 10  # in a short trace 5 % may be two turns of one conversation, so there it takes more


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Both [requests]. `group_of` is dense in first-seen order."""

    group_of: Ints
    global_blocks: Ints  # how many leading blocks of a request are global prefixes

    @property
    def count(self) -> int:
        return int(self.group_of.max(initial=-1)) + 1


def sharing_groups(blocks: Blocks, session_ids: Ints | None = None, max_share: float = MAX_SHARE) -> Groups:
    """All requests below the shallowest prefix-tree node that fewer than `max_share` of the requests visit.

    Nodes above it are global prefixes. In a trace of fewer than 200 requests it takes ten visits to be one (half of
    the requests below 20), and wherever sessions are known, two sessions: else a long conversation in a short trace
    would pass for a system prompt. Sessions (-1:
    none) are never split: groups that one session touches are one group. A request that ends inside global prefixes is
    a group of its own. Ids must be chained.
    """
    requests = len(blocks)
    owner = np.repeat(np.arange(requests), blocks.lengths)
    enough = max(max_share * requests, min(ENOUGH_VISITS, requests / 2), 2)
    is_global = np.bincount(blocks.ids) >= enough  # chained ids come once in a path: references are visits
    if session_ids is not None:
        session = np.where(session_ids >= 0, session_ids, np.arange(requests) + session_ids.max(initial=0) + 1)
        is_global &= _visits(blocks.ids, session[owner]) >= 2
    # Visits never grow along a chained path, so the global blocks are the leading ones.
    sums = np.concatenate([[0], np.cumsum(is_global[blocks.ids])])
    depth = sums[blocks.offsets[1:]] - sums[blocks.offsets[:-1]]

    first_private = np.full(requests, -1, dtype=np.int64)
    has_private = depth < blocks.lengths
    first_private[has_private] = blocks.ids[(blocks.offsets[:-1] + depth)[has_private]]
    alone = np.arange(requests) + int(blocks.ids.max(initial=-1)) + 1
    keys = np.where(first_private >= 0, first_private, alone)
    if session_ids is not None:
        keys = _joined(keys, session_ids)
    return Groups(group_of=_first_seen(keys), global_blocks=depth)


def _visits(ids: NDArray[np.int32], visitor: Ints) -> Ints:
    """How many different visitors each id has."""
    if not len(ids):
        return np.zeros(0, dtype=np.int64)
    pairs = ids.astype(np.int64) << 32 | visitor
    pairs.sort()  # np.unique hashes integers, which takes several times as long on so many
    return np.bincount(pairs[np.append(True, pairs[1:] != pairs[:-1])] >> 32)


def _joined(keys: Ints, session_ids: Ints) -> Ints:
    """One key for all groups that some session connects (union-find)."""
    parent: dict[int, int] = {}

    def root(node: int) -> int:
        while (above := parent.setdefault(node, node)) != node:
            parent[node] = node = parent.setdefault(above, above)
        return node

    for key, session in zip(keys.tolist(), session_ids.tolist(), strict=True):
        if session >= 0:
            parent[root(-1 - session)] = root(key)
    return np.array([root(key) for key in keys.tolist()], dtype=np.int64)


def _first_seen(keys: Ints) -> Ints:
    """Keys renumbered from 0 in first-seen order."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]
