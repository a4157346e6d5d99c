"""`chatreel calibrate`: step costs fitted to a run folder until the engine in virtual time gives the run's TTFT and TPOT.

First a regression of the gaps between tokens (replay/sim/fitting.py), then Gauss-Newton steps on three factors, each
tried out by simulating the run: the price of a step that only answers, the price of prompts, and what passes before the
scheduler sees a request. Fitted on what was due in the first two thirds of each point; the last third is only compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.errors import PlanError
from replay.judge.metrics import Facts, tpot_ms
from replay.outcome import Outcome, Sample
from replay.plan.plan import Plan
from replay.plan.scale import scale_plan
from replay.results import read_lines, read_outcomes
from replay.run import planned
from replay.sim.engines import measured
from replay.sim.fitting import costs_from, gaps_of
from replay.sim.presets import Preset, changed
from replay.sim.virtual import play

Floats = NDArray[np.float64]

FIT_SHARE = 2 / 3
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
ROUNDS = 4
STEP = 0.05  # of the logarithm of a factor: what a slope is measured with
LARGEST = 0.7  # change of a logarithm in one round
MIN_REQUESTS = 20
DEFAULTS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "block_tokens": 16}


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """run.json, as far as its plan has to be made again."""

    trace: str
    target: str
    model: str
    seed: int
    limit: int | None = None
    dequantise: bool = True
    open_loop: bool = False
    kv_capacity_tokens: int | None = None
    block_tokens: int | None = None
    points: list[Facts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    plan: Plan
    outcomes: dict[int, Outcome]  # answered ones, by number in the plan
    cut_ns: int  # due before: fitted; after: held back


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    name: str  # "TTFT p50, ms", ...
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative; of hit rates the difference."""
        return self.predicted - self.measured if "rate" in self.name else self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    engine: Preset
    name: str
    fitted: list[Figure]
    held_back: list[Figure]
    simulations: int
    notes: list[str]


def calibrate(run_dir: Path, *, trace: Path | None = None, base: Preset | None = None, **limits: int | None) -> Calibration:
    """`base`: an engine whose limits hold where neither `limits` nor the run says otherwise. Raises PlanError."""
    facts = _facts(run_dir)
    points = [_point(run_dir, facts, one, trace) for one in facts.points if one.stopped is None]
    points = [one for one in points if len(one.outcomes) >= MIN_REQUESTS]
    if not points:
        raise PlanError("too little to fit", path=str(run_dir), wanted=f"a point with at least {MIN_REQUESTS} answered requests")
    engine, notes = _start(run_dir, facts, points, base, limits)
    tries = _Tries(points, engine)
    best = np.zeros(3)
    error = tries.residuals(best)
    for _ in range(ROUNDS):
        step = _gauss_newton(tries, best, error)
        for part in (1.0, 0.3, 0.1):
            again = tries.residuals(best + part * step)
            if again @ again < error @ error:
                best, error = best + part * step, again
                break
        else:
            break
        if float(np.abs(error).mean()) < 0.005:
            break
    final = tries.engine(best)
    fitted, held_back = _compare(points, final)
    name = f"{facts.model} at {facts.target}, calibrated"
    return Calibration(engine=final, name=name, fitted=fitted, held_back=held_back, simulations=tries.count, notes=notes)


def _facts(run_dir: Path) -> RunFacts:
    path = run_dir / "run.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunFacts)
    except OSError as error:
        raise PlanError(
            "not a run folder", path=str(run_dir), wanted="run.json in it", next_step="Use the folder of a replay"
        ) from error
    except msgspec.DecodeError as error:
        raise PlanError("cannot be read", path=str(path), seen=str(error), wanted="what chatreel replay writes") from error


