"""`chatreel calibrate`: step costs fitted to run folders until the engine in virtual time gives the run's TTFT and TPOT.

First a regression over the steps that the client saw (replay/sim/seen.py, replay/sim/fitting.py), then what passes before the
scheduler sees a request, then factors on groups of costs, each tried out by simulating the run (replay/sim/tuning.py).
Fitted on what was due in two thirds of each point; the held-back third is only compared. That is its last third, and then the
error holds how the server's speed changed meanwhile; or three stretches in between, and then it is of the model alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.book import read_run
from replay.errors import PlanError
from replay.judge.metrics import Facts, tpot_ms
from replay.outcome import Outcome, Sample
from replay.plan.scale import scale_plan
from replay.results import read_lines, read_outcomes
from replay.run import planned
from replay.sim.engines import measured
from replay.sim.fitting import IDENTIFIED, NAMES, Fit, costs_from
from replay.sim.presets import Preset, StepCosts, changed
from replay.sim.seen import Starts, full_batch, heard_of_s, joined, steps_of
from replay.sim.tuning import Pair, Point, Tries, simulated, ttft_ms, tuned, values_of

Floats = NDArray[np.float64]

HELD_BACK: dict[str, tuple[tuple[float, float], ...]] = {  # of the time of a point
    "last": ((2 / 3, math.inf),),
    "interleaved": ((1 / 9, 2 / 9), (4 / 9, 5 / 9), (7 / 9, 8 / 9)),  # in the middle of each third: a drift adds up to nothing
}
MIN_REQUESTS = 20
DEFAULTS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "block_tokens": 16}
BUDGETS = (8192, 256, 512, 1024, 2048, 4096, 16384, 32768)  # tried where nobody says; the default first: it wins a draw
ANY_COSTS = StepCosts(overhead_s=1e-3, weights_s=5e-3, context_token_s=1e-7, token_s=5e-5, pair_s=1e-9)
VLLM = "vLLM's default"
_UNTOLD_S = 1e-3
BETTER = 0.95  # of the loss of the default: from here on another budget is believed


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """run.json, as far as its plan has to be made again."""

    trace: str
    target: str
    model: str
    seed: int
    limit: int | None = None
    dequantise: bool = True
    open_loop: bool = False
    hang_up: bool = False  # where the recorded clients did
    kv_capacity_tokens: int | None = None
    block_tokens: int | None = None
    points: list[Facts]


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
class Cost:
    name: str
    seconds: float
    relative_error: float  # standard error / value; inf: nothing in the run depends on it

    @property
    def is_told(self) -> bool:
        return self.relative_error <= IDENTIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    engine: Preset
    name: str
    costs: list[Cost]
    fitted: list[Figure]
    held_back: list[Figure]
    simulations: int
    notes: list[str]


def calibrate(
    *run_dirs: Path, trace: Path | None = None, base: Preset | None = None, hold_back: str = "last", **limits: int | None
) -> Calibration:
    """`base`: an engine whose limits hold where neither `limits` nor a run says otherwise. Raises PlanError.

    Several runs: of one server.
    """
    runs = [(run_dir, read_run(run_dir, RunFacts)) for run_dir in run_dirs]
    _require_one_server(runs)
    facts = runs[0][1]
    measured_points = [
        _point(run_dir, run, one, trace, hold_back) for run_dir, run in runs for one in run.points if one.stopped is None
    ]
    points = [one for one in measured_points if one.outcomes]
    if sum(len(one.outcomes) for one in points) < MIN_REQUESTS:
        raise PlanError("too little to fit", path=str(run_dirs[0]), wanted=f"at least {MIN_REQUESTS} answered requests")
    chosen, notes = _limits(runs, base, limits)
    fit = _with_unsaid(_with_cached(points, chosen, notes), chosen, notes)
    costs = fit.costs if fit is not None else base.costs if base is not None else None
    if costs is None:
        raise PlanError(
            "too few gaps between tokens to start from",
            path=str(run_dirs[0]),
            wanted="streamed answers",
            next_step="Give an --engine",
        )
    length = base.model.max_model_len if base is not None else chosen["kv_tokens"]
    start = changed(measured(facts.model, costs, max_model_len=length, **chosen))
    tries = Tries(points)
    errors = dict.fromkeys(NAMES, float("inf")) if fit is None else fit.relative_error
    start = replace(start, request_overhead_s=_UNTOLD_S if fit is None else fit.request_overhead_s)
    engine = tuned(tries, start, errors)
    fitted, held_back = _compare(points, engine)
    return Calibration(
        engine=engine,
        name=f"{facts.model} at {facts.target}, calibrated",
        costs=[Cost(name=name, seconds=_cost_s(engine, name), relative_error=errors[name]) for name in NAMES],
        fitted=fitted,
        held_back=held_back,
        simulations=tries.count,
        notes=notes,
    )


def _require_one_server(runs: Sequence[tuple[Path, RunFacts]]) -> None:
    said = [f"{run.model}, {run.kv_capacity_tokens} tokens of KV in blocks of {run.block_tokens}" for _, run in runs]
    for (path, _), one in zip(runs, said, strict=True):
        if one != said[0]:
            raise PlanError("runs of different servers", path=str(path), seen=one, wanted=f"{said[0]}, as in {runs[0][0]}")


def _point(run_dir: Path, run: RunFacts, facts: Facts, trace: Path | None, hold_back: str) -> Point:
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
    span_s = float(plan.planned_ns[-1]) / 1e9
    held_back = [(span_s * first, span_s * end) for first, end in HELD_BACK[hold_back]]
    return Point(plan=plan, outcomes=answered, held_back=held_back, hang_up=run.hang_up, label=f"{facts.scale:g}x {facts.by}")


def _limits(
    runs: Sequence[tuple[Path, RunFacts]], base: Preset | None, limits: Mapping[str, int | None]
) -> tuple[dict[str, int], list[str]]:
    """As given, as the server told, as the base has them, as vLLM has them. Of a step only what somebody says."""
    run_dir, facts = runs[0]
    told = {"block_tokens": facts.block_tokens, "kv_tokens": facts.kv_capacity_tokens or facts.points[0].kv_capacity_tokens}
    told["max_num_seqs"] = _full_batch(runs)
    bases = (
        {}
        if base is None
        else {name: getattr(base, name) for name in DEFAULTS} | {"kv_tokens": base.kv_blocks * base.block_tokens}
    )
    defaults = {name: value for name, value in DEFAULTS.items() if not name.startswith("max_num")}
    sources = (("given", limits), ("told by the server", told), ("of --engine", bases), (VLLM, defaults))
    chosen: dict[str, int] = {}
    notes = []
    for name in ("kv_tokens", *DEFAULTS):
        found = [(value, source) for source, values in sources if (value := values.get(name)) is not None]
        if found:
            chosen[name], source = found[0]
            notes.append(f"{name} = {chosen[name]}: {source}")
    if "kv_tokens" not in chosen:
        raise PlanError("the server's KV size is not known", path=str(run_dir), next_step="Give it with --kv-tokens")
    return chosen, notes


def _with_cached(points: Sequence[Point], chosen: Mapping[str, int], notes: list[str]) -> Sequence[Point]:
    """What a server does not say that it had cached, as simulated: that hardly depends on what steps cost."""
    if any(one.cached_tokens is not None for point in points for one in point.outcomes.values()):
        return points
    notes.append("cached tokens: simulated, the server does not say them")
    guess = measured("any", ANY_COSTS, max_model_len=chosen["kv_tokens"], **{**DEFAULTS, **chosen})
    found = []
    for point in points:
        cached = {one.request_id: other.cached_tokens for one, other in simulated(point, guess, early=False)}
        outcomes = {
            number: msgspec.structs.replace(one, cached_tokens=cached.get(number)) for number, one in point.outcomes.items()
        }
        found.append(replace(point, outcomes=outcomes))
    return found


def _with_unsaid(points: Sequence[Point], chosen: dict[str, int], notes: list[str]) -> Fit | None:
    """The fit, and into `chosen` the limits of a step that nobody says: those that the steps show, or vLLM's."""
    budget, most = "max_num_batched_tokens", "max_num_seqs"
    limits = {most: DEFAULTS[most], **chosen}
    budgets = [chosen[budget]] if budget in chosen else BUDGETS
    fits = {one: _fit(points, {**limits, budget: one}) for one in budgets}
    loss = {one: float("inf") if fit is None else fit.loss for one, (fit, _) in fits.items()}
    best = min(loss, key=lambda one: loss[one])
    best = best if loss[best] < BETTER * loss[budgets[0]] else budgets[0]
    _, starts = fits[best]
    if budget not in chosen:
        told = f"{VLLM}, and nothing speaks against it" if best == budgets[0] else "the steps fit it best"
        notes.append(f"{budget} = {best}: {told}")
    limits[budget] = best
    if most not in chosen:
        full = full_batch(starts)
        limits[most] = full or max([limits[most], *(one.most for one in starts)])
        notes.append(
            f"{most} = {limits[most]}: " + (f"{VLLM}, never seen full" if full is None else "requests waited beside so many")
        )
    fit, _ = _fit(points, limits, carefully=True)
    chosen.update(limits)
    return fit


