"""Outcomes and samples of one point to judged figures. Pure; each formula stands where it is computed."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from replay.judge.summary import Cache, Latency, Little, LoadBy, Percentiles, Slo, Steadiness
from replay.outcome import NO_FAULT, Outcome, Sample

WARM_UP_SHARE, WARM_UP_MAX_S = 0.1, 30.0
SMALL_POINT = 50  # requests; below that nothing is left out, since a warm-up would be a handful of requests
TALLY_AT = 1_000_000  # values that are held before they are counted
KV_FULL = 0.95  # of the blocks: engines admit nothing new at some per cent below 1

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What run.json knows of one of several servers of a point."""

    url: str
    planned: int
    metrics_urls: list[str] = field(default_factory=list)
    kv_capacity_tokens: int | None = None
    hit_rate_predicted: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What run.json knows of a point."""

    index: int
    scale: float
    by: LoadBy = "users"
    seed: int | None = None
    planned: int
    planned_span_s: float  # first to last planned request
    later_turns: int = 0  # turns that wait for the answer before them
    hit_rate_predicted: float | None = None
    hit_rate_predicted_infinite: float | None = None
    kv_capacity_tokens: int | None = None
    answers_reused: bool | None = None
    stopped: str | None = None  # why the point ended early
    window_s: tuple[float, float] | None = None  # a sweep measures where its points are steady; else see steady_window
    steady: Steadiness | None = None
    little: Little | None = None
    trace_input_tokens: float | None = None  # a sweep plays a part of its trace: the mean prompt of all of it
    servers: list[ServerFacts] = field(default_factory=list)  # where there are several


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """Nearest rank: the smallest value with at least p % of all values at or below it (Hyndman and Fan 1996, type 1)."""
    ordered = np.sort(values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=np.float64))
    n = len(ordered)
    if n == 0:
        return None

    def rank(per_cent: int) -> float:
        return float(ordered[-(-per_cent * n // 100) - 1])  # ceil in integers: 0.99 * n is not exact

    return Percentiles(count=n, p50=rank(50), p90=rank(90), p99=rank(99), max=float(ordered[-1]), mean=float(ordered.mean()))


def steady_window(planned_span_s: float, planned: int, seen_until_s: float, is_whole: bool) -> tuple[float, float]:
    """From when to when (s) a point counts.

    Left out: the first 10 % of the planned span, at most 30 s, while cache and batch fill, and the drain after the last
    planned request, which no real traffic has. A point of fewer than 50 requests counts whole, drain included. A point
    that was cut short counts until the last thing seen.
    """
    if planned < SMALL_POINT:
        return 0.0, max(planned_span_s, seen_until_s)
    end = planned_span_s if is_whole else min(planned_span_s, seen_until_s)
    start = min(WARM_UP_SHARE * planned_span_s, WARM_UP_MAX_S)
    return (start, end) if start < end else (0.0, end)


def seen_until_s(outcomes: Sequence[Outcome], samples: Sequence[Sample]) -> float:
    ends = [one.end_ns for one in outcomes if one.end_ns is not None]
    return max([0, *ends, *(one.t_ns for one in samples)]) / 1e9


def in_window(outcomes: Iterable[Outcome], window_s: tuple[float, float]) -> list[Outcome]:
    """Requests that were due inside the window."""
    return [one for one in outcomes if is_within(one.planned_ns, window_s)]


def is_within(t_ns: int | None, window_s: tuple[float, float]) -> bool:
    return t_ns is not None and window_s[0] <= t_ns / 1e9 <= window_s[1]


def tpot_ms(one: Outcome) -> float | None:
    """(last token - first token) / (n - 1), n >= 2 output tokens as the server counted them."""
    n = one.output_tokens
    if one.error_kind or one.first_token_ns is None or one.last_token_ns is None or n is None or n < 2:
        return None
    return (one.last_token_ns - one.first_token_ns) / (n - 1) / 1e6


def ttft_ms(one: Outcome) -> float | None:
    """Schedule TTFT: first token - planned. Waiting in the client counts."""
    return _since(one, one.planned_ns, one.first_token_ns)


def e2e_ms(one: Outcome) -> float | None:
    """Schedule E2E: last token - planned."""
    return _since(one, one.planned_ns, one.last_token_ns)


def _since(one: Outcome, start_ns: int | None, until_ns: int | None) -> float | None:
    """Only of answered requests: how long a failure took says nothing about answers."""
    return None if one.error_kind or start_ns is None or until_ns is None else (until_ns - start_ns) / 1e6


def latency(outcomes: Sequence[Outcome], chunked: Iterable[Outcome] | None = None) -> Latency:
    """Service latencies start at sent, schedule latencies at planned. `chunked`: the outcomes again, where these lack chunks."""
    done = [one for one in outcomes if one.error_kind is None]
    by_token, by_chunk, is_known = _Tally(), _Tally(), bool(done)
    for one in done if chunked is None else (one for one in chunked if one.error_kind is None):
        gaps = token_gaps_ms(one)
        is_known = is_known and gaps is not None
        if gaps is not None:
            by_token.add(gaps)
        by_chunk.add(np.asarray(one.chunk_gaps_us, dtype=np.float64) / 1e3)
    return Latency(
        ttft_schedule_ms=percentiles(_known(map(ttft_ms, done))),
        ttft_service_ms=percentiles(_known(_since(one, one.sent_ns, one.first_token_ns) for one in done)),
        e2e_schedule_ms=percentiles(_known(map(e2e_ms, done))),
        e2e_service_ms=percentiles(_known(_since(one, one.sent_ns, one.last_token_ns) for one in done)),
        tpot_ms=percentiles(_known(map(tpot_ms, done))),
        itl_ms=by_token.percentiles() if is_known else None,
        chunk_gap_ms=by_chunk.percentiles(),
    )


class _Tally:
    """How often each value came: gaps are whole microseconds, so even hundreds of millions are few different ones."""

    def __init__(self) -> None:
        self._values, self._counts = np.empty(0), np.empty(0, dtype=np.int64)
        self._held: list[Floats] = []
        self._held_count = 0

    def add(self, values: Floats) -> None:
        if len(values):
            self._held.append(values)
            self._held_count += len(values)
        if self._held_count >= TALLY_AT:
            self._count()

    def percentiles(self) -> Percentiles | None:
        """As the function of this name gives them."""
        self._count()
        if not len(self._values):
            return None
        upto = np.cumsum(self._counts)
        n = int(upto[-1])

        def rank(per_cent: int) -> float:
            return float(self._values[np.searchsorted(upto, -(-per_cent * n // 100))])

        mean = float((self._values * self._counts).sum() / n)
        return Percentiles(count=n, p50=rank(50), p90=rank(90), p99=rank(99), max=float(self._values[-1]), mean=mean)

    def _count(self) -> None:
        new, counts = np.unique(np.concatenate([np.empty(0), *self._held]), return_counts=True)
        self._held, self._held_count = [], 0
        values, place = np.unique(np.concatenate([self._values, new]), return_inverse=True)
        total = np.zeros(len(values), dtype=np.int64)
        np.add.at(total, place, np.concatenate([self._counts, counts]))
        self._values, self._counts = values, total


def token_gaps_ms(one: Outcome) -> Floats | None:
    """Gap before each token after the first, or None where a chunk's token count is not known.

    A chunk of m tokens after a gap g gives one gap g and m - 1 gaps of 0: they came together, as the client saw it. A
    chunk without a token lengthens the gap of the next one.
    """
    tokens = one.chunk_tokens
    if not tokens or len(tokens) != len(one.chunk_gaps_us) + 1 or tokens[0] < 1 or min(tokens) < 0:
        return None
    before = np.cumsum(tokens)  # tokens before chunk i + 1
    gaps = np.zeros(before[-1])  # gap i is the one before token i + 1; the last place has no token
    np.add.at(gaps, before[:-1] - 1, np.asarray(one.chunk_gaps_us, dtype=np.float64) / 1e3)
    return gaps[:-1]


def _known(values: Iterable[float | None]) -> Iterable[float]:
    return (value for value in values if value is not None)


def lateness(outcomes: Sequence[Outcome]) -> Percentiles | None:
    """sent - planned in ms: what the client itself did wrong."""
    return percentiles((one.sent_ns - one.planned_ns) / 1e6 for one in outcomes if one.sent_ns is not None)


def is_late_turn(one: Outcome) -> bool:
    """A later turn that was due after its recorded time, because the answer before it took longer than recorded."""
    return one.turn > 0 and one.recorded_ns is not None and one.planned_ns > one.recorded_ns


def meets(one: Outcome, slos: Sequence[Slo]) -> bool:
    """All limits hold, by schedule latency. A metric that cannot exist (TPOT of a one-token answer) is no miss."""
    if one.error_kind is not None:
        return False
    seen = {"ttft": ttft_ms(one), "tpot": tpot_ms(one), "e2e": e2e_ms(one)}
    return all((value := seen[slo.metric]) is None or value <= slo.limit_ms for slo in slos)


def is_undecided(one: Outcome, slos: Sequence[Slo]) -> bool:
    """Cut off, by the end of the run or by its client, before it had broken a limit: neither met nor missed."""
    if one.error_kind not in NO_FAULT or one.end_ns is None:
        return False
    waited_ms = (one.end_ns - one.planned_ns) / 1e6
    waits = {"ttft": waited_ms if one.first_token_ns is None else 0.0, "e2e": waited_ms, "tpot": 0.0}
    return all(waits[slo.metric] <= slo.limit_ms for slo in slos)


def goodput(outcomes: Sequence[Outcome], slos: Sequence[Slo], window_s: float) -> tuple[float | None, float | None]:
    """(requests per second that meet every SLO, met / sent). Errors are misses; undecided requests are not counted."""
    counted = [one for one in outcomes if not is_undecided(one, slos)]
    if not slos or not counted or window_s <= 0:
        return None, None
    met = sum(meets(one, slos) for one in counted)
    return met / window_s, met / len(counted)


def exact_share(outcomes: Sequence[Outcome], seen: str, wanted: str) -> float | None:
    """Share of answered requests for which the server counted as many tokens as planned; None: it never said."""
    usage = [one for one in outcomes if one.error_kind is None and one.token_count_source == "usage"]
    pairs = [(getattr(one, seen), getattr(one, wanted)) for one in usage]
    known = [(a, b) for a, b in pairs if a is not None]
    return sum(a == b for a, b in known) / len(known) if known else None


def cache(outcomes: Sequence[Outcome], samples: Sequence[Sample], facts: Facts, window_s: tuple[float, float]) -> Cache:
    """Hit rates are hit tokens / prompt tokens over the whole point (warm-up included, as in the prediction)."""
    steady = [one for one in samples if is_within(one.t_ns, window_s)]
    usage, usage_all = _gauge(steady, "kv_usage"), _gauge(samples, "kv_usage")
    waiting, waiting_all = _gauge(steady, "waiting"), _gauge(samples, "waiting")
    running = _gauge(samples, "running")
    full = [one.kv_usage >= KV_FULL for one in steady if one.kv_usage is not None]
    queries, hits = last_value(samples, "prefix_queries_tokens"), last_value(samples, "prefix_hits_tokens")
    preemptions, from_host = last_value(samples, "preemptions"), last_value(samples, "host_hits_tokens")
    return Cache(
        hit_rate_predicted=facts.hit_rate_predicted,
        hit_rate_predicted_infinite=facts.hit_rate_predicted_infinite,
        hit_rate_usage=hit_rate_usage(outcomes),
        hit_rate_metrics=hits / queries if hits is not None and queries else None,
        hit_rate_host=from_host / queries if from_host and queries else None,
        kv_capacity_tokens=facts.kv_capacity_tokens,
        kv_usage_p50=usage.p50 if usage else None,
        kv_usage_max=usage_all.max if usage_all else None,
        kv_full_share=sum(full) / len(full) if full else None,
        preemptions=None if preemptions is None else int(preemptions),
        first_preemption_s=next((one.t_ns / 1e9 for one in samples if one.preemptions), None),
        running_max=running.max if running else None,
        waiting_p50=waiting.p50 if waiting else None,
        waiting_max=waiting_all.max if waiting_all else None,
    )


def hit_rate_usage(outcomes: Iterable[Outcome]) -> float | None:
    """sum of cached_tokens / sum of prompt tokens, over requests whose usage names both."""
    pairs = [(one.cached_tokens, one.input_tokens) for one in outcomes]
    known = [(cached, prompt) for cached, prompt in pairs if cached is not None and prompt is not None]
    total = sum(prompt for _, prompt in known)
    return sum(cached for cached, _ in known) / total if total else None


def _gauge(samples: Iterable[Sample], name: str) -> Percentiles | None:
    return percentiles(_known(getattr(one, name) for one in samples))


def last_value(samples: Sequence[Sample], name: str) -> float | None:
    """A counter's last known value: the last scrape may have failed with its server."""
    return next((value for one in reversed(samples) if (value := getattr(one, name)) is not None), None)


def error_counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Without those that were hung up on: that was the plan."""
    return dict(Counter(one.error_kind for one in outcomes if one.error_kind not in (None, "client_abort")))
