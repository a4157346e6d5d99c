"""`sweep` and `capacity`. Parsing, calling and printing; nothing is decided here."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from chatreel.options import SEED, SLO, TRACE

out = Console(soft_wrap=False)
err = Console(stderr=True)

Kind = Literal["concurrency", "rate", "scale"]
RATE_STEPS = 8


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: chatreel sweep concurrency 1..256 monday.parquet --engine h100-llama3-8b")(sweep)


def loads(text: str, kind: Kind) -> tuple[float, ...]:
    """`1,2,4`; `1..256`: doubled each time; `2..40/8`: eight values that grow by one factor. Raises BadParameter."""
    try:
        if ".." not in text:
            return tuple(float(part) for part in text.split(","))
        ends, _, steps = text.partition("/")
        low, high = (float(part) for part in ends.split(".."))
        if not 0 < low < high:
            raise ValueError(text)
        if kind == "rate" or steps:
            count = int(steps or RATE_STEPS)
            values = [low * (high / low) ** (i / max(1, count - 1)) for i in range(count)]
            return tuple(float(round(v)) if kind == "concurrency" else float(f"{v:.4g}") for v in values)
        values = [low]
        while values[-1] * 2 < high:
            values.append(values[-1] * 2)
        return (*values, high)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is neither 1,2,4 nor 1..256 nor 2..40/8", param_hint="VALUES") from error


def sweep(
    kind: Annotated[Kind, typer.Argument(help="What grows: sessions at once, requests per second, or the trace.")],
    values: Annotated[str, typer.Argument(help="1,2,4 or 1..256 (doubled) or 2..40/8 (eight by one factor).")],
    trace: TRACE,
    target: Annotated[str | None, typer.Option(help="Root URL of the server, without /v1; or else:")] = None,
    engine: Annotated[str | None, typer.Option(help="A simulated engine in virtual time; see docs/presets.md.")] = None,
    run_dir: Annotated[Path, typer.Option("--out", "-o", help="Run folder.")] = Path("sweep"),
    by: Annotated[Literal["users", "time"], typer.Option(help="scale: more sharing groups, or shorter gaps.")] = "users",
    arrivals: Annotated[Literal["poisson", "recorded", "burst"], typer.Option(help="rate: gaps between requests.")] = "poisson",
    turns: Annotated[
        Literal["open", "wait"], typer.Option(help="rate: later turns come at the rate too, or follow the answer before them.")
    ] = "open",
    think: Annotated[Literal["drop", "keep"], typer.Option(help="concurrency: pauses between turns.")] = "drop",
    cache: Annotated[
        Literal["cold", "primed", "carry"],
        typer.Option(help="Each point with prompts that no cache knows; with the same once before; or all with the same."),
    ] = "cold",
    max_s: Annotated[float, typer.Option(help="Seconds that a point may take to get steady.")] = 120.0,
    min_requests: Annotated[int, typer.Option(help="Requests that end after the warm-up, at least.")] = 200,
    limit: Annotated[int | None, typer.Option(help="Only the first so many requests of the trace.")] = None,
    kv_tokens: Annotated[int | None, typer.Option(help="KV cache: of the engine, or if the server does not say.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in a batch, of the engine.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens in a step, of the engine.")] = None,
    prompt_mode: Annotated[Literal["auto", "ids", "text"], typer.Option(help="As in replay, like the next four.")] = "auto",
    tokenizer: Annotated[str, typer.Option()] = "cl100k",
    api_key_env: Annotated[str | None, typer.Option()] = None,
    metrics_url: Annotated[str | None, typer.Option()] = None,
    workers: Annotated[int, typer.Option()] = 1,
    slo: SLO = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was cut off.")] = False,
    seed: SEED = 0,
) -> None:
    """Load that grows point by point, each until steady: where latency bends, where the wall is, and why."""
    from chatreel.replaying import parse_slos, write_reports
    from replay.sweeping import SweepConfig, run_sweep

    slos = parse_slos(slo or [])
    config = SweepConfig(
        trace=trace,
        run_dir=run_dir,
        kind=kind,
        values=loads(values, kind),
        target=target,
        engine=engine,
        by=by,
        arrivals=arrivals,
        waits=turns == "wait",
        keep_think=think == "keep",
        cache=cache,
        max_s=max_s,
        min_requests=min_requests,
        limit=limit,
        seed=seed,
        resume=resume,
        kv_tokens=kv_tokens,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prompt_mode=prompt_mode,
        tokenizer=tokenizer,
        api_key_env=api_key_env,
        metrics_url=metrics_url,
        workers=workers,
    )
    err.print(f"seed {seed}", highlight=False)
    run_sweep(config, lambda line: err.print(line, highlight=False))
    raise typer.Exit(write_reports(run_dir, slos, None, out, err))