def _point(run_dir: Path, run: RunFacts, facts: Facts, trace: Path | None) -> Point:
    path = trace or Path(run.trace)
    if not path.exists():
        raise PlanError("the run's trace is not there", path=str(path), next_step="Give it with --trace")
    if facts.by not in ("users", "time"):
        raise PlanError("a sweep of this kind cannot be sent again", path=str(run_dir), seen=facts.by, wanted="a run of replay")
    plan = planned(path, run.seed, limit=run.limit, dequantise=run.dequantise, open_loop=run.open_loop)
    plan = scale_plan(plan, facts.scale, facts.by, np.random.default_rng(facts.seed))
    if len(plan) != facts.planned:
        raise PlanError(
            "this is not the trace of the run",
            path=str(path),
            seen=f"{len(plan)} requests at {facts.scale:g}x",
            wanted=f"{facts.planned}",
            next_step="Give the right one with --trace",
        )
    outcomes, _ = read_outcomes(run_dir, facts.index)
    answered = {one.request_id: one for one in outcomes if one.error_kind is None and one.first_token_ns is not None}
    return Point(plan=plan, outcomes=answered, cut_ns=int(plan.planned_ns[-1] * FIT_SHARE))


def _start(
    run_dir: Path, facts: RunFacts, points: Sequence[Point], base: Preset | None, limits: Mapping[str, int | None]
) -> tuple[Preset, list[str]]:
    """Limits as given, as the server told, as the base has them, as vLLM has them; costs by regression."""
    told = {"block_tokens": facts.block_tokens, "kv_tokens": facts.kv_capacity_tokens or facts.points[0].kv_capacity_tokens}
    told["max_num_seqs"] = _full_batch(run_dir, facts)
    bases = (
        {}
        if base is None
        else {name: getattr(base, name) for name in DEFAULTS} | {"kv_tokens": base.kv_blocks * base.block_tokens}
    )
    chosen: dict[str, int] = {}
    notes = []
    for name in ("kv_tokens", *DEFAULTS):
        for source, values in (
            ("given", limits),
            ("told by the server", told),
            ("of --engine", bases),
            ("vLLM's default", DEFAULTS),
        ):
            if (value := values.get(name)) is not None:
                chosen[name] = value
                notes.append(f"{name} = {value}: {source}")
                break
    if "kv_tokens" not in chosen:
        raise PlanError("the server's KV size is not known", path=str(run_dir), next_step="Give it with --kv-tokens")
    early = [one for point in points for one in point.outcomes.values() if one.planned_ns < point.cut_ns]
    costs = costs_from(gaps_of(early), chosen["max_num_batched_tokens"]) or (base.costs if base is not None else None)
    if costs is None:
        raise PlanError(
            "too few gaps between tokens to start from",
            path=str(run_dir),
            wanted="streamed answers",
            next_step="Give an --engine",
        )
    length = base.model.max_model_len if base is not None else chosen["kv_tokens"]
    return changed(measured(facts.model, costs, max_model_len=length, **chosen)), notes


