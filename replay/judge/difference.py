"""Two runs of the same load, figure by figure: is the second one worse by more than noise? Pure."""

from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.judge.metrics import e2e_ms, in_window, is_undecided, meets, tpot_ms, ttft_ms
from replay.judge.summary import Point, Slo
from replay.outcome import Outcome

BLOCKS = 12  # of a point's window, equally long: what is close in time is alike, so a block is drawn whole
DRAWS = 300
SURE = 0.05  # chance that any figure of two equal runs is called different, all figures together
TOLERANCE = 0.05  # of a figure's value: a smaller change is nothing to act upon, however sure
SHARE_TOLERANCE = 0.01  # of hit rate, answered share, attainment
TAIL_COUNT = 100  # requests; below that p99 is one of them
LOAD_TOLERANCE = 0.02

type Floats = NDArray[np.float64]
type Verdict = Literal["worse", "better", "same", "unsure"]
type Statistic = Callable[[Floats, Floats], float]  # (values, weights)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one point. `change`: (after - before) / before, of a share after - before."""

    point: str
    figure: str
    is_share: bool  # of requests or tokens, 0..1
    before: float
    after: float
    change: float
    low: float  # of the change, an interval that holds for all figures at once
    high: float
    verdict: Verdict


class _Figure(msgspec.Struct, frozen=True):
    name: str
    value: Callable[[Outcome], float | None]
    statistic: Statistic
    weight: Callable[[Outcome], float] = lambda _: 1.0
    is_share: bool = False
    more_is_worse: bool = True
    least: int = 2  # values


def differences(
    before: tuple[Point, Sequence[Outcome]],
    after: tuple[Point, Sequence[Outcome]],
    slos: Sequence[Slo],
    *,
    figures_in_all: int,
    tolerance: float = TOLERANCE,
    seed: int = 0,
) -> list[Difference]:
    """Of one point run twice; `figures_in_all`: how many will be judged, over all points.

    The interval: a block bootstrap over time (Kuensch 1989) gives the standard error of the change (of the logarithm of the
    ratio, of a share the difference); its width holds for all figures at once (Bonferroni). Where both runs played the same
    requests, the same blocks are drawn for both: what the load does to both is no noise then.
    """
    rng = np.random.default_rng(seed)
    draws = [rng.multinomial(BLOCKS, [1 / BLOCKS] * BLOCKS, DRAWS) for _ in range(2)]
    if _played(before[1]) == _played(after[1]):
        draws[1] = draws[0]
    wide = _student(1 - SURE / 2 / max(figures_in_all, 1), BLOCKS - 1) * (BLOCKS / (BLOCKS - 1)) ** 0.5
    found = []
    for figure in figures(slos):
        sides = [_Side.of(figure, point, outcomes) for point, outcomes in (before, after)]
        if min(len(side.values) for side in sides) >= figure.least:
            found.append(_judged(before[0].label, figure, sides, draws, wide, tolerance))
    return [one for one in found if one is not None]


