"""Outcomes and samples of one point in time bins, for charts. Pure."""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from replay.judge.metrics import percentiles, tpot_ms, ttft_ms
from replay.judge.summary import Series
from replay.outcome import Outcome, Sample

MAX_BINS = 100
WIDTHS_S = (0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600)

type Bins[T] = list[list[T]]
type MaybeFloats = list[float | None]


def series(outcomes: Sequence[Outcome], samples: Sequence[Sample], duration_s: float, was_killed: bool = False) -> Series:
    """Latencies and hit rates stand in the bin in which their request was due, so a stall shows where it began."""
    width = next((w for w in WIDTHS_S if duration_s / w <= MAX_BINS), math.ceil(duration_s / MAX_BINS))
    bins = max(1, math.ceil(duration_s / width))

    def place(t_ns: int) -> int:
        return min(bins - 1, max(0, int(t_ns / 1e9 / width)))

    def rate(times_ns: Iterable[int | None]) -> list[float]:
        places = np.array([place(t) for t in times_ns if t is not None], dtype=np.int64)
        return [float(value) for value in np.bincount(places, minlength=bins) / width]

    def binned[T](pairs: Iterable[tuple[int, T | None]]) -> Bins[T]:
        found: Bins[T] = [[] for _ in range(bins)]
        for t_ns, value in pairs:
            if value is not None:
                found[place(t_ns)].append(value)
        return found

    def gauge(name: str) -> MaybeFloats:
        values: Bins[float] = binned((one.t_ns, getattr(one, name)) for one in samples)
        return [max(map(float, seen), default=None) for seen in values]

    def counter(name: str) -> MaybeFloats:
        return _increases(gauge(name))

    done = [one for one in outcomes if one.error_kind is None]
    ttft = binned((one.planned_ns, ttft_ms(one)) for one in done)
    tpot = binned((one.planned_ns, tpot_ms(one)) for one in done)
    offered: MaybeFloats = [*rate(one.planned_ns if one.recorded_ns is None else one.recorded_ns for one in outcomes)]
    unknown: MaybeFloats = [None] * bins
    gpus = {name: gauge(name) for name in ("gpu_busy", "gpu_tensor_active", "gpu_memory_active", "gpu_power_w")}
    return Series(
        t_s=[(i + 0.5) * width for i in range(bins)],
        offered_per_s=unknown if was_killed else offered,
        sent_per_s=unknown if was_killed else [*rate(one.sent_ns for one in outcomes)],
        completed_per_s=rate(one.end_ns for one in done),
        failed_per_s=rate(one.end_ns for one in outcomes if one.error_kind is not None),
        in_flight=gauge("client_in_flight"),
        ttft_p50_ms=[_at(values, "p50") for values in ttft],
        ttft_p99_ms=[_at(values, "p99") for values in ttft],
        tpot_p50_ms=[_at(values, "p50") for values in tpot],
        tpot_p99_ms=[_at(values, "p99") for values in tpot],
        hit_rate=_hit_rate(done, binned, counter),
        kv_usage=gauge("kv_usage"),
        running=gauge("running"),
        waiting=gauge("waiting"),
        preemptions=counter("preemptions"),
        **(gpus if any(one.gpu_count for one in samples) else {}),
    )


def _at(values: list[float], name: str) -> float | None:
    found = percentiles(values)
    return None if found is None else float(getattr(found, name))


def _increases(totals: MaybeFloats) -> MaybeFloats:
    """Increase of a counter since the last bin that saw it; it starts at 0."""
    before = 0.0
    new: MaybeFloats = []
    for total in totals:
        new.append(None if total is None else total - before)
        before = before if total is None else total
    return new


def _hit_rate(
    done: Sequence[Outcome],
    binned: Callable[[Iterable[tuple[int, tuple[int, int] | None]]], Bins[tuple[int, int]]],
    counter: Callable[[str], MaybeFloats],
) -> MaybeFloats:
    """Token-weighted, from usage where any answer has it, else from the server's counters."""
    named = [(one, one.cached_tokens, one.input_tokens) for one in done]
    pairs = [(one.planned_ns, (a, b)) for one, a, b in named if a is not None and b is not None]
    if pairs:
        return [_ratio(sum(a for a, _ in seen), sum(b for _, b in seen)) for seen in binned(pairs)]
    return [_ratio(a, b) for a, b in zip(counter("prefix_hits_tokens"), counter("prefix_queries_tokens"), strict=True)]


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
