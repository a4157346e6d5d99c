"""Pages that are made from code: docs/cli.md from --help, the column table of docs/trace-format.md from the schema."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import typer
from typer.main import get_command

from tracer.schema import COLUMNS


def command_names(app: typer.Typer) -> list[str]:
    return list(getattr(get_command(app), "commands", {}))


def cli_page() -> str:
    """The help of every command, as a user at an 88-column terminal sees it, without colour."""
    from chatreel.cli import app

    names = ["", *command_names(app)]
    with ThreadPoolExecutor(2) as pool:
        texts = pool.map(_help_text, names)
    parts = ["# Command line\n\nMade from `--help` by `scripts/generate-docs`.\n"]
    for name, text in zip(names, texts, strict=True):
        parts.append(f"## {f'chatreel {name}'.strip()}\n\n```\n{text}\n```\n")
    return "\n".join(parts)


def _help_text(command: str) -> str:
    """From a process of its own: width and colour are settled when the libraries are first imported."""
    environment = {**os.environ, "COLUMNS": "88", "TERMINAL_WIDTH": "88", "NO_COLOR": "1", "TERM": "dumb"}
    arguments = [sys.executable, "-m", "chatreel", *command.split(), "--help"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def trace_columns() -> str:
    rows = [f"| `{name}` | {kind} | {meaning} |" for name, kind, meaning in COLUMNS]
    return "\n".join(["| column | type | meaning |", "|---|---|---|", *rows, ""])
