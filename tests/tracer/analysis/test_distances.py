"""Runs of blocks with the same visitors: who touched them last, how deep they lie, how far back that is."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.analysis.distances import _heavier_before, reuse_segments
from tracer.blocks import Blocks


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9))))
@settings(max_examples=100, deadline=None)
def test_weights_of_greater_values_before_each_element_are_summed(pairs: list[tuple[int, int]]) -> None:
    values = np.array([value for value, _ in pairs], dtype=np.int64)
    weights = np.array([weight for _, weight in pairs], dtype=np.int64)

    found = _heavier_before(values, weights)

    assert found.tolist() == [sum(w for v, w in pairs[:k] if v > pairs[k][0]) for k in range(len(pairs))]


def test_a_request_sees_its_upper_and_lower_part_with_their_own_last_visitors() -> None:
    blocks = Blocks.from_lists([[0, 1, 2, 3], [], [0, 1, 4], [0, 1, 2, 3, 5]])
    units = np.array([1, 1, 2, 2, 1, 1, 7, 1, 1, 2, 2, 9])

    found = reuse_segments(blocks, units, np.array([4, 0, 9, 5]))

    assert found.requests.tolist() == [2, 3, 3]
    assert found.predecessors.tolist() == [0, 2, 0]
    assert found.depths.tolist() == [0, 0, 2]
    assert found.distances.tolist() == [0, 0, 9]  # 2 + 7 of request 2, then its own two lower blocks
    assert found.counts.tolist() == [2, 2, 3]
    assert found.request_hits.tolist() == [0, 0, 2, 5]
    assert found.unique == 6 + 7 + 9


def test_nothing_at_all_has_no_segments() -> None:
    found = reuse_segments(Blocks.from_lists([[], []]), np.zeros(0, dtype=np.int64), np.zeros(2, dtype=np.int64))

    assert (len(found.distances), found.unique, found.request_hits.tolist()) == (0, 0, [0, 0])
