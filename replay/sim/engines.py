"""An engine by what a user calls it: a preset's name, GPU:MODEL, or a TOML file that `chatreel calibrate` wrote."""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from replay.sim.hardware import Dtype, engine_of, model_named
from replay.sim.presets import Gpu, Model, Preset, StepCosts, preset_named
from tracer.errors import TraceError

LIMITS = ("kv_tokens", "block_tokens", "max_num_seqs", "max_num_batched_tokens", "gpus")


def engine_named(
    name: str,
    *,
    gpus: int = 1,
    dtype: Dtype | None = None,
    kv_dtype: Dtype | None = None,
    config: Mapping[str, Any] | None = None,
) -> Preset:
    """`config`: a model's config.json, then `name` is a GPU. Raises TraceError for what is not known."""
    if config is not None:
        return engine_of(name, config, str(config.get("model_type", "model")), gpus=gpus, dtype=dtype, kv_dtype=kv_dtype)
    gpu, colon, model = name.partition(":")
    if colon and not name.endswith(".toml"):
        return engine_of(gpu, model_named(model), model, gpus=gpus, dtype=dtype, kv_dtype=kv_dtype)
    if gpus != 1 or dtype is not None or kv_dtype is not None:
        raise TraceError(
            "this engine is fixed",
            seen=f"{name} with GPUs per replica or a type of weights",
            wanted="GPU:MODEL, as h100:llama3-8b",
        )
    return read_engine(Path(name)) if name.endswith(".toml") else preset_named(name)


def write_engine(path: Path, preset: Preset, name: str, notes: list[str]) -> None:
    """Limits and step costs, seconds. Everything that `read_engine` needs, and nothing of the run."""
    lines = [f"# {note}" for note in notes]
    lines += [f'name = "{name}"', f"max_model_len = {preset.model.max_model_len}"]
    lines += [f"{key} = {getattr(preset, key)}" for key in LIMITS if getattr(preset, key) is not None]
    lines += ["", "[step]  # seconds: of a step, a computed token, a token of context, a query-key pair; see docs/presets.md"]
    lines += [f"{key} = {value:.6g}" for key, value in asdict(preset.costs).items()]
    try:
        path.write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise TraceError(f"cannot be written: {error.strerror}", path=str(path), next_step="Choose another -o") from error


def read_engine(path: Path) -> Preset:
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise TraceError(
            f"cannot be read: {error.strerror}", path=str(path), next_step="Give a file of chatreel calibrate"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TraceError("no TOML file", path=str(path), seen=str(error), wanted="what chatreel calibrate writes") from error
    known = {"name", "max_model_len", "step", *LIMITS}
    step = found.get("step")
    costs = {field.name for field in fields(StepCosts)}
    unknown = sorted((found.keys() - known) | (step.keys() - costs if isinstance(step, dict) else set()))
    if unknown:
        raise TraceError("unknown setting", path=str(path), seen=unknown[0], wanted=", ".join(sorted(known | costs)))
    try:
        given = StepCosts(**{key: float(value) for key, value in found["step"].items()})
        limits = {key: int(found[key]) for key in LIMITS if key in found}
        name, length = str(found["name"]), int(found["max_model_len"])
        limits["kv_tokens"]  # without a GPU's memory nothing else says it
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(
            "not a whole engine", path=str(path), seen=str(error), wanted="name, max_model_len, kv_tokens and [step] with numbers"
        ) from error
    if min(asdict(given).values()) < 0:
        raise TraceError("no step takes less than nothing", path=str(path), seen="a cost below 0", wanted="0 or more")
    return measured(name, given, max_model_len=length, **limits)


def measured(name: str, costs: StepCosts, *, max_model_len: int, **limits: Any) -> Preset:
    """An engine of which the step costs are known and not what they come from."""
    return Preset(
        model=Model(name=name, parameters=0, layers=0, query_width=0, kv_bytes_per_token=0, max_model_len=max_model_len),
        gpu=Gpu(name="measured", memory_bytes=0, bytes_per_s=0, flops_per_s=0),
        bandwidth_efficiency=1.0,
        flops_efficiency=1.0,
        overhead_s=costs.overhead_s,
        given_costs=costs,
        **limits,
    )
