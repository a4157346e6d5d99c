"""`replay` and `report`. Parsing, calling and printing; nothing is decided here."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from chatreel.options import ATTAIN, BY, METRICS_URL, ROUTE, SEED, SLO, TARGETS, TRACE, By, numbers

out = Console(soft_wrap=False)
err = Console(stderr=True)


class PromptMode(StrEnum):
    auto = "auto"
    ids = "ids"
    text = "text"
    chat = "chat"


class Transport(StrEnum):
    own = "own"
    httpx = "httpx"


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: chatreel replay monday.parquet --target http://127.0.0.1:8000 --scale 1,2,5 --slo ttft:500")(
        replay
    )


def add_report_to(app: typer.Typer) -> None:
    app.command(epilog="Example: chatreel gather shard-0 shard-1 -o run")(gather)
    app.command(epilog="Example: chatreel report run --slo ttft:500 --images charts")(report)


def replay(
    trace: TRACE,
    target: TARGETS,
    route: ROUTE = "prefix",
    scale: Annotated[str, typer.Option(help="Load factors, one point each.")] = "1,2,5",
    by: BY = By.users,
    run_dir: Annotated[Path, typer.Option("--out", "-o", help="Run folder.")] = Path("run"),
    limit: Annotated[int | None, typer.Option(help="Only the first so many requests.")] = None,
    prompt_mode: Annotated[
        PromptMode, typer.Option(help="Token ids, or text that re-tokenizes exactly: plain, or as a chat's message.")
    ] = PromptMode.auto,
    tokenizer: Annotated[str, typer.Option(help="For text prompts: cl100k, o200k or the server's tokenizer.json.")] = "cl100k",
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable with the API key.")] = None,
    metrics_url: METRICS_URL = None,
    kv_tokens: Annotated[int | None, typer.Option(help="The server's KV size, if it does not say.")] = None,
    slo: SLO = None,
    attain: ATTAIN = 0.99,
    timeout: Annotated[float, typer.Option(help="Seconds without a byte until a request counts as failed.")] = 600.0,
    keep_grid: Annotated[bool, typer.Option("--keep-grid", help="Do not spread time stamps inside their recorded grid.")] = False,
    open_loop: Annotated[
        bool, typer.Option("--open-loop", help="Later turns at their recorded times, not after the answer and think time.")
    ] = False,
    workers: Annotated[int, typer.Option(help="Sending processes; each uses up to one core.")] = 1,
    transport: Annotated[
        Transport, typer.Option(help="httpx: its own transport, as a cross-check or behind a proxy.")
    ] = Transport.own,
    shard: Annotated[
        str | None, typer.Option(help="I/N, I from 0: this host sends its sessions of N hosts' and `gather` joins their folders.")
    ] = None,
    start_at: Annotated[
        str | None, typer.Option(help="When to start: 2026-01-31T09:30:00Z, or seconds since 1970. Keep clocks true by NTP.")
    ] = None,
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
        metrics_urls=tuple(metrics_url or ()),
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
    raise typer.Exit(run_and_report(config, slos, attain if slos else None, out, err))


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
    run_dir: Annotated[Path, typer.Argument(help="Run folder of a replay.", show_default=False)],
    slo: SLO = None,
    attain: ATTAIN = 0.99,
    images: Annotated[Path | None, typer.Option(help="Also write each chart as SVG and PNG into this folder.")] = None,
) -> None:
    """Judge a run folder again: text, summary.json and report.html."""
    from chatreel.replaying import parse_slos, write_reports

    slos = parse_slos(slo or [])
    raise typer.Exit(write_reports(run_dir, slos, attain if slos else None, out, err, images))
