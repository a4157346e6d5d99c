"""Source ids become chained, dense ids that name prefixes and nothing else."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.blocks import Blocks, DenseIds, first_unchained
from tracer.formats.ids import ChainedIds, FirstSeen, LaidOut

PATHS = st.lists(st.lists(st.integers(-3, 6) | st.just(2**63), max_size=6), max_size=12)


@given(PATHS)
@settings(max_examples=200, deadline=None)
def test_equal_prefixes_and_only_they_get_equal_ids_dense_in_first_seen_order(paths: list[list[int]]) -> None:
    chained = ChainedIds()
    prefixes: DenseIds[tuple[int, ...]] = DenseIds()

    seen = [chained.path(path) for path in paths]

    assert seen == [[prefixes[tuple(path[: k + 1])] for k in range(len(path))] for path in paths]
    assert first_unchained(Blocks.from_lists(seen)) is None


def test_ids_that_are_dense_and_chained_already_stay_as_they_are() -> None:
    chained = ChainedIds()

    assert [chained.path(path) for path in ([0, 1, 2], [0, 3], [0, 1, 4])] == [[0, 1, 2], [0, 3], [0, 1, 4]]


def test_first_seen_numbers_and_fresh_ones_never_meet() -> None:
    numbers = FirstSeen()

    got = [numbers[7], numbers.fresh(), numbers[0], numbers[7], numbers.fresh(), numbers[3]]

    assert got == [0, 1, 2, 0, 3, 4]
    assert numbers.row([3, 9, 0, 9]) == [4, 5, 2, 5] and numbers.row([]) == []
    assert [numbers.fresh(), numbers[9], numbers[10]] == [6, 5, 7]


TOKENS = {"a": 5, "b": 16, "c": 0, "d": 11, "e": 40}


@given(st.lists(st.lists(st.sampled_from(sorted(TOKENS)), max_size=6), max_size=12), st.sampled_from([4, 16]))
@settings(max_examples=200, deadline=None)
def test_blocks_of_contents_are_equal_where_all_tokens_up_to_their_ends_are(prompts: list[list[str]], size: int) -> None:
    laid_out = LaidOut(size)
    prefixes: DenseIds[tuple[tuple[str, int], ...]] = DenseIds()

    seen = [laid_out.path((one, TOKENS[one]) for one in prompt) for prompt in prompts]

    tokens = [[(one, at) for one in prompt for at in range(TOKENS[one])] for prompt in prompts]
    assert seen == [[prefixes[tuple(one[:end])] for end in range(size, len(one) + 1, size)] for one in tokens]
