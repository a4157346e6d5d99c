"""Which configuration to take: the best, those that noise cannot tell from it, and where more might be found. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.judge import metrics
from replay.judge.search import BLOCKS, Bracket, Run, Z
from replay.judge.summary import Slo

ALIKE = 0.01  # of the best goodput: a smaller difference is nothing to choose by, however sure
ROUNDING = 1e-9

type Setting = bool | int | float | str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Met:
    """One run: when the requests were due (s, since its start) that met every limit."""

    window_s: tuple[float, float]
    due_s: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration at one load, or with the bracket of its capacity."""

    number: int
    values: Mapping[str, Setting]
    goodput_per_s: float
    meets: bool  # as it seems: enough of the requests are within the limits
    may_meet: bool  # the interval of that does not speak against it
    met: Sequence[Met] = ()  # one run after the other, each the same load as that of the other candidates
    bracket: Bracket | None = None


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    value: float
    is_largest: bool  # of the grid, else smallest


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """`alike`: as good as the best for all purposes; `unsure`: further off, but noise may be why. None of them holds the best."""

    recommended: int
    best: int
    alike: list[int]
    unsure: list[int]
    meets: bool
    reason: str
    edges: list[Edge]


def met_in(run: Run, slos: Sequence[Slo]) -> Met:
    due = [one.planned_ns / 1e9 for one in run.outcomes if metrics.meets(one, slos)]
    return Met(run.window_s, np.sort(np.array(due, dtype=np.float64)))


def choose(
    candidates: Sequence[Candidate],
    lists: Mapping[str, Sequence[Setting]],
    cheapest: Sequence[str] = (),
    within: float = ALIKE,
) -> Choice | None:
    """Of configurations under the same load. None: there is none. If none seems to meet the limits, the nearest is named.

    `within`: of the best goodput, a smaller difference is nothing to choose by.
    """
    able = [one for one in candidates if one.meets] or list(candidates)
    if not able:
        return None
    best = max(able, key=lambda one: one.goodput_per_s)  # the first of equals
    others = [one for one in candidates if one is not best and (one.may_meet or not best.meets)]
    least_per_s = best.goodput_per_s * (1 - within) - ROUNDING
    alike = [one for one in others if one.goodput_per_s >= least_per_s and (one.meets or not best.meets)]
    unsure = [one for one in others if one not in alike and _may_be_as_good(one, best)]
    equal = sorted([best, *alike], key=lambda one: one.number)
    chosen = min(equal, key=lambda one: _costs(one, cheapest))
    return Choice(
        recommended=chosen.number,
        best=best.number,
        alike=[one.number for one in alike],
        unsure=[one.number for one in unsure],
        meets=best.meets,
        reason=_reason(len(equal), cheapest, within),
        edges=_edges(chosen, [*alike, best, *unsure], lists),
    )


def _costs(one: Candidate, cheapest: Sequence[str]) -> list[float]:
    return [float(one.values[key]) for key in cheapest]  # type: ignore[arg-type]


def _reason(alike: int, cheapest: Sequence[str], within: float) -> str:
    if alike == 1:
        return "the best goodput"
    least = f"the least {', then '.join(cheapest)}" if cheapest else "the first in the grid"
    return f"{least} of {alike} that are alike (within {within:.0%} of the best)"


def _may_be_as_good(one: Candidate, best: Candidate) -> bool:
    if one.bracket is not None and best.bracket is not None:
        return (one.bracket.high or inf) > (best.bracket.low or 0.0)
    return lead_per_s(best.met, one.met)[1] <= 0


def lead_per_s(best: Sequence[Met], other: Sequence[Met]) -> tuple[float, float, float]:
    """Goodput of `best` less that of `other`, and its 99 % interval: (seen, low, high).

    Both had the same requests at the same times, so what the load does to both cancels: differences of tenths of a run, and of
    fifths and halves of it, since congestion lasts; the scale with the largest variance counts (see search.py).
    """
    parts, width_s = [], 0.0
    for one, two in zip(best, other, strict=False):
        start, end = max(one.window_s[0], two.window_s[0]), min(one.window_s[1], two.window_s[1])
        if end > start:
            edges = np.linspace(start, end, BLOCKS + 1)
            parts.append(np.diff(np.searchsorted(one.due_s, edges)) - np.diff(np.searchsorted(two.due_s, edges)))
            width_s += end - start
    if not parts:
        return 0.0, -inf, inf
    apart = np.array(parts, dtype=np.float64)
    seen = float(apart.sum()) / width_s
    error = 0.0
    for joined in (1, 2, BLOCKS // 2):
        sums = apart.reshape(-1, joined).sum(axis=1)
        error = max(error, sqrt(len(sums) / (len(sums) - 1) * float(((sums - sums.mean()) ** 2).sum())) / width_s)
    return seen, seen - Z * error, seen + Z * error


def _edges(chosen: Candidate, good: Sequence[Candidate], lists: Mapping[str, Sequence[Setting]]) -> list[Edge]:
    """Keys whose end is better than all within the grid: of those as good as the best, every one lies on that end."""
    found = []
    for key, tried in lists.items():
        numbers = [float(one) for one in tried if isinstance(one, int | float) and not isinstance(one, bool)]
        if len(numbers) < max(2, len(tried)):
            continue
        value = float(chosen.values[key])  # type: ignore[arg-type]
        if value in (min(numbers), max(numbers)) and all(one.values[key] == chosen.values[key] for one in good):
            found.append(Edge(key=key, value=value, is_largest=value == max(numbers)))
    return found
