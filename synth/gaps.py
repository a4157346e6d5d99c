"""Laws of the gaps between starts inside a window, all of mean 1, and the choice among them by likelihood. Pure."""

from math import lgamma

import numpy as np
from numpy.typing import NDArray

from synth.learned import PROBABILITIES, Law

type Floats = NDArray[np.float64]
SHAPES = np.geomspace(0.2, 8, 80)
ENOUGH_GAPS = 20
SHAPE_COST, MISFIT = 2.0, 0.05


def gap_law(gaps: Floats) -> tuple[Law, float | None]:
    """The likeliest law and its shape; the empirical one where the likeliest is off by more than 0.05 (Kolmogorov-Smirnov).

    A shape costs two units of log-likelihood (BIC at some thousand gaps: ln(n) / 2 is 4).
    """
    gaps = gaps[gaps > 0]
    if len(gaps) < ENOUGH_GAPS:
        return "exponential", None
    gaps = gaps / gaps.mean()
    gamma, weibull = _gamma_likelihood(gaps), _weibull_likelihood(gaps)
    best: dict[Law, tuple[float, float | None]] = {
        "exponential": (-float(gaps.sum()) + SHAPE_COST, None),
        "gamma": (float(gamma.max()), float(SHAPES[gamma.argmax()])),
        "weibull": (float(weibull.max()), float(SHAPES[weibull.argmax()])),
    }
    law = max(best, key=lambda name: best[name][0])
    shape = best[law][1]
    drawn = np.sort(unit_gaps(law, shape, None, (np.arange(4000) + 0.5) / 4000, np.random.default_rng(0)))
    below = np.searchsorted(drawn, np.sort(gaps), side="right") / len(drawn)
    if np.abs(below - np.arange(1, len(gaps) + 1) / len(gaps)).max() > MISFIT:
        return "empirical", None
    return law, None if shape is None else float(f"{shape:.3g}")


def unit_gaps(law: Law, shape: float | None, table: list[float] | None, uniform: Floats, rng: np.random.Generator) -> Floats:
    """Gaps of mean 1. `uniform` decides all but the gamma ones."""
    match law:
        case "empirical":
            return np.interp(uniform, PROBABILITIES, table or [1.0] * len(PROBABILITIES))
        case "gamma" if shape:
            return rng.standard_gamma(shape, len(uniform)) / shape
        case "weibull" if shape:
            return np.asarray((-np.log1p(-uniform)) ** (1 / shape) / np.exp(lgamma(1 + 1 / shape)))
    return np.asarray(-np.log1p(-uniform))


def _gamma_likelihood(gaps: Floats) -> Floats:
    """Log-likelihood at each of `SHAPES`, the mean held at 1."""
    constant = SHAPES * np.log(SHAPES) - np.array([lgamma(shape) for shape in SHAPES])
    return np.asarray(len(gaps) * constant + (SHAPES - 1) * np.log(gaps).sum() - SHAPES * gaps.sum())


def _weibull_likelihood(gaps: Floats) -> Floats:
    scales = np.exp([-lgamma(1 + 1 / shape) for shape in SHAPES])
    powers = np.array([((gaps / scale) ** shape).sum() for shape, scale in zip(SHAPES, scales, strict=True)])
    constant = np.log(SHAPES) - SHAPES * np.log(scales)
    return np.asarray(len(gaps) * constant + (SHAPES - 1) * np.log(gaps).sum() - powers)
