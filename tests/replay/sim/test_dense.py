"""The cache on arrays gives what the cache of single blocks gives, whatever is asked of them."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from replay.sim.cache import BlockCache
from replay.sim.dense import DenseCache

TOTAL, NAMES = 60, 120


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_both_caches_agree(data: st.DataObject) -> None:
    """Requests begin (from what is cached), grow (by few blocks or many) and end; their names overlap."""
    caches: list[Any] = [BlockCache(TOTAL), DenseCache(TOTAL, NAMES)]
    held: list[tuple[int, int, list[Any]]] = []  # first name, blocks named, blocks in either cache
    for _ in range(data.draw(st.integers(1, 25))):
        if held and data.draw(st.booleans()):
            _, _, blocks = held.pop(data.draw(st.integers(0, len(held) - 1)))
            for cache, own in zip(caches, blocks, strict=True):
                cache.release(own)
        else:
            first = data.draw(st.sampled_from([0, 5, 40, 80]))
            names = list(range(first, first + data.draw(st.integers(1, 30))))
            hits = [cache.leading_run(names, len(names) - 1) for cache in caches]
            new = len(names) - len(hits[0])
            assert len(hits[0]) == len(hits[1])
            room = [cache.can_hold(found, new) for cache, found in zip(caches, hits, strict=True)]
            assert room[0] == room[1]
            if not room[0]:
                continue
            named = data.draw(st.integers(len(hits[0]), len(names)))
            for cache, blocks in zip(caches, hits, strict=True):
                found = len(blocks)
                cache.hold(blocks)
                blocks.extend(cache.take(new))
                cache.give_names(blocks[found:named], names[found:named])
            held.append((first, named, hits))
        assert caches[0].free == caches[1].free
        assert [caches[0].knows(name) for name in range(NAMES)] == [caches[1].knows(name) for name in range(NAMES)]
        assert sorted(caches[0].references) == sorted(caches[1].references.tolist())
