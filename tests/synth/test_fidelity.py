"""Distances between traces."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.fidelity import curve_error, ks_distance
from tracer.analysis.reuse import HitCurve, Touches, hit_curve
from tracer.blocks import Blocks


def curve(requests: list[list[int]], unit_tokens: int = 16) -> HitCurve:
    lists = Blocks.from_lists(requests)
    return hit_curve(
        Touches(
            blocks=lists,
            units=np.ones(len(lists.ids), dtype=np.int64),
            lookup_units=lists.lengths,
            prompt_tokens=lists.lengths * unit_tokens,
            unit_tokens=unit_tokens,
        )
    )


def test_a_curve_has_no_distance_to_itself_and_the_whole_distance_to_no_reuse() -> None:
    again = curve([[0, 1, 2, 3]] * 10)
    never = curve([[4 * i + j for j in range(4)] for i in range(10)])

    assert curve_error(again, again).largest == 0
    assert curve_error(again, never).largest == pytest.approx(0.9)
    assert curve_error(again, never).at_capacity_units == 4


def test_order_alone_makes_a_distance_at_small_sizes() -> None:
    close = curve([[i] for i in range(20) for _ in range(2)])
    apart = curve([[i] for i in range(20)] * 2)

    found = curve_error(close, apart)

    assert close.hit_rate_infinite == apart.hit_rate_infinite == 0.5
    assert found.largest == 0.5
    assert 0 < found.area < found.largest


def test_curves_in_other_units_are_compared_at_the_same_number_of_tokens() -> None:
    coarse = curve([[0], [1]] * 6, unit_tokens=32)
    fine = curve([[0, 1], [2, 3]] * 6, unit_tokens=16)

    assert curve_error(coarse, fine).largest == 0


@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 9), max_size=30))
@settings(max_examples=60, deadline=None)
def test_ks_is_the_largest_gap_between_the_distribution_functions(first: list[int], second: list[int]) -> None:
    found = ks_distance(np.array(first), np.array(second))

    if first and second:
        gaps = [abs(sum(a <= x for a in first) / len(first) - sum(b <= x for b in second) / len(second)) for x in range(10)]
        assert found == pytest.approx(max(gaps))
    else:
        assert found == float(bool(first) != bool(second))