def _fit(points: Sequence[Point], limits: Mapping[str, int], *, carefully: bool = False) -> tuple[Fit | None, list[Starts]]:
    """Twice: when a request is heard of says which steps its prompt was in."""
    before_s, fit = 0.0, None
    for again in (False, True):
        seen = [
            steps_of(
                list(point.outcomes.values()),
                max_num_batched_tokens=limits["max_num_batched_tokens"],
                max_num_seqs=limits["max_num_seqs"],
                before_s=before_s,
                without=point.held_back,
            )
            for point in points
        ]
        fit = costs_from(joined([steps for steps, _ in seen]), carefully=carefully and again)
        starts = [one for _, one in seen]
        heard = heard_of_s(starts)
        if fit is not None:
            fit = _with_request_overhead(fit, heard)
            before_s = fit.request_overhead_s
    return fit, starts


def _with_request_overhead(fit: Fit, heard: tuple[float, float] | None) -> Fit:
    """By an idle engine or by when prompts began on a busy one, whichever tells it better."""
    name = "request_overhead_s"
    if heard is not None:
        seconds, error_s = heard
        error = error_s / max(seconds, 1e-9)
        if error < fit.relative_error[name]:
            return replace(fit, request_overhead_s=seconds, relative_error={**fit.relative_error, name: error})
    return fit if fit.request_overhead_s > 0 else replace(fit, request_overhead_s=_UNTOLD_S)


