"""Shared beginnings of prompts: which system prompt and documents a session has, and which blocks are already named.

Only full blocks are shared: where a level ends inside a block, that block belongs to whatever follows it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from synth.lengths import counts
from synth.model import Workload
from tracer.schema import BASE_BLOCK_TOKENS

Ints = NDArray[np.int64]
MAX_CHOICES = 10_000_001  # a library has no more documents


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Token lengths and popularity of what sessions share. Cumulative probabilities, most popular first."""

    system_tokens: Ints  # [system prompts]
    document_tokens: Ints  # [documents]
    system_cdf: NDArray[np.float64]
    document_cdf: NDArray[np.float64]
    documents_per_session: int

    def draw(self, sessions: int, rng: np.random.Generator) -> Ints:
        """[sessions, 1 + documents_per_session]: a system prompt, then documents."""
        uniform = rng.random((sessions, 1 + self.documents_per_session))
        chosen = np.searchsorted(self.document_cdf, uniform, side="right")
        chosen[:, 0] = np.searchsorted(self.system_cdf, uniform[:, 0], side="right")
        return chosen.astype(np.int64)

    def level_ends(self, chosen: Ints) -> Ints:
        """[sessions, levels]: prompt tokens up to the end of each level of these choices."""
        lengths = np.empty_like(chosen)
        lengths[:, 0] = self.system_tokens[chosen[:, 0]]
        lengths[:, 1:] = self.document_tokens[chosen[:, 1:]]
        return np.cumsum(lengths, axis=1)

    def scaled(self, factor: float) -> "Pools":
        """System prompts `factor` times as long, in whole blocks of 16."""
        tokens = (16 * np.rint(self.system_tokens * factor / 16)).astype(np.int64)
        return Pools(
            system_tokens=tokens,
            document_tokens=self.document_tokens,
            system_cdf=self.system_cdf,
            document_cdf=self.document_cdf,
            documents_per_session=self.documents_per_session,
        )


def make_pools(workload: Workload, rng: np.random.Generator) -> Pools:
    system, library = workload.system_prompts, workload.documents
    system_rng, document_rng = rng.spawn(2)
    documents = library.count if library.per_session else 1
    return Pools(
        system_tokens=counts(system.tokens, system_rng.standard_normal(system.count), least=0),
        document_tokens=counts(library.tokens, document_rng.standard_normal(documents), least=0),
        system_cdf=_zipf_cdf(system.count, system.zipf),
        document_cdf=_zipf_cdf(documents, library.zipf),
        documents_per_session=library.per_session,
    )


def _zipf_cdf(count: int, exponent: float) -> NDArray[np.float64]:
    """P(rank <= r) where P(rank = r) ~ r ** -exponent, ranks from 1."""
    sums = np.cumsum(np.arange(1, count + 1, dtype=np.float64) ** -exponent)
    sums /= sums[-1]
    sums[-1] = 1.0
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class NewNodes:
    """Levels that `PrefixTree.walk` met for the first time, parents before children; all [nodes]."""

    node: Ints
    parent: Ints  # -1: none
    depth: Ints
    request: Ints  # who named it
    offset: Ints  # blocks between the first one that the request names and the node's own
    blocks: Ints


