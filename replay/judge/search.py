"""Which load to try next on the way to the highest one that meets its limits, and how sure that is. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.judge import metrics
from replay.judge.summary import Little, Slo
from replay.outcome import Outcome

Verdict = Literal["meets", "misses", "unsure"]
BLOCKS = 10  # of time, in each run: requests near each other meet or miss together
Z = 2.576  # each end of an interval is passed by chance in 0.5 %; at one of several looks at a load in less than 1 %
LEAST_RUNS = 2  # at the ends of the bracket, with different seeds
NOISE_RUNS = 3  # from so many on, runs are compared with each other
LITTLE_OFF, LITTLE_LEAST = 0.1, 1.0  # of what Little's law gives; requests: less is noise of small numbers


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """`share` of the requests must have this metric within its limit."""

    slo: Slo
    share: float


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Share of requests that meet a limit (or all of them), with its 99 % interval."""

    name: str
    wanted: float
    seen: float
    low: float
    high: float


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """A load, all its runs together."""

    load: float
    runs: int
    requests: int
    is_growing: bool  # in most of the runs: past capacity, whatever the shares say
    client_limit: str | None  # what the client itself did wrong in one of the runs
    shares: list[Share]
    ttft_p99_ms: float | None
    tpot_p99_ms: float | None
    little: list[Little]  # of each run
    prompt_tokens: float | None = None  # mean, as planned

    @property
    def verdict(self) -> Verdict:
        """One run that grows may be chance; two are not."""
        if any(one.high < one.wanted for one in self.shares):
            return "misses"
        if self.is_growing:
            return "misses" if self.runs >= LEAST_RUNS else "unsure"
        return "meets" if all(one.low >= one.wanted for one in self.shares) else "unsure"

    @property
    def little_off(self) -> float:
        """How far the worst run is from Little's law, as a share of what that gives. A run that grows need not obey it."""
        return max((_off(one) for one in self.little), default=0.0)

    @property
    def obeys_little(self) -> bool:
        return self.is_growing or self.little_off <= LITTLE_OFF

    @property
    def seems_to_meet(self) -> bool:
        return not self.is_growing and all(one.seen >= one.wanted for one in self.shares)


class Bracket(msgspec.Struct, frozen=True, kw_only=True):
    """`low`: the highest load that surely meets the limits; `high`: the lowest that surely misses them; null: none was found.

    Capacity lies between with 99 % confidence; `estimate` is between the last two loads of the bisection.
    """

    low: float | None
    high: float | None
    estimate: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a load: the requests in its steady window."""

    window_s: tuple[float, float]
    is_growing: bool
    outcomes: Sequence[Outcome]
    little: Little | None = None
    client_limit: str | None = None


def tried(load: float, runs: Sequence[Run], limits: Sequence[Limit], attain: float) -> Tried:
    """All limits together must be met by `attain` of the requests, each by its own share."""
    slos = [one.slo for one in limits]
    shares = [_share("all limits", attain, runs, slos)]
    shares += [_share(f"{one.slo.metric} <= {one.slo.limit_ms:g} ms", one.share, runs, [one.slo]) for one in limits]
    outcomes = [one for run in runs for one in run.outcomes]
    latency = metrics.latency(outcomes)
    return Tried(
        load=load,
        runs=len(runs),
        requests=len(outcomes),
        is_growing=2 * sum(run.is_growing for run in runs) > len(runs),
        client_limit=next((run.client_limit for run in runs if run.client_limit), None),
        shares=shares,
        ttft_p99_ms=latency.ttft_schedule_ms.p99 if latency.ttft_schedule_ms else None,
        tpot_p99_ms=latency.tpot_ms.p99 if latency.tpot_ms else None,
        little=[run.little for run in runs if run.little],
        prompt_tokens=sum(one.planned_input_tokens for one in outcomes) / len(outcomes) if outcomes else None,
    )


def _off(little: Little) -> float:
    apart = abs(little.in_flight - little.expected)
    return apart / little.expected if apart > LITTLE_LEAST and little.expected > 0 else 0.0


def _share(name: str, wanted: float, runs: Sequence[Run], slos: Sequence[Slo]) -> Share:
    met, sent = np.zeros((len(runs), BLOCKS)), np.zeros((len(runs), BLOCKS))
    for number, run in enumerate(runs):
        start, end = run.window_s
        for one in run.outcomes:
            if metrics.is_undecided(one, slos):
                continue
            place = min(BLOCKS - 1, int((one.planned_ns / 1e9 - start) / max(end - start, 1e-9) * BLOCKS))
            sent[number, place] += 1
            met[number, place] += metrics.meets(one, slos)
    if not sent.any():
        return Share(name=name, wanted=wanted, seen=0.0, low=0.0, high=1.0)
    low, high = interval(met, sent)
    return Share(name=name, wanted=wanted, seen=float(met.sum() / sent.sum()), low=low, high=high)


def interval(met: NDArray[np.float64], sent: NDArray[np.float64]) -> tuple[float, float]:
    """99 % interval of the share that is met, from counts [runs, BLOCKS].

    Wilson's, of as many independent requests as tell as much as these do (Korn and Graubard 1998; Dean and Pagano 2015). Misses
    come together, so n requests count as n / design effect: variance of the share over blocks of time (of a ratio, Cochran
    1977, 6.4) / variance if all were independent. The share +- so many errors instead would not do: with a few clusters of
    misses it is a skewed figure, whose error is seen too small just where few of them came by chance.

    Blocks of a tenth, a fifth and half a run, and from three runs on the runs themselves: the scale with the largest variance
    counts. Congestion lasts, so short blocks are not independent; and runs may differ as a whole (another tenant, a hot GPU).
    """
    n = float(sent.sum())
    share = float(met.sum()) / n
    left = met - share * sent
    parts = [left.reshape(-1, joined).sum(axis=1) for joined in (1, 2, BLOCKS // 2)]
    parts += [left.sum(axis=1)] if len(left) >= NOISE_RUNS else []
    variance = max(len(part) / (len(part) - 1) * float((part**2).sum()) for part in parts)
    independent = n * share * (1 - share)
    low, high = _wilson(share, n / max(1.0, variance / independent) if independent > 0 else n, _student(left.size - 1))
    return max(0.0, low), min(1.0, high)


def _wilson(share: float, n: float, z: float) -> tuple[float, float]:
    """Wilson 1927: all true shares from which the one seen is no more than z standard errors away."""
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return middle - half, middle + half


def _student(freedom: int) -> float:
    """Student's t where the normal has Z (Abramowitz and Stegun 26.7.5), to 0.1 % from 9 degrees of freedom on."""
    z, v = Z, freedom
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3


