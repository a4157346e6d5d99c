"""Commands that make one trace of others. Parsing, calling and printing; nothing is decided here."""

from pathlib import Path
from typing import Annotated

import typer

from chatreel.options import OUT, SEED, TRACE


def add_to(app: typer.Typer) -> None:
    app.command("slice", epilog="Example: chatreel slice monday.parquet --from 9h --to 10h -o morning.parquet")(slice_)
    app.command(epilog="Example: chatreel head monday.parquet -n 1000 -o first.parquet")(head)
    app.command(epilog="Example: chatreel merge morning.parquet noon.parquet -o day.parquet")(merge)
    app.command(epilog="Example: chatreel thin monday.parquet --keep 0.1 -o tenth.parquet")(thin)
    app.command(epilog="Example: chatreel anonymize monday.parquet --round 10s -o shared.parquet")(anonymize)
    app.command(epilog="Example: chatreel diff monday.parquet tuesday.parquet")(diff)


def slice_(
    trace: TRACE,
    out_path: OUT,
    start: Annotated[str | None, typer.Option("--from", help="Since the start of the trace: 90s, 15m, 1.5h.")] = None,
    end: Annotated[str | None, typer.Option("--to", help="Up to, not including: as --from.")] = None,
    session: Annotated[list[int] | None, typer.Option(help="Only this session; may be repeated.")] = None,
    sessions: Annotated[int | None, typer.Option(help="Only the first so many sessions.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Only requests for this model; may be repeated.")] = None,
    groups: Annotated[
        int | None, typer.Option(help="Only the so many sharing groups with the most prompt tokens, whole.")
    ] = None,
) -> None:
    """Cut a part out of a trace: a span of time, sessions, models. Slices of one trace can be merged back."""
    from chatreel.surgery import run_slice

    typer.echo(run_slice(trace, out_path, start, end, session or [], model or [], sessions, groups), err=True)


def head(
    trace: TRACE,
    out_path: OUT,
    requests: Annotated[int, typer.Option("--requests", "-n", help="How many requests.")] = 1000,
) -> None:
    """The first requests of a trace."""
    from tracer.surgery.slicing import head as cut

    typer.echo(f"{cut(trace, out_path, requests):,} requests -> {out_path}", err=True)


def merge(
    traces: Annotated[list[Path], typer.Argument(help="Two or more traces.", show_default=False)],
    out_path: OUT,
) -> None:
    """Several traces at once, sharing nothing between them; or slices of one trace, put together again."""
    from tracer.surgery.merging import MIXED, merge_traces
    from tracer.tracefile import read_footer

    count = merge_traces(traces, out_path)
    how = "side by side, no ids in common" if read_footer(out_path).source_format == MIXED else "slices of one trace, joined"
    typer.echo(f"{count:,} requests -> {out_path} ({how})", err=True)


def thin(
    trace: TRACE,
    out_path: OUT,
    keep: Annotated[float, typer.Option(help="Share of the sharing groups to keep.")] = 0.1,
    seed: SEED = 0,
) -> None:
    """A miniature: whole sharing groups only. Compare its hit rate at a cache of C * keep with the trace's at C."""
    from tracer.surgery.thinning import thin_trace

    requests, kept, groups = thin_trace(trace, out_path, keep, seed)
    typer.echo(f"{requests:,} requests of {kept:,} of {groups:,} sharing groups -> {out_path} (seed {seed})", err=True)


def anonymize(
    trace: TRACE,
    out_path: OUT,
    grid: Annotated[str, typer.Option("--round", help="Times down to multiples of this: 100ms, 1s, 1m.")] = "1s",
    at_least: Annotated[int, typer.Option(help="Clients, models and adapters of fewer requests lose their names.")] = 10,
    seed: SEED = 0,
) -> None:
    """Make a trace fit to give away: times rounded, lengths blurred inside 16 tokens, rare clients and models without names.

    What is cached and hit stays the same.
    """
    from chatreel.surgery import run_anonymize

    for line in run_anonymize(trace, out_path, grid, at_least, seed):
        typer.echo(line, err=True)


def diff(
    first: Annotated[Path, typer.Argument(help="A trace.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="The trace to hold against it.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """The figures of two traces side by side: load, lengths, sessions, sharing."""
    from chatreel.surgery import run_diff

    run_diff(first, second, as_json)
