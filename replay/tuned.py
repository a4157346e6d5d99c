"""What `chatreel tune` has found: figures of each configuration from its folder's files, and the choice among them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from replay.capacity import run_of
from replay.configurations import Grid, Value
from replay.judge import metrics
from replay.judge.choice import ALIKE, Candidate, Choice, Met, choose, met_in
from replay.judge.search import Bracket, Limit, Run, Share, Tried, tried
from replay.judge.summary import LoadBy, Percentiles, Point
from replay.report.json import write_json as write_summary
from replay.report.reading import judge_run
from replay.sweeping import SweepConfig


class AtLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One load, all runs of it. Goodput: requests per second within every limit, by schedule latency."""

    load: float
    runs: int
    requests: int
    goodput_per_s: float
    shares: list[Share]  # of all limits together, then of each
    meets: bool
    may_meet: bool
    is_growing: bool
    client_limit: str | None  # not null: not valid
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    hit_rate: float | None
    kv_usage_max: float | None
    preemptions: int | None
    cause: str | None

    @property
    def attainment(self) -> Share:
        return self.shares[0]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration. `failed`: why there are no figures."""

    number: int
    values: dict[str, bool | int | float | str | list[str]]
    run: str  # folder
    command: list[str]
    ready_s: float | None = None
    took_s: float
    failed: str | None = None
    log_tail: list[str] = []
    loads: list[AtLoad] = []
    bracket: Bracket | None = None  # of a search

    @property
    def setting(self) -> dict[str, Value]:
        return {key: tuple(value) if isinstance(value, list) else value for key, value in self.values.items()}


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """What tune.json holds. `load`: at which the configurations were compared; null for a search."""

    schema_version: int = 1
    trace: str
    grid: str
    by: LoadBy
    simulated: bool
    limits: list[Limit]
    attain: float
    seed: int
    configurations: int
    rows: list[Row]
    load: float | None = None
    choice: Choice | None = None
    stopped: str | None = None  # why not all were tried
    asked: dict[str, Any] = {}  # what must be the same to go on


def at_loads(sweep: SweepConfig, limits: Sequence[Limit], attain: float) -> list[AtLoad]:
    """From the files of a configuration's folder; summary.json is written beside them."""
    summary = judge_run(sweep.run_dir, [one.slo for one in limits])
    write_summary(summary, sweep.run_dir / "summary.json")
    runs = _runs(sweep)
    return [
        _at_load(load, runs[load], [one for one in summary.points if one.scale == load], limits, attain) for load in sorted(runs)
    ]


def _runs(sweep: SweepConfig) -> dict[float, list[Run]]:
    manifest = msgspec.json.decode((sweep.run_dir / "run.json").read_bytes())
    runs: dict[float, list[Run]] = {}
    for facts in manifest["points"]:
        runs.setdefault(facts["scale"], []).append(run_of(sweep, facts))
    return runs


def _at_load(load: float, runs: Sequence[Run], points: Sequence[Point], limits: Sequence[Limit], attain: float) -> AtLoad:
    slos = [one.slo for one in limits]
    seen = tried(load, runs, limits, attain)
    latency = metrics.latency([one for run in runs for one in run.outcomes])
    caches = [one.cache for one in points]
    hits = [one.hit_rate_reported for one in caches if one.hit_rate_reported is not None]
    preemptions = [one.preemptions for one in caches if one.preemptions is not None]
    met = sum(len(met_in(run, slos).due_s) for run in runs)
    return AtLoad(
        load=load,
        runs=len(runs),
        requests=seen.requests,
        goodput_per_s=met / max(sum(run.window_s[1] - run.window_s[0] for run in runs), 1e-9),
        shares=seen.shares,
        meets=seen.seems_to_meet,
        may_meet=_may_meet(seen),
        is_growing=seen.is_growing,
        client_limit=seen.client_limit,
        ttft_ms=latency.ttft_schedule_ms,
        tpot_ms=latency.tpot_ms,
        hit_rate=sum(hits) / len(hits) if hits else None,
        kv_usage_max=max((one.kv_usage_max for one in caches if one.kv_usage_max is not None), default=None),
        preemptions=sum(preemptions) if preemptions else None,
        cause=next((one.cause for one in points if one.cause and one.regime != "invalid"), None),
    )


def _may_meet(seen: Tried) -> bool:
    return not seen.is_growing and all(one.high >= one.wanted for one in seen.shares)


def chosen(found: Tuned, sweep: SweepConfig, grid: Grid, tolerance: float | None) -> Tuned:
    """Compared at the highest load that any of them seems to sustain; if none does, where the most requests meet the limits.

    `tolerance`: of a search, None: all had the same loads.
    """
    valid = [(row, one) for row in found.rows for one in row.loads if one.client_limit is None]
    if not valid:
        return found
    if tolerance is not None:
        candidates = [one for row in found.rows if (one := _searched(row)) is not None]
        return msgspec.structs.replace(found, choice=choose(candidates, grid.lists, grid.cheapest, max(ALIKE, tolerance)))
    met = [one.load for _, one in valid if one.meets]
    load = max(met) if met else max(valid, key=lambda one: one[1].goodput_per_s)[1].load
    candidates = [
        Candidate(
            number=row.number,
            values=row.setting,
            goodput_per_s=one.goodput_per_s,
            meets=one.meets,
            may_meet=one.may_meet,
            met=_met(sweep, row, load, found.limits),
        )
        for row, one in valid
        if one.load == load
    ]
    return msgspec.structs.replace(found, load=load, choice=choose(candidates, grid.lists, grid.cheapest))


def _met(sweep: SweepConfig, row: Row, load: float, limits: Sequence[Limit]) -> list[Met]:
    runs = _runs(dataclasses.replace(sweep, run_dir=sweep.run_dir / row.run))
    return [met_in(run, [one.slo for one in limits]) for run in runs[load]]


def _searched(row: Row) -> Candidate | None:
    best = deciding(row)
    if best is None or row.bracket is None or best.client_limit is not None:
        return None
    return Candidate(
        number=row.number,
        values=row.setting,
        goodput_per_s=best.goodput_per_s,
        meets=best.meets,
        may_meet=best.may_meet,
        bracket=row.bracket,
    )


def deciding(row: Row, load: float | None = None) -> AtLoad | None:
    """The figures that a configuration is compared by: at this load; of a search at the highest that it seems to sustain."""
    if row.bracket is None:
        return next((one for one in row.loads if one.load == load), row.loads[-1] if row.loads else None)
    misses = min((one.load for one in row.loads if not one.meets), default=math.inf)
    below = [one for one in row.loads if one.meets and one.load < misses]
    return below[-1] if below else next(iter(row.loads), None)
