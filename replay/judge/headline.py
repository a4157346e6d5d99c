"""What was found, in plain words. Pure; every sentence is read off the figures of the points."""

from collections.abc import Sequence

from replay.judge.summary import Percentiles, Point

ALIKE_HIT_RATE, ALIKE_LATENCY = 0.01, 1.1


def headline(points: Sequence[Point]) -> list[str]:
    """Most important finding first: what not to trust, then cache, pressure, latency, failures."""
    ordered = sorted(points, key=lambda one: one.scale)
    if not any(one.sent for one in ordered):
        return ["Nothing was sent."]
    lines = [_distrust(one) for one in ordered if not one.valid or _cut_short(one)]
    valid = [one for one in ordered if one.valid and one.completed]
    if valid:
        first, last = valid[0], valid[-1]
        lines += _hit_rate(first, last)
        lines += _preemptions(valid)
        lines += _regimes(valid)
        lines += _ttft(first, last)
        lines += [_throughput(one) for one in valid if one.regime == "wall"]
    lines += [_failures(one) for one in ordered if one.errors]
    return lines


def _distrust(point: Point) -> str:
    seen = next(note.seen for note in point.notes if not point.valid or note.kind == "stopped_early")
    return f"{point.label} is not valid: {seen}." if not point.valid else f"{point.label} was {seen}."


def _cut_short(point: Point) -> bool:
    return any(note.kind == "stopped_early" for note in point.notes)


def _hit_rate(first: Point, last: Point) -> list[str]:
    before, now = first.cache.hit_rate_reported, last.cache.hit_rate_reported
    if before is None or now is None:
        return []
    if first is last:
        return [f"Prefix hit rate {before:.1%} at {first.label}{_predicted(first, last)}."]
    if abs(now - before) < ALIKE_HIT_RATE:
        change = f"stays near {now:.1%}"
    else:
        change = f"{'falls' if now < before else 'rises'} from {before:.1%} to {now:.1%}"
    return [f"Prefix hit rate {change} between {first.label} and {last.label}{_predicted(first, last)}."]


def _predicted(first: Point, last: Point) -> str:
    a, b = first.cache.hit_rate_predicted, last.cache.hit_rate_predicted
    if a is None or b is None:
        return ""
    return f" (predicted {a:.1%})" if first is last else f" (predicted {a:.1%} and {b:.1%})"


def _preemptions(valid: Sequence[Point]) -> list[str]:
    """Onset is known only as a bracket: the last scale without and the first with preemptions."""
    known = [one for one in valid if one.cache.preemptions is not None]
    if not known:
        return []
    hit = next((one for one in known if one.cache.preemptions), None)
    if hit is None:
        return [f"No preemptions up to {known[-1].label}." if len(known) > 1 else f"No preemptions at {known[0].label}."]
    before = [one for one in known if one.scale < hit.scale]
    where = f"between {before[-1].label} and {hit.label}" if before else f"at {hit.label} already"
    counts = ", ".join(f"{one.cache.preemptions} at {one.label}" for one in known if one.cache.preemptions)
    return [f"Preemptions start {where}: {counts}."]


def _regimes(valid: Sequence[Point]) -> list[str]:
    bent = [one for one in valid if one.regime in ("knee", "wall")]
    if not bent and len(valid) > 1 and all(one.regime == "flat" for one in valid):
        return [f"Latency stays flat up to {valid[-1].label}."]
    alike: dict[tuple[str, str | None], list[str]] = {}
    for one in bent:
        alike.setdefault((one.regime, one.cause), []).append(one.label)
    return [
        f"{' and '.join(scales)} {'is' if len(scales) == 1 else 'are'} past the {regime}: {cause}."
        for (regime, cause), scales in alike.items()
    ]


def _ttft(first: Point, last: Point) -> list[str]:
    a, b = first.latency.ttft_schedule_ms, last.latency.ttft_schedule_ms
    if a is None or b is None:
        return []
    if first is last or a.p99 <= 0:
        return [f"TTFT p50 {_time(b.p50)}, p99 {_time(b.p99)} at {last.label}."]
    between = f"between {first.label} and {last.label}: {_time(a.p99)} to {_time(b.p99)}"
    if b.p99 > ALIKE_LATENCY * a.p99:
        return [f"TTFT p99 grows {b.p99 / a.p99:.1f} times {between}{_few(a, b)}."]
    return [f"TTFT p99 {'does not grow' if b.p99 * ALIKE_LATENCY > a.p99 else 'falls'} {between}{_few(a, b)}."]


def _few(*figures: Percentiles) -> str:
    least = min(one.count for one in figures)
    return f" (of {least} requests only)" if least < 100 else ""


def _throughput(point: Point) -> str:
    offered, answered = point.offered_per_s, point.requests_per_s
    return f"At {point.label} the plan offers {offered:.1f} requests/s, the server answers {answered:.1f}."


def _failures(point: Point) -> str:
    return f"{sum(point.errors.values())} of {point.sent} requests failed at {point.label}."


def _time(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"
