"""Outcomes and samples of one point to judged figures. Pure; each formula stands where it is computed."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replay.judge.summary import Cache, Latency, Percentiles, Series, Slo
from replay.outcome import Outcome, Sample

WARM_UP_SHARE, WARM_UP_MAX_S = 0.1, 30.0
SMALL_POINT = 50  # requests; below that nothing is left out, since a warm-up would be a handful of requests
MAX_BINS = 150

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What run.json knows of a point."""

    index: int
    scale: float
    by: str
    seed: int
    planned: int
    planned_span_s: float
    later_turns: int
    hit_rate_predicted: float | None
    hit_rate_predicted_infinite: float | None
    kv_capacity_tokens: int | None
    answers_reused: bool
    stopped: str | None


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """Nearest rank: the smallest value with at least p % of all values at or below it (Hyndman and Fan 1996, type 1)."""
    ordered = np.sort(np.fromiter(values, dtype=np.float64))
    n = len(ordered)
    if n == 0:
        return None

    def rank(share: float) -> float:
        return float(ordered[max(0, math.ceil(share * n) - 1)])

    return Percentiles(count=n, p50=rank(0.5), p90=rank(0.9), p99=rank(0.99), max=float(ordered[-1]), mean=float(ordered.mean()))


def steady_window(planned_span_s: float, planned: int) -> tuple[float, float]:
    """Planned times (s) that count. Left out: the first 10 % of the span, at most 30 s, while cache and batch fill.

    It ends with the last planned request: what is sent later waits in a drain that no real traffic has. A point of
    fewer than 50 requests counts whole.
    """
    if planned < SMALL_POINT:
        return 0.0, planned_span_s
    return min(WARM_UP_SHARE * planned_span_s, WARM_UP_MAX_S), planned_span_s


def in_window(outcomes: Iterable[Outcome], window_s: tuple[float, float]) -> list[Outcome]:
    return [one for one in outcomes if window_s[0] <= one.planned_ns / 1e9 <= window_s[1]]


def tpot_ms(one: Outcome) -> float | None:
    """(last token - first token) / (n - 1), n >= 2 output tokens as the server counted them."""
    if one.error_kind or one.first_token_ns is None or one.last_token_ns is None or (one.output_tokens or 0) < 2:
        return None
    assert one.output_tokens is not None
    return (one.last_token_ns - one.first_token_ns) / (one.output_tokens - 1) / 1e6


def ttft_ms(one: Outcome) -> float | None:
    """Schedule TTFT: first token - planned. Waiting in the client counts."""
    first = one.first_token_ns
    return None if one.error_kind or first is None else (first - one.planned_ns) / 1e6


def e2e_ms(one: Outcome) -> float | None:
    """Schedule E2E: last token - planned."""
    return None if one.error_kind or one.last_token_ns is None else (one.last_token_ns - one.planned_ns) / 1e6


def service_ms(one: Outcome, until_ns: int | None) -> float | None:
    """Service latency: until - sent."""
    if one.error_kind or until_ns is None or one.sent_ns is None:
        return None
    return (until_ns - one.sent_ns) / 1e6


def _token_gaps_ms(one: Outcome) -> list[float] | None:
    """Gap before each token after the first, or None where a chunk's token count is not known.

    A chunk of m tokens after a gap g gives one gap g and m - 1 gaps of 0: they came together, as the client saw it.
    """
    if one.chunk_tokens is None or len(one.chunk_tokens) != len(one.chunk_gaps_us) + 1:
        return None
    gaps = [0.0] * max(0, one.chunk_tokens[0] - 1)
    for gap_us, tokens in zip(one.chunk_gaps_us, one.chunk_tokens[1:], strict=True):
        gaps.append(gap_us / 1e3)
        gaps += [0.0] * max(0, tokens - 1)
    return gaps


def latency(outcomes: Sequence[Outcome]) -> Latency:
    done = [one for one in outcomes if one.error_kind is None]
    by_token = [_token_gaps_ms(one) for one in done]
    knows_tokens = bool(by_token) and all(gaps is not None for gaps in by_token)
    return Latency(
        ttft_schedule_ms=percentiles(_known(map(ttft_ms, done))),
        ttft_service_ms=percentiles(_known(service_ms(one, one.first_token_ns) for one in done)),
        e2e_schedule_ms=percentiles(_known(map(e2e_ms, done))),
        e2e_service_ms=percentiles(_known(service_ms(one, one.last_token_ns) for one in done)),
        tpot_ms=percentiles(_known(map(tpot_ms, done))),
        itl_ms=percentiles(gap for gaps in by_token for gap in gaps or ()) if knows_tokens else None,
        chunk_gap_ms=percentiles(gap / 1e3 for one in done for gap in one.chunk_gaps_us),
    )


def _known(values: Iterable[float | None]) -> Iterable[float]:
    return (value for value in values if value is not None)


def lateness(outcomes: Sequence[Outcome]) -> Percentiles | None:
    """sent - planned in ms: what the client itself did wrong."""
    return percentiles((one.sent_ns - one.planned_ns) / 1e6 for one in outcomes if one.sent_ns is not None)


def meets(one: Outcome, slos: Sequence[Slo]) -> bool:
    """All limits hold, by schedule latency. A metric that cannot exist (TPOT of a one-token answer) is no miss."""
    if one.error_kind is not None:
        return False
    seen = {"ttft": ttft_ms(one), "tpot": tpot_ms(one), "e2e": e2e_ms(one)}
    return all((value := seen[slo.metric]) is None or value <= slo.limit_ms for slo in slos)


