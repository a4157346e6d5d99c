"""Start times of sessions, and the loss of a recording grid."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.arrivals import NS, WINDOW_NS, gamma_starts, recorded_starts, spread_inside_grid


def take(chunks: Iterator[np.ndarray], count: int) -> np.ndarray:
    parts: list[np.ndarray] = []
    while sum(map(len, parts)) < count:
        parts.append(next(chunks))
    return np.concatenate(parts)[:count]


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_gaps_have_the_asked_rate_and_cv(cv: float) -> None:
    starts = take(gamma_starts(4.0, cv, np.random.default_rng(1)), 60_000)

    gaps = np.diff(starts) / NS

    assert gaps.mean() == pytest.approx(0.25, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)


def test_poisson_counts_have_an_index_of_dispersion_of_one() -> None:
    starts = take(gamma_starts(4.0, 1.0, np.random.default_rng(2)), 60_000)

    per_window = np.bincount(starts // (10 * NS))

    assert per_window.var() / per_window.mean() == pytest.approx(1, abs=0.12)


@given(st.lists(st.integers(0, 900 * NS), min_size=2, max_size=60), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_recorded_arrivals_repeat_the_gaps_and_count_of_every_window(stamps: list[int], seed: int) -> None:
    recorded = np.sort(np.array(stamps)) - min(stamps)

    drawn = take(recorded_starts(np.array(stamps), None, np.random.default_rng(seed)), len(stamps))

    windows = recorded // WINDOW_NS
    assert (drawn // WINDOW_NS == windows).all()
    for window in np.unique(windows):
        assert sorted(np.diff(drawn[windows == window])) == sorted(np.diff(recorded[windows == window]))


def test_recorded_arrivals_keep_their_rate_profile_and_take_a_new_rate() -> None:
    rng = np.random.default_rng(3)
    busy, calm = np.sort(rng.integers(0, 600 * NS, 3000)), np.sort(rng.integers(600 * NS, 1200 * NS, 300))
    stamps = np.concatenate([busy, calm])

    same = take(recorded_starts(stamps, None, rng), 6600)
    faster = take(recorded_starts(stamps, 5.5, rng), 3300)

    per_half = np.bincount(same // (600 * NS))
    assert per_half[:4] == pytest.approx([3000, 300, 3000, 300], rel=0.05)
    assert 3300 / (faster[-1] / NS) == pytest.approx(5.5, rel=0.02)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=50), st.integers(1, 3 * NS), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_stamps_leave_their_grid_but_not_their_cell_nor_their_order(steps: list[int], grid_ns: int, seed: int) -> None:
    stamps = np.sort(np.array(steps)) * grid_ns

    spread = spread_inside_grid(stamps, grid_ns, np.random.default_rng(seed))

    assert ((spread - stamps >= 0) & (spread - stamps < grid_ns)).all()
    assert (np.diff(spread) >= 0).all()
