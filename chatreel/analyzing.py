"""`chatreel analyze`: read a trace, describe it, hold it against a GPU's memory, write what was asked for."""

import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from tracer.analysis import breaks, kv, memory, profile, routing
from tracer.analysis.kv import Budget, KvBytes
from tracer.analysis.order import check_order
from tracer.analysis.reuse import hit_curve, touches_as_engine
from tracer.analysis.segments import segment_reuse
from tracer.analysis.summary import COLUMNS, Analysis, analyze
from tracer.analysis.text import print_analysis
from tracer.errors import TraceError
from tracer.tracefile import blocks as block_column
from tracer.tracefile import read_footer, read_table


class AnalyzeOptions(msgspec.Struct, frozen=True, kw_only=True):
    sizes_blocks: list[int]
    top: int = 10
    model_config: Path | None = None
    kv_bytes_per_token: float | None = None
    gpu: str | None = None
    tp: int = 1
    replicas: int = 1


def analyze_trace(trace: Path, options: AnalyzeOptions) -> Analysis:
    kv_bytes, one = _model(options)
    columns = dict.fromkeys([*COLUMNS, *breaks.COLUMNS, "end_ns"])
    table, footer = read_table(trace, list(columns)), read_footer(trace)
    found = analyze(table, footer, str(trace), options.sizes_blocks, options.top)
    changes: dict[str, Any] = {"profile": profile.describe(table, footer)}
    if found.engine_sharing is not None:
        per_token = kv_bytes.per_token if kv_bytes else options.kv_bytes_per_token
        sizes = [one.kv_tokens] if one is not None else [found.engine_sharing.cache_tokens_for_90_percent or 0]
        changes["breaks"] = breaks.find_breaks(table, footer, sizes)
        changes["order"] = check_order(block_column(table, "input_blocks"))
        changes["memory"] = memory.describe(table, footer, per_token)
        if one is not None:
            changes["kv"] = kv.fit(hit_curve(touches_as_engine(table, footer)), one, kv_bytes)
        if options.replicas > 1:
            changes["routing"] = routing.describe(table, footer, options.replicas, sizes if one is not None else [])
    changes["segments"] = segment_reuse(table)
    return msgspec.structs.replace(found, **changes)


def _model(options: AnalyzeOptions) -> tuple[KvBytes | None, Budget | None]:
    if options.model_config is not None and options.kv_bytes_per_token is not None:
        raise TraceError("--model-config and --kv-bytes-per-token say the same thing", next_step="Give one of them")
    if options.kv_bytes_per_token is not None and options.kv_bytes_per_token <= 0:
        raise TraceError("no such KV size", seen=f"--kv-bytes-per-token {options.kv_bytes_per_token:g}", wanted="more than 0")
    if options.replicas < 1:
        raise TraceError("no such number of replicas", seen=f"--replicas {options.replicas}", wanted="1 or more")
    config = read_config(options.model_config) if options.model_config is not None else None
    found = kv.kv_bytes_per_token(config) if config is not None else None
    if options.gpu is None:
        return found, None
    gpu = kv.gpu_named(options.gpu)
    if config is not None:
        return found, kv.budget(gpu, options.tp, config)
    if options.kv_bytes_per_token is not None:
        return None, kv.budget_without_model(gpu, options.tp, options.kv_bytes_per_token)
    raise TraceError("a GPU's memory holds no known number of tokens", next_step="Add --model-config or --kv-bytes-per-token")


def read_config(path: Path) -> dict[str, Any]:
    """A model's config.json, or the folder that holds it."""
    file = path / "config.json" if path.is_dir() else path
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise TraceError(f"cannot be read: {error.strerror}", path=str(file), next_step="Give a model's config.json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError("not a JSON object", path=str(file), seen=str(error), wanted="a model's config.json") from error


def run_analyze(
    trace: Path, options: AnalyzeOptions, json_path: Path | None, html_path: Path | None, images: Path | None, out: Console
) -> None:
    found = analyze_trace(trace, options)
    text = msgspec.json.format(msgspec.json.encode(found), indent=2)
    if html_path is not None or images is not None:
        _write_pictures(found, html_path, images)
    if json_path == Path("-"):
        sys.stdout.write(text.decode() + "\n")
        return
    print_analysis(found, out)
    if json_path is not None:
        json_path.write_bytes(text + b"\n")


def _write_pictures(found: Analysis, html_path: Path | None, images: Path | None) -> None:
    from tracer.report.analysis import write_html, write_images

    try:
        if html_path is not None:
            write_html(found, html_path)
        for kind in ("svg", "png") if images is not None else ():
            write_images(found, images or Path(), kind)
    except OSError as error:
        raise TraceError(
            f"cannot write here: {error.strerror or error}",
            path=str(error.filename or html_path or images),
            next_step="Choose another path",
        ) from error
