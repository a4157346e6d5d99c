"""Shared prefixes, ranked by what they save."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.analysis.prefixes import top_prefixes
from tracer.blocks import Blocks, DenseIds

PATHS = st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=30)


def chained(words: list[list[int]]) -> Blocks:
    ids: DenseIds[tuple[int, ...]] = DenseIds()
    return Blocks.from_lists([[ids[tuple(word[: k + 1])] for k in range(len(word))] for word in words])


def test_a_system_prompt_and_a_long_document_below_it_are_two_runs() -> None:
    blocks = Blocks.from_lists([[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 6], [0, 1]])

    first, second = top_prefixes(blocks, 16, 10)

    assert (first.requests, first.depth_tokens, first.own_tokens, first.reusable_tokens) == (4, 32, 32, 96)
    assert (second.requests, second.depth_tokens, second.own_tokens, second.reusable_tokens) == (2, 80, 48, 48)
    assert (first.last_block, second.last_block) == (1, 4)


@given(PATHS)
@settings(max_examples=100, deadline=None)
def test_the_runs_together_hold_every_block_that_an_endless_cache_would_save(words: list[list[int]]) -> None:
    blocks = chained(words)

    runs = top_prefixes(blocks, 1, 10**6)

    visits = Counter(blocks.ids.tolist())
    assert sum(run.reusable_tokens for run in runs) == sum(count - 1 for count in visits.values())
    assert all(visits[run.last_block] == run.requests > 1 for run in runs)
    assert [run.reusable_tokens for run in runs] == sorted((run.reusable_tokens for run in runs), reverse=True)


def test_nothing_shared_gives_no_runs() -> None:
    assert top_prefixes(Blocks.from_lists([[0], [1]]), 16, 5) == []
    assert top_prefixes(Blocks.from_lists([[], []]), 16, 5) == []
