"""Pages that are made from code: docs/cli.md from --help, the column table of docs/trace-format.md from the schema."""

import typer
from typer.main import get_command
from typer.testing import CliRunner

from tracer.schema import COLUMNS


def cli_page() -> str:
    """The help of every command, as a user at an 88-column terminal sees it, without colour."""
    from chatreel.cli import app

    group = get_command(app)
    names = list(getattr(group, "commands", {}))
    parts = ["# Command line\n\nMade from `--help` by `scripts/generate-docs`.\n"]
    for name in ["", *names]:
        title = f"chatreel {name}".strip()
        parts.append(f"## {title}\n\n```\n{help_text(app, name)}\n```\n")
    return "\n".join(parts)


def help_text(app: typer.Typer, command: str) -> str:
    environment = {
        "COLUMNS": "88",
        "TERMINAL_WIDTH": "88",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "_TYPER_FORCE_DISABLE_TERMINAL": "1",
    }
    result = CliRunner().invoke(app, [*command.split(), "--help"], env=environment, prog_name="chatreel")
    return "\n".join(line.rstrip() for line in result.output.strip().splitlines())


def trace_columns() -> str:
    rows = [f"| `{name}` | {kind} | {meaning} |" for name, kind, meaning in COLUMNS]
    return "\n".join(["| column | type | meaning |", "|---|---|---|", *rows, ""])
