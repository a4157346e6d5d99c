"""Marginals and correlation of drawn lengths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.lengths import counts, mean_count, seconds, tied_scores
from synth.model import Distribution

SCORES = np.random.default_rng(5).standard_normal(40_000)


def ranks(values: np.ndarray) -> np.ndarray:
    """Average ranks, as Spearman's correlation wants them."""
    _, inverse, number = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(number) - (number - 1) / 2)[inverse]


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


@given(st.floats(5, 5000), st.floats(1.05, 30))
@settings(max_examples=20, deadline=None)
def test_a_lognormal_has_the_asked_median_and_99th_percentile(p50: float, ratio: float) -> None:
    values = counts(Distribution(p50=p50, p99=p50 * ratio), SCORES)

    assert np.quantile(values, 0.5) == pytest.approx(p50, rel=0.05, abs=1)
    assert np.quantile(values, 0.99) == pytest.approx(p50 * ratio, rel=0.12, abs=1)


@given(st.floats(20, 5000), st.floats(0.05, 1.5))
@settings(max_examples=20, deadline=None)
def test_a_lognormal_has_the_asked_mean_and_cv(mean: float, cv: float) -> None:
    values = seconds(Distribution(mean=mean, cv=cv), SCORES)

    assert values.mean() == pytest.approx(mean, rel=0.05)
    assert values.std() / values.mean() == pytest.approx(cv, rel=0.15)


@pytest.mark.parametrize("mean", [1.0, 1.5, 4.0, 30.0])
def test_a_mean_alone_is_geometric_for_counts_and_exponential_for_seconds(mean: float) -> None:
    turns = counts(Distribution(mean=mean), SCORES)
    waits = seconds(Distribution(mean=mean), SCORES)

    assert turns.min() == 1
    assert turns.mean() == pytest.approx(mean, rel=0.03)
    assert (turns == 1).mean() == pytest.approx(1 / mean, abs=0.01)
    assert waits.std() / waits.mean() == pytest.approx(1, rel=0.03)


def test_uniform_empirical_and_clipped_distributions_keep_to_their_values() -> None:
    uniform = seconds(Distribution(min=10, max=20), SCORES)
    listed = counts(Distribution(values=(30, 10, 20), weights=(1, 2, 1)), SCORES)
    clipped = counts(Distribution(p50=100, p99=1000, min=50, max=200), SCORES)

    assert 10 <= uniform.min() < 10.01
    assert 19.99 < uniform.max() <= 20
    assert uniform.mean() == pytest.approx(15, abs=0.05)
    assert [(listed == value).mean() for value in (10, 20, 30)] == pytest.approx([0.5, 0.25, 0.25], abs=0.01)
    assert (clipped.min(), clipped.max()) == (50, 200)


@given(st.floats(-1, 1))
@settings(max_examples=20, deadline=None)
def test_two_lengths_are_tied_by_the_asked_rank_correlation_and_keep_their_marginals(wanted: float) -> None:
    fresh = np.random.default_rng(6).standard_normal(len(SCORES))
    one = Distribution(p50=200, p99=2000)

    tied = tied_scores(SCORES, fresh, wanted)

    assert spearman(counts(one, SCORES), counts(one, tied)) == pytest.approx(wanted, abs=0.01)
    assert np.quantile(counts(one, tied), [0.5, 0.99]) == pytest.approx([200, 2000], rel=0.08)


def test_mean_count_agrees_with_the_mean_of_draws() -> None:
    for one in (Distribution(mean=3.5, max=40), Distribution(p50=20, p99=150), Distribution(constant=2)):
        assert mean_count(one) == pytest.approx(counts(one, SCORES).mean(), rel=0.03)
