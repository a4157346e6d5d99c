"""The block cache alone: eviction order, names, references."""

from array import array

import pytest

from replay.sim.cache import BlockCache, chained_names


def test_a_name_commits_to_every_token_before_it() -> None:
    names = chained_names(array("I", [1, 2, 3, 4, 5, 6, 7]), 2)
    other = chained_names(array("I", [9, 2, 3, 4, 5, 6, 7]), 2)

    assert len(names) == 3
    assert not set(names) & set(other)
    assert chained_names(array("I", [1, 2, 3, 4, 8, 8]), 2)[:2] == names[:2]


def test_the_least_recently_released_block_is_taken_first_and_tails_before_heads() -> None:
    cache = BlockCache(4)
    old, new = cache.take(2), cache.take(2)
    for i, block in enumerate(old + new):
        cache.give_name(block, i)

    cache.release(old)
    cache.release(new)

    assert cache.take(4) == [old[1], old[0], new[1], new[0]]


def test_a_block_without_a_name_is_spent_before_any_cached_one() -> None:
    cache = BlockCache(2)
    full, partial = cache.take(2)
    cache.give_name(full, 7)

    cache.release([full, partial])

    assert cache.take(1) == [partial]
    assert cache.leading_run([7], 1) == [full]


def test_a_taken_block_forgets_its_name() -> None:
    cache = BlockCache(1)
    blocks = cache.take(1)
    cache.give_name(blocks[0], 7)
    cache.release(blocks)

    cache.take(1)

    assert cache.leading_run([7], 1) == []
    assert cache.cached == 0


def test_a_run_ends_at_the_first_missing_name_and_at_the_limit() -> None:
    cache = BlockCache(3)
    blocks = cache.take(3)
    for block, name in zip(blocks, [1, 2, 4], strict=True):
        cache.give_name(block, name)

    assert cache.leading_run([1, 2, 3, 4], 4) == blocks[:2]
    assert cache.leading_run([1, 2, 3, 4], 1) == blocks[:1]


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    cache = BlockCache(1)
    blocks = cache.take(1)
    cache.hold(blocks)

    cache.release(blocks)
    still_held = cache.free
    cache.release(blocks)

    assert (still_held, cache.free) == (0, 1)


def test_hits_that_are_free_leave_less_room_for_new_blocks() -> None:
    cache = BlockCache(3)
    held, free = cache.take(1), cache.take(1)
    cache.release(free)

    assert cache.can_hold(held, 2)
    assert cache.can_hold(free, 1)
    assert not cache.can_hold(free, 2)


def test_the_newer_copy_of_a_block_keeps_the_name_and_the_older_one_is_spent_first() -> None:
    cache = BlockCache(3)
    older = cache.take(1)
    cache.give_name(older[0], 7)
    cache.release(older)
    newer = cache.take(1)

    cache.give_name(newer[0], 7)

    assert cache.leading_run([7], 1) == newer
    assert cache.take(1) == older
    assert cache.leading_run([7], 1) == newer


def test_a_reset_forgets_names_and_keeps_references() -> None:
    cache = BlockCache(2)
    blocks = cache.take(1)
    cache.give_name(blocks[0], 7)

    cache.reset()

    assert cache.leading_run([7], 1) == []
    assert cache.free == 1


def test_misuse_is_an_error() -> None:
    cache = BlockCache(1)

    with pytest.raises(ValueError, match="2 blocks asked, 1 are free"):
        cache.take(2)
    with pytest.raises(ValueError, match="released more often"):
        cache.release([0])
