"""`chatreel export`: a trace in a public format or as input of another load generator; a run as a trace."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from tracer.errors import TraceError
from tracer.importing import export_trace
from tracer.tracefile import read_footer


def run_export(trace: Path, out_path: Path, target_format: str | None) -> Iterator[str]:
    """Yields what to say when it is done."""
    if target_format is None:
        raise TraceError("in which format?", path=str(trace), next_step="Give --format; only the folder of a run needs none")
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


def run_export_of_run(
    run_dir: Path, out_path: Path, target_format: str | None, point: int | None, trace: Path | None
) -> Iterator[str]:
    """As a trace, or through a trace in another format."""
    from replay.retracing import retrace

    if target_format is not None:
        with tempfile.TemporaryDirectory(prefix="chatreel-export-") as folder:
            list(run_export_of_run(run_dir, Path(folder) / "run.parquet", None, point, trace))
            yield from run_export(Path(folder) / "run.parquet", out_path, target_format)
        return
    done = retrace(run_dir, out_path, point=point, trace=trace)
    parts = [f"{done.requests:,} requests"]
    parts += [f"{done.failed:,} of them failed"] if done.failed else []
    parts += [f"{done.not_sent:,} more were never sent"] if done.not_sent else []
    yield f"{', '.join(parts)} ({done.label}) -> {out_path}"
    yield f"compare: chatreel compare {trace or 'TRACE'} {out_path}"
