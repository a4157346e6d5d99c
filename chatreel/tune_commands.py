"""`tune`. Parsing, calling and printing; nothing is decided here."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from chatreel.options import (
    API_KEY_ENV,
    API_KEY_FILE,
    ATTAIN,
    METRICS_URL,
    PROMPT_MODE,
    SEED,
    TOKENIZER,
    TRACE,
    WORKERS,
    PromptMode,
)
from chatreel.sweep_commands import ARRIVALS, CACHE, LIMIT, TURNS, ends, loads

out = Console(soft_wrap=False)
err = Console(stderr=True)


def add_to(app: typer.Typer) -> None:
    app.command(
        epilog="Example: chatreel tune monday.parquet --grid server.toml --slo ttft:p99:500ms --slo tpot:p99:40ms --rate 8"
    )(tune)


def tune(
    trace: TRACE,
    grid: Annotated[
        Path, typer.Option(help="TOML file: command to launch a server, and [grid] with lists of values.", show_default=False)
    ],
    slo: Annotated[list[str], typer.Option(help="METRIC:pNN:MS with ttft, tpot or e2e; may be repeated.", show_default=False)],
    attain: ATTAIN = 0.99,
    scale: Annotated[str | None, typer.Option(help="Load: 1,2 times the trace.  [1, if none is given]")] = None,
    rate: Annotated[str | None, typer.Option(help="Load: 4,8 requests per second, or 2..32/4.")] = None,
    search: Annotated[
        Literal["rate", "users", "time"] | None,
        typer.Option(help="Find the capacity of each instead, as chatreel capacity --load does; takes far longer."),
    ] = None,
    by: Annotated[Literal["users", "time"], typer.Option(help="scale: more sharing groups, or shorter gaps.")] = "users",
    engine: Annotated[
        str | None, typer.Option(help="Launch nothing: kv_tokens, max_num_seqs and max_num_batched_tokens go to this engine.")
    ] = None,
    run_dir: Annotated[Path, typer.Option("--out", "-o", help="Run folder.")] = Path("tune"),
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", "-n", help="Of a run, after its warm-up.  [1000 on a server; on an engine once through the trace]"
        ),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Runs of each load, each elsewhere in the trace.  [1; of a search as capacity]")
    ] = None,
    max_s: Annotated[
        float | None, typer.Option(help="Seconds that a run may take.  [300 on a server, 3600 on an engine]")
    ] = None,
    box_s: Annotated[
        float | None, typer.Option(help="Seconds that a configuration may take.  [as its runs; of a search 3600 on a server]")
    ] = None,
    within: Annotated[str | None, typer.Option("--range", help="search: LOW..HIGH; else around the trace's own rate.")] = None,
    tolerance: Annotated[float, typer.Option(help="search: how near the two ends shall be, as a share.")] = 0.05,
    arrivals: ARRIVALS = "poisson",
    turns: TURNS = "open",
    cache: CACHE = "cold",
    limit: LIMIT = None,
    prompt_mode: PROMPT_MODE = PromptMode.auto,
    tokenizer: TOKENIZER = "cl100k",
    api_key_env: API_KEY_ENV = None,
    api_key_file: API_KEY_FILE = None,
    metrics_url: METRICS_URL = None,
    workers: WORKERS = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on: what has been measured or has failed is not run again.")
    ] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="resume: those that failed are run again.")] = False,
    seed: SEED = 0,
) -> None:
    """Launch a server in each configuration of a grid under the same load: which one has the most goodput within the SLO."""
    from chatreel.capacity_report import parse_limits
    from chatreel.tune_report import tune_and_report
    from replay.capacity import CapacityConfig
    from replay.configurations import read_grid
    from replay.sweeping import SweepConfig
    from replay.tune import TuneConfig

    if sum(one is not None for one in (scale, rate, search)) > 1:
        raise typer.BadParameter("give one of --scale, --rate and --search", param_hint="load")
    kind: Literal["rate", "scale"] = "rate" if rate is not None or search == "rate" else "scale"
    lowest, highest = ends(within)
    sweep = SweepConfig(
        trace=trace,
        run_dir=run_dir,
        kind=kind,
        values=loads(rate or scale or "1", kind),
        engine=engine,
        by=search if search in ("users", "time") else by,
        arrivals=arrivals,
        waits=turns == "wait",
        cache=cache,
        max_s=max_s if max_s is not None else 3600.0 if engine else 300.0,
        limit=limit,
        seed=seed,
        resume=resume,
        prompt_mode=prompt_mode.value,
        tokenizer=tokenizer,
        api_key_env=api_key_env,
        api_key_file=api_key_file,
        metrics_urls=tuple(metrics_url or ()),
        workers=workers,
    )
    limits = parse_limits(slo)
    searching = CapacityConfig(
        sweep=sweep,
        limits=limits,
        attain=attain,
        lowest=lowest,
        highest=highest,
        tolerance=tolerance,
        repeats=repeats if repeats is not None else 5 if engine else 3,
    )
    config = TuneConfig(
        grid=read_grid(grid, is_launched=engine is None),
        sweep=sweep,
        limits=limits,
        attain=attain,
        repeats=repeats or 1,
        requests=requests if requests is not None or engine else 1000,
        search=searching if search else None,
        box_s=box_s if box_s is not None or engine or not search else 3600.0,
        retry_failed=retry_failed,
    )
    raise typer.Exit(tune_and_report(config, out, err))
