"""`sweep` and `capacity`. Parsing, calling and printing; nothing is decided here."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from chatreel.options import (
    API_KEY_ENV,
    API_KEY_FILE,
    ATTAIN,
    GPU,
    METRICS_HZ,
    METRICS_URL,
    PROMPT_MODE,
    ROUTE,
    SEED,
    SERVE_METRICS,
    SLO,
    TARGET_OR_ENGINE,
    TOKENIZER,
    TRACE,
    WORKERS,
    PromptMode,
)

out = Console(soft_wrap=False)
err = Console(stderr=True)

Kind = Literal["concurrency", "rate", "scale"]
RATE_STEPS = 8

# Options of both commands.
ENGINE = Annotated[str | None, typer.Option(help="A simulated engine in virtual time; see docs/presets.md.")]
ARRIVALS = Annotated[Literal["poisson", "recorded", "burst"], typer.Option(help="rate: gaps between requests.")]
TURNS = Annotated[
    Literal["open", "wait"], typer.Option(help="rate: later turns come at the rate too, or follow the answer before them.")
]
CACHE = Annotated[
    Literal["cold", "primed", "carry"],
    typer.Option(help="Each point with prompts that no cache knows; with the same once before; or all with the same."),
]
LIMIT = Annotated[int | None, typer.Option(help="Only the first so many requests of the trace.")]
KV_TOKENS = Annotated[int | None, typer.Option(help="KV cache: of the engine, or if the server does not say.")]
MAX_NUM_SEQS = Annotated[int | None, typer.Option(help="Sequences in a batch, of the engine.")]
MAX_NUM_BATCHED_TOKENS = Annotated[int | None, typer.Option(help="Tokens in a step, of the engine.")]
RESUME = Annotated[bool, typer.Option("--resume", help="Go on with a run that was cut off.")]


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: chatreel sweep concurrency 1..256 monday.parquet --engine h100-llama3-8b")(sweep)
    app.command(
        epilog="Example: chatreel capacity monday.parquet --slo ttft:p99:500ms --slo tpot:p99:10ms --engine h100-llama3-8b"
    )(capacity)


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
    target: TARGET_OR_ENGINE = None,
    route: ROUTE = "prefix",
    engine: ENGINE = None,
    run_dir: Annotated[Path, typer.Option("--out", "-o", help="Run folder.")] = Path("sweep"),
    by: Annotated[Literal["users", "time"], typer.Option(help="scale: more sharing groups, or shorter gaps.")] = "users",
    arrivals: ARRIVALS = "poisson",
    turns: TURNS = "open",
    think: Annotated[Literal["drop", "keep"], typer.Option(help="concurrency: pauses between turns.")] = "drop",
    cache: CACHE = "cold",
    max_s: Annotated[float, typer.Option(help="Seconds that a point may take to get steady.")] = 120.0,
    min_requests: Annotated[int, typer.Option(help="Requests that end after the warm-up, at least.")] = 200,
    begin: Annotated[
        float,
        typer.Option(
            help="Where in the trace a point begins, 0 to 1; it ends once steady. The first requests are the lightest where "
            "sessions grow. Beyond 0, requests before the point, not counted, bring back the history that the cache would hold."
        ),
    ] = 0.0,
    limit: LIMIT = None,
    kv_tokens: KV_TOKENS = None,
    max_num_seqs: MAX_NUM_SEQS = None,
    max_num_batched_tokens: MAX_NUM_BATCHED_TOKENS = None,
    prompt_mode: PROMPT_MODE = PromptMode.auto,
    tokenizer: TOKENIZER = "cl100k",
    api_key_env: API_KEY_ENV = None,
    api_key_file: API_KEY_FILE = None,
    metrics_url: METRICS_URL = None,
    metrics_hz: METRICS_HZ = 4.0,
    gpu: GPU = None,
    serve_metrics: SERVE_METRICS = None,
    workers: WORKERS = 1,
    slo: SLO = None,
    resume: RESUME = False,
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
        target=target[0] if target else None,
        other_targets=tuple(target[1:]) if target else (),
        router=route,
        engine=engine,
        by=by,
        arrivals=arrivals,
        waits=turns == "wait",
        keep_think=think == "keep",
        cache=cache,
        max_s=max_s,
        min_requests=min_requests,
        begin=begin,
        limit=limit,
        seed=seed,
        resume=resume,
        kv_tokens=kv_tokens,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prompt_mode=prompt_mode.value,
        tokenizer=tokenizer,
        api_key_env=api_key_env,
        api_key_file=api_key_file,
        metrics_urls=tuple(metrics_url or ()),
        metrics_hz=metrics_hz,
        gpu=gpu,
        serve_metrics=serve_metrics,
        workers=workers,
    )
    err.print(f"seed {seed}", highlight=False)
    run_sweep(config, lambda line: err.print(line, highlight=False))
    raise typer.Exit(write_reports(run_dir, slos, None, out, err))


def capacity(
    trace: TRACE,
    slo: Annotated[list[str], typer.Option(help="METRIC:pNN:MS with ttft, tpot or e2e; may be repeated.", show_default=False)],
    attain: ATTAIN = 0.99,
    target: TARGET_OR_ENGINE = None,
    route: ROUTE = "prefix",
    engine: ENGINE = None,
    load: Annotated[
        Literal["rate", "users", "time"], typer.Option(help="Requests per second, or the trace scaled by users or time.")
    ] = "rate",
    within: Annotated[str | None, typer.Option("--range", help="LOW..HIGH; else around the trace's own rate.")] = None,
    tolerance: Annotated[float, typer.Option(help="How near the two ends shall be, as a share.")] = 0.05,
    repeats: Annotated[
        int | None,
        typer.Option(help="Runs of a load that is not sure yet, each elsewhere in the trace.  [3 on a target, 5 on an engine]"),
    ] = None,
    run_dir: Annotated[Path, typer.Option("--out", "-o", help="Run folder.")] = Path("capacity"),
    arrivals: ARRIVALS = "poisson",
    turns: TURNS = "open",
    cache: CACHE = "cold",
    max_s: Annotated[
        float | None, typer.Option(help="Seconds that a run may take.  [300 on a target, 3600 on an engine]")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", "-n", help="Of a run, after its warm-up.  [1000 on a target; on an engine once through the trace]"
        ),
    ] = None,
    limit: LIMIT = None,
    kv_tokens: KV_TOKENS = None,
    max_num_seqs: MAX_NUM_SEQS = None,
    max_num_batched_tokens: MAX_NUM_BATCHED_TOKENS = None,
    prompt_mode: PROMPT_MODE = PromptMode.auto,
    tokenizer: TOKENIZER = "cl100k",
    api_key_env: API_KEY_ENV = None,
    api_key_file: API_KEY_FILE = None,
    metrics_url: METRICS_URL = None,
    metrics_hz: METRICS_HZ = 4.0,
    gpu: GPU = None,
    serve_metrics: SERVE_METRICS = None,
    workers: WORKERS = 1,
    resume: RESUME = False,
    seed: SEED = 0,
) -> None:
    """The highest load that meets the SLOs, as a bracket; exit code 4 if not even the lowest one does."""
    from chatreel.capacity_report import find_and_report, parse_limits
    from replay.capacity import CapacityConfig
    from replay.sweeping import SweepConfig

    lowest, highest = ends(within)
    by: Literal["users", "time"] = "users" if load == "rate" else load
    config = SweepConfig(
        trace=trace,
        run_dir=run_dir,
        kind="rate" if load == "rate" else "scale",
        values=(1.0,),
        target=target[0] if target else None,
        other_targets=tuple(target[1:]) if target else (),
        router=route,
        engine=engine,
        by=by,
        arrivals=arrivals,
        waits=turns == "wait",
        cache=cache,
        max_s=max_s if max_s is not None else 3600.0 if engine else 300.0,
        limit=limit,
        seed=seed,
        resume=resume,
        kv_tokens=kv_tokens,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prompt_mode=prompt_mode.value,
        tokenizer=tokenizer,
        api_key_env=api_key_env,
        api_key_file=api_key_file,
        metrics_urls=tuple(metrics_url or ()),
        metrics_hz=metrics_hz,
        gpu=gpu,
        serve_metrics=serve_metrics,
        workers=workers,
    )
    whole = CapacityConfig(
        sweep=config,
        limits=parse_limits(slo),
        attain=attain,
        lowest=lowest,
        highest=highest,
        tolerance=tolerance,
        requests=requests if requests is not None or engine else 1000,
        repeats=repeats if repeats is not None else 5 if engine else 3,
    )
    raise typer.Exit(find_and_report(whole, out, err))


def ends(within: str | None) -> tuple[float | None, float | None]:
    if within is None:
        return None, None
    try:
        low, high = within.split("..")
        return float(low), float(high)
    except ValueError as error:
        raise typer.BadParameter(f"{within!r} is not like 2..40", param_hint="--range") from error
