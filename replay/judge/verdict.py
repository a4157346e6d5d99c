"""Points to judgement: was the client the limit, where does latency bend, and what is the cause. Pure."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from replay.judge import metrics, notes
from replay.judge.metrics import Facts
from replay.judge.summary import Note, Point, Slo, Summary
from replay.outcome import Outcome, Sample

Regime = Literal["flat", "knee", "wall", "invalid", "unknown"]
KNEE_FACTOR = 2.0  # p99 TTFT or p50 TPOT grown so much against the lowest valid point
WALL_SHARE = 0.9  # completed / due in the window below this share of the base point's: throughput no longer follows
KV_FULL = 0.95
HIT_RATE_FALL = 0.05

EXIT_OK, EXIT_INVALID, EXIT_SLO_MISSED = 0, 3, 4


def judge_point(facts: Facts, outcomes: Sequence[Outcome], samples: Sequence[Sample], slos: Sequence[Slo]) -> Point:
    """Figures of one point by itself; `regime` and `cause` need the other points, see `judge_points`."""
    window = metrics.steady_window(facts.planned_span_s, facts.planned)
    steady = metrics.in_window(outcomes, window)
    done = [one for one in steady if one.error_kind is None]
    span = max(window[1] - window[0], 1e-9)
    ends = [one.end_ns for one in outcomes if one.end_ns is not None]
    duration = max(ends, default=0) / 1e9
    late, speeds = metrics.lateness(steady), metrics.latency(steady)
    cache = metrics.cache(outcomes, samples, facts)
    cpu = max((one.client_cpu_share for one in samples if one.client_cpu_share is not None), default=None)
    lag = metrics.percentiles(one.client_loop_lag_ns / 1e6 for one in samples if one.client_loop_lag_ns is not None)
    limits = notes.client_limits(late, speeds, lag.p99 if lag else None, _sustained_cpu(samples))
    prompt_exact = metrics.exact_share(outcomes, "input_tokens", "planned_input_tokens")
    has_metrics = any(one.running is not None for one in samples)
    good, attained = metrics.goodput(steady, slos, span)
    errors = metrics.error_counts(outcomes)
    # Rates by completion time inside the window: what the server got through, not what was asked of it.
    finished = [one for one in outcomes if one.error_kind is None and window[0] <= (one.end_ns or 0) / 1e9 <= window[1]]
    return Point(
        index=facts.index,
        scale=facts.scale,
        by="time" if facts.by == "time" else "users",
        seed=facts.seed,
        planned=facts.planned,
        sent=len(outcomes),
        completed=sum(one.error_kind is None for one in outcomes),
        errors=errors,
        not_sent=facts.planned - len(outcomes),
        duration_s=duration,
        window_s=window,
        offered_per_s=facts.planned / facts.planned_span_s if facts.planned_span_s else 0.0,
        due_per_s=len(steady) / span,
        requests_per_s=len(finished) / span,
        input_tokens_per_s=sum(one.input_tokens or 0 for one in finished) / span,
        output_tokens_per_s=sum(one.output_tokens or 0 for one in finished) / span,
        input_tokens_exact_share=prompt_exact,
        output_tokens_exact_share=metrics.exact_share(outcomes, "output_tokens", "planned_output_tokens"),
        latency=speeds,
        lateness_ms=late,
        late_turns=sum(one.turn > 0 and one.planned_ns > (one.recorded_ns or one.planned_ns) for one in outcomes),
        goodput_per_s=good,
        attainment=attained,
        cache=cache,
        client_cpu_share_max=cpu,
        client_loop_lag_p99_ms=lag.p99 if lag else None,
        valid=not limits,
        regime="unknown" if not limits else "invalid",
        cause="client" if limits else None,
        notes=[*limits, *_stopped(facts), *notes.cache_notes(cache, facts, prompt_exact, has_metrics)]
        + [*_errors(errors), *notes.sample_notes(len(done))],
        series=metrics.series(outcomes, samples, max(duration, facts.planned_span_s)),
    )


def _sustained_cpu(samples: Sequence[Sample]) -> float | None:
    """Median share over the busiest tenth of the samples: one busy quarter second is no limit."""
    shares = sorted(one.client_cpu_share for one in samples if one.client_cpu_share is not None)
    busiest = shares[-max(3, len(shares) // 10) :]
    return busiest[len(busiest) // 2] if len(shares) >= 4 else None


def _stopped(facts: Facts) -> list[Note]:
    if facts.stopped is None:
        return []
    return [
        Note(
            kind="stopped_early",
            seen=f"the point ended early: {facts.stopped}",
            why="its figures cover only what was sent until then",
            action="look at the server's log, then replay this scale again",
        )
    ]


def _errors(errors: dict[str, int]) -> list[Note]:
    if not errors:
        return []
    text = ", ".join(f"{count} {kind}" for kind, count in sorted(errors.items()))
    return [
        Note(
            kind="errors",
            seen=f"requests failed: {text}",
            why="latency figures cover only the requests that were answered; each failure is a missed SLO",
            action="see error_text in the outcomes file",
        )
    ]


def judge_points(points: Sequence[Point]) -> list[Point]:
    """Regime and cause of every point, against the valid point of the lowest scale."""
    base = min((one for one in points if one.valid and one.completed), key=lambda one: one.scale, default=None)
    return [msgspec.structs.replace(one, **_regime(one, base)) for one in points]


def _regime(point: Point, base: Point | None) -> dict[str, object]:
    if not point.valid:
        return {"regime": "invalid", "cause": "client"}
    if base is None or not point.completed or point.latency.ttft_schedule_ms is None:
        return {"regime": "unknown", "cause": None}
    ttft, tpot = _growth(point, base)
    throughput_lags = _kept_up(point) < WALL_SHARE * (1.0 if point is base else _kept_up(base))
    grows = ttft > KNEE_FACTOR or tpot > KNEE_FACTOR
    is_overloaded = throughput_lags and (point.cache.waiting_p50 or 0) >= 1  # a queue that stands, not one that comes and goes
    if point.scale == base.scale and not is_overloaded and not point.cache.preemptions:
        return {"regime": "flat", "cause": None}
    if is_overloaded and (grows or point.scale == base.scale):
        return {"regime": "wall", "cause": _cause(point, base)}
    if grows or point.cache.preemptions:
        return {"regime": "knee", "cause": _cause(point, base)}
    return {"regime": "flat", "cause": None}


def _kept_up(point: Point) -> float:
    """Completed / due inside the steady window."""
    return point.requests_per_s / point.due_per_s if point.due_per_s else 1.0


def _growth(point: Point, base: Point) -> tuple[float, float]:
    """(p99 schedule TTFT, p50 TPOT) as multiples of the base point's."""
    ttft, ttft_base = point.latency.ttft_schedule_ms, base.latency.ttft_schedule_ms
    tpot, tpot_base = point.latency.tpot_ms, base.latency.tpot_ms
    return (
        ttft.p99 / ttft_base.p99 if ttft and ttft_base and ttft_base.p99 else 1.0,
        tpot.p50 / tpot_base.p50 if tpot and tpot_base and tpot_base.p50 else 1.0,
    )


