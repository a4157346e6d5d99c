"""Factors on step costs by which the engine in virtual time comes closest to a measured run. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from replay.judge.metrics import tpot_ms
from replay.outcome import Outcome
from replay.plan.plan import Plan
from replay.sim.presets import Preset
from replay.sim.seen import Spans, within
from replay.sim.virtual import play

Floats = NDArray[np.float64]
Pair = tuple[Outcome, Outcome]  # measured, simulated

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
NOISE = 0.02  # of the logarithm of a quantile of a run
FAR = 2.0  # of NOISE: from here on the loss grows as Huber's: queues grow far where costs are hardly wrong
GROUPS = (  # costs that change by one factor
    ("overhead_s", "token_overhead_s", "weights_s"),
    ("context_token_s",),
    ("token_s", "pair_s"),
    ("request_overhead_s",),
)
SURE, UNSURE = 0.003, 1.0  # standard deviation of the logarithm of a factor: at least, and of a cost that no step tells
ROUNDS = 4
STEP = 0.05  # of the logarithm of a factor: what a slope is measured with
LARGEST = 0.7  # change of a logarithm in one round
CLOSE = 0.005  # mean of the logarithms, where nothing is left to do


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    plan: Plan
    outcomes: dict[int, Outcome]  # answered ones, by number in the plan
    held_back: Spans  # what is due in these is not fitted
    hang_up: bool = False  # where the recorded clients did
    label: str = ""  # of points that are one load, measured again

    def is_held_back(self, one: Outcome) -> bool:
        return bool(within(np.array(one.planned_ns / 1e9), self.held_back))


def ttft_ms(one: Outcome) -> float:
    """Service TTFT: what the client itself was late is not the server's."""
    start_ns = one.sent_ns if one.sent_ns is not None else one.planned_ns
    return ((one.first_token_ns or 0) - start_ns) / 1e6


def values_of(measure: Callable[[Outcome], float | None], outcomes: Sequence[Outcome]) -> Floats:
    return np.array([value for one in outcomes if (value := measure(one)) is not None and value > 0])


def simulated(point: Point, engine: Preset, *, early: bool) -> list[Pair]:
    """Of requests that both answered; `early`: of the fitted part, and no further."""
    wanted = {number for number, one in point.outcomes.items() if not early or not point.is_held_back(one)}
    pairs = []
    for one in play(point.plan, engine, replicas=1, router="rr", sample_s=1e9, hang_up=point.hang_up):
        if isinstance(one, Outcome) and one.request_id in wanted:
            wanted.discard(one.request_id)
            if one.error_kind is None:
                pairs.append((point.outcomes[one.request_id], one))
            if not wanted:
                break
    return pairs


class Tries:
    """Simulations of the fitted part."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.points = points
        self.count = 0

    def pairs(self, engine: Preset) -> dict[str, list[Pair]]:
        """Of each load, over all times that it was measured."""
        self.count += 1
        found: dict[str, list[Pair]] = {}
        for point in self.points:
            found.setdefault(point.label, []).extend(simulated(point, engine, early=True))
        return found

    def residuals(self, engine: Preset) -> Floats:
        """Logarithms of predicted / measured at the quantiles of TTFT and TPOT, of every load."""
        found: list[float] = []
        for pairs in self.pairs(engine).values():
            for measure in (ttft_ms, tpot_ms):
                seen = values_of(measure, [one for one, _ in pairs])
                ours = values_of(measure, [other for _, other in pairs])
                if len(seen) and len(ours):
                    found += np.log(np.quantile(ours, QUANTILES) / np.quantile(seen, QUANTILES)).tolist()
        return np.array(found)


def tuned(tries: Tries, start: Preset, errors: dict[str, float]) -> Preset:
    """Gauss-Newton on the logarithms of the factors, each held by its standard error, so that it moves if no step tells it."""
    spread = np.clip([max(_finite(errors[name]) for name in group) for group in GROUPS], SURE, UNSURE)
    best = np.zeros(len(spread))
    error = tries.residuals(start)

    def loss(factors: Floats, residuals: Floats) -> float:
        size = np.abs(residuals) / NOISE
        return float(np.where(size < FAR, size**2, 2 * FAR * size - FAR**2).sum() + ((factors / spread) ** 2).sum())

    for _ in range(ROUNDS):
        if float(np.abs(error).mean()) < CLOSE:
            break
        slopes = [(tries.residuals(changed_by(start, best + STEP * unit)) - error) / STEP for unit in np.eye(len(best))]
        slope, weights = np.stack(slopes, axis=1) / NOISE, np.minimum(1.0, FAR * NOISE / np.maximum(np.abs(error), 1e-12))
        curvature = slope.T @ (slope * weights[:, None]) + np.diag(spread**-2.0)
        step = np.linalg.solve(curvature, -slope.T @ (weights * error / NOISE) - best / spread**2)
        step = np.clip(step, -LARGEST, LARGEST)
        for part in (1.0, 0.3, 0.1):
            again = tries.residuals(changed_by(start, best + part * step))
            if loss(best + part * step, again) < loss(best, error):
                best, error = best + part * step, again
                break
        else:
            break
    return changed_by(start, best)


def _finite(error: float) -> float:
    return error if np.isfinite(error) else UNSURE


def changed_by(start: Preset, factors: Floats) -> Preset:
    """`factors`: logarithms, of GROUPS."""
    by_name = {name: factor for names, factor in zip(GROUPS, np.exp(factors).tolist(), strict=True) for name in names}
    before_s = start.request_overhead_s * by_name.pop("request_overhead_s")
    costs = replace(start.costs, **{name: getattr(start.costs, name) * factor for name, factor in by_name.items()})
    return replace(start, given_costs=costs, request_overhead_s=before_s)
