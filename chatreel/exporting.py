"""`chatreel export`: a trace in a public format, or as input of another load generator."""

from collections.abc import Iterator
from pathlib import Path

from tracer.importing import export_trace
from tracer.tracefile import read_footer


def run_export(trace: Path, out_path: Path, target_format: str) -> Iterator[str]:
    """Yields what to say when it is done."""
    done = export_trace(trace, out_path, target_format)
    yield f"{done.rows:,} requests -> {out_path}"
    if done.losses:
        lost = ", ".join(f"{what} ({count:,})" for what, count in sorted(done.losses.items()))
        yield f"what {target_format} cannot hold, and in how many requests: {lost}"
    if done.usage is not None:
        grid_ns = read_footer(trace).time_grid_ns
        if grid_ns:
            yield f"time stamps lie on a grid of {grid_ns / 1e9:g} s, so the tool will send bursts; chatreel replay spreads them"
        yield f"use: {done.usage}"
