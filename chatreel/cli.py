"""Parsing, calling and printing; nothing is decided here. Data goes to stdout, everything else to stderr."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from chatreel import __version__
from chatreel.options import OUT, SEED, TRACE, numbers
from chatreel.replay_commands import add_report_to as add_report_command
from chatreel.replay_commands import add_to as add_replay_commands
from chatreel.sim_commands import add_to as add_sim_commands
from chatreel.sweep_commands import add_to as add_sweep_commands
from chatreel.synth_commands import add_to as add_synth_commands
from chatreel.trace_commands import add_to as add_trace_commands
from chatreel.tune_commands import add_to as add_tune_commands
from tracer.errors import TraceError

app = typer.Typer(
    name="chatreel",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # locals may hold prompts or keys
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Record the shape of LLM chat traffic, generate more of it, replay it at 1x, 2x, 5x, and see what it does to the "
    "prefix cache and the KV memory. Start with `chatreel demo`.",
)
out = Console(soft_wrap=False)
err = Console(stderr=True)


class Mode(StrEnum):
    REVERSE = "reverse"
    FORWARD = "forward"


def main() -> None:
    """Entry point: a user's fault is one clear line and exit code 1."""
    try:
        app(prog_name="chatreel")
    except TraceError as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"chatreel {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version


@app.command("import", epilog="Example: chatreel import conversation_trace.jsonl -o conversation.parquet")
def import_(
    source: Annotated[
        Path, typer.Argument(help="A public trace, or a capture that another tool made; also gzipped.", show_default=False)
    ],
    out_path: OUT,
    source_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="mooncake, azure, burstgpt, bailian, weka, ragpulse, aiperf, dynamo, dynamo_trace, timed_trace (vLLM), csv; or "
            "a capture: mitm, har, litellm, langfuse, otel, sglang, goreplay, gateway_csv, openai_jsonl. Found out by itself "
            "if left out.",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            "--map",
            help="Of plain CSV: arrival=COLUMN,input=COLUMN,output=COLUMN, also session, client, model, kind, cached, ttft, "
            "duration. Usual names are found.",
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first bad row instead of setting it aside.")] = False,
    tokenizer: Annotated[str, typer.Option(help="Of a capture: cl100k, o200k, a tokenizer.json or a model's folder.")] = "cl100k",
    key: Annotated[Path | None, typer.Option(help="Of a capture: key of an earlier recording, to compare with it.")] = None,
) -> None:
    """Import a public trace, or a capture of traffic: its shape, never its text."""
    from chatreel.importing import run_import

    for line in run_import(source, out_path, source_format, columns, strict, tokenizer, key, err):
        err.print(line, highlight=False, markup=False, soft_wrap=True)


@app.command(
    epilog="Example: chatreel export conversation.parquet --format mooncake -o conversation.jsonl; chatreel export run --point 0 "
    "-o replayed.parquet"
)
def export(
    trace: Annotated[Path, typer.Argument(help="A trace file, or the run folder of a replay or sweep.", show_default=False)],
    out_path: OUT,
    target_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="mooncake, azure, burstgpt, bailian, weka, ragpulse, csv; or for a tool: aiperf, aiperf_sessions (turns wait "
            "for answers), guidellm, timed_trace (vllm bench serve), inference_perf, dynamo, dynamo_trace. Left out for a run: "
            "as a trace.",
        ),
    ] = None,
    point: Annotated[int | None, typer.Option(help="Of a run of several points: which, from 0.")] = None,
    source: Annotated[Path | None, typer.Option("--trace", help="Of a run: its trace, if that was moved.")] = None,
) -> None:
    """Write a trace in a public format, or as input of another load generator; what that cannot hold is named.

    Of a run: what was sent and what came back, as a trace, to hold against its source by `chatreel compare`.
    """
    from chatreel.exporting import run_export, run_export_of_run

    is_run = trace.is_dir()
    lines = (
        run_export_of_run(trace, out_path, target_format, point, source) if is_run else run_export(trace, out_path, target_format)
    )
    for line in lines:
        err.print(line, highlight=False, markup=False, soft_wrap=True)


