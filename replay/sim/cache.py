"""Paged KV blocks with reference counts and prefix caching, by the rules of vLLM's block pool. Pure.

A block is an index. It is *held* by running requests (reference count > 0) or *free*; a free block keeps its name (the
chained hash of the tokens in it) and can be hit until it is taken again.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol


class Tier(Protocol):
    """Where the names of evicted blocks go."""

    def run(self, names: Sequence[int]) -> int: ...
    def put(self, name: int) -> None: ...
    def drop(self, name: int) -> None: ...
    def reset(self) -> None: ...


class BlockCache:
    """`total` blocks; a free list in eviction order, least recently used first. What is evicted goes to the `host`, if any."""

    def __init__(self, total: int, host: Tier | None = None) -> None:
        self.total = total
        self.host = host
        self.references = [0] * total
        self._names: list[int | None] = [None] * total
        self._named: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that could be hit now."""
        return len(self._named)

    def leading_run(self, names: Sequence[int], limit: int) -> list[int]:
        """Blocks that hold the longest cached prefix of at most `limit` names. Takes no reference."""
        named = self._named
        found: list[int] = []
        for i in range(min(limit, len(names))):
            block = named.get(names[i])
            if block is None:
                break
            found.append(block)
        return found

    def can_hold(self, hits: Sequence[int], new: int) -> bool:
        """Whether the hits can be held and `new` more blocks taken; free hits leave the free list themselves."""
        if new + len(hits) <= len(self._free):
            return True
        references = self.references
        return new + sum(not references[block] for block in hits) <= len(self._free)

    def hold(self, blocks: Sequence[int]) -> None:
        references, free = self.references, self._free
        for block in blocks:
            if not references[block]:
                del free[block]
            references[block] += 1

    def take(self, count: int) -> list[int]:
        """`count` blocks from the free list, least recently used first; their names are forgotten."""
        self.require(count)
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._forget(block)
            self.references[block] = 1
        return taken

    def require(self, count: int) -> None:
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked, {len(self._free)} are free")

    def knows(self, name: int) -> bool:
        return name in self._named

    def knows_any(self, names: Iterable[int]) -> bool:
        return any(name in self._named for name in names)

    def give_names(self, blocks: Sequence[int], names: Sequence[int]) -> None:
        for block, name in zip(blocks, names, strict=True):
            self.give_name(block, name)

    def give_name(self, block: int, name: int) -> None:
        """The block is full now, so it can be hit.

        A second copy arises when the last block of a fully cached prompt is computed again. The newer copy keeps the
        name; the older one can never be hit any more and is spent first.
        """
        older = self._named.get(name)
        if older == block:
            return
        if older is not None:
            self._names[older] = None
            if not self.references[older]:
                self._free.move_to_end(older, last=False)
        self._named[name] = block
        self._names[block] = name
        if self.host is not None:
            self.host.drop(name)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back a request's blocks, tail first, so that the tail is evicted first.

        Blocks without a name are spent before any other (as vLLM's `free_blocks` does since 0.24).
        """
        references, names, free = self.references, self._names, self._free
        for block in reversed(blocks):
            if not references[block]:
                raise ValueError(f"block {block} is released more often than it was held")
            references[block] -= 1
            if references[block]:
                continue
            free[block] = None
            if names[block] is None:
                free.move_to_end(block, last=False)

    def reset(self) -> None:
        """Forget every name. Held blocks stay held."""
        self._named.clear()
        self._names = [None] * self.total
        if self.host is not None:
            self.host.reset()

    def _forget(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            del self._named[name]
            self._names[block] = None
            if self.host is not None:
                self.host.put(name)


def chained_names(tokens: "array[int]", block_tokens: int) -> list[int]:
    """64-bit names of the full blocks of `tokens`, each committing to all before it; equal only within a process."""
    data = tokens.tobytes()
    width = block_tokens * tokens.itemsize
    names: list[int] = []
    parent = 0
    for end in range(width, len(data) + 1, width):
        parent = hash((parent, data[end - width : end]))
        names.append(parent)
    return names
