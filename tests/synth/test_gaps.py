"""Which law of gaps is chosen, and that all of them have mean 1."""

import numpy as np
import pytest

from synth.gaps import gap_law, unit_gaps
from synth.learned import Law, quantiles


@pytest.mark.parametrize(
    ("law", "shape"), [("exponential", None), ("gamma", 0.4), ("gamma", 3.0), ("weibull", 0.6), ("weibull", 2.5)]
)
def test_a_law_is_found_again_in_its_own_gaps(law: Law, shape: float | None) -> None:
    rng = np.random.default_rng(3)
    gaps = unit_gaps(law, shape, None, rng.random(4000), rng)

    found, found_shape = gap_law(gaps * 7.0)

    assert found == law
    assert found_shape == (None if shape is None else pytest.approx(shape, rel=0.1))
    assert gaps.mean() == pytest.approx(1, rel=0.1)


def test_gaps_like_no_law_are_kept_as_a_table() -> None:
    rng = np.random.default_rng(4)
    gaps = np.where(rng.random(3000) < 0.5, 0.1, 1.9) + rng.random(3000) * 0.01

    law, _ = gap_law(gaps)
    drawn = unit_gaps(law, None, quantiles(gaps), rng.random(3000), rng)

    assert law == "empirical"
    assert np.quantile(drawn, [0.25, 0.75]) == pytest.approx(np.quantile(gaps, [0.25, 0.75]), rel=0.05)


def test_few_gaps_tell_nothing() -> None:
    assert gap_law(np.full(5, 2.0)) == ("exponential", None)
