"""`chatreel predict`: a trace through the simulated engine in virtual time, into a run folder like that of a replay."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from replay.book import point_facts, write_json
from replay.errors import PlanError
from replay.outcome import Outcome, Sample
from replay.plan.plan import Plan
from replay.plan.predict import predict
from replay.plan.route import Router
from replay.plan.scale import By, scale_plan
from replay.results import log_path, write_outcomes
from replay.run import plan_options, planned, point_seeds
from replay.sim.engines import engine_named
from replay.sim.hardware import Dtype
from replay.sim.presets import Preset, changed
from replay.sim.split import Split, SplitFleet, check_split
from replay.sim.virtual import ROUTERS, play

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
    split: Split | None = None  # then `replicas` are those of both sides together
    limit: int | None = None
    seed: int = 0
    dequantise: bool = True
    open_loop: bool = False
    hang_up: bool = True  # where the recorded clients did
    model_config: Mapping[str, Any] | None = None  # a model's config.json; then `engine` is a GPU
    gpus_per_replica: int = 1
    dtype: Dtype | None = None  # of weights
    kv_dtype: Dtype | None = None
    kv_tokens: int | None = None  # of each replica; this and what follows: instead of the engine's
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # other fields of Preset


def run_predict(config: PredictConfig) -> Path:
    """Every scale in turn; the folder reads like that of a replay, and its target says that it was simulated."""
    preset = preset_of(config)
    if config.replicas < 1:
        raise PlanError("wrong number of replicas", seen=str(config.replicas), wanted="1 or more")
    plan = planned(config.trace, config.seed, limit=config.limit, dequantise=config.dequantise, open_loop=config.open_loop)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    manifest = _manifest(config, preset, plan)
    for index, scale in enumerate(config.scales):
        point_seed, _ = point_seeds(config.seed, index)
        scaled = scale_plan(plan, scale, config.by, np.random.default_rng(point_seed))
        caching = config.replicas if config.split is None else config.split.prefill
        capacity = (preset.kv_blocks + preset.offload_blocks) * preset.block_tokens * caching
        prediction = predict(scaled, capacity, answers_reused=True)
        manifest["points"].append(point_facts(index, scale, config.by, point_seed, scaled, prediction))
        write_json(config.run_dir / "run.json", manifest)
        fleet = None
        if config.split is not None:
            fleet = SplitFleet(scaled, preset, config.split, config.router, hang_up=config.hang_up)
        playing = play(
            scaled,
            preset,
            replicas=config.replicas,
            router=config.router,
            sample_s=SAMPLE_S,
            fleet=fleet,
            hang_up=config.hang_up,
        )
        write_played(config.run_dir, index, playing)
    return config.run_dir


def write_played(
    run_dir: Path,
    index: int,
    playing: Iterator[Outcome | Sample],
    see: Callable[[Sample, int], object] = lambda _sample, _ended: None,
) -> None:
    """What `play` gives, into a point's files as it comes. `see`: told each sample, and how many requests have ended by it."""
    encode = msgspec.json.Encoder().encode

    def outcomes(samples: BinaryIO) -> Iterator[Outcome]:
        ended = 0
        for one in playing:
            if isinstance(one, Outcome):
                ended += 1
                yield one
            else:
                samples.write(encode(one) + b"\n")
                see(one, ended)

    with _no_collection(), open(run_dir / f"point-{index}.samples.jsonl", "wb") as file:
        write_outcomes(log_path(run_dir, index, 0).with_suffix(".parquet"), outcomes(file))


@contextmanager
def _no_collection() -> Iterator[None]:
    """The engine leaves no cycles behind, so looking for them is time lost."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def preset_of(config: PredictConfig) -> Preset:
    if config.router not in ROUTERS:
        raise PlanError("no such router", seen=config.router, wanted=", ".join(ROUTERS))
    engine = engine_named(
        config.engine,
        gpus=config.gpus_per_replica,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        config=config.model_config,
    )
    preset = changed(
        engine,
        kv_tokens=config.kv_tokens,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        **config.settings,
    )
    if config.split is not None:
        check_split(config.split, preset)
    return preset


def _manifest(config: PredictConfig, preset: Preset, plan: Plan) -> dict[str, Any]:
    several = f"{config.replicas} replicas, {config.router} router, " if config.replicas > 1 else ""
    if config.split is not None:
        several = (
            f"split, {config.split.prefill} prefill and {config.split.decode} decode replicas, KV over "
            f"{config.split.link_gbps:g} Gb/s, {config.router} router, "
        )
    engine = config.engine if config.model_config is None else f"{config.engine} with {preset.model.name}"
    gpus = f"{preset.gpus} GPUs and " if preset.gpus > 1 else ""
    return {
        "schema_version": 1,
        "trace": str(config.trace),
        "target": f"simulated: {several}{engine}, {gpus}{preset.kv_blocks * preset.block_tokens:,} tokens of KV each",
        "model": engine,
        "prompt_mode": "names",
        "kv_capacity_tokens": preset.kv_blocks * preset.block_tokens,
        "block_tokens": preset.block_tokens,
        "has_metrics": True,
        "seed": config.seed,
        "by": config.by,
        **plan_options(config.limit, config.dequantise, config.open_loop),
        "hang_up": config.hang_up,
        "simulated": True,
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "notes": ["simulated in virtual time: no server was asked", *_split_notes(config.split), *plan.notes],
        "points": [],
    }


def _split_notes(split: Split | None) -> list[str]:
    if split is None:
        return []
    return ["split: the first token comes from the prefill replica, so TTFT has no transfer of KV in it; the second waits for it"]