def goodput(outcomes: Sequence[Outcome], slos: Sequence[Slo], window_s: float) -> tuple[float | None, float | None]:
    """(requests per second that meet every SLO, met / sent). Errors are misses, cancelled ones are not counted."""
    counted = [one for one in outcomes if one.error_kind != "cancelled"]
    if not slos or not counted or window_s <= 0:
        return None, None
    met = sum(meets(one, slos) for one in counted)
    return met / window_s, met / len(counted)


def exact_share(outcomes: Sequence[Outcome], seen: str, wanted: str) -> float | None:
    """Share of answered requests for which the server counted as many tokens as planned; None: it never said."""
    pairs = [(getattr(one, seen), getattr(one, wanted)) for one in outcomes if one.error_kind is None]
    known = [(a, b) for a, b in pairs if a is not None]
    return sum(a == b for a, b in known) / len(known) if known else None


def cache(outcomes: Sequence[Outcome], samples: Sequence[Sample], facts: Facts) -> Cache:
    """Hit rates are hit tokens / prompt tokens over the whole point (warm-up included, as in the prediction)."""
    counted = [one for one in outcomes if one.cached_tokens is not None and one.input_tokens]
    prompt = sum(one.input_tokens or 0 for one in counted)
    last = samples[-1] if samples else None
    queries = last.prefix_queries_tokens if last else None
    hits = last.prefix_hits_tokens if last else None
    usage = percentiles(_known(one.kv_usage for one in samples))
    waiting = percentiles(_known(one.waiting for one in samples))
    running = percentiles(_known(one.running for one in samples))
    preempted = [one for one in samples if one.preemptions]
    return Cache(
        hit_rate_predicted=facts.hit_rate_predicted,
        hit_rate_predicted_infinite=facts.hit_rate_predicted_infinite,
        hit_rate_usage=sum(one.cached_tokens or 0 for one in counted) / prompt if prompt else None,
        hit_rate_metrics=hits / queries if hits is not None and queries else None,
        kv_capacity_tokens=facts.kv_capacity_tokens,
        kv_usage_p50=usage.p50 if usage else None,
        kv_usage_max=usage.max if usage else None,
        preemptions=int(last.preemptions) if last and last.preemptions is not None else None,
        first_preemption_s=preempted[0].t_ns / 1e9 if preempted else None,
        running_max=running.max if running else None,
        waiting_p50=waiting.p50 if waiting else None,
        waiting_max=waiting.max if waiting else None,
    )


def error_counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    return dict(Counter(one.error_kind for one in outcomes if one.error_kind is not None))


def series(outcomes: Sequence[Outcome], samples: Sequence[Sample], duration_s: float) -> Series:
    """Everything over time, in at most MAX_BINS bins of whole seconds (or half ones in short runs)."""
    width = max(0.5, math.ceil(duration_s / MAX_BINS))
    bins = max(1, math.ceil(duration_s / width))
    middle = [(i + 0.5) * width for i in range(bins)]

    def rate(times_ns: Iterable[int | None]) -> list[float]:
        places = [min(bins - 1, max(0, int(t / 1e9 / width))) for t in times_ns if t is not None]
        return list((np.bincount(places, minlength=bins) / width).tolist()) if places else [0.0] * bins

    done = [one for one in outcomes if one.error_kind is None]
    ttft = _binned([(one.planned_ns, ttft_ms(one)) for one in done], width, bins)
    tpot = _binned([(one.planned_ns, tpot_ms(one)) for one in done], width, bins)
    hits = _binned(
        [(one.planned_ns, (one.cached_tokens, one.input_tokens)) for one in done if one.cached_tokens is not None],
        width,
        bins,
    )
    sampled = {
        name: _last_in_bin([(one.t_ns, getattr(one, name)) for one in samples], width, bins)
        for name in ("client_in_flight", "kv_usage", "running", "waiting", "preemptions")
    }
    return Series(
        t_s=middle,
        offered_per_s=rate(one.recorded_ns if one.recorded_ns is not None else one.planned_ns for one in outcomes),
        sent_per_s=rate(one.sent_ns for one in outcomes),
        completed_per_s=rate(one.end_ns for one in done),
        failed_per_s=rate(one.end_ns for one in outcomes if one.error_kind is not None),
        in_flight=sampled["client_in_flight"],
        ttft_p50_ms=[_at(values, "p50") for values in ttft],
        ttft_p99_ms=[_at(values, "p99") for values in ttft],
        tpot_p50_ms=[_at(values, "p50") for values in tpot],
        tpot_p99_ms=[_at(values, "p99") for values in tpot],
        hit_rate=[sum(a for a, _ in pairs) / sum(b for _, b in pairs) if pairs else None for pairs in hits],
        kv_usage=sampled["kv_usage"],
        running=sampled["running"],
        waiting=sampled["waiting"],
        preemptions=_new_per_bin(sampled["preemptions"]),
    )


def _binned(pairs: Iterable[tuple[int, object]], width: float, bins: int) -> list[list]:  # type: ignore[type-arg]
    binned: list[list[object]] = [[] for _ in range(bins)]
    for t_ns, value in pairs:
        if value is not None:
            binned[min(bins - 1, max(0, int(t_ns / 1e9 / width)))].append(value)
    return binned


def _at(values: list[float], name: str) -> float | None:
    found = percentiles(values)
    return None if found is None else float(getattr(found, name))


def _last_in_bin(pairs: list[tuple[int, float | None]], width: float, bins: int) -> list[float | None]:
    values: list[float | None] = [None] * bins
    for t_ns, value in pairs:
        if value is not None:
            values[min(bins - 1, max(0, int(t_ns / 1e9 / width)))] = float(value)
    return values


def _new_per_bin(totals: list[float | None]) -> list[float | None]:
    """Increase of a counter since the last bin that saw it."""
    before, new = 0.0, []
    for total in totals:
        new.append(None if total is None else total - before)
        before = before if total is None else total
    return new
