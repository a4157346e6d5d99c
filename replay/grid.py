"""`chatreel predict --grid`: every KV size with every number of replicas, and with whatever else is varied; a run folder each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from replay.errors import PlanError
from replay.foretelling import PredictConfig, preset_of, run_predict
from replay.judge.summary import Point, Slo
from replay.report.reading import judge_run
from replay.sim.split import Split

type Setting = str | int | bool
# Fields of PredictConfig; all others are those of its `settings`.
_FIELDS = ("engine", "router", "max_num_seqs", "max_num_batched_tokens")


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One point of a grid. Rates count requests per second in the steady window, over all replicas."""

    scale: float
    kv_tokens: int  # of each replica
    replicas: int  # of both sides, where prefill and decode are split
    gpus: int
    requests_per_s: float
    goodput_per_s: float | None  # null without an SLO, as the next one
    attainment: float | None
    hit_rate: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    preemptions: int | None
    run: str  # folder
    split: str | None = None  # prefill:decode
    settings: dict[str, Setting] = {}  # what else is varied


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """The cheapest cell of a scale that meets the SLO: fewest GPUs, then least KV. None: none in the grid does."""

    scale: float
    cell: Cell | None


def run_grid(
    config: PredictConfig,
    kv_tokens: Sequence[int | None],
    replicas: Sequence[int | Split],
    slos: Sequence[Slo],
    say: Callable[[str], None] = lambda _: None,
    vary: Mapping[str, Sequence[Setting]] | None = None,
) -> list[Cell]:
    """Writes RUN/kv-<tokens>-replicas-<count>/, or -split-<prefill>-<decode>, for each combination, and RUN/grid.json.

    None: as much KV as the engine has. `vary`: other settings, each with the values that it takes.
    """
    if (config.run_dir / "grid.json").exists():
        raise PlanError("there is a grid here already", path=str(config.run_dir), next_step="Choose another --out")
    vary = vary or {}
    others = [dict(zip(vary, values, strict=True)) for values in product(*vary.values())]
    combined = list(product(kv_tokens, replicas, others))
    configs = [_varied(replace(config, kv_tokens=kv, **_fleet(fleet)), other) for kv, fleet, other in combined]
    presets = [preset_of(one) for one in configs]  # what cannot run is said before anything does
    cells: list[Cell] = []
    for one, preset, (_, _, other) in zip(configs, presets, combined, strict=True):
        size = preset.kv_blocks * preset.block_tokens
        split = one.split
        name = f"kv-{size}-" + (f"split-{split.prefill}-{split.decode}" if split else f"replicas-{one.replicas}")
        name += "".join(f"-{key}-{str(value).replace('/', '_')}" for key, value in other.items())
        say(f"{name} of {len(configs)}")
        summary = judge_run(run_predict(replace(one, run_dir=config.run_dir / name)), slos)
        cells += [msgspec.structs.replace(_cell(point, size, one, preset.gpus, name), settings=other) for point in summary.points]
    write_cells(config.run_dir / "grid.json", cells)
    return cells


def _varied(config: PredictConfig, values: Mapping[str, Setting]) -> PredictConfig:
    own: dict[str, Any] = {key: value for key, value in values.items() if key in _FIELDS}
    return replace(config, **own, settings={**config.settings, **{key: values[key] for key in values.keys() - own.keys()}})


def _fleet(fleet: int | Split) -> dict[str, Any]:
    if isinstance(fleet, Split):
        return {"replicas": fleet.prefill + fleet.decode, "split": fleet}
    return {"replicas": fleet, "split": None}


def _cell(point: Point, kv_tokens: int, config: PredictConfig, gpus: int, run: str) -> Cell:
    ttft, tpot = point.latency.ttft_schedule_ms, point.latency.tpot_ms
    return Cell(
        scale=point.scale,
        kv_tokens=kv_tokens,
        replicas=config.replicas,
        gpus=config.replicas * gpus,
        split=f"{config.split.prefill}:{config.split.decode}" if config.split else None,
        requests_per_s=point.requests_per_s,
        goodput_per_s=point.goodput_per_s,
        attainment=point.attainment,
        hit_rate=point.cache.hit_rate_usage,
        ttft_p99_ms=ttft.p99 if ttft else None,
        tpot_p50_ms=tpot.p50 if tpot else None,
        preemptions=point.cache.preemptions,
        run=run,
    )


def needed(cells: Iterable[Cell], attain: float) -> list[Needed]:
    """GPUs needed at each scale: the fewest of which at least `attain` of the requests meet every SLO."""
    by_scale: dict[float, list[Cell]] = {}
    for cell in cells:
        by_scale.setdefault(cell.scale, [])
        if cell.attainment is not None and cell.attainment >= attain:
            by_scale[cell.scale].append(cell)
    return [
        Needed(scale=scale, cell=min(able, key=lambda one: (one.gpus, one.kv_tokens), default=None))
        for scale, able in sorted(by_scale.items())
    ]


def write_cells(path: Path, cells: Sequence[Cell]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode({"schema_version": 1, "simulated": True, "cells": cells})) + b"\n")
