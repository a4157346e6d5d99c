"""How rate and lengths spread out, in bins: what a chart needs, small however long the trace is. Pure."""

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tracer.schema import Footer
from tracer.tracefile import column

Ints = NDArray[np.int64]
RATE_BINS, BINS_PER_DECADE = 120, 8


class LengthBin(msgspec.Struct, frozen=True, kw_only=True):
    from_tokens: int
    below_tokens: int
    requests: int


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    rate_bin_s: float
    requests_per_s: list[float]  # from the first arrival on, one figure a bin
    input_tokens: list[LengthBin]
    output_tokens: list[LengthBin]


def describe(table: pa.Table, footer: Footer) -> Profile:
    arrival_ns = column(table, "arrival_ns")
    bin_s, rates = request_rate(arrival_ns, footer.time_grid_ns)
    return Profile(
        rate_bin_s=bin_s,
        requests_per_s=rates,
        input_tokens=length_bins(column(table, "input_tokens")),
        output_tokens=length_bins(column(table, "output_tokens")),
    )


def request_rate(arrival_ns: Ints, grid_ns: int | None) -> tuple[float, list[float]]:
    """Bins of 1/120 of the span, at least 1 s, and whole steps of the grid on which the stamps lie, if there is one."""
    seconds = (arrival_ns - arrival_ns[0]) / 1e9
    step = (grid_ns or 1_000_000_000) / 1e9
    bin_s = max(np.ceil(float(seconds[-1]) / RATE_BINS / step), 1.0) * step
    counts = np.bincount((seconds // bin_s).astype(np.int64))
    return float(bin_s), [float(one) for one in counts / bin_s]


def length_bins(tokens: Ints) -> list[LengthBin]:
    """Log-spaced, from 0 on; unknown lengths (-1) are left out."""
    known = tokens[tokens >= 0]
    if not len(known):
        return []
    decades = np.log10(max(int(known.max()), 1)) + 1 / BINS_PER_DECADE
    edges = np.unique(np.round(10 ** np.arange(0, decades + 1 / BINS_PER_DECADE, 1 / BINS_PER_DECADE)).astype(np.int64))
    edges = np.concatenate([[0], edges])
    counts, _ = np.histogram(known, bins=edges)
    used = np.flatnonzero(counts)
    return [
        LengthBin(from_tokens=int(edges[k]), below_tokens=int(edges[k + 1]), requests=int(counts[k]))
        for k in range(used[0], used[-1] + 1)
    ]
