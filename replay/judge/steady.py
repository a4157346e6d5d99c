"""When a point of a sweep is steady, and when its figures depend on how long it lasts. Pure."""

from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from replay.judge.summary import Little, Steadiness

Floats = NDArray[np.float64]

BINS = 60
BATCHES = 10
SURE_T = 3.0  # |t| of a trend over 10 batches: 8 degrees of freedom, 1.7 % by chance
GROWTH = 0.25  # of the mean, over the steady part
LEAST_GROWTH = 4.0  # requests in flight: less is noise of small numbers
DRIFT = 0.15
WIDEST = 0.2  # half of the 95 % confidence interval of the mean, over the mean
T_95 = 2.262  # Student's t, 9 degrees of freedom


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """`drift`: how much the watched figure grows over what is left after the warm-up, over its mean."""

    verdict: Steadiness
    warm_up_s: float
    ended: int  # requests after the warm-up
    drift: float
    half_width: float | None  # of the mean's 95 % confidence interval, over the mean


def steadiness(t_s: Floats, in_flight: Floats, ended: Floats, *, is_closed: bool) -> Steady:
    """What samples (times, requests in flight, requests ended so far) say about a point.

    Watched is the number in flight, which by Little's law is latency as well; in a closed loop it is given, so throughput is
    watched. The warm-up ends where MSER says (White 1997): the cut d that minimises the variance of x[d:] / its length.
    The rest, in 10 batches: growing if the trend is sure and large, steady if there is none and the mean is well known.
    """
    if len(t_s) < 2 or t_s[-1] <= t_s[0]:
        return Steady(verdict="unsettled", warm_up_s=0.0, ended=0, drift=0.0, half_width=None)
    edges = np.linspace(t_s[0], t_s[-1], BINS + 1)
    counts = np.interp(edges, t_s, ended)
    width_s = (edges[1] - edges[0]) or 1.0
    series = np.diff(counts) / width_s if is_closed else _bin_means(t_s, in_flight, edges)
    cut = mser(series)
    rest = series[cut:]
    batches = np.array([part.mean() for part in np.array_split(rest, BATCHES)])
    mean = float(batches.mean())
    drift, t_value = _trend(batches)
    done = int(counts[-1] - counts[cut])
    if mean <= 0:
        return Steady(verdict="unsettled", warm_up_s=float(edges[cut]), ended=done, drift=0.0, half_width=None)
    half_width = T_95 * float(batches.std(ddof=1)) / sqrt(BATCHES) / mean
    relative = drift / mean
    is_growing = not is_closed and t_value > SURE_T and relative > GROWTH and drift > LEAST_GROWTH
    is_steady = (abs(relative) <= DRIFT or abs(t_value) < SURE_T) and (half_width <= WIDEST or mean < 1) and cut < BINS // 2
    return Steady(
        verdict="growing" if is_growing else "steady" if is_steady else "unsettled",
        warm_up_s=float(edges[cut]),
        ended=done,
        drift=relative,
        half_width=half_width,
    )


def mser(series: Floats) -> int:
    """How much of the beginning to leave out, at most half: argmin over d of var(x[d:]) / (n - d)."""
    n = len(series)
    scores = [float(series[d:].var()) / (n - d) for d in range(n // 2 + 1)]
    return int(np.argmin(scores))


def little_of(sent_ns: Floats, end_ns: Floats, t_s: Floats, in_flight: Floats, window_s: tuple[float, float]) -> Little | None:
    """Little's law over the window; None where nothing was sent or seen in it."""
    inside = (sent_ns / 1e9 >= window_s[0]) & (sent_ns / 1e9 <= window_s[1])
    seen = (t_s >= window_s[0]) & (t_s <= window_s[1])
    width_s = window_s[1] - window_s[0]
    if not inside.any() or not seen.any() or width_s <= 0:
        return None
    return Little(
        in_flight=float(in_flight[seen].mean()),
        rate_per_s=float(inside.sum() / width_s),
        time_s=float((end_ns - sent_ns)[inside].mean() / 1e9),
    )


def _bin_means(t_s: Floats, values: Floats, edges: Floats) -> Floats:
    place = np.clip(np.searchsorted(edges, t_s, side="right") - 1, 0, len(edges) - 2)
    counts = np.bincount(place, minlength=len(edges) - 1)
    sums = np.bincount(place, weights=values, minlength=len(edges) - 1)
    middles = (edges[:-1] + edges[1:]) / 2
    known = counts > 0
    return np.interp(middles, middles[known], sums[known] / counts[known])


def _trend(batches: Floats) -> tuple[float, float]:
    """(growth from the first batch to the last along the fitted line, t of its slope)."""
    x = np.arange(len(batches)) - (len(batches) - 1) / 2
    slope = float((x * batches).sum() / (x * x).sum())
    left = batches - batches.mean() - slope * x
    error = sqrt(float((left**2).sum()) / (len(batches) - 2) / float((x * x).sum()))
    return slope * (len(batches) - 1), slope / error if error > 0 else (0.0 if slope == 0 else float(np.sign(slope)) * np.inf)
