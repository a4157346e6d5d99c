"""Where latency bends as the load grows, and what bends it. Pure; each name rests on figures in the points."""

from collections.abc import Sequence
from math import sqrt
from typing import Literal

import msgspec

from replay.judge.metrics import KV_FULL
from replay.judge.notes import SMALL_SAMPLE
from replay.judge.summary import Point
from replay.outcome import NO_FAULT

type Regime = Literal["flat", "knee", "wall", "invalid", "unknown"]

KNEE_FACTOR = 2.0  # TTFT tail or median TPOT against the lowest valid scale
WALL_SHARE = 0.1  # of the requests sent in the window have piled up by its end
UNREACHED_SHARE = 0.8  # of the offered load got through, while a queue stood
FAILED_SHARE = 0.05
KV_FULL_SHARE = 0.1  # of the time
HIT_RATE_FALL = 0.05
LONGER_STEPS = 1.25  # median TPOT against the lowest valid scale
QUEUE_FACTOR, QUEUE_MIN = 2, 5


def with_regimes(points: Sequence[Point]) -> list[Point]:
    """Regime and cause of every point, against the valid point of the lowest scale."""
    base = min((one for one in points if one.valid and one.completed), key=lambda one: one.scale, default=None)
    judged = []
    for one in points:
        regime = regime_of(one, base)
        cause = cause_of(one, base) if regime in ("knee", "wall") else "client" if regime == "invalid" else None
        judged.append(msgspec.structs.replace(one, regime=regime, cause=cause))
    return judged


def regime_of(point: Point, base: Point | None) -> Regime:
    """wall: the server does not get through what it is sent. knee: it does, but latency has bent. flat: neither."""
    if not point.valid:
        return "invalid"
    if failed_share(point) > FAILED_SHARE or is_backlogged(point):
        return "wall"
    if base is None or point.latency.ttft_schedule_ms is None:
        return "unknown"
    has_bent = max(_ttft_growth(point, base), _tpot_growth(point, base)) > KNEE_FACTOR
    return "knee" if has_bent or point.cache.preemptions or is_queue_standing(point) else "flat"


def is_backlogged(point: Point) -> bool:
    """More than a tenth of what was sent in the window piled up, beyond the noise of counting (two standard deviations
    of a Poisson count); or, where sessions wait for answers and so send less, a queue stood and the load was not reached.
    """
    window = point.window_s[1] - point.window_s[0]
    sent, done = (point.sent_per_s or 0) * window, point.requests_per_s * window
    return sent - done > max(WALL_SHARE * sent, 2 * sqrt(sent)) or (
        is_queue_standing(point) and point.requests_per_s < UNREACHED_SHARE * point.offered_per_s
    )


def is_queue_standing(point: Point) -> bool:
    """Requests waited in the server at least half of the time."""
    return bool(point.cache.waiting_p50)


def failed_share(point: Point) -> float:
    failed = sum(count for kind, count in point.errors.items() if kind not in NO_FAULT)
    return failed / point.sent if point.sent else 0.0


def cause_of(point: Point, base: Point | None) -> str:
    """Every cause that the figures show, nearest to the root first; "unknown" where they show none."""
    cache = point.cache
    is_full = (cache.kv_full_share or 0) >= KV_FULL_SHARE or bool(cache.preemptions and (cache.kv_usage_max or 0) >= KV_FULL)
    queued_before = (base.cache.waiting_max or 0) if base and base is not point else 0
    is_queued = is_queue_standing(point) or (cache.waiting_max or 0) > QUEUE_FACTOR * queued_before + QUEUE_MIN
    causes = ["requests fail"] if failed_share(point) > FAILED_SHARE else []
    causes += ["KV full"] if is_full else []
    causes += ["preemptions"] if cache.preemptions else []
    causes += ["hit-rate collapse"] if base and _hit_rate_fall(point, base) > HIT_RATE_FALL else []
    causes += ["queue growth"] if is_queued else []
    if base and not is_full and _tpot_growth(point, base) > LONGER_STEPS:
        causes.append("batch saturation")
    if causes:
        return ", ".join(causes)
    return "unknown (no server metrics)" if cache.waiting_max is None else "unknown"


def _hit_rate_fall(point: Point, base: Point) -> float:
    now, before = point.cache.hit_rate_reported, base.cache.hit_rate_reported
    return 0.0 if now is None or before is None else before - now


def _ttft_growth(point: Point, base: Point) -> float:
    """Of the p99, or of the p90 where one of the two points has fewer than 100 requests.

    The step that a request finds under way is left out: a server that is never idle makes each one wait for it, and that
    alone doubles a short prompt's TTFT without any queue.
    """
    now, before = point.latency.ttft_schedule_ms, base.latency.ttft_schedule_ms
    if now is None or before is None:
        return 1.0
    step_ms = point.latency.tpot_ms.p50 if point.latency.tpot_ms else 0.0
    tail, tail_before = (now.p99, before.p99) if min(now.count, before.count) >= SMALL_SAMPLE else (now.p90, before.p90)
    return _ratio(max(tail - step_ms, 0.0), tail_before)


def _tpot_growth(point: Point, base: Point) -> float:
    now, before = point.latency.tpot_ms, base.latency.tpot_ms
    return _ratio(now.p50, before.p50) if now and before else 1.0


def _ratio(now: float, before: float) -> float:
    return now / before if before > 0 else 1.0