@app.command(epilog="Example: chatreel analyze conversation.parquet --model-config config.json --gpu h100-80g --html report.html")
def analyze(
    trace: TRACE,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write all figures as JSON; - is stdout.")] = None,
    sizes_blocks: Annotated[str, typer.Option(help="Cache sizes in blocks for LRU hits.")] = "1000,2000,5000,10000,20000",
    top: Annotated[int, typer.Option(help="How many shared prefixes to list.")] = 10,
    model_config: Annotated[Path | None, typer.Option(help="A model's config.json: what a token of KV takes.")] = None,
    kv_bytes_per_token: Annotated[float | None, typer.Option(help="Instead of --model-config.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="a10, a100-40g, a100-80g, l40s, h100-80g, h200, b200 or mi300x: what its memory holds.")
    ] = None,
    tp: Annotated[int, typer.Option(help="GPUs that share one copy of the model.")] = 1,
    replicas: Annotated[int, typer.Option(help="Also compare routing rules for so many copies.")] = 1,
    html_path: Annotated[Path | None, typer.Option("--html", help="Also write one HTML page with charts.")] = None,
    images: Annotated[Path | None, typer.Option(help="Also write each chart as SVG and PNG into this folder.")] = None,
) -> None:
    """Lengths, arrivals, sessions, shared prefixes, and what every size of KV memory would hit."""
    from chatreel.analyzing import AnalyzeOptions, run_analyze

    options = AnalyzeOptions(
        sizes_blocks=numbers(sizes_blocks, int, "--sizes-blocks"),
        top=top,
        model_config=model_config,
        kv_bytes_per_token=kv_bytes_per_token,
        gpu=gpu,
        tp=tp,
        replicas=replicas,
    )
    run_analyze(trace, options, json_path, html_path, images, out)


add_trace_commands(app)


@app.command(epilog='Example: chatreel query t.parquet "select model, count(*) from trace group by 1"')
def query(
    source: Annotated[Path, typer.Argument(help="A trace file, or the run folder of a replay.", show_default=False)],
    sql: Annotated[
        str,
        typer.Argument(help="SQL (DuckDB); views: trace; of a run points, outcomes, samples.", show_default=False),
    ],
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
) -> None:
    """Run SQL on a trace or on a run."""
    from chatreel.query import print_query

    print_query(source, sql, csv)


@app.command(epilog="Example: chatreel generate --preset chat -n 5000 --rate 4 -o chat.parquet")
def generate(
    out_path: OUT,
    spec: Annotated[
        Path | None,
        typer.Argument(help="A TOML file of a workload, or a fitted model (.json).", show_default=False),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Start from: chat, rag, agentic, few-shot, long-document, merged, random.")
    ] = None,
    from_trace: Annotated[Path | None, typer.Option("--from", help="Draw sharing groups from this trace instead.")] = None,
    requests: Annotated[int | None, typer.Option("--requests", "-n", help="How many requests.")] = None,
    duration: Annotated[float | None, typer.Option(help="How long, in seconds.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second.")] = None,
    users: Annotated[float | None, typer.Option(help="Sets the rate: sessions under way on average.")] = None,
    diurnal: Annotated[str | None, typer.Option(help="Swing of the rate as amplitude@period, as 0.5@24h.")] = None,
    burstiness: Annotated[str | None, typer.Option(help="CV of gamma-distributed gaps; 1 is Poisson.")] = None,
    system_prompts: Annotated[int | None, typer.Option(help="System prompts in the pool.")] = None,
    system_prompt_tokens: Annotated[int | None, typer.Option(help="Tokens of each system prompt.")] = None,
    zipf: Annotated[float | None, typer.Option(help="Zipf exponent of their popularity.")] = None,
    turns: Annotated[str | None, typer.Option(help="Mean turns per session.")] = None,
    think: Annotated[str | None, typer.Option(help="Mean think time in seconds.")] = None,
    documents: Annotated[int | None, typer.Option(help="Documents in the library.")] = None,
    depth: Annotated[int | None, typer.Option(help="Documents of each session, between system prompt and question.")] = None,
    messages_per_request: Annotated[
        int | None, typer.Option(help="Messages of different users that are packed into one request.")
    ] = None,
    input_tokens: Annotated[
        str | None, typer.Option("--input-tokens", "--input", help="New tokens of each turn; 120:3000 is p50:p99.")
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option("--output-tokens", "--output", help="Tokens of each answer; likewise.")
    ] = None,
    prefix_share: Annotated[float | None, typer.Option(help="Share of prompt tokens that an endless cache serves.")] = None,
    hit_rate: Annotated[
        str | None, typer.Option(help="LRU hit rate at a KV size in tokens, as 0.6@400k: scales what prompts share.")
    ] = None,
    seed: SEED = 0,
) -> None:
    """Make a workload: from flags, a TOML file, a preset, a fitted model, or a trace.

    Of a fitted model, --burstiness, --turns, --think, --input-tokens and --output-tokens also take a factor, as x2.
    """
    from chatreel.generating import GenerateOptions, run_generate

    options = GenerateOptions(
        spec=spec,
        preset=preset,
        from_trace=from_trace,
        requests=requests,
        duration_s=duration,
        rate_per_s=rate,
        burstiness=burstiness,
        system_prompts=system_prompts,
        system_prompt_tokens=system_prompt_tokens,
        zipf=zipf,
        turns=turns,
        think=think,
        documents=documents,
        depth=depth,
        messages_per_request=messages_per_request,
        users=users,
        diurnal=diurnal,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        prefix_share=prefix_share,
        hit_rate=hit_rate,
    )
    for line in run_generate(options, seed, out_path):
        err.print(line, highlight=False, markup=False)


add_synth_commands(app)


@app.command(epilog="Example: chatreel record --upstream http://127.0.0.1:8000 --port 9000 -o monday.parquet")
def record(
    upstream: Annotated[
        list[str] | None,
        typer.Option(help="The server to record, e.g. http://127.0.0.1:8000. More of them as /path=URL or host=URL."),
    ] = None,
    out_path: OUT = Path("recording.parquet"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    beyond_loopback: Annotated[
        bool, typer.Option("--beyond-loopback", help="Allow a --host that others reach: they can then use your server.")
    ] = False,
    port: Annotated[int, typer.Option(help="0 takes any free port.")] = 9000,
    tokenizer: Annotated[
        list[str] | None,
        typer.Option(
            help="cl100k (default), o200k, a tokenizer.json, a model's folder, server (its /tokenize); for one: MODEL=..."
        ),
    ] = None,
    chunk_times: Annotated[bool, typer.Option("--chunk-times", help="Also keep the time of every chunk.")] = False,
    force_usage: Annotated[
        bool, typer.Option("--force-usage", help="Ask the server for token counts where clients do not; they see no change.")
    ] = False,
    keep_text: Annotated[
        bool, typer.Option("--keep-text", help="Also write prompts and answers IN CLEAR, to OUT.text.jsonl (0600).")
    ] = False,
    key: Annotated[Path | None, typer.Option(help="Key of an earlier recording, to compare with it; else a new one.")] = None,
    mode: Annotated[Mode, typer.Option(help="forward: a forward proxy that reads TLS, to --allow-host only.")] = Mode.REVERSE,
    allow_host: Annotated[list[str] | None, typer.Option(help="host or host:port that a forward proxy may reach.")] = None,
    upstream_ca: Annotated[Path | None, typer.Option(help="PEM file of the authority of upstreams with private TLS.")] = None,
    ca: Annotated[
        Path | None, typer.Option(help="Folder of the proxy's own authority; mitmproxy-ca-cert.pem in it is what clients trust.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Proxy processes on the one port; each uses up to one core.")] = 1,
    prometheus: Annotated[int | None, typer.Option(help="Port of a metrics page on loopback; 0 takes any free one.")] = None,
) -> None:
    """Record chat traffic on its way to a server: its shape, never its text. Ctrl-C drains and writes the trace."""
    from chatreel.recording import check_host, run_record, split_tokenizers
    from tracer.record.session import RecordConfig

    check_host(host, beyond_loopback, err)
    first, *more = upstream or [""]
    default_tokenizer, model_tokenizers = split_tokenizers(tokenizer or [])
    config = RecordConfig(
        upstream=first,
        more_upstreams=more,
        forward=mode is Mode.FORWARD,
        allow_hosts=allow_host or [],
        upstream_ca=str(upstream_ca) if upstream_ca else None,
        ca_folder=str(ca) if ca else None,
        out=str(out_path),
        host=host,
        port=port,
        tokenizer=default_tokenizer,
        model_tokenizers=model_tokenizers,
        chunk_times=chunk_times,
        force_usage=force_usage,
        keep_text=keep_text,
        key_path=str(key) if key else None,
        workers=workers,
    )
    for line in run_record(config, prometheus, err):
        err.print(line, highlight=False, markup=False, soft_wrap=True)


@app.command(epilog="Example: chatreel compact recording.parquet")
def compact(
    recording: Annotated[Path, typer.Argument(help="The -o path of a recording that was cut off.", show_default=False)],
) -> None:
    """Turn the segments of a killed recorder into its trace; torn tails are cut and counted."""
    from chatreel.recording import run_compact

    for line in run_compact(recording):
        err.print(line, highlight=False, markup=False)


add_replay_commands(app)
add_sim_commands(app)
add_sweep_commands(app)
add_tune_commands(app)
add_report_command(app)


@app.command(epilog="Example: chatreel demo --quick")
def demo(
    folder: Annotated[Path, typer.Option("--out", "-o", help="Folder for everything that it makes.")] = Path("demo-out"),
    quick: Annotated[bool, typer.Option("--quick", help="A short one, under half a minute.")] = False,
    seed: SEED = 0,
) -> None:
    """The whole loop on this machine, without a GPU: record, analyze, generate, replay 1x/2x/5x, report."""
    from chatreel.demo import run_demo

    raise typer.Exit(run_demo(folder, quick, seed, out, err))
