"""`chatreel capacity`: loads tried one after the other, as judge/search.py says, into a run folder like that of a sweep."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import uvloop

from replay.errors import PlanError
from replay.judge import metrics
from replay.judge.search import Bracket, Limit, Run, Tried, bracket, next_load, tried
from replay.results import read_outcomes
from replay.run import write_json
from replay.running import opened
from replay.sweeping import Book, Say, SweepConfig, load_name

MOST_POINTS = 60
LOWEST, HIGHEST = 1 / 64, 256  # times the trace's own rate


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityConfig:
    """`sweep` says what is loaded and how; its `values` are not used."""

    sweep: SweepConfig
    limits: Sequence[Limit]
    attain: float = 0.99
    lowest: float | None = None
    highest: float | None = None
    tolerance: float = 0.05
    repeats: int = 3


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What capacity.json holds. `lowest_meets`: False if not even the lowest load that was tried met the limits."""

    schema_version: int = 1
    by: str
    attain: float
    limits: list[Limit]
    bracket: Bracket
    tried: list[Tried]  # by load

    @property
    def lowest_meets(self) -> bool:
        return bool(self.tried) and self.tried[0].seems_to_meet


def run_capacity(config: CapacityConfig, say: Say = lambda _: None) -> Capacity:
    """Raises TraceError or PlanError before anything is sent."""
    return asyncio.run(find(config, say)) if config.sweep.engine else uvloop.run(find(config, say))


async def find(config: CapacityConfig, say: Say = lambda _: None) -> Capacity:
    if not config.limits:
        raise PlanError("capacity under which limit?", wanted="--slo METRIC:pNN:MS, e.g. ttft:p99:500ms")
    if config.sweep.kind == "concurrency":
        raise PlanError("capacity is that of an open loop", wanted="rate or scale")
    book = Book(config.sweep)
    start, lowest, highest = _range(config, book)
    runs: dict[float, list[Run]] = {}
    seen: dict[float, Tried] = {}
    async with opened(config.sweep.setting) as runner:
        book.begin(runner.facts)
        for index in range(MOST_POINTS):
            load = next_load(
                list(seen.values()),
                start=start,
                lowest=lowest,
                highest=highest,
                tolerance=config.tolerance,
                repeats=config.repeats,
            )
            if load is None:
                break
            facts = book.facts_of(index) or await runner.point(book.load(index, load))
            book.close(facts)
            if facts["stopped"] is not None:
                break
            runs.setdefault(load, []).append(_run(config.sweep, facts))
            seen[load] = tried(load, runs[load], config.limits, config.attain)
            say(f"{load_name(config.sweep, load)}: {seen[load].shares[0].seen:.2%}, {seen[load].verdict}")
    found = Capacity(
        by=str(book.manifest["by"]),
        attain=config.attain,
        limits=list(config.limits),
        bracket=bracket(list(seen.values())),
        tried=sorted(seen.values(), key=lambda one: one.load),
    )
    write_json(config.sweep.run_dir / "capacity.json", found)
    return found


def _run(config: SweepConfig, facts: dict[str, Any]) -> Run:
    outcomes, _ = read_outcomes(config.run_dir, facts["index"])
    window: tuple[float, float] = tuple(facts["window_s"])
    kept = [msgspec.structs.replace(one, chunk_gaps_us=[], chunk_tokens=None) for one in metrics.in_window(outcomes, window)]
    return Run(window_s=window, is_growing=facts["steady"] == "growing", outcomes=kept)


def _range(config: CapacityConfig, book: Book) -> tuple[float, float, float]:
    """(where to start, lowest, highest): around the trace's own rate, if not given."""
    span_s = max(1e-9, float(book.plan.planned_ns[-1]) / 1e9)
    own = max(1, len(book.plan) - 1) / span_s if config.sweep.kind == "rate" else 1.0
    least = 1.0 if config.sweep.kind == "scale" and config.sweep.by == "users" else own * LOWEST
    lowest = config.lowest if config.lowest is not None else least
    highest = config.highest if config.highest is not None else own * HIGHEST
    if not 0 < lowest < highest:
        raise PlanError("no such range of loads", seen=f"{lowest:g}..{highest:g}", wanted="LOW..HIGH, both above 0")
    return own, lowest, highest