def _student(chance: float, freedom: int) -> float:
    """Quantile of Student's t, by its expansion around the normal one (Abramowitz and Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(chance)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def figures(slos: Sequence[Slo]) -> list[_Figure]:
    rows = []
    for name, value in (("TTFT", ttft_ms), ("TPOT", tpot_ms), ("E2E", e2e_ms)):
        rows.append(_Figure(f"{name} p50, ms", value, _quantile(0.5)))
        rows.append(_Figure(f"{name} p99, ms", value, _quantile(0.99), least=TAIL_COUNT))
    rows.append(_Figure("output tokens", lambda one: one.output_tokens, _mean, more_is_worse=False))
    shares = [
        _Figure("answered share", lambda one: float(one.error_kind is None), _mean),
        _Figure("prefix hit rate", _hit_share, _mean, weight=lambda one: float(one.input_tokens or 0)),
    ]
    if slos:
        shares.append(_Figure("SLO attainment", lambda one: None if is_undecided(one, slos) else float(meets(one, slos)), _mean))
    return rows + [msgspec.structs.replace(one, is_share=True, more_is_worse=False) for one in shares]


def same_load(before: tuple[Point, Sequence[Outcome]], after: tuple[Point, Sequence[Outcome]]) -> str | None:
    """None, or what is not alike: requests, their rate, or their lengths."""
    for name, of in (("requests", _requests), ("requests/s", _offered), ("prompt tokens", _prompt), ("answer tokens", _answer)):
        first, second = of(*before), of(*after)
        if abs(second - first) > LOAD_TOLERANCE * first:
            return f"{first:,.4g} and {second:,.4g} {name}"
    return None


def _played(outcomes: Sequence[Outcome]) -> set[tuple[int, int | None]]:
    return {(one.source_request_id, one.recorded_ns) for one in outcomes}


def _requests(point: Point, _: Sequence[Outcome]) -> float:
    return point.planned


def _offered(point: Point, _: Sequence[Outcome]) -> float:
    return point.offered_per_s


def _prompt(_: Point, outcomes: Sequence[Outcome]) -> float:
    return float(np.mean([one.planned_input_tokens for one in outcomes])) if outcomes else 0.0


def _answer(_: Point, outcomes: Sequence[Outcome]) -> float:
    return float(np.mean([one.planned_output_tokens for one in outcomes])) if outcomes else 0.0


def _hit_share(one: Outcome) -> float | None:
    return None if one.cached_tokens is None or not one.input_tokens else one.cached_tokens / one.input_tokens


class _Side(msgspec.Struct, frozen=True):
    """One run's values of a figure, ascending, with their weights and blocks."""

    values: Floats
    weights: Floats
    blocks: NDArray[np.int64]

    @staticmethod
    def of(figure: _Figure, point: Point, outcomes: Sequence[Outcome]) -> "_Side":
        start, end = point.window_s
        rows = [
            (value, figure.weight(one), int(BLOCKS * (one.planned_ns / 1e9 - start) / (end - start)))
            for one in in_window(outcomes, point.window_s)
            if (value := figure.value(one)) is not None
        ]
        columns = np.array(rows, dtype=np.float64).reshape(-1, 3)
        columns = columns[columns[:, 0].argsort(kind="stable")]
        return _Side(columns[:, 0], columns[:, 1], np.clip(columns[:, 2], 0, BLOCKS - 1).astype(np.int64))

    def drawn(self, statistic: Statistic, draws: NDArray[np.int64]) -> Floats:
        """The statistic of each draw; NaN where a draw has nothing."""
        weights = (self.weights * draw[self.blocks] for draw in draws)
        return np.array([statistic(self.values, one) if one.any() else np.nan for one in weights])


def _judged(
    point: str, figure: _Figure, sides: list[_Side], draws: list[NDArray[np.int64]], wide: float, tolerance: float
) -> Difference | None:
    before, after = (figure.statistic(side.values, side.weights) if side.weights.any() else np.nan for side in sides)
    if np.isnan(before) or np.isnan(after) or (not figure.is_share and min(before, after) <= 0):
        return None
    drawn = [side.drawn(figure.statistic, one) for side, one in zip(sides, draws, strict=True)]
    with np.errstate(divide="ignore", invalid="ignore"):
        changes = drawn[1] - drawn[0] if figure.is_share else np.log(drawn[1] / drawn[0])
    error = float(np.nanstd(changes[np.isfinite(changes)])) if np.isfinite(changes).any() else np.inf
    middle = after - before if figure.is_share else float(np.log(after / before))
    ends = (middle - wide * error, middle + wide * error)
    change, low, high = (middle, *ends) if figure.is_share else (np.expm1(value) for value in (middle, *ends))
    return Difference(
        point=point,
        figure=figure.name,
        is_share=figure.is_share,
        before=float(before),
        after=float(after),
        change=float(change),
        low=float(low),
        high=float(high),
        verdict=_verdict(float(change), float(low), float(high), figure, SHARE_TOLERANCE if figure.is_share else tolerance),
    )


def _verdict(change: float, low: float, high: float, figure: _Figure, tolerance: float) -> Verdict:
    if abs(change) > tolerance and (low > 0 or high < 0):
        return "worse" if (change > 0) == figure.more_is_worse else "better"
    return "same" if -tolerance <= low and high <= tolerance else "unsure"


def _mean(values: Floats, weights: Floats) -> float:
    return float(np.average(values, weights=weights))


def _quantile(share: float) -> Statistic:
    """Nearest rank, as everywhere; `values` ascending."""

    def of(values: Floats, weights: Floats) -> float:
        upto = np.cumsum(weights)
        return float(values[np.searchsorted(upto, share * upto[-1] * (1 - 1e-12))])

    return of
