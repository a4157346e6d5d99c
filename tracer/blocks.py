"""Prefix blocks: runs of tokens named so that an id commits to everything before it (chained).

Pure arithmetic on ids. Keyed hashing of real tokens lives in record/privacy.py, because it needs a secret.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Ragged lists of block ids: request i owns `ids[offsets[i]:offsets[i + 1]]`.

    Shapes: offsets int64 [requests + 1], ids int32 [references].
    """

    offsets: NDArray[np.int64]
    ids: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, request: int) -> NDArray[np.int32]:
        return self.ids[self.offsets[request] : self.offsets[request + 1]]

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def lengths_of(self, requests: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.offsets[requests + 1] - self.offsets[requests]

    def span(self, start: int, end: int) -> "Blocks":
        """The lists of requests `start` to `end` - 1; their ids are not copied."""
        offsets = self.offsets[start : end + 1]
        return Blocks(offsets=offsets - offsets[0], ids=self.ids[offsets[0] : offsets[-1]])

    def rows(self, requests: NDArray[np.int64]) -> "Blocks":
        """The lists of these requests, in this order."""
        lengths = self.lengths_of(requests)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        source = np.repeat(self.offsets[requests] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Blocks(offsets=offsets, ids=self.ids[source])

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int] | NDArray[np.int32]]) -> "Blocks":
        offsets = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum([len(one) for one in lists], out=offsets[1:])
        parts = [np.asarray(one, dtype=np.int32) for one in lists if len(one)]
        return cls(offsets=offsets, ids=np.concatenate(parts) if parts else np.empty(0, dtype=np.int32))


class DenseIds[Key: Hashable]:
    """Gives each new key the next integer from 0, in first-seen order: small numbers that reveal nothing."""

    def __init__(self) -> None:
        self._ids: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._ids)

    def __getitem__(self, key: Key) -> int:
        return self._ids.setdefault(key, len(self._ids))


def coarsen(ids: Sequence[Any], factor: int) -> Sequence[Any]:
    """Ids at blocks `factor` times as large: every `factor`-th one, since a chained id implies all before it."""
    return ids[factor - 1 :: factor]


def first_unchained(requests: Blocks) -> int | None:
    """Number of the first request that gives an id a second predecessor, or None if the ids are chained."""
    predecessor: dict[int, int] = {}
    for i, ids in enumerate(requests):
        before = -1
        for block in ids.tolist():
            if predecessor.setdefault(block, before) != before:
                return i
            before = block
    return None
