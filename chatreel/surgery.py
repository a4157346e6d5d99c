"""`chatreel slice`, `head`, `merge`, `thin`: a trace in, another trace out."""

import re
from collections.abc import Callable
from pathlib import Path

from tracer.errors import TraceError
from tracer.schema import Request
from tracer.surgery.slicing import slice_trace

_UNITS_NS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86_400 * 10**9}
_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", re.ASCII)


def parse_time_ns(text: str, option: str) -> int:
    """`90s`, `1.5h`: nanoseconds since the start of the trace."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise TraceError(f"{option} is no time", seen=repr(text), wanted="a number with ms, s, m, h or d, like 90s or 1.5h")
    return round(float(match[1]) * _UNITS_NS[match[2]])


def run_slice(
    trace: Path, out_path: Path, start: str | None, end: str | None, sessions: list[int], models: list[str], count: int | None
) -> str:
    """Returns what to say when it is done."""
    if start is None and end is None and not sessions and not models and count is None:
        raise TraceError("nothing to cut by", next_step="Give --from, --to, --session, --sessions or --model")
    kept = slice_trace(
        trace,
        out_path,
        from_ns=parse_time_ns(start, "--from") if start else 0,
        to_ns=parse_time_ns(end, "--to") if end else None,
        keep=_keep(set(sessions), set(models), count),
    )
    return f"{kept:,} requests -> {out_path}"


def _keep(sessions: set[int], models: set[str], count: int | None) -> Callable[[Request], bool] | None:
    """None: all of them. `count`: only the first so many sessions."""
    if not sessions and not models and count is None:
        return None

    def is_kept(row: Request) -> bool:
        session, model = row.get("session_id"), row.get("model")
        is_early = count is None or (session is not None and session < count)  # ids are dense in first-seen order
        return is_early and (not sessions or session in sessions) and (not models or model in models)

    return is_kept
