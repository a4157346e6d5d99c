"""Commands of the simulated engine. Parsing, calling and printing; nothing is decided here."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from chatreel.options import (
    ATTAIN,
    BLOCK_TOKENS,
    BY,
    CHUNKED_PREFILL,
    EVICTION,
    HANG_UP,
    OFFLOAD_GB_PER_S,
    OFFLOAD_TOKENS,
    PROTECTED_TOKENS,
    SEED,
    SLO,
    TRACE,
    By,
    Eviction,
    cache_settings,
    counts,
    numbers,
)

if TYPE_CHECKING:
    from replay.grid import Setting
    from replay.sim.split import Split

out = Console(soft_wrap=False)
err = Console(stderr=True)


# What --vary takes, and of which kind its values are.
_VARIED = {
    "engine": "name",
    "router": "prefix|sticky|rr",
    "max_num_seqs": "count",
    "max_num_batched_tokens": "count",
    "block_tokens": "count",
    "eviction": "lru|fifo|priority",
    "protected_tokens": "count",
    "offload_tokens": "count",
    "chunked_prefill": "on/off",
}


class Router(StrEnum):
    prefix = "prefix"
    sticky = "sticky"
    rr = "rr"


class Dtype(StrEnum):
    bf16 = "bf16"
    fp8 = "fp8"


class HoldBack(StrEnum):
    last = "last"
    interleaved = "interleaved"


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: chatreel serve --preset h100-llama3-8b --kv-tokens 200000 --port 8000")(serve)
    app.command(
        epilog="Example: chatreel predict monday.parquet --engine h100:llama3-8b --scale 1,2,5 --replicas 2 --slo ttft:500"
    )(predict)
    app.command(epilog="Example: chatreel calibrate run -o mine.toml; chatreel predict monday.parquet --engine mine.toml")(
        calibrate
    )


def serve(
    preset: Annotated[str, typer.Option(help="GPU and model; see docs/presets.md.")] = "laptop-demo",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any free port.")] = 8000,
    kv_tokens: Annotated[int | None, typer.Option(help="KV cache size, instead of the preset's.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in a batch.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens in a step.")] = None,
    block_tokens: BLOCK_TOKENS = None,
    eviction: EVICTION = Eviction.lru,
    protected_tokens: PROTECTED_TOKENS = 0,
    offload_tokens: OFFLOAD_TOKENS = 0,
    offload_gb_per_s: OFFLOAD_GB_PER_S = 25.0,
    chunked_prefill: CHUNKED_PREFILL = True,
    speed: Annotated[float, typer.Option(help="Run virtual time so many times as fast.")] = 1.0,
    tokenizer: Annotated[str, typer.Option(help="cl100k, o200k or a tokenizer.json.")] = "cl100k",
    seed: SEED = 0,
) -> None:
    """A simulated LLM server (OpenAI API): real paged prefix cache, batching, preemption; no GPU."""
    from replay.sim.server import ServerConfig, run_server

    config = ServerConfig(
        preset=preset,
        host=host,
        port=port,
        kv_tokens=kv_tokens,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        settings=cache_settings(
            block_tokens, eviction, protected_tokens, offload_tokens, offload_gb_per_s, chunked_prefill=chunked_prefill
        ),
        speed=speed,
        tokenizer=tokenizer,
        seed=seed,
    )
    run_server(config, lambda url: err.print(f"serving {preset} at {url} (Ctrl-C ends it)", highlight=False))


def predict(
    trace: TRACE,
    engine: Annotated[
        str, typer.Option(help="GPU:MODEL, a preset, or a file of chatreel calibrate; see docs/presets.md.")
    ] = "h100-llama3-8b",
    gpu: Annotated[str | None, typer.Option(help="With --model-config, instead of --engine.")] = None,
    model_config: Annotated[Path | None, typer.Option(help="A model's config.json or its folder.")] = None,
    gpus_per_replica: Annotated[int, typer.Option(help="Tensor parallelism.")] = 1,
    dtype: Annotated[Dtype | None, typer.Option(help="Of weights, if not as the checkpoint says.")] = None,
    kv_dtype: Annotated[Dtype | None, typer.Option(help="Of KV, if not as the checkpoint says.")] = None,
    scale: Annotated[str, typer.Option(help="Load factors, one point each.")] = "1,2,5",
    by: BY = By.users,
    replicas: Annotated[str, typer.Option(help="Engines behind the router; with --grid: 1,2,4.")] = "1",
    router: Annotated[
        Router, typer.Option(help="prefix: where most is cached; sticky: by session; rr: in turn.")
    ] = Router.prefix,
    prefill_replicas: Annotated[
        str | None, typer.Option(help="Engines for prompts only, with --decode-replicas, instead of --replicas.")
    ] = None,
    decode_replicas: Annotated[str | None, typer.Option(help="Engines that go on from there; with --grid: 1,2,4.")] = None,
    kv_link_gbps: Annotated[float, typer.Option(help="Between them, of each GPU: 400 is one ConnectX-7.")] = 400.0,
    kv_link_latency_ms: Annotated[float, typer.Option(help="Of each transfer of a prompt's KV.")] = 0.0,
    run_dir: Annotated[Path, typer.Option("--out", "-o", help="Run folder.")] = Path("predicted"),
    limit: Annotated[int | None, typer.Option(help="Only the first so many requests.")] = None,
    kv_tokens: Annotated[
        str | None,
        typer.Option("--kv-tokens", "--kv", help="KV cache of each replica, instead of the engine's; with --grid: 100k,200k."),
    ] = None,
    grid: Annotated[
        bool, typer.Option("--grid", help="All of --kv, --replicas and --vary together: one table, and the frontier as a chart.")
    ] = False,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="grid: KEY=VALUE,VALUE of engine, router, max-num-seqs, block-tokens, eviction...; may be repeated."),
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in a batch.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens in a step.")] = None,
    block_tokens: BLOCK_TOKENS = None,
    eviction: EVICTION = Eviction.lru,
    protected_tokens: PROTECTED_TOKENS = 0,
    offload_tokens: OFFLOAD_TOKENS = 0,
    offload_gb_per_s: OFFLOAD_GB_PER_S = 25.0,
    chunked_prefill: CHUNKED_PREFILL = True,
    hang_up: HANG_UP = True,
    slo: SLO = None,
    attain: ATTAIN = 0.99,
    open_loop: Annotated[
        bool, typer.Option("--open-loop", help="Later turns at their recorded times, not after the answer and think time.")
    ] = False,
    seed: SEED = 0,
) -> None:
    """What a server would do with a trace: the simulated engine in virtual time, no server asked, the same report."""
    from chatreel.replaying import grid_and_report, parse_slos, predict_and_report
    from replay.foretelling import PredictConfig

    fleets = counts(replicas, "--replicas")
    sizes: list[int | None] = [*counts(kv_tokens, "--kv-tokens")] if kv_tokens is not None else [None]
    splits = _splits(prefill_replicas, decode_replicas, replicas, kv_link_gbps, kv_link_latency_ms)
    if splits:
        fleets = [1]
    varied = _varied(vary or [])
    if varied and (not grid or (model_config is not None and "engine" in varied)):
        raise typer.BadParameter("needs --grid, and no engine beside --model-config", param_hint="--vary")
    if not grid and max(len(splits), 1) * len(fleets) * len(sizes) > 1:
        raise typer.BadParameter("several values need --grid", param_hint="--replicas or --kv-tokens")
    name, config_json = _engine(engine, gpu, model_config)
    config = PredictConfig(
        trace=trace,
        run_dir=run_dir,
        engine=name,
        model_config=config_json,
        gpus_per_replica=gpus_per_replica,
        dtype=dtype.value if dtype else None,
        kv_dtype=kv_dtype.value if kv_dtype else None,
        scales=tuple(numbers(scale, float, "--scale")),
        by=by.value,
        replicas=fleets[0] if not splits else splits[0].prefill + splits[0].decode,
        split=splits[0] if splits else None,
        router=router.value,
        limit=limit,
        seed=seed,
        open_loop=open_loop,
        hang_up=hang_up,
        kv_tokens=sizes[0],
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        settings=cache_settings(
            block_tokens, eviction, protected_tokens, offload_tokens, offload_gb_per_s, chunked_prefill=chunked_prefill
        ),
    )
    slos = parse_slos(slo or [])
    if grid:
        raise typer.Exit(grid_and_report(config, sizes, splits or fleets, varied, slos, attain, out, err))
    raise typer.Exit(predict_and_report(config, slos, attain if slos else None, out, err))


def _varied(texts: list[str]) -> "dict[str, list[Setting]]":
    """`max-num-seqs=64,256` -> the field of a prediction and its values."""
    whole: dict[str, list[Setting]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        name = key.strip().replace("-", "_")
        if name not in _VARIED or not values or name in whole:
            raise typer.BadParameter(f"{text!r} is not KEY=VALUE,VALUE with a key of {', '.join(_VARIED)}", param_hint="--vary")
        match _VARIED[name]:
            case "count":
                whole[name] = [*counts(values, f"--vary {key}")]
            case "on/off":
                if not set(values.split(",")) <= {"on", "off"}:
                    raise typer.BadParameter(f"{text!r} is not on, off or both", param_hint="--vary")
                whole[name] = [one == "on" for one in values.split(",")]
            case choices:
                wrong = [one for one in values.split(",") if choices != "name" and one not in choices.split("|")]
                if wrong:
                    raise typer.BadParameter(f"{wrong[0]!r} is none of {choices}", param_hint="--vary")
                whole[name] = [*values.split(",")]
    return whole


def _splits(prefill: str | None, decode: str | None, replicas: str, link_gbps: float, link_latency_ms: float) -> "list[Split]":
    """Every pair of both lists; none without them."""
    from replay.sim.split import Split

    if prefill is None and decode is None:
        return []
    if prefill is None or decode is None:
        raise typer.BadParameter("--prefill-replicas and --decode-replicas go together", param_hint="--prefill-replicas")
    if replicas != "1":
        raise typer.BadParameter("a split has its own numbers of replicas", param_hint="--replicas")
    return [
        Split(prefill=one, decode=other, link_gbps=link_gbps, link_latency_s=link_latency_ms / 1e3)
        for one in counts(prefill, "--prefill-replicas")
        for other in counts(decode, "--decode-replicas")
    ]


def _engine(engine: str, gpu: str | None, model_config: Path | None) -> tuple[str, dict[str, Any] | None]:
    from chatreel.analyzing import read_config

    if (gpu is None) != (model_config is None):
        raise typer.BadParameter("--gpu and --model-config go together", param_hint="--gpu")
    return (engine, None) if gpu is None or model_config is None else (gpu, read_config(model_config))


def calibrate(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run folders of replays, all against one server.", show_default=False)],
    out_path: Annotated[Path, typer.Option("--out", "-o", help="Engine file, for predict and sweep.")] = Path("engine.toml"),
    trace: Annotated[Path | None, typer.Option(help="The run's trace, if it has moved.")] = None,
    engine: Annotated[str | None, typer.Option(help="Limits where neither the run nor an option below says any.")] = None,
    hold_back: Annotated[
        HoldBack, typer.Option(help="last: a point's last third; interleaved: three stretches, for a server whose speed drifts.")
    ] = HoldBack.last,
    kv_tokens: Annotated[int | None, typer.Option(help="The server's KV cache.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Its sequences in a batch.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Its tokens in a step.")] = None,
    block_tokens: Annotated[int | None, typer.Option(help="Its tokens of a KV block.")] = None,
) -> None:
    """Fit the simulated engine to a measured run; a third of each point is held back, and the error on it told."""
    from chatreel.predicting import run_calibrate

    limits = {
        "kv_tokens": kv_tokens,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "block_tokens": block_tokens,
    }
    run_calibrate(run_dirs, out_path, trace, engine, hold_back.value, limits, out, err)
