"""Bins lose no request."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracer.analysis.profile import length_bins, request_rate


@given(st.lists(st.integers(-1, 2_000_000), min_size=1))
def test_every_known_length_is_in_one_bin(lengths: list[int]) -> None:
    values = np.array(lengths)

    bins = length_bins(values)

    assert sum(one.requests for one in bins) == int((values >= 0).sum())
    for one in bins:
        assert one.requests == int(((values >= one.from_tokens) & (values < one.below_tokens)).sum())


@given(st.lists(st.integers(0, 10**13), min_size=1), st.sampled_from([None, 3 * 10**9]))
def test_rates_sum_to_all_requests(stamps: list[int], grid_ns: int | None) -> None:
    bin_s, rates = request_rate(np.sort(np.array(stamps)), grid_ns)

    assert sum(rates) * bin_s == pytest.approx(len(stamps))
    assert len(rates) <= 121 and bin_s >= 1


def test_bins_are_whole_grid_steps_so_that_they_do_not_beat_against_it() -> None:
    stamps = np.repeat(np.arange(0, 600) * 3 * 10**9, 5)

    bin_s, rates = request_rate(stamps, 3 * 10**9)

    assert bin_s == 15.0 and set(rates) == {25 / 15}
