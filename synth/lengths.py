"""Lengths, counts and durations drawn through normal scores, so that two of them can be tied by rank. Pure."""

from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synth.model import Distribution

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_Z99 = NormalDist().inv_cdf(0.99)
_LARGEST = 2**31 - 1  # token columns are int32
_LONGEST_S = 1e8  # three years, so that sums of nanoseconds fit in int64


def seconds(one: Distribution, scores: Floats) -> Floats:
    """Value of the distribution at each standard normal score."""
    return np.minimum(_clipped(one, _quantiles(one, scores)), _LONGEST_S)


def counts(one: Distribution, scores: Floats, least: int = 1) -> Ints:
    """As `seconds`, rounded to whole numbers >= `least`; `mean` alone is a geometric distribution on 1, 2, ..."""
    if one.mean is not None and one.cv is None:
        stop = 1.0 / max(one.mean, 1.0)
        values = np.ceil(np.log1p(-normal_share(scores)) / np.log1p(-stop)) if stop < 1 else np.ones_like(scores)
    else:
        values = _quantiles(one, scores)
    return np.clip(np.rint(_clipped(one, values)), least, _LARGEST).astype(np.int64)


def mean_count(one: Distribution) -> float:
    """Mean of `counts`, by 8191 equally likely quantiles."""
    return float(counts(one, _even_scores()).mean())


def mean_seconds(one: Distribution) -> float:
    """Mean of `seconds`, likewise."""
    return float(seconds(one, _even_scores()).mean())


def _even_scores() -> Floats:
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / 8191) for i in range(8191)])


def tied_scores(first: Floats, fresh: Floats, spearman: float) -> Floats:
    """Scores with the wanted rank correlation to `first`, made from it and independent `fresh` ones.

    Gaussian copula: Pearson's r of the scores = 2 sin(pi * spearman / 6).
    """
    r = 2 * np.sin(np.pi * spearman / 6)
    return np.asarray(r * first + np.sqrt(max(0.0, 1 - r * r)) * fresh)


def _quantiles(one: Distribution, scores: Floats) -> Floats:
    if one.constant is not None:
        return np.full(len(scores), float(one.constant))
    if one.p50 is not None and one.p99 is not None:
        return np.asarray(np.exp(np.log(one.p50) + np.log(one.p99 / one.p50) / _Z99 * scores))
    if one.mean is not None and one.cv is not None:
        variance = np.log1p(one.cv**2)
        return np.asarray(np.exp(np.log(one.mean) - variance / 2 + np.sqrt(variance) * scores))
    uniform = normal_share(scores)
    if one.mean is not None:
        return -one.mean * np.log1p(-uniform)
    if one.values is not None:
        return _empirical(one, uniform)
    assert one.min is not None and one.max is not None  # the model admits no other combination
    return one.min + (one.max - one.min) * uniform


def _empirical(one: Distribution, uniform: Floats) -> Floats:
    values = np.array(one.values, dtype=np.float64)
    weights = np.ones(len(values)) if one.weights is None else np.array(one.weights, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    edges = np.cumsum(weights[order]) / weights.sum()
    return values[order][np.minimum(np.searchsorted(edges, uniform, side="right"), len(values) - 1)]


def _clipped(one: Distribution, values: Floats) -> Floats:
    return values if one.min is None and one.max is None else np.asarray(np.clip(values, one.min, one.max))


def normal_share(scores: Floats) -> Floats:
    """Standard normal distribution function in [0, 1), error below 1e-7 (Abramowitz and Stegun 7.1.26)."""
    x = np.abs(scores) / np.sqrt(2.0)
    t = 1.0 / (1.0 + 0.3275911 * x)
    poly: Any = 1.061405429
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        poly = poly * t + factor
    half_tail = 0.5 * poly * t * np.exp(-x * x)
    return np.asarray(np.minimum(np.where(scores < 0, half_tail, 1.0 - half_tail), np.nextafter(1.0, 0.0)))
