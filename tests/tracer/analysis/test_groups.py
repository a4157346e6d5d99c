"""Sharing groups: what must be copied, kept or dropped together."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.analysis.groups import sharing_groups
from tracer.blocks import Blocks, DenseIds

PATHS = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=60)


def chained(words: list[list[int]]) -> Blocks:
    ids: DenseIds[tuple[int, ...]] = DenseIds()
    return Blocks.from_lists([[ids[tuple(word[: k + 1])] for k in range(len(word))] for word in words])


def test_requests_share_a_group_below_the_global_prefix() -> None:
    words = [[0, 1, k % 50, k % 100] for k in range(400)]  # 50 documents, 8 requests each, all under one system prompt

    groups = sharing_groups(chained(words))

    assert groups.count == 50
    assert groups.global_blocks.tolist() == [2] * 400
    assert groups.group_of.tolist() == [k % 50 for k in range(400)]


def test_a_request_that_ends_inside_the_global_prefix_or_shares_nothing_is_alone() -> None:
    words = [[0]] * 300 + [[0, 1], [0, 1], [2], []]

    groups = sharing_groups(chained(words))

    assert groups.count == 300 + 3
    assert groups.group_of[300] == groups.group_of[301]
    assert groups.global_blocks.tolist()[-4:] == [1, 1, 0, 0]


def test_a_session_is_never_split_and_joins_the_groups_it_touches() -> None:
    words = [[k] for k in range(6)]
    sessions = np.array([7, -1, 7, 3, -1, 3])

    groups = sharing_groups(chained(words), sessions)

    assert groups.group_of.tolist() == [0, 1, 0, 2, 3, 2]


def test_in_a_short_trace_a_long_conversation_is_no_global_prefix() -> None:
    words = [[0, k] for k in range(30)] + [[1, *range(turn)] for turn in range(8)]
    known = np.array([*range(30), *[99] * 8])

    by_visits = sharing_groups(chained(words))
    by_session = sharing_groups(chained([[1, *range(turn)] for turn in range(8)]), known[30:])

    assert by_visits.global_blocks.tolist() == [1] * 30 + [0] * 8
    assert by_visits.count == 31
    assert by_session.count == 1 and not by_session.global_blocks.any()


@pytest.mark.parametrize("words", [[], [[]], [[], []]])
def test_traces_without_blocks_have_one_group_a_request(words: list[list[int]]) -> None:
    groups = sharing_groups(chained(words))

    assert groups.count == len(words)
    assert groups.group_of.tolist() == list(range(len(words)))


@given(PATHS, st.floats(0.01, 0.6))
@settings(max_examples=100, deadline=None)
def test_requests_of_different_groups_share_nothing_but_global_blocks(words: list[list[int]], share: float) -> None:
    blocks = chained(words)

    groups = sharing_groups(blocks, max_share=share)

    owner: dict[int, int] = {}
    for request, path in enumerate(blocks):
        for block in path.tolist()[groups.global_blocks[request] :]:
            assert owner.setdefault(block, int(groups.group_of[request])) == groups.group_of[request]
    assert sorted(set(groups.group_of.tolist())) == list(range(groups.count))


@given(PATHS, st.floats(0.01, 0.6), st.lists(st.integers(-1, 5), min_size=60, max_size=60))
@settings(max_examples=100, deadline=None)
def test_sessions_stay_whole_and_are_only_joined_where_blocks_are_shared(
    words: list[list[int]], share: float, drawn: list[int]
) -> None:
    blocks = chained(words)
    sessions = np.array(drawn[: len(words)])

    groups = sharing_groups(blocks, sessions, max_share=share)

    edges = [(("session", session), request) for request, session in enumerate(sessions.tolist()) if session >= 0]
    for request, path in enumerate(blocks):
        edges += [(("block", block), request) for block in path.tolist()[groups.global_blocks[request] :]]
    assert partition(groups.group_of.tolist()) == partition(connected(len(words), edges))


def connected(count: int, edges: list[tuple[tuple[str, int], int]]) -> list[int]:
    """Smallest request that each can be reached from, by passing the lower number on until nothing changes."""
    lowest = list(range(count))
    while True:
        by_key: dict[tuple[str, int], int] = {}
        for key, request in edges:
            by_key[key] = min(by_key.get(key, count), lowest[request])
        passed = list(lowest)
        for key, request in edges:
            passed[request] = min(passed[request], by_key[key])
        if passed == lowest:
            return lowest
        lowest = passed


def partition(labels: list[int]) -> set[frozenset[int]]:
    return {frozenset(k for k, one in enumerate(labels) if one == label) for label in labels}
