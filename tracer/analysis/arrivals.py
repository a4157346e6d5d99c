"""When requests arrive: rate, burstiness, and the clock's own grid. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
GRID_TOLERANCE = 0.002  # share of the grid by which stamps may miss it (Mooncake conversation: 3 ms of 3 s)
MIN_GRID_NS = 100_000_000
WINDOW_S = 60
MIN_WINDOW_REQUESTS = 10  # the CV of fewer gaps says little


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    span_s: float
    rate_per_s: float
    gap_cv: float | None  # standard deviation / mean of the gaps; 1 is Poisson
    gap_cv_window_p50: float | None  # per 60 s window of 10 requests or more: drift of the rate left out
    gap_cv_window_p90: float | None
    dispersion: dict[str, float | None]  # variance / mean of counts per 1, 10, 60 s; 1 is Poisson at every scale
    dispersion_whole_windows: dict[str, float | None]  # without the last, cut-off window, which inflates it
    grid_s: float | None  # stamps lie on this grid; the figures above are of the stamps spread inside it
    gap_cv_as_recorded: float | None


def time_grid_ns(stamps_ns: Sequence[int] | Ints) -> int | None:
    """The coarse grid on which all stamps lie, or None.

    Candidate: the smallest gap between distinct ticks, where stamps closer than 100 ms are one tick. It is a grid if every
    tick misses a multiple of it by at most 0.2 %, there are 20 ticks or more, and several requests share most of them.
    """
    stamps = np.unique(np.asarray(stamps_ns, dtype=np.int64))
    if len(stamps) == 0 or len(stamps_ns) < 40:
        return None
    starts = stamps[np.concatenate([[True], np.diff(stamps) > MIN_GRID_NS])]
    if len(starts) < 20 or len(stamps_ns) < 2 * len(starts):
        return None
    steps = np.diff(starts)
    grid = float(np.median(steps[steps < 1.5 * steps.min()]))
    grid = _rounded(grid)
    offset = (stamps - stamps[0]) / grid
    missed = np.abs(offset - np.rint(offset))
    return int(grid) if missed.max() <= GRID_TOLERANCE else None


def _rounded(grid_ns: float) -> float:
    """To whole tenths of a second: grids are human numbers, and jitter must not move them."""
    return round(grid_ns / MIN_GRID_NS) * MIN_GRID_NS


def index_of_dispersion(times_s: NDArray[np.float64], window_s: float, *, whole_windows: bool = False) -> float | None:
    """Variance / mean of the counts per window (Cox and Lewis 1966). None: the times span less than two windows.

    Published figures count the last, cut-off window like any other, and so does the default; in a short trace that
    alone can make a Poisson stream read 5 at 60 s. `whole_windows` leaves it out.
    """
    if not len(times_s) or times_s[-1] < 2 * window_s:
        return None
    counts = np.bincount((times_s // window_s).astype(np.int64))
    if whole_windows:
        counts = counts[:-1]
    return float(counts.var() / counts.mean()) if counts.any() else None


def gap_cv(times: NDArray[Any]) -> float | None:
    """Standard deviation / mean of the gaps."""
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else None


def _window_cvs(times_s: NDArray[np.float64]) -> list[float]:
    """CV of the gaps inside each window that has enough requests for one."""
    starts = np.flatnonzero(np.diff(times_s // WINDOW_S)) + 1
    busy = [window for window in np.split(times_s, starts) if len(window) >= MIN_WINDOW_REQUESTS]
    return [cv for window in busy if (cv := gap_cv(window)) is not None]


def describe(arrival_ns: Ints, grid_ns: int | None) -> Arrivals:
    """`arrival_ns` sorted. Stamps on a grid are spread evenly inside it first, by a fixed rule, so the figures repeat."""
    as_recorded = gap_cv(arrival_ns)
    if grid_ns:
        arrival_ns = np.sort(arrival_ns + np.random.default_rng(0).integers(0, grid_ns, len(arrival_ns)))
    times_s = (arrival_ns - arrival_ns[0]) / 1e9
    span = float(times_s[-1])
    per_window = _window_cvs(times_s)
    return Arrivals(
        span_s=span,
        rate_per_s=len(times_s) / span if span else 0.0,
        gap_cv=gap_cv(times_s),
        gap_cv_window_p50=float(np.quantile(per_window, 0.5)) if per_window else None,
        gap_cv_window_p90=float(np.quantile(per_window, 0.9)) if per_window else None,
        dispersion={f"{w}s": index_of_dispersion(times_s, w) for w in (1, 10, 60)},
        dispersion_whole_windows={f"{w}s": index_of_dispersion(times_s, w, whole_windows=True) for w in (1, 10, 60)},
        grid_s=grid_ns / 1e9 if grid_ns else None,
        gap_cv_as_recorded=as_recorded,
    )
