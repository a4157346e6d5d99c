"""One point's figures put together, and the run's exit code. Pure; regimes are in knee.py, words in headline.py."""

from collections.abc import Iterable, Sequence

import msgspec

from replay.judge import metrics, notes
from replay.judge.doubts import doubts
from replay.judge.gpu import gpu
from replay.judge.metrics import Facts
from replay.judge.series import series
from replay.judge.servers import servers
from replay.judge.summary import Note, Point, Slo, Summary
from replay.outcome import Outcome, Sample

QUARTER_NS = 250_000_000
EXIT_OK, EXIT_INVALID, EXIT_SLO_MISSED = 0, 3, 4


def judge_point(
    facts: Facts,
    outcomes: Sequence[Outcome],
    samples: Sequence[Sample],
    slos: Sequence[Slo],
    chunked: Iterable[Outcome] | None = None,
) -> Point:
    """Figures of one point; regime and cause need the others, see knee.py. `chunked`: outcomes again, where they lack chunks."""
    is_whole = facts.stopped is None and len(outcomes) >= facts.planned
    was_killed = facts.stopped is None and not is_whole
    until_s = metrics.seen_until_s(outcomes, samples)
    window = facts.window_s or metrics.steady_window(facts.planned_span_s, facts.planned, until_s, is_whole)
    width_s = window[1] - window[0]
    steady = metrics.in_window(outcomes, window)
    done = [one for one in outcomes if one.error_kind is None]
    finished = [one for one in done if metrics.is_within(one.end_ns, window)]  # what the server got through, not what was asked

    def per_second(count: int) -> float:
        return count / width_s if width_s > 0 else 0.0

    again = chunked if chunked is None else (one for one in chunked if metrics.is_within(one.planned_ns, window))
    late, latency = metrics.lateness(steady), metrics.latency(steady, again)
    cpu_share = _busy_cpu_share(samples)
    lag = metrics.percentiles(_loop_lags_ms(samples))
    limits = notes.client_limits(late, latency, lag, cpu_share)
    output_tokens_per_s = per_second(sum(one.output_tokens or 0 for one in finished))
    good, attained = metrics.goodput(steady, slos, width_s)
    point = Point(
        index=facts.index,
        scale=facts.scale,
        by=facts.by,
        seed=facts.seed,
        planned=facts.planned,
        sent=len(outcomes),
        completed=len(done),
        errors=metrics.error_counts(outcomes),
        hung_up=sum(one.error_kind == "client_abort" for one in outcomes),
        retried=sum(bool(one.retried) for one in outcomes),
        not_sent=facts.planned - len(outcomes),
        duration_s=until_s,
        window_s=window,
        offered_per_s=facts.planned / facts.planned_span_s if facts.planned_span_s > 0 else per_second(facts.planned),
        sent_per_s=None if was_killed else per_second(sum(metrics.is_within(one.sent_ns, window) for one in outcomes)),
        requests_per_s=per_second(len(finished)),
        input_tokens_per_s=per_second(sum(one.input_tokens or 0 for one in finished)),
        output_tokens_per_s=output_tokens_per_s,
        input_tokens_exact_share=metrics.exact_share(outcomes, "input_tokens", "planned_input_tokens"),
        output_tokens_exact_share=metrics.exact_share(outcomes, "output_tokens", "planned_output_tokens"),
        latency=latency,
        lateness_ms=late,
        late_turns=sum(map(metrics.is_late_turn, outcomes)),
        goodput_per_s=good,
        attainment=attained,
        cache=metrics.cache(outcomes, samples, facts, window),
        client_cpu_share_busy=cpu_share,
        client_loop_lag_p99_ms=lag.p99 if lag else None,
        valid=not limits,
        regime="unknown",
        cause=None,
        notes=limits,
        steady=facts.steady,
        little=facts.little,
        gpu=gpu(samples, window, output_tokens_per_s),
        servers=servers(facts, outcomes, samples, window),
        series=series(outcomes, samples, max(until_s, facts.planned_span_s) if is_whole else until_s, was_killed),
    )
    return msgspec.structs.replace(point, notes=[*limits, *_other_notes(point, facts, outcomes, samples)])


def _other_notes(point: Point, facts: Facts, outcomes: Sequence[Outcome], samples: Sequence[Sample]) -> list[Note]:
    prompt, output = point.input_tokens_exact_share, point.output_tokens_exact_share
    answered = point.latency.ttft_schedule_ms
    return [
        *notes.run_notes(facts, outcomes),
        *notes.load_notes(point, facts.later_turns),
        *notes.count_notes(facts, outcomes, samples, prompt, output),
        *notes.cache_notes(point.cache, has_metrics=any(one.running is not None for one in samples)),
        *notes.server_notes(samples),
        *notes.sample_notes(answered.count if answered else 0),
        *doubts(point, facts, outcomes),
    ]


def _loop_lags_ms(samples: Sequence[Sample]) -> list[float]:
    """The worst of each quarter second, however often the client was looked at."""
    worst: dict[int, float] = {}
    for one in samples:
        if one.client_loop_lag_ns is not None:
            at = one.t_ns // QUARTER_NS
            worst[at] = max(worst.get(at, 0.0), one.client_loop_lag_ns / 1e6)
    return list(worst.values())


def _busy_cpu_share(samples: Sequence[Sample]) -> float | None:
    """Median share over the busiest tenth of the quarter seconds, at least three: one busy quarter second is no limit."""
    seen: dict[int, list[float]] = {}
    for one in samples:
        if one.client_cpu_share is not None:
            seen.setdefault(one.t_ns // QUARTER_NS, []).append(one.client_cpu_share)
    shares = sorted(sum(some) / len(some) for some in seen.values())
    busiest = shares[-max(3, len(shares) // 10) :]
    return busiest[len(busiest) // 2] if len(shares) >= 4 else None


def exit_code(summary: Summary, attain: float | None = None) -> int:
    """3 if the client was the limit anywhere, 4 if an SLO was asked for and missed, else 0."""
    if any(not one.valid for one in summary.points):
        return EXIT_INVALID
    if attain is not None and any(one.attainment is not None and one.attainment < attain for one in summary.points):
        return EXIT_SLO_MISSED
    return EXIT_OK
