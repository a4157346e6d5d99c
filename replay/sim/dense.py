"""The rules of `BlockCache`, on arrays: for names that are small numbers, whole prompts at a time. Pure.

A prompt of 100,000 tokens is 6,250 blocks; to look them up, hold, name and release them one by one is most of the cost of
virtual time. Which free block is taken never shows in a result, only which names go: so this cache and the other one agree.
"""

from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_NONE = -1
_FEW = 8  # up to so many blocks it is faster to go one by one
_HELD = np.iinfo(np.int64).min  # a place that no run has


class DenseCache:
    """`total` blocks whose names are 0 .. `names` - 1. Blocks come and go as `array("q")`.

    The free list is a queue of runs of blocks, each with the place of its first block. A block is still there if its own
    place says so; one that has been held since is skipped when the run comes up.
    """

    def __init__(self, total: int, names: int) -> None:
        self.total = total
        self.free = total
        self.host = None
        self.references = np.zeros(total, dtype=np.int64)
        self._name_of = np.full(total, _NONE, dtype=np.int64)
        self._block_of = np.full(names + 1, _NONE, dtype=np.int32)
        self._place = np.arange(total, dtype=np.int64)
        self._ascending = np.arange(total, dtype=np.int64)
        # The same memory, for one place at a time: numpy takes several times as long for it.
        self._references_at, self._name_at = memoryview(self.references), memoryview(self._name_of)
        self._block_at, self._place_at = memoryview(self._block_of), memoryview(self._place)
        self._runs: deque[tuple[int, NDArray[np.int64]]] = deque([(0, np.arange(total, dtype=np.int64))])
        self._front, self._back = 0, total  # places: of the first block, and behind the last one

    def leading_run(self, names: Sequence[int], limit: int) -> "array[int]":
        """Blocks that hold the longest cached prefix of at most `limit` names. Takes no reference."""
        found = self._block_of.take(_names(names)[:limit])
        missing = found < 0
        end = int(missing.argmax()) if len(found) else 0
        if len(found) and missing[end]:
            found = found[:end]
        return array("q", found.astype(np.int64).tobytes())

    def can_hold(self, hits: Sequence[int], new: int) -> bool:
        """Whether the hits can be held and `new` more blocks taken; free hits leave the free list themselves."""
        if new + len(hits) <= self.free:
            return True
        if new > self.free:
            return False
        return new + int((self.references[_numbers(hits)] == 0).sum()) <= self.free

    def hold(self, blocks: Sequence[int]) -> None:
        held = _numbers(blocks)
        fresh = held[self.references.take(held) == 0]
        self._place[fresh] = _HELD
        self.free -= len(fresh)
        self.references[held] += 1

    def take(self, count: int) -> "array[int]":
        """`count` blocks from the free list, least recently used first; their names are forgotten."""
        if count > self.free:
            raise ValueError(f"{count} blocks asked, {self.free} are free")
        if count <= _FEW:
            return self._take_few(count)
        parts: list[NDArray[np.int64]] = []
        missing, width = count, count + 16
        while missing:
            place, run = self._runs.popleft()
            window = run[:width]
            width *= 2  # a run whose blocks are held again is passed in few strides
            there = (self._place.take(window) == self._ascending[: len(window)] + place).nonzero()[0][:missing]
            spent = int(there[-1]) + 1 if len(there) == missing else len(window)
            if spent < len(run):
                self._runs.appendleft((place + spent, run[spent:]))
            parts.append(window[there])
            missing -= len(there)
        taken = np.concatenate(parts) if len(parts) != 1 else parts[0]
        self._block_of[self._name_of.take(taken)] = _NONE  # of those without a name: the place behind the last name
        self._name_of[taken] = _NONE
        self._place[taken] = _HELD
        self.references[taken] = 1
        self.free -= count
        return array("q", taken.tobytes())

    def _take_few(self, count: int) -> "array[int]":
        """The same, one by one."""
        taken = array("q")
        while len(taken) < count:
            place, run = self._runs.popleft()
            spent = 0
            for block in run[: count + 16].tolist():
                spent += 1
                if self._place_at[block] != place + spent - 1:
                    continue
                self._block_at[self._name_at[block]] = _NONE
                self._name_at[block] = _NONE
                self._place_at[block] = _HELD
                self._references_at[block] = 1
                taken.append(block)
                if len(taken) == count:
                    break
            if spent < len(run):
                self._runs.appendleft((place + spent, run[spent:]))
        self.free -= count
        return taken

    def knows(self, name: int) -> bool:
        return self._block_at[name] != _NONE

    def knows_any(self, names: "array[int]") -> bool:
        if len(names) <= _FEW:
            return any(self._block_at[name] != _NONE for name in names)
        return bool(self._block_of[_names(names)].max() != _NONE)

    def give_names(self, blocks: Sequence[int], names: Sequence[int]) -> None:
        """See `BlockCache.give_name`. No name twice."""
        held, named = _numbers(blocks), _names(names)
        older = self._block_of.take(named)
        if len(older) and older.max() != _NONE:
            copies = older[(older != _NONE) & (older != held)]
            self._name_of[copies] = _NONE
            for block in copies[self.references[copies] == 0]:
                self._to_front(np.array([block], dtype=np.int64))
        self._block_of[named] = held
        self._name_of[held] = named

    def release(self, blocks: Sequence[int]) -> None:
        """Give back a request's blocks, tail first; see `BlockCache.release`."""
        released = _numbers(blocks)
        self.references[released] -= 1
        left = self.references.take(released)
        if left.min(initial=0) < 0:
            raise ValueError(f"block {released[np.argmin(left)]} is released more often than it was held")
        freed = released[left == 0]
        self.free += len(freed)
        is_named = self._name_of.take(freed) != _NONE
        run = freed[is_named][::-1]
        self._place[run] = np.arange(self._back, self._back + len(run))
        self._runs.append((self._back, run))
        self._back += len(run)
        self._to_front(freed[~is_named])  # the last one first, so that it comes after those that are pushed later

    def reset(self) -> None:
        """Forget every name. Held blocks stay held."""
        self._block_of[:] = _NONE
        self._name_of[:] = _NONE

    def _to_front(self, run: NDArray[np.int64]) -> None:
        self._front -= len(run)
        self._place[run] = np.arange(self._front, self._front + len(run))
        self._runs.appendleft((self._front, run))


def _names(names: Sequence[int]) -> NDArray[np.int64]:
    return np.frombuffer(names, dtype=np.int64) if isinstance(names, array) else np.asarray(names, dtype=np.int64)


def _numbers(blocks: Sequence[int]) -> NDArray[np.int64]:
    return np.frombuffer(blocks, dtype=np.int64) if isinstance(blocks, array) else np.asarray(blocks, dtype=np.int64)
