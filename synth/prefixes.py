"""Shared beginnings of prompts: which system prompt and documents a session has, and which blocks are already named.

Only full blocks are shared: where a level ends inside a block, that block belongs to whatever follows it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from synth.lengths import counts
from synth.model import Workload

Ints = NDArray[np.int64]
Ids = NDArray[np.int32]


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
    """Block ids of shared beginnings, by the choices that lead to them."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, ...], Ids] = {}

    def known(self, path: tuple[int, ...]) -> Ids:
        """Ids of the longest beginning of this path that has been added."""
        for depth in range(len(path), 0, -1):
            ids = self._ids.get(path[:depth])
            if ids is not None:
                return ids
        return np.empty(0, dtype=np.int32)

    def add(self, path: tuple[int, ...], ends: list[int], prompt_ids: Ids, block_tokens: int) -> None:
        """Name each level of a path by the leading ids of a prompt that has it."""
        for depth, end in enumerate(ends, start=1):
            if path[:depth] not in self._ids:
                self._ids[path[:depth]] = prompt_ids[: end // block_tokens].copy()


def depth_seen_before(chosen: Ints) -> Ints:
    """For each session in order, how many leading levels some earlier session shares."""
    sessions, levels = chosen.shape
    seen = np.zeros(sessions, dtype=np.int64)
    key = np.zeros(sessions, dtype=np.int64)
    for level in range(levels):
        pairs = key * (int(chosen[:, level].max(initial=0)) + 1) + chosen[:, level]
        _, first, key = np.unique(pairs, return_index=True, return_inverse=True)  # dense, so products stay small
        seen += first[key] < np.arange(sessions)
    return seen