def _cost_s(engine: Preset, name: str) -> float:
    return float(engine.request_overhead_s if name == "request_overhead_s" else getattr(engine.costs, name))


def _full_batch(runs: Sequence[tuple[Path, RunFacts]]) -> int | None:
    """max_num_seqs, where requests waited with KV to spare and never did more run: then the batch was full, not the memory."""
    paths = [run_dir / f"point-{point.index}.samples.jsonl" for run_dir, facts in runs for point in facts.points]
    samples = [one for path in paths for one in read_lines(path, Sample)[0]]
    most = max((int(one.running or 0) for one in samples), default=0)
    full = [one for one in samples if (one.waiting or 0) >= 2 and one.kv_usage is not None and one.kv_usage < 0.7]
    often = sum(int(one.running or 0) == most for one in full)
    return most if often >= max(3, len(full) // 2) else None


def _e2e_ms(one: Outcome) -> float | None:
    start_ns = one.sent_ns if one.sent_ns is not None else one.planned_ns
    return None if one.last_token_ns is None else (one.last_token_ns - start_ns) / 1e6


def _compare(points: Sequence[Point], engine: Preset) -> tuple[list[Figure], list[Figure]]:
    """Figures of the fitted and of the held-back part, over all points together; one simulation gives both."""
    early: list[Pair] = []
    late: list[Pair] = []
    for point in points:
        for pair in simulated(point, engine, early=False):
            (late if point.is_held_back(pair[0]) else early).append(pair)
    return _figures(early), _figures(late)


def _figures(pairs: Sequence[Pair]) -> list[Figure]:
    found = []
    for name, measure in (("TTFT", ttft_ms), ("TPOT", tpot_ms), ("E2E", _e2e_ms)):
        seen, ours = (values_of(measure, side) for side in zip(*pairs, strict=True)) if pairs else ((), ())
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
