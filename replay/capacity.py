"""`chatreel capacity`: loads tried one after the other, as judge/search.py says, into a run folder like that of a sweep."""

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import uvloop

from replay.book import write_json
from replay.errors import PlanError
from replay.judge import metrics
from replay.judge.metrics import Facts
from replay.judge.search import LEAST_RUNS, Bracket, Limit, Run, Tried, bracket, next_load, tried
from replay.judge.summary import LoadBy
from replay.judge.verdict import judge_point
from replay.outcome import NO_FAULT, Outcome, Sample
from replay.results import read_lines, read_outcomes
from replay.running import Runner, opened
from replay.sweeping import Book, Say, SweepConfig, load_name

MOST_POINTS = 200
LOWEST, HIGHEST = 1 / 64, 256  # times the trace's own rate
FASTEST_PER_S = 1e5
LEAST_REQUESTS, MOST_REQUESTS = 1_000, 10_000  # of a run on an engine: once through the trace, if it is not too short or long
LEAST_GROWING = 50  # requests: fewer show how the server fills, not how a queue grows
LEAST_KEPT = 0.75  # of a window, when its end is cut off


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityConfig:
    """`sweep` says what is loaded and how; its `values` are not used. `requests`: of a run; None: once through the trace."""

    sweep: SweepConfig
    limits: Sequence[Limit]
    attain: float = 0.99
    lowest: float | None = None
    highest: float | None = None
    tolerance: float = 0.05
    repeats: int = 3
    requests: int | None = None
    box_s: float | None = None  # no further run begins after so long


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What capacity.json holds. `lowest_meets`: False if not even the lowest load that was tried met the limits."""

    schema_version: int = 1
    trace: str
    target: str
    by: LoadBy
    attain: float
    limits: list[Limit]
    seed: int
    bracket: Bracket
    lowest_meets: bool
    tried: list[Tried]  # by load
    stopped: str | None = None  # why the search ended before it was done
    trace_prompt_tokens: float | None = None  # mean


def run_capacity(config: CapacityConfig, say: Say = lambda _: None) -> Capacity:
    """Raises TraceError or PlanError before anything is sent."""
    return asyncio.run(find(config, say)) if config.sweep.engine else uvloop.run(find(config, say))


async def find(config: CapacityConfig, say: Say = lambda _: None) -> Capacity:
    check(config)
    book = Book(config.sweep)
    requests = config.requests or requests_of(book)
    book.config = sweep = dataclasses.replace(config.sweep, is_sample=True, min_requests=requests)
    least = min(max(math.ceil(len(book.plan) / requests), LEAST_RUNS), config.repeats)  # an end has seen the whole trace
    start, lowest, highest = _range(config, book)
    runs: dict[float, list[Run]] = {}
    seen: dict[float, Tried] = {}
    stopped: str | None = f"{MOST_POINTS} runs were not enough"
    began_s = asyncio.get_running_loop().time()
    async with opened(sweep.setting) as runner:
        book.begin(runner.facts)
        for index in range(MOST_POINTS):
            tries = list(seen.values())
            load = next_load(
                tries,
                start=start,
                lowest=lowest,
                highest=highest,
                tolerance=config.tolerance,
                repeats=config.repeats,
                least=least,
            )
            if load is None:
                stopped = None
                break
            if config.box_s is not None and asyncio.get_running_loop().time() - began_s >= config.box_s:
                stopped = f"its {config.box_s:g} s are over"
                break
            facts = await _facts(book, runner, index, load, len(runs.get(load, [])))
            stopped = facts["stopped"]
            if stopped is not None:
                break
            runs.setdefault(load, []).append(run_of(sweep, facts))
            seen[load] = tried(load, runs[load], config.limits, config.attain)
            say(_line(load_name(sweep, load), seen[load]))
    found = _capacity(config, book, list(seen.values()), stopped)
    write_json(sweep.run_dir / "capacity.json", found)
    return found


async def _facts(book: Book, runner: Runner, index: int, load: float, nth: int) -> dict[str, Any]:
    """Of a run that was made before a crash, or of a new one."""
    facts = book.facts_of(index)
    if facts is None:
        facts = await runner.point(book.load(index, load, nth))
        book.close(facts)
    if not math.isclose(facts["scale"], load):
        raise PlanError(
            "another search is in this folder",
            path=str(book.config.run_dir),
            seen=f"run {index + 1} at {load_name(book.config, facts['scale'])}",
            wanted=f"at {load_name(book.config, load)}, as these limits and this range have it",
            next_step="Go on with the same options, or choose another --out",
        )
    return facts


def run_of(config: SweepConfig, facts: dict[str, Any]) -> Run:
    """The end of the window is cut off: who came when arrivals were about to stop was served by an emptying server."""
    outcomes, _ = read_outcomes(config.run_dir, facts["index"])
    samples, _ = read_lines(config.run_dir / f"point-{facts['index']}.samples.jsonl", Sample)
    _refuse_silence(outcomes, config, facts["scale"])
    point = judge_point(msgspec.convert(facts, Facts), outcomes, samples, [])
    start, end = facts["window_s"]
    took_s = [(one.end_ns - one.planned_ns) / 1e9 for one in outcomes if one.end_ns is not None]
    end = max(end - float(np.quantile(took_s, 0.9)), start + LEAST_KEPT * (end - start))
    kept = metrics.in_window(outcomes, (start, end))
    return Run(
        window_s=(start, end),
        is_growing=facts["steady"] == "growing" and len(kept) >= LEAST_GROWING,
        outcomes=[msgspec.structs.replace(one, chunk_gaps_us=[], chunk_tokens=None) for one in kept],
        little=point.little,
        client_limit=None if point.valid else point.notes[0].seen,
    )


def _refuse_silence(outcomes: Sequence[Outcome], config: SweepConfig, load: float) -> None:
    """A server that answers nothing has no capacity to be found by trying less."""
    if any(one.error_kind is None for one in outcomes):
        return
    first = next((one for one in outcomes if one.error_kind not in NO_FAULT), None)
    raise PlanError(
        f"no request was answered at {load_name(config, load)}",
        seen="nothing" if first is None else f"{first.error_kind} {first.error_text or ''}".strip(),
        wanted="answers",
        next_step="See whether the server is up and takes such requests; --max-s gives it more time",
    )


def _line(name: str, one: Tried) -> str:
    share = one.shares[0]
    growing = ", queue grows" if one.is_growing else ""
    return (
        f"{name}, run {one.runs}: {share.seen:.2%} ({share.low:.2%} to {share.high:.2%}) met all limits{growing}: {one.verdict}"
    )


def _capacity(config: CapacityConfig, book: Book, tries: list[Tried], stopped: str | None) -> Capacity:
    ordered = sorted(tries, key=lambda one: one.load)
    return Capacity(
        trace=str(config.sweep.trace),
        target=str(book.manifest["target"]),
        by=book.manifest["by"],
        attain=config.attain,
        limits=list(config.limits),
        seed=config.sweep.seed,
        bracket=bracket(ordered),
        lowest_meets=bool(ordered) and ordered[0].seems_to_meet,
        tried=ordered,
        stopped=stopped,
        trace_prompt_tokens=float(book.plan.input_tokens.mean()),
    )


def requests_of(book: Book) -> int:
    """Of a run on an engine, when none are asked for."""
    return min(max(len(book.plan), LEAST_REQUESTS), MOST_REQUESTS)


def check(config: CapacityConfig) -> None:
    if not config.limits:
        raise PlanError("capacity under which limit?", wanted="--slo METRIC:pNN:MS, e.g. ttft:p99:500ms")
    if config.sweep.kind == "concurrency":
        raise PlanError("capacity is that of an open loop", wanted="rate or scale")
    if not 0 < config.attain < 1:
        raise PlanError("no such share", seen=f"--attain {config.attain:g}", wanted="more than 0 and less than 1, e.g. 0.99")
    if not 0.005 <= config.tolerance <= 1:
        raise PlanError("no such tolerance", seen=f"--tolerance {config.tolerance:g}", wanted="0.005 to 1, e.g. 0.05")
    if config.repeats < LEAST_RUNS:
        raise PlanError("too few runs of a load", seen=f"--repeats {config.repeats}", wanted=f"{LEAST_RUNS} or more")


def _range(config: CapacityConfig, book: Book) -> tuple[float, float, float]:
    """(where to start, lowest, highest): around the trace's own rate, if not given."""
    own = book.own_rate if config.sweep.kind == "rate" else 1.0
    if config.highest is None and own > FASTEST_PER_S:
        raise PlanError(
            "the trace has no rate to begin with: all at once", path=str(config.sweep.trace), wanted="--range LOW..HIGH"
        )
    floor = 1.0 if config.sweep.kind == "scale" and config.sweep.by == "users" else 0.0
    lowest = config.lowest if config.lowest is not None else max(own * LOWEST, floor)
    highest = config.highest if config.highest is not None else own * HIGHEST
    if not 0 < lowest < highest < math.inf:
        raise PlanError("no such range of loads", seen=f"--range {lowest:g}..{highest:g}", wanted="LOW..HIGH, both above 0")
    if lowest < floor:
        raise PlanError("users cannot be fewer than recorded", seen=f"--range {lowest:g}..", wanted="1 or more, or --load time")
    return own, lowest, highest
