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


class PrefixTree:
    """Shared beginnings that have been named: each node is a level, a run of consecutive block ids below its parent's."""

    def __init__(self, levels: int) -> None:
        self.levels = levels
        self._nodes: dict[tuple[int, int], int] = {}  # (parent or -1, choice) -> node
        self._depth_firsts = np.zeros((16, levels), dtype=np.int64)  # [nodes, levels] first ids of the runs down to a node
        self._depth_lengths = np.zeros((16, levels), dtype=np.int64)

    def walk(self, choices: Ints, ends: Ints) -> tuple[Ints, Ints, list[tuple[int, int, int, int, int]]]:
        """For first requests, in order: the deepest node that is named already (-1: none), and how many blocks that covers.

        What is not named yet is added, as (node, parent, depth, request, blocks before it that the request names too);
        `name` must follow.
        """
        nodes, known = np.full(len(choices), -1, dtype=np.int64), np.zeros(len(choices), dtype=np.int64)
        new: list[tuple[int, int, int, int, int]] = []
        blocks = (ends // BASE_BLOCK_TOKENS).tolist()
        self._new_lengths: list[int] = []
        for request, path in enumerate(choices.tolist()):
            node, at, is_known = -1, 0, True
            for depth, choice in enumerate(path):
                found = self._nodes.get((node, choice)) if is_known else None
                if found is None:
                    is_known = False
                    found = self._nodes[node, choice] = len(self._nodes)
                    new.append((found, node, depth, request, at - int(known[request])))
                    self._new_lengths.append(blocks[request][depth] - at)
                else:
                    nodes[request], known[request] = found, blocks[request][depth]
                node, at = found, blocks[request][depth]
        return nodes, known, new

    def name(self, new: list[tuple[int, int, int, int, int]], first_ids: Ints) -> None:
        """Give the nodes that `walk` has added their ids; `first_ids` are those of the requests."""
        if not new:
            return
        while len(self._depth_firsts) < len(self._nodes):
            self._depth_firsts = np.concatenate([self._depth_firsts, np.zeros_like(self._depth_firsts)])
            self._depth_lengths = np.concatenate([self._depth_lengths, np.zeros_like(self._depth_lengths)])
        node, parent, depth, request, offset = np.array(new, dtype=np.int64).T
        lengths = np.array(self._new_lengths, dtype=np.int64)
        for level in range(self.levels):  # parents before children
            at = depth == level
            if level:
                self._depth_firsts[node[at]] = self._depth_firsts[parent[at]]
                self._depth_lengths[node[at]] = self._depth_lengths[parent[at]]
            self._depth_firsts[node[at], level] = first_ids[request[at]] + offset[at]
            self._depth_lengths[node[at], level] = lengths[at]

    def runs(self, nodes: Ints) -> tuple[Ints, Ints]:
        """[nodes, levels]: first id and length of each level's run; length 0 below the node, and for node -1."""
        is_node = nodes[:, None] >= 0
        return np.where(is_node, self._depth_firsts[nodes], 0), np.where(is_node, self._depth_lengths[nodes], 0)


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
