"""Two traces side by side: the same figures of both, and how much the second differs. Pure."""

from collections.abc import Callable

import msgspec
import numpy as np

from tracer.analysis.summary import Analysis, Distribution, EngineSharing

HIT_RATE_SHARES = (0.5, 0.9)  # sizes of the cache: where the first trace has these shares of its possible hits


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # with its unit; a share is between 0 and 1
    first: float | None
    second: float | None

    @property
    def ratio(self) -> float | None:
        return self.second / self.first if self.first and self.second is not None else None


def differences(first: Analysis, second: Analysis) -> list[Difference]:
    """In the order of the report. What neither trace knows is left out."""
    rows = [
        _both("requests", first, second, lambda one: one.requests),
        _both("failed requests", first, second, lambda one: one.failed),
        _both("span, s", first, second, lambda one: one.arrivals.span_s),
        _both("requests per second", first, second, lambda one: one.arrivals.rate_per_s),
        _both("CV of gaps, median of 60 s windows", first, second, lambda one: one.arrivals.gap_cv_window_p50),
    ]
    rows += [
        Difference(name=f"dispersion per {scale}", first=value, second=second.arrivals.dispersion.get(scale))
        for scale, value in first.arrivals.dispersion.items()
    ]
    lengths: dict[str, Callable[[Analysis], Distribution | None]] = {
        "input tokens": lambda one: one.lengths.input_tokens,
        "output tokens": lambda one: one.lengths.output_tokens,
        "turns per session": lambda one: one.sessions.turns if one.sessions else None,
        "think time, s": lambda one: one.sessions.think_s if one.sessions else None,
    }
    for name, of in lengths.items():
        before, after = of(first), of(second)
        rows += [
            Difference(name=f"{name}, {field}", first=getattr(before, field, None), second=getattr(after, field, None))
            for field in ("mean", "p50", "p99")
        ]
    rows.append(_both("sessions", first, second, lambda one: one.sessions.count if one.sessions else None))
    rows.append(_both("sharing groups", first, second, lambda one: one.sharing_groups))
    rows += _sharing(first, second)
    rows.append(_both("tokens lost to prefix breaks", first, second, lambda one: one.breaks.lost_tokens if one.breaks else None))
    return [row for row in rows if row.first is not None or row.second is not None]


def hit_rate_at(sharing: EngineSharing, cache_tokens: float) -> float:
    """Along the curve's points, straight between them."""
    sizes, rates = [one.cache_tokens for one in sharing.curve], [one.hit_rate for one in sharing.curve]
    return float(np.interp(cache_tokens, [0, *sizes], [0.0, *rates]))


def _sharing(first: Analysis, second: Analysis) -> list[Difference]:
    a, b = first.engine_sharing, second.engine_sharing
    rows = [
        _both("distinct tokens", first, second, lambda one: one.engine_sharing.footprint_tokens if one.engine_sharing else None),
        _both(
            "hit rate, endless cache",
            first,
            second,
            lambda one: one.engine_sharing.hit_rate_infinite if one.engine_sharing else None,
        ),
        _both(
            "cache tokens for 90 % of the possible hits",
            first,
            second,
            lambda one: one.engine_sharing.cache_tokens_for_90_percent if one.engine_sharing else None,
        ),
    ]
    if a is None or b is None:
        return rows
    for share in HIT_RATE_SHARES:
        wanted = share * a.hit_rate_infinite
        size = next((one.cache_tokens for one in a.curve if one.hit_rate >= wanted and one.hit_rate > 0), None)
        if size is not None:
            rows.append(Difference(name=f"hit rate at {size:,} tokens", first=hit_rate_at(a, size), second=hit_rate_at(b, size)))
    return rows


def _both(name: str, first: Analysis, second: Analysis, of: Callable[[Analysis], float | None]) -> Difference:
    return Difference(name=name, first=of(first), second=of(second))