def _cause(point: Point, base: Point) -> str:
    """The nearest cause that the evidence shows, the strongest first."""
    cache = point.cache
    causes = []
    if cache.preemptions:
        causes.append("preemptions (KV full)")
    elif cache.kv_usage_max is not None and cache.kv_usage_max >= KV_FULL:
        causes.append("KV full")
    fall = _fall(point, base)
    if fall is not None and fall > HIT_RATE_FALL:
        causes.append("hit-rate collapse")
    if (cache.waiting_max or 0) > 2 * (base.cache.waiting_max or 0) + 4 and not causes:
        causes.append("queue growth")
    if _growth(point, base)[1] > KNEE_FACTOR and not causes:
        causes.append("batch saturation")
    if causes:
        return ", ".join(causes)
    return "unknown: no server metrics" if cache.waiting_max is None else "longer steps (more requests in a batch)"


def reported_hit_rate(point: Point) -> float | None:
    return point.cache.hit_rate_usage if point.cache.hit_rate_usage is not None else point.cache.hit_rate_metrics


def _fall(point: Point, base: Point) -> float | None:
    now, before = reported_hit_rate(point), reported_hit_rate(base)
    return None if now is None or before is None else before - now


def headline(points: Sequence[Point]) -> list[str]:
    """What was found, in plain words, most important first. Only what the figures show."""
    if not points:
        return ["Nothing was sent."]
    lines = [f"{one.scale:g}x is not valid: {one.notes[0].seen}." for one in points if not one.valid]
    valid = [one for one in points if one.valid and one.completed]
    if not valid:
        return lines or ["No request was answered."]
    first, last = valid[0], valid[-1]
    lines += _hit_rate_line(first, last)
    lines += _preemption_line(valid)
    lines += _latency_lines(first, last)
    for one in valid:
        if one.errors:
            total = sum(one.errors.values())
            lines.append(f"{total} of {one.sent} requests failed at {one.scale:g}x.")
    return lines


