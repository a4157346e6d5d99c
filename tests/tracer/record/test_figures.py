"""Sketches add up and keep quantiles within 5 %; remembered blocks never overstate reuse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.record.figures import SeenBlocks, bucket, quantile, together
from tracer.record.messages import Figures

VALUES = st.lists(st.integers(1, 10**9), min_size=1, max_size=60)


def sketch(values: list[int]) -> dict[int, int]:
    return {one: sum(bucket(value) == one for value in values) for one in {bucket(value) for value in values}}


@settings(deadline=None, max_examples=60)
@given(VALUES, VALUES, st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_quantiles_of_sketches_that_were_added_up_are_those_of_all_values(one: list[int], other: list[int], share: float) -> None:
    both = together([Figures(ttft_us=sketch(one)), Figures(ttft_us=sketch(other))]).ttft_us

    found = quantile(both, share)

    assert found == pytest.approx(np.quantile(one + other, share, method="inverted_cdf"), rel=0.05)


def test_nothing_counted_has_no_quantile() -> None:
    assert quantile({}, 0.5) is None


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=40), st.sampled_from([7, 64, 1 << 16]))
def test_reuse_is_exact_with_room_and_never_too_high_without(chains: list[tuple[int, int]], places: int) -> None:
    """Chain c's block k is the same whatever follows, as chained digests are."""
    table, truth = SeenBlocks(places), set[int]()
    for chain, length in chains:
        digests = [hash((chain, depth)) % 2**64 or 1 for depth in range(length)]
        joined = np.array(digests, dtype="<u8").tobytes()
        known = sum(one in truth for one in digests)

        found = table.reused(joined)
        table.add(joined)
        truth.update(digests)

        assert found <= known
        assert places < 1 << 16 or found == known


def test_a_table_more_than_half_full_says_that_it_forgets() -> None:
    table = SeenBlocks(1000)
    table.add(np.arange(1, 501, dtype="<u8").tobytes())
    half = table.forgets
    table.add(np.arange(501, 502, dtype="<u8").tobytes())

    assert (half, table.forgets) == (False, True)
