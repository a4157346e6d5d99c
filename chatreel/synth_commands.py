"""Commands of the synthesizer beside `generate`. Parsing, calling and printing; nothing is decided here."""

from pathlib import Path
from typing import Annotated

import typer

from chatreel.options import TRACE


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: chatreel fit monday.parquet -o monday.json")(fit)
    app.command(epilog="Example: chatreel materialize monday.parquet -o prompts.jsonl --tokenizer models/llama-3")(materialize)
    app.command(epilog="Example: chatreel compare monday.parquet more.parquet --html fidelity.html")(compare)


def fit(
    trace: TRACE,
    out_path: Annotated[Path, typer.Option("-o", "--out", help="Where to write the model (JSON).", show_default=False)],
) -> None:
    """Learn a workload: a small JSON file, without any row of the trace, from which `generate` draws."""
    from chatreel.fitting import run_fit

    for line in run_fit(trace, out_path):
        typer.echo(line, err=True)


def compare(
    real: Annotated[Path, typer.Argument(help="The trace to be like.", show_default=False)],
    synth: Annotated[Path, typer.Argument(help="The trace to judge.", show_default=False)],
    html_path: Annotated[Path | None, typer.Option("--html", help="Also write one HTML page with both curves.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write all figures as JSON; - is stdout.")] = None,
) -> None:
    """Is a trace like a real one? Distances beside the real trace's own noise, a verdict for each; exit code 4 on a miss."""
    from chatreel.comparing import run_compare

    raise typer.Exit(run_compare(real, synth, html_path, json_path))


def materialize(
    trace: TRACE,
    out_path: Annotated[Path, typer.Option("-o", "--out", help="Where to write the dataset.", show_default=False)],
    dataset_format: Annotated[
        str, typer.Option("--format", help="openai, vllm_custom, aiperf, aiperf_multi (a session a line), sharegpt.")
    ] = "openai",
    tokenizer: Annotated[
        str, typer.Option(help="cl100k, o200k, a tokenizer.json, or a model folder with its chat template.")
    ] = "cl100k",
    limit: Annotated[int | None, typer.Option(help="Only the first so many requests.")] = None,
    check: Annotated[int, typer.Option(help="Tokenize so many prompts again and compare lengths and blocks.")] = 200,
    workers: Annotated[int, typer.Option(help="Processes; 0: one per core.")] = 0,
    seed: Annotated[int, typer.Option(help="Same seed, same bytes; another one is new to every cache.")] = 0,
) -> None:
    """Write real prompts for any tool: exact token counts, exactly the trace's sharing; exit code 4 if a check says otherwise."""
    from chatreel.materializing import Options, run_materialize

    options = Options(format=dataset_format, tokenizer=tokenizer, limit=limit, check=check, workers=workers, seed=seed)
    raise typer.Exit(run_materialize(trace, out_path, options, lambda line: typer.echo(line, err=True)))