def _hit_rate_line(first: Point, last: Point) -> list[str]:
    before, now = reported_hit_rate(first), reported_hit_rate(last)
    if before is None or now is None:
        return []
    expected = _predicted(first, last)
    if first is last:
        return [f"Prefix hit rate {before:.1%} at {first.scale:g}x{expected}."]
    verb = "stays at" if abs(before - now) < 0.01 else ("falls from" if now < before else "rises from")
    change = f"{now:.1%}" if verb == "stays at" else f"{before:.1%} to {now:.1%}"
    return [f"Prefix hit rate {verb} {change} between {first.scale:g}x and {last.scale:g}x{expected}."]


def _predicted(first: Point, last: Point) -> str:
    a, b = first.cache.hit_rate_predicted, last.cache.hit_rate_predicted
    if a is None or b is None:
        return ""
    return f" (predicted {a:.1%})" if first is last else f" (predicted {a:.1%} and {b:.1%})"


def _preemption_line(valid: Sequence[Point]) -> list[str]:
    known = [one for one in valid if one.cache.preemptions is not None]
    hit = next((one for one in known if one.cache.preemptions), None)
    if not known:
        return []
    if hit is None:
        return [f"No preemptions up to {known[-1].scale:g}x."]
    before = [one for one in known if one.scale < hit.scale]
    where = f"between {before[-1].scale:g}x and {hit.scale:g}x" if before else f"at {hit.scale:g}x already"
    counts = ", ".join(f"{one.cache.preemptions} at {one.scale:g}x" for one in known if one.cache.preemptions)
    return [f"Preemptions start {where}: {counts}."]


def _latency_lines(first: Point, last: Point) -> list[str]:
    a, b = first.latency.ttft_schedule_ms, last.latency.ttft_schedule_ms
    if a is None or b is None:
        return []
    if first is last:
        return [f"TTFT p50 {a.p50:.0f} ms, p99 {a.p99:.0f} ms at {first.scale:g}x."]
    change = f"from {a.p99:.0f} ms to {b.p99:.0f} ms ({b.p99 / a.p99:.1f} times)"
    line = f"TTFT p99 goes {change} between {first.scale:g}x and {last.scale:g}x"
    reason = f"; {last.regime}, cause: {last.cause}" if last.cause else ""
    return [f"{line}{reason}."]


def exit_code(summary: Summary, attain: float | None = None) -> int:
    """3 if the client was the limit anywhere, 4 if an SLO was asked for and missed, else 0."""
    if any(not one.valid for one in summary.points):
        return EXIT_INVALID
    if attain is not None and any(one.attainment is not None and one.attainment < attain for one in summary.points):
        return EXIT_SLO_MISSED
    return EXIT_OK