class PrefixTree:
    """Shared beginnings that have been named: each node is a level, a run of consecutive block ids below its parent's."""

    def __init__(self, levels: int) -> None:
        self.levels = levels
        self._count = 0
        self._keys = np.empty(0, dtype=np.int64)  # of (parent, choice), sorted
        self._nodes = np.empty(0, dtype=np.int64)  # of those keys
        self._firsts = np.zeros((16, levels), dtype=np.int32)  # [nodes, levels] first ids of the runs down to a node
        self._lengths = np.zeros((16, levels), dtype=np.int32)

    def walk(self, choices: Ints, ends: Ints) -> tuple[Ints, Ints, NewNodes]:
        """For first requests, in order: the deepest node that is named already (-1: none), and how many blocks that covers.

        What is not named yet is added; `name` must follow.
        """
        blocks = np.concatenate([np.zeros((len(ends), 1), dtype=np.int64), ends // BASE_BLOCK_TOKENS], axis=1)
        known_node, known = np.full(len(choices), -1, dtype=np.int64), np.zeros(len(choices), dtype=np.int64)
        parent, is_known = known_node.copy(), np.ones(len(choices), dtype=np.bool_)
        parts: list[tuple[Ints, ...]] = []
        for depth in range(self.levels):
            node, request = self._found((parent + 1) * MAX_CHOICES + choices[:, depth])
            is_known[request] = False  # the first to have it names it
            known_node[is_known], known[is_known] = node[is_known], blocks[is_known, depth + 1]
            before = blocks[request, depth]
            parts.append(
                (
                    node[request],
                    parent[request],
                    np.full(len(request), depth),
                    request,
                    before - known[request],
                    blocks[request, depth + 1] - before,
                )
            )
            parent = node
        names = ("node", "parent", "depth", "request", "offset", "blocks")
        new = NewNodes(**{name: np.concatenate(column) for name, column in zip(names, zip(*parts, strict=True), strict=True)})
        return known_node, known, new

    def _found(self, keys: Ints) -> tuple[Ints, Ints]:
        """Node of each key, and the requests that are the first to have theirs; those nodes are new."""
        place = np.searchsorted(self._keys, keys)
        old = np.zeros(len(keys), dtype=np.bool_)
        inside = place < len(self._keys)
        old[inside] = self._keys[place[inside]] == keys[inside]
        nodes = np.empty(len(keys), dtype=np.int64)
        nodes[old] = self._nodes[place[old]]
        fresh = np.flatnonzero(~old)
        new_keys, first, which = np.unique(keys[fresh], return_index=True, return_inverse=True)
        numbers = self._count + np.arange(len(new_keys))
        nodes[fresh] = numbers[which]
        self._count += len(new_keys)
        at = np.searchsorted(self._keys, new_keys)
        self._keys, self._nodes = np.insert(self._keys, at, new_keys), np.insert(self._nodes, at, numbers)
        return nodes, fresh[first]

    def name(self, new: NewNodes, first_ids: Ints) -> None:
        """Give the nodes that `walk` has added their ids; `first_ids` are those of the requests."""
        while len(self._firsts) < self._count:
            self._firsts = np.concatenate([self._firsts, np.zeros_like(self._firsts)])
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
        for depth in range(self.levels):
            at = new.depth == depth
            node = new.node[at]
            if depth:
                self._firsts[node], self._lengths[node] = self._firsts[new.parent[at]], self._lengths[new.parent[at]]
            self._firsts[node, depth] = first_ids[new.request[at]] + new.offset[at]
            self._lengths[node, depth] = new.blocks[at]

    def runs(self, nodes: Ints) -> tuple[Ints, Ints]:
        """[nodes, levels]: first id and length of each level's run; length 0 below the node, and for node -1."""
        is_node = nodes[:, None] >= 0
        return np.where(is_node, self._firsts[nodes], 0), np.where(is_node, self._lengths[nodes], 0)


def prefix_numbers(chosen: Ints) -> Ints:
    """[sessions, levels]: a number for each beginning of choices; equal ones for equal beginnings only."""
    numbers = np.empty_like(chosen)
    key, used = np.zeros(len(chosen), dtype=np.int64), 0
    for level in range(chosen.shape[1]):
        pairs = key * (int(chosen[:, level].max(initial=0)) + 1) + chosen[:, level]
        _, key = np.unique(pairs, return_inverse=True)  # dense, so products stay small
        numbers[:, level] = key + used
        used += int(key.max(initial=-1)) + 1
    return numbers


def depth_seen_before(chosen: Ints) -> Ints:
    """For each session in order, how many leading levels some earlier session shares."""
    numbers = prefix_numbers(chosen)
    seen = np.zeros(len(chosen), dtype=np.int64)
    for level in range(chosen.shape[1]):
        _, first, key = np.unique(numbers[:, level], return_index=True, return_inverse=True)
        seen += first[key] < np.arange(len(chosen))
    return seen
