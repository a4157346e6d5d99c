"""What else may become of cached blocks than vLLM's LRU: other orders of eviction, and host memory behind the GPU's. Pure."""

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from replay.sim.cache import BlockCache
from replay.sim.presets import Preset


def is_plain(preset: Preset) -> bool:
    """LRU on the GPU alone."""
    return preset.eviction == "lru" and not preset.offload_blocks


def new_cache(preset: Preset) -> BlockCache:
    host = HostTier(preset.offload_blocks) if preset.offload_blocks else None
    if preset.eviction == "lru":
        return BlockCache(preset.kv_blocks, host)
    return LeafCache(
        preset.kv_blocks,
        host,
        renewed=preset.eviction == "priority",
        protected_blocks=preset.protected_tokens // preset.block_tokens if preset.eviction == "priority" else 0,
    )


class HostTier:
    """Names of blocks that were evicted from the GPU, least recently evicted first.

    A block is in one tier only: it leaves this one when it is loaded or computed again. So both together are one LRU list
    (a victim cache: Jouppi, ISCA 1990).
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._names: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def run(self, names: Sequence[int]) -> int:
        """How many of the first names are here without a gap."""
        for count, name in enumerate(names):
            if name not in self._names:
                return count
        return len(names)

    def put(self, name: int) -> None:
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > self.blocks:
            self._names.popitem(last=False)

    def drop(self, name: int) -> None:
        self._names.pop(name, None)

    def reset(self) -> None:
        self._names.clear()


class LeafCache(BlockCache):
    """Evicts cached blocks that no cached block goes on from, the one with the smallest key first.

    Radix caches do so (SGLang's `RadixCache.evict`): a block whose beginning is gone could never be hit. The key is
    (is protected, stamp); the stamp counts releases. `renewed`: each release gives a new one, so the order is least recently
    used; else the first one stays: first in, first out. `protected_blocks` of the beginning of a request outlive the
    others, as a token range with a priority does in TensorRT-LLM's `KvCacheRetentionConfig`.
    """

    def __init__(self, total: int, host: HostTier | None = None, *, renewed: bool, protected_blocks: int = 0) -> None:
        super().__init__(total, host)
        self.renewed = renewed
        self.protected_blocks = protected_blocks
        self._stamp = 0
        self._keys: dict[int, tuple[bool, int]] = {}  # by name, as the next ones
        self._parents: dict[int, int] = {}
        self._children: dict[int, int] = {}  # cached ones
        self._leaves: list[tuple[tuple[bool, int], int]] = []  # heap of (key, name); old entries are skipped

    def take(self, count: int) -> list[int]:
        self.require(count)
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        block = next(iter(self._free))
        if self._names[block] is not None:  # those without a name stand in front
            block = self._next_leaf(block)
        del self._free[block]
        self._forget(block)
        self.references[block] = 1
        return block

    def _next_leaf(self, else_block: int) -> int:
        while self._leaves:
            key, name = heapq.heappop(self._leaves)
            block = self._named.get(name)
            if block is None or self.references[block] or self._keys.get(name) != key or name in self._children:
                continue
            return block
        return else_block  # only after a name has moved to a newer copy: a free block below a held one

    def release(self, blocks: Sequence[int]) -> None:
        names = [self._names[block] for block in blocks]
        for parent, name in zip(names, names[1:], strict=False):
            if parent is not None and name is not None and name not in self._parents:
                self._parents[name] = parent
                self._children[parent] = self._children.get(parent, 0) + 1
        super().release(blocks)
        for place in reversed(range(len(blocks))):
            name = names[place]
            if name is None or self.references[blocks[place]]:
                continue
            self._stamp += 1
            if self.renewed or name not in self._keys:
                self._keys[name] = place < self.protected_blocks, self._stamp
            self._offer(name)

    def _offer(self, name: int) -> None:
        if name not in self._children:
            heapq.heappush(self._leaves, (self._keys[name], name))

    def _forget(self, block: int) -> None:
        name = self._names[block]
        super()._forget(block)
        if name is None:
            return
        del self._keys[name]
        parent = self._parents.pop(name, None)
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            above = self._named.get(parent)
            if above is not None and not self.references[above]:
                self._offer(parent)

    def reset(self) -> None:
        super().reset()
        for table in (self._keys, self._parents, self._children):
            table.clear()
        self._leaves.clear()
