"""`replay` and `report`. Parsing, calling and printing; nothing is decided here."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from chatreel.options import (
    API_KEY_ENV,
    API_KEY_FILE,
    ATTAIN,
    BY,
    GPU,
    HANG_UP,
    METRICS_HZ,
    METRICS_URL,
    PROMPT_MODE,
    ROUTE,
    SEED,
    SERVE_METRICS,
    SLO,
    TARGETS,
    TOKENIZER,
    TRACE,
    WORKERS,
    By,
    PromptMode,
    numbers,
)

out = Console(soft_wrap=False)
err = Console(stderr=True)


class Transport(StrEnum):
    own = "own"
    httpx = "httpx"


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: chatreel replay monday.parquet --target http://127.0.0.1:8000 --scale 1,2,5 --slo ttft:500")(
        replay
    )


def add_report_to(app: typer.Typer) -> None:
    app.command(epilog="Example: chatreel gather shard-0 shard-1 -o run")(gather)
    both = "chatreel report run --slo ttft:500 --images charts; chatreel report before after --format csv"
    app.command(epilog=f"Example: {both}")(report)


def replay(
    trace: TRACE,
    target: TARGETS,
    route: ROUTE = "prefix",
    scale: Annotated[str, typer.Option(help="Load factors, one point each.")] = "1,2,5",
    by: BY = By.users,
    run_dir: Annotated[Path, typer.Option("--out", "-o", help="Run folder.")] = Path("run"),
    limit: Annotated[int | None, typer.Option(help="Only the first so many requests.")] = None,
    prompt_mode: PROMPT_MODE = PromptMode.auto,
    tokenizer: TOKENIZER = "cl100k",
    api_key_env: API_KEY_ENV = None,
    api_key_file: API_KEY_FILE = None,
    hang_up: HANG_UP = True,
    retries: Annotated[int, typer.Option(min=0, help="Times to send a request again that failed before its first token.")] = 0,
    metrics_url: METRICS_URL = None,
    metrics_hz: METRICS_HZ = 4.0,
    gpu: GPU = None,
    serve_metrics: SERVE_METRICS = None,
    kv_tokens: Annotated[int | None, typer.Option(help="The server's KV size, if it does not say.")] = None,
    slo: SLO = None,
    attain: ATTAIN = 0.99,
    timeout: Annotated[float, typer.Option(help="Seconds without a byte until a request counts as failed.")] = 600.0,
    keep_grid: Annotated[bool, typer.Option("--keep-grid", help="Do not spread time stamps inside their recorded grid.")] = False,
    open_loop: Annotated[
        bool, typer.Option("--open-loop", help="Later turns at their recorded times, not after the answer and think time.")
    ] = False,
    workers: WORKERS = 1,
    transport: Annotated[
        Transport, typer.Option(help="httpx: its own transport, as a cross-check or behind a proxy.")
    ] = Transport.own,
    shard: Annotated[
        str | None, typer.Option(help="I/N, I from 0: this host sends its sessions of N hosts' and `gather` joins their folders.")
    ] = None,
    start_at: Annotated[
        str | None, typer.Option(help="When to start: 2026-01-31T09:30:00Z, or seconds since 1970. Keep clocks true by NTP.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="A Ray cluster (auto, HOST:PORT or ray://HOST:10001) whose nodes send it, a shard each.")
    ] = None,
    ray_workers: Annotated[int | None, typer.Option(min=1, help="Shards over its nodes.", show_default="one a node")] = None,
    seed: SEED = 0,
) -> None:
    """Send a trace at several scales, on an exact schedule, and judge what the server did."""
    from chatreel.replaying import parse_shard, parse_slos, parse_start, run_and_report
    from replay.run import ReplayConfig

    config = ReplayConfig(
        trace=trace,
        target=target[0],
        other_targets=tuple(target[1:]),
        router=route,
        run_dir=run_dir,
        scales=tuple(numbers(scale, float, "--scale")),
        by=by.value,
        limit=limit,
        seed=seed,
        prompt_mode=prompt_mode.value,
        tokenizer=tokenizer,
        api_key_env=api_key_env,
        api_key_file=api_key_file,
        hang_up=hang_up,
        retries=retries,
        metrics_urls=tuple(metrics_url or ()),
        metrics_hz=metrics_hz,
        gpu=gpu,
        serve_metrics=serve_metrics,
        kv_tokens=kv_tokens,
        timeout_s=timeout,
        dequantise=not keep_grid,
        open_loop=open_loop,
        workers=workers,
        transport=transport.value,
        shard=parse_shard(shard),
        start_at_ns=parse_start(start_at),
    )
    slos = parse_slos(slo or [])
    raise typer.Exit(run_and_report(config, slos, attain if slos else None, out, err, ray, ray_workers))


def gather(
    shards: Annotated[list[Path], typer.Argument(help="The run folders of all shards.", show_default=False)],
    run_dir: Annotated[Path, typer.Option("--out", "-o", help="Run folder.")] = Path("run"),
    slo: SLO = None,
    attain: ATTAIN = 0.99,
) -> None:
    """Join what several hosts sent by replay --shard into one run, and judge it."""
    from chatreel.replaying import gather_and_report, parse_slos

    slos = parse_slos(slo or [])
    raise typer.Exit(gather_and_report(shards, run_dir, slos, attain if slos else None, out, err))


def report(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders of replay, sweep or predict.", show_default=False)
    ],
    slo: SLO = None,
    attain: ATTAIN = 0.99,
    how: Annotated[
        Literal["json", "csv", "md", "html"] | None,
        typer.Option("--format", help="Print only this, to stdout: csv has a row a point, of all runs."),
    ] = None,
    images: Annotated[Path | None, typer.Option(help="Also write each chart as SVG and PNG into this folder.")] = None,
) -> None:
    """Judge run folders again: text, and summary.json and report.html in each; or one format on stdout."""
    from chatreel.replaying import parse_slos, write_reports
    from chatreel.reporting import print_reports, worst

    slos = parse_slos(slo or [])
    if how is not None:
        raise typer.Exit(print_reports(run_dirs, how, slos, attain if slos else None))
    raise typer.Exit(worst([write_reports(one, slos, attain if slos else None, out, err, images) for one in run_dirs]))
