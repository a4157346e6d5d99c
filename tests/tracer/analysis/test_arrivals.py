"""Burstiness figures and the grid of a coarse clock."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.analysis.arrivals import describe, gap_cv, index_of_dispersion, time_grid_ns

SECOND = 10**9


def poisson(seed: int, count: int = 4000, rate: float = 4.0) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).exponential(SECOND / rate, count)).astype(np.int64)


def test_a_poisson_stream_has_all_its_figures_near_one() -> None:
    found = describe(poisson(1, 60_000), None)

    assert found.rate_per_s == pytest.approx(4.0, rel=0.05)
    assert found.gap_cv == pytest.approx(1.0, abs=0.05)
    assert found.gap_cv_window_p50 == pytest.approx(1.0, abs=0.05)
    assert found.dispersion["1s"] == pytest.approx(1.0, abs=0.1)
    assert found.dispersion_whole_windows["60s"] == pytest.approx(1.0, abs=0.3)
    assert found.grid_s is None and found.gap_cv_as_recorded == pytest.approx(found.gap_cv)


def test_a_clockwork_stream_has_no_burstiness_at_all() -> None:
    found = describe(np.arange(1200) * SECOND // 4, None)

    assert found.gap_cv == pytest.approx(0.0, abs=1e-9)
    assert found.dispersion == found.dispersion_whole_windows == {"1s": 0.0, "10s": 0.0, "60s": 0.0}


def test_a_rate_that_drifts_shows_in_the_dispersion_but_not_within_windows() -> None:
    slow, fast = poisson(2, 1000, 1.0), poisson(3, 9000, 9.0)

    found = describe(np.concatenate([slow, slow[-1] + fast]), None)

    assert found.dispersion["60s"] is not None and found.dispersion["60s"] > 100
    assert found.gap_cv is not None and found.gap_cv > 1.4
    assert found.gap_cv_window_p50 == pytest.approx(1.0, abs=0.1)


def test_dispersion_is_variance_over_mean_of_counts() -> None:
    times = np.array([0.0, 0.1, 0.2, 1.5, 2.5, 3.5])  # 3, 1, 1, 1 a second

    assert index_of_dispersion(times, 1) == pytest.approx(0.75 / 1.5)
    assert index_of_dispersion(times, 1, whole_windows=True) == pytest.approx((8 / 9) / (5 / 3))
    assert index_of_dispersion(times, 10) is None


@given(st.integers(0, 10**6), st.sampled_from([1, 3, 5, 60]))
@settings(max_examples=25, deadline=None)
def test_stamps_cut_to_a_grid_are_found_out_and_spread_again(seed: int, grid_s: int) -> None:
    exact = poisson(seed, 3000, 6.0)
    jitter = np.random.default_rng(seed).integers(-3_000_000, 3_000_001, len(exact))
    coarse = np.sort(exact // (grid_s * SECOND) * grid_s * SECOND + (jitter if grid_s == 3 else 0))

    grid_ns = time_grid_ns(coarse)
    found = describe(coarse - coarse[0], grid_ns)

    assert grid_ns == (grid_s * SECOND if exact[-1] > 20 * grid_s * SECOND else None)
    if grid_ns:
        assert found.grid_s == grid_s
        assert found.gap_cv_as_recorded is not None and found.gap_cv_as_recorded > 1.8
        assert found.gap_cv == pytest.approx(1.0, abs=0.1)


@given(st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_a_fine_clock_has_no_grid(seed: int) -> None:
    exact = poisson(seed)

    assert time_grid_ns(exact) is None
    assert time_grid_ns(exact // 10**6 * 10**6) is None  # whole milliseconds


def test_traces_too_short_for_a_figure_have_none() -> None:
    one = describe(np.zeros(1, dtype=np.int64), None)

    assert (one.span_s, one.rate_per_s, one.gap_cv, one.gap_cv_window_p50) == (0.0, 0.0, None, None)
    assert one.dispersion == {"1s": None, "10s": None, "60s": None}
    assert gap_cv(np.zeros(5)) is None
    assert time_grid_ns([]) is None
