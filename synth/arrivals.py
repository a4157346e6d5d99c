"""When sessions start, and how recorded stamps lose their grid. Pure: a generator of random numbers is passed in."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
NS = 1_000_000_000
_CHUNK = 1024
WINDOW_NS = 60 * NS  # recorded arrivals keep their rate per window; gaps are shuffled inside it


def gamma_starts(rate_per_s: float, cv: float, rng: np.random.Generator) -> Iterator[Ints]:
    """Endless start times in ns, in chunks: gaps are Gamma with mean 1 / rate and shape 1 / cv**2 (cv 1: Poisson)."""
    shape = 1.0 / (cv * cv)
    now_s = 0.0
    while True:
        times = now_s + np.cumsum(rng.standard_gamma(shape, _CHUNK)) / (shape * rate_per_s)
        now_s = float(times[-1])
        yield (times * NS).astype(np.int64)


def recorded_starts(starts_ns: Ints, rate_per_s: float | None, rng: np.random.Generator) -> Iterator[Ints]:
    """Endless start times that repeat a recording's rate profile, in chunks.

    The gaps inside each window of 60 s are shuffled, those across a window's edge stay: every window keeps its count and
    its burstiness. With a rate the time axis is stretched or compressed to reach it.
    """
    starts = np.sort(starts_ns) - int(starts_ns.min())
    span = int(starts[-1]) + max(1, int(starts[-1]) // max(1, len(starts) - 1))  # one mean gap after the last
    stretch = 1.0 if rate_per_s is None else len(starts) / (span / NS) / rate_per_s
    gaps = np.diff(starts, append=span)
    windows = starts // WINDOW_NS
    crosses_edge = np.diff(windows, append=windows[-1] + 1) > 0
    repeat = 0
    while True:
        order = np.lexsort((rng.random(len(gaps)) + crosses_edge, windows))
        times = repeat * span + np.concatenate([[0], np.cumsum(gaps[order])[:-1]])
        stretched = (times * stretch).astype(np.int64)
        yield from (stretched[i : i + _CHUNK] for i in range(0, len(stretched), _CHUNK))
        repeat += 1


def diurnal(chunks: Iterator[Ints], amplitude: float, period_s: float) -> Iterator[Ints]:
    """Start times moved so that their rate swings as 1 + amplitude * sin(2 pi t / period) around what it was.

    A start at u moves to the t with t + amplitude * period / (2 pi) * (1 - cos(2 pi t / period)) = u.
    """
    swing_s = amplitude * period_s / (2 * np.pi)
    for chunk in chunks:
        wanted = chunk / NS
        low, high = np.maximum(wanted - 2 * swing_s, 0.0), wanted.copy()
        for _ in range(64):  # halving: at amplitude 1 the rate touches 0, where Newton's steps fail
            middle = (low + high) / 2
            is_early = middle + swing_s * (1 - np.cos(2 * np.pi * middle / period_s)) < wanted
            low, high = np.where(is_early, middle, low), np.where(is_early, high, middle)
        yield (high * NS).astype(np.int64)


def spread_inside_grid(stamps_ns: Ints, grid_ns: int | None, rng: np.random.Generator) -> Ints:
    """Sorted stamps on a grid, each moved forward by less than the grid's step; equal ones keep their order."""
    if not grid_ns:
        return stamps_ns
    offsets = rng.integers(0, grid_ns, len(stamps_ns))
    order = np.lexsort((offsets, stamps_ns))
    return stamps_ns + offsets[order]
