"""`chatreel predict`: a trace through the simulated engine in virtual time, into a run folder like that of a replay."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from replay.errors import PlanError
from replay.outcome import Outcome
from replay.plan.plan import Plan
from replay.plan.predict import predict
from replay.plan.scale import By, scale_plan
from replay.results import compact, log_path
from replay.run import planned, point_facts, point_seeds, predicted_facts, write_json
from replay.sim.presets import Preset, changed
from replay.sim.virtual import ROUTERS, Router, play

SAMPLE_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictConfig:
    trace: Path
    run_dir: Path
    engine: str = "h100-llama3-8b"
    scales: tuple[float, ...] = (1.0, 2.0, 5.0)
    by: By = "users"
    replicas: int = 1
    router: Router = "prefix"
    limit: int | None = None
    seed: int = 0
    dequantise: bool = True
    open_loop: bool = False
    kv_tokens: int | None = None  # of each replica; this and the next two: instead of the preset's
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


def run_predict(config: PredictConfig) -> Path:
    """Every scale in turn; the folder reads like that of a replay, and its target says that it was simulated."""
    preset = _preset(config)
    if config.replicas < 1:
        raise PlanError("wrong number of replicas", seen=str(config.replicas), wanted="1 or more")
    plan = planned(config.trace, config.seed, limit=config.limit, dequantise=config.dequantise, open_loop=config.open_loop)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    manifest = _manifest(config, preset, plan)
    for index, scale in enumerate(config.scales):
        point_seed, _ = point_seeds(config.seed, index)
        scaled = scale_plan(plan, scale, config.by, np.random.default_rng(point_seed))
        prediction = predict(scaled, preset.kv_blocks * preset.block_tokens * config.replicas, answers_reused=True)
        manifest["points"].append(point_facts(index, scale, config.by, point_seed, scaled) | predicted_facts(prediction))
        write_json(config.run_dir / "run.json", manifest)
        _play_into(config.run_dir, index, scaled, preset, config)
    return config.run_dir


def _play_into(run_dir: Path, index: int, plan: Plan, preset: Preset, config: PredictConfig) -> None:
    encode = msgspec.json.Encoder().encode
    log = log_path(run_dir, index, 0)
    with open(log, "wb") as outcomes, open(run_dir / f"point-{index}.samples.jsonl", "wb") as samples:
        for one in play(plan, preset, replicas=config.replicas, router=config.router, sample_s=SAMPLE_S):
            (outcomes if isinstance(one, Outcome) else samples).write(encode(one) + b"\n")
    compact(log)


def _preset(config: PredictConfig) -> Preset:
    if config.router not in ROUTERS:
        raise PlanError("no such router", seen=config.router, wanted=", ".join(ROUTERS))
    return changed(
        config.engine,
        kv_tokens=config.kv_tokens,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )


def _manifest(config: PredictConfig, preset: Preset, plan: Plan) -> dict[str, Any]:
    several = f"{config.replicas} replicas, {config.router} router, " if config.replicas > 1 else ""
    return {
        "schema_version": 1,
        "trace": str(config.trace),
        "target": f"simulated: {several}{config.engine}, {preset.kv_blocks * preset.block_tokens:,} tokens of KV each",
        "model": config.engine,
        "prompt_mode": "names",
        "has_metrics": True,
        "seed": config.seed,
        "by": config.by,
        "simulated": True,
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "notes": ["simulated in virtual time: no server was asked", *plan.notes],
        "points": [],
    }