def _full_batch(run_dir: Path, facts: RunFacts) -> int | None:
    """max_num_seqs, where requests waited with KV to spare: then the batch was full, not the memory."""
    found = []
    for point in facts.points:
        samples, _ = read_lines(run_dir / f"point-{point.index}.samples.jsonl", Sample)
        held_up = [one for one in samples if (one.waiting or 0) >= 2 and one.kv_usage is not None and one.kv_usage < 0.7]
        found += [int(one.running or 0) for one in held_up]
    often = [value for value in set(found) if found.count(value) >= max(3, len(found) // 2)]
    return max(often) if often else None


class _Tries:
    """Simulations of the fitted part; factors are logarithms: of the answering step, of prompts, of the time before."""

    def __init__(self, points: Sequence[Point], start: Preset) -> None:
        self.points, self.start = points, start
        self.count = 0
        early = [one for point in points for one in point.outcomes.values() if one.planned_ns < point.cut_ns]
        quickest = np.quantile([_ttft_ms(one) for one in early], 0.02) / 1e3
        self.before_s = float(max(1e-4, 0.1 * quickest))

    def engine(self, factors: Floats) -> Preset:
        answers, prompts, before = np.exp(factors).tolist()
        costs = self.start.costs
        changed_costs = replace(
            costs,
            overhead_s=costs.overhead_s * answers,
            token_overhead_s=costs.token_overhead_s * answers,
            weights_s=costs.weights_s * answers,
            context_token_s=costs.context_token_s * answers,
            token_s=costs.token_s * prompts,
            pair_s=costs.pair_s * prompts,
        )
        return replace(self.start, given_costs=changed_costs, request_overhead_s=self.before_s * before)

    def residuals(self, factors: Floats) -> Floats:
        """Logarithms of predicted / measured at the quantiles of TTFT and TPOT, of every point."""
        self.count += 1
        found: list[float] = []
        engine = self.engine(factors)
        for point in self.points:
            pairs = _simulated(point, engine, early=True)
            for measure in (_ttft_ms, tpot_ms):
                seen = _values(measure, [one for one, _ in pairs])
                ours = _values(measure, [other for _, other in pairs])
                if len(seen) and len(ours):
                    found += np.log(np.quantile(ours, QUANTILES) / np.quantile(seen, QUANTILES)).tolist()
        return np.array(found)


def _gauss_newton(tries: _Tries, at: Floats, error: Floats) -> Floats:
    slopes = np.stack([(tries.residuals(at + STEP * unit) - error) / STEP for unit in np.eye(len(at))], axis=1)
    damped = slopes.T @ slopes + 1e-3 * np.eye(len(at))
    step: Floats = np.clip(np.linalg.solve(damped, -slopes.T @ error), -LARGEST, LARGEST)
    return step


def _simulated(point: Point, engine: Preset, *, early: bool) -> list[tuple[Outcome, Outcome]]:
    """(measured, simulated) pairs of requests that both answered; `early`: of the fitted part, and no further."""
    wanted = {number for number, one in point.outcomes.items() if not early or one.planned_ns < point.cut_ns}
    pairs = []
    for one in play(point.plan, engine, replicas=1, router="rr", sample_s=1e9):
        if isinstance(one, Outcome) and one.request_id in wanted:
            wanted.discard(one.request_id)
            if one.error_kind is None:
                pairs.append((point.outcomes[one.request_id], one))
            if not wanted:
                break
    return pairs


def _ttft_ms(one: Outcome) -> float:
    """Service TTFT: what the client itself was late is not the server's."""
    start_ns = one.sent_ns if one.sent_ns is not None else one.planned_ns
    return ((one.first_token_ns or 0) - start_ns) / 1e6


def _e2e_ms(one: Outcome) -> float | None:
    start_ns = one.sent_ns if one.sent_ns is not None else one.planned_ns
    return None if one.last_token_ns is None else (one.last_token_ns - start_ns) / 1e6


def _values(measure: Any, outcomes: Sequence[Outcome]) -> Floats:
    return np.array([value for one in outcomes if (value := measure(one)) is not None and value > 0])


def _compare(points: Sequence[Point], engine: Preset) -> tuple[list[Figure], list[Figure]]:
    """Figures of the fitted and of the held-back part, over all points together; one simulation gives both."""
    early: list[tuple[Outcome, Outcome]] = []
    late: list[tuple[Outcome, Outcome]] = []
    for point in points:
        for pair in _simulated(point, engine, early=False):
            (early if pair[0].planned_ns < point.cut_ns else late).append(pair)
    return _figures(early), _figures(late)


def _figures(pairs: Sequence[tuple[Outcome, Outcome]]) -> list[Figure]:
    found = []
    for name, measure in (("TTFT", _ttft_ms), ("TPOT", tpot_ms), ("E2E", _e2e_ms)):
        seen, ours = (_values(measure, side) for side in zip(*pairs, strict=True)) if pairs else ((), ())
        if len(seen) and len(ours):
            for rank in (50, 90):
                a, b = float(np.percentile(seen, rank)), float(np.percentile(ours, rank))
                found.append(Figure(name=f"{name} p{rank}, ms", measured=a, predicted=b))
    known = [(one, other) for one, other in pairs if one.cached_tokens is not None and one.input_tokens]
    if known:
        rates = [
            sum(one.cached_tokens or 0 for one in side) / sum(one.input_tokens or 1 for one in side)
            for side in zip(*known, strict=True)
        ]
        found.append(Figure(name="hit rate", measured=rates[0], predicted=rates[1]))
    return found