def next_load(
    seen: Sequence[Tried],
    *,
    start: float,
    lowest: float,
    highest: float,
    tolerance: float,
    repeats: int,
    least: int = LEAST_RUNS,
) -> float | None:
    """Doubled or halved until the limits are met below and missed above; then the geometric middle until both are within
    `tolerance` of each other; then outwards from there until each end is sure in `least` runs or more. None: done.
    """
    if not seen:
        return min(max(start, lowest), highest)
    low, high = _ends(seen)
    if low is None and high is not None and high > lowest:
        return max(high / 2, lowest)
    if high is None and low is not None and low < highest:
        return min(low * 2, highest)
    if low is not None and high is not None and high / low > 1 + tolerance:
        return sqrt(low * high)
    for end, factor, wanted in ((low, 1 / (1 + tolerance), "meets"), (high, 1 + tolerance, "misses")):
        load: float | None = end
        while load is not None and lowest <= load <= highest:
            known = next((one for one in seen if one.load == load), None)
            if known is None or known.runs < least or (known.runs < repeats and _may_become(known, wanted, repeats)):
                return load
            if known.verdict == wanted:
                break
            load = _outwards(seen, load, load * factor)
    return None


def _may_become(one: Tried, wanted: str, repeats: int) -> bool:
    """Unsure, and not so near to the limit that `repeats` runs would not tell: an interval shrinks with the root of the runs."""
    if one.verdict != "unsure":
        return False
    left = sqrt(one.runs / repeats)
    if wanted == "meets":
        return not one.is_growing and all(each.seen - left * (each.seen - each.low) >= each.wanted for each in one.shares)
    return one.is_growing or any(each.seen + left * (each.high - each.seen) < each.wanted for each in one.shares)


def _outwards(seen: Sequence[Tried], load: float, beyond: float) -> float:
    """The next load in this direction: one that was tried already rather than one close to it."""
    near, far = min(load, beyond), max(load, beyond)
    between = [one.load for one in seen if near < one.load < far]
    return min(between, key=lambda one: abs(one - load)) if between else beyond


def _ends(seen: Sequence[Tried]) -> tuple[float | None, float | None]:
    """(highest that seems to meet the limits below all that do not, lowest that does not)."""
    high = min((one.load for one in seen if not one.seems_to_meet), default=None)
    low = max((one.load for one in seen if one.seems_to_meet and (high is None or one.load < high)), default=None)
    return low, high


def bracket(seen: Sequence[Tried]) -> Bracket:
    low, high = _ends(seen)
    misses = [one.load for one in seen if one.verdict == "misses"]
    surely = [one.load for one in seen if one.verdict == "meets" and one.load < min(misses, default=np.inf)]
    return Bracket(
        low=max(surely, default=None),
        high=min((load for load in misses if load > max(surely, default=0.0)), default=None),
        estimate=sqrt(low * high) if low is not None and high is not None else low,
    )
