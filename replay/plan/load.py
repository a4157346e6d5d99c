"""A trace's requests under another load than the recorded one: at a rate, or so many sessions at once. Pure."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from replay.plan.plan import Ints, Plan
from replay.plan.scale import fresh_copies, rows_of

Arrivals = Literal["poisson", "recorded", "burst"]
BURST_VARIATION = 2.0  # of the gaps of `burst`: their standard deviation / mean, where Poisson has 1


def at_rate(plan: Plan, per_s: float, arrivals: Arrivals, rng: np.random.Generator, *, waits: bool) -> Plan:
    """The requests in their recorded order at `per_s` requests a second.

    All open loop; with `waits` only sessions are (then their starts are drawn, at per_s / turns of a session), and later turns
    follow the answer before them and their think time.
    """
    is_drawn = ~((plan.parent >= 0) & (plan.think_ns >= 0)) if waits else np.ones(len(plan), dtype=bool)
    share = is_drawn.mean()
    planned = plan.planned_ns.copy()
    planned[is_drawn] = np.round(GAPS[arrivals](plan.planned_ns[is_drawn], rng) / (per_s * share) * 1e9).astype(np.int64)
    if not waits:
        return replace(plan, planned_ns=planned, think_ns=np.full(len(plan), -1))
    later = np.flatnonzero(~is_drawn)
    for row in later.tolist():  # for charts of the offered load only
        planned[row] = planned[plan.parent[row]] + plan.think_ns[row]
    return rows_of(replace(plan, planned_ns=planned), np.argsort(planned, kind="stable"))


def _poisson(recorded_ns: Ints, rng: np.random.Generator) -> NDArray[np.float64]:
    return np.cumsum(rng.exponential(1.0, len(recorded_ns)))


def _burst(recorded_ns: Ints, rng: np.random.Generator) -> NDArray[np.float64]:
    """Gamma gaps of mean 1: the larger their variation, the more arrivals come in clusters."""
    shape = 1 / BURST_VARIATION**2
    return np.cumsum(rng.gamma(shape, 1 / shape, len(recorded_ns)))


def _recorded(recorded_ns: Ints, _rng: np.random.Generator) -> NDArray[np.float64]:
    """The recorded gaps, stretched to a mean of 1."""
    span = max(1, int(recorded_ns[-1] - recorded_ns[0]))
    gaps: NDArray[np.float64] = (recorded_ns - recorded_ns[0]) / span * max(1, len(recorded_ns) - 1)
    return gaps


GAPS: dict[Arrivals, Callable[[Ints, np.random.Generator], NDArray[np.float64]]] = {
    "poisson": _poisson,
    "recorded": _recorded,
    "burst": _burst,
}


def closed(plan: Plan, *, keep_think: bool) -> Plan:
    """Closed loop: every session is ready at once, in recorded order; who sends it opens so many at a time."""
    think = np.maximum(plan.think_ns, 0) if keep_think else np.zeros(len(plan), dtype=np.int64)
    return replace(plan, planned_ns=np.zeros(len(plan), dtype=np.int64), think_ns=np.where(plan.parent >= 0, think, -1))


def as_long_as(plan: Plan, requests: int) -> Plan:
    """The first so many requests; a trace that has fewer goes on with copies of itself whose private ids are fresh."""
    if len(plan) < requests:
        plan = fresh_copies(plan, -(-requests // len(plan)))
    return rows_of(plan, np.arange(min(requests, len(plan))))


def twice(plan: Plan) -> Plan:
    """The same requests once more, same ids: the first pass fills the cache for the second."""
    return fresh_copies(plan, 2, is_fresh=False)
