"""`chatreel slice`, `anonymize`, `diff`: what the options ask for, and what to say of it."""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from chatreel.analyzing import AnalyzeOptions, analyze_trace
from tracer.analysis.difference import differences
from tracer.errors import TraceError
from tracer.schema import Request
from tracer.surgery.anonymizing import anonymize_trace
from tracer.surgery.slicing import slice_trace
from tracer.surgery.thinning import largest_groups

_UNITS_NS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86_400 * 10**9}
_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", re.ASCII)


def parse_time_ns(text: str, option: str) -> int:
    """`90s`, `1.5h`: nanoseconds since the start of the trace."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise TraceError(f"{option} is no time", seen=repr(text), wanted="a number with ms, s, m, h or d, like 90s or 1.5h")
    return round(float(match[1]) * _UNITS_NS[match[2]])


def run_slice(
    trace: Path,
    out_path: Path,
    start: str | None,
    end: str | None,
    sessions: list[int],
    models: list[str],
    count: int | None,
    groups: int | None = None,
) -> str:
    """Returns what to say when it is done."""
    if start is None and end is None and not sessions and not models and count is None and groups is None:
        raise TraceError("nothing to cut by", next_step="Give --from, --to, --session, --sessions, --model or --groups")
    in_groups = largest_groups(trace, groups) if groups is not None else None
    kept = slice_trace(
        trace,
        out_path,
        from_ns=parse_time_ns(start, "--from") if start else 0,
        to_ns=parse_time_ns(end, "--to") if end else None,
        keep=_keep(set(sessions), set(models), count, in_groups),
    )
    return f"{kept:,} requests -> {out_path}"


def _keep(
    sessions: set[int], models: set[str], count: int | None, in_groups: NDArray[np.bool_] | None
) -> Callable[[Request], bool] | None:
    """None: all of them. `count`: only the first so many sessions; `in_groups`: which requests, [requests]."""
    if not sessions and not models and count is None and in_groups is None:
        return None

    def is_kept(row: Request) -> bool:
        session, model = row.get("session_id"), row.get("model")
        is_early = count is None or (session is not None and session < count)  # ids are dense in first-seen order
        is_early &= in_groups is None or bool(in_groups[row["request_id"]])
        return is_early and (not sessions or session in sessions) and (not models or model in models)

    return is_kept


def run_anonymize(trace: Path, out_path: Path, grid: str, at_least: int, seed: int) -> list[str]:
    done = anonymize_trace(trace, out_path, round_ns=parse_time_ns(grid, "--round"), at_least=at_least, seed=seed)
    lines = [f"{done.requests:,} requests -> {out_path}: times in steps of {grid}, lengths blurred (seed {seed})"]
    if done.rare_clients:
        lines.append(f"{done.rare_clients:,} clients with fewer than {at_least} requests are not told apart any more")
    if done.rare_models:
        lines.append(f"models without a name now: {', '.join(done.rare_models)}")
    return lines


def run_diff(first: Path, second: Path, as_json: bool) -> None:
    options = AnalyzeOptions(sizes_blocks=[])
    found = differences(analyze_trace(first, options), analyze_trace(second, options))
    console = Console()
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("", "left"), (first.name, "right"), (second.name, "right"), ("ratio", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in found:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.name, _shown(row.name, row.first), _shown(row.name, row.second), ratio)
    console.print(table)


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.startswith("hit rate"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"
