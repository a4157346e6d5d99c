"""`chatreel compare`: read two traces, judge the second, write what was asked for."""

import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from synth.fidelity import COLUMNS, Fidelity, Trace, compare
from synth.fidelity_page import HEAD, cells, page, remarks, verdict
from tracer.errors import TraceError
from tracer.tracefile import column, read_footer, read_table

GATE_MISSED = 4


def read_trace(path: Path) -> Trace:
    table = read_table(path, COLUMNS)
    if not table.num_rows:
        raise TraceError("the trace has no request", path=str(path))
    return table, read_footer(path)


def run_compare(real_path: Path, synth_path: Path, html_path: Path | None, json_path: Path | None) -> int:
    """Exit code."""
    real, synth = read_trace(real_path), read_trace(synth_path)
    found = compare(real, synth)
    if html_path is not None:
        names = (real_path.stem, synth_path.stem)
        titles = (("Tokens of prompts", "input_tokens"), ("Tokens of answers", "output_tokens"))
        lengths = [(title, *(_known(one, name) for one in (real, synth))) for title, name in titles]
        _write(html_path, page(found, names, lengths).encode())
    text = as_json(found)
    if json_path == Path("-"):
        sys.stdout.write(text.decode())
    else:
        _print(found, Console())
        if json_path is not None:
            _write(json_path, text)
    return 0 if found.passed else GATE_MISSED


def as_json(found: Fidelity) -> bytes:
    plain = msgspec.to_builtins(found)
    plain["passed"] = found.passed
    for row, gate in zip(plain["gates"], found.gates, strict=True):
        row["passed"] = gate.passed
    return msgspec.json.format(msgspec.json.encode(plain), indent=2) + b"\n"


def _known(trace: Trace, name: str) -> Any:
    values = column(trace[0], name)
    return values[values >= 0]


def _print(found: Fidelity, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in HEAD:
        table.add_column(name, justify="left" if name == "gate" else "right")
    for gate in found.gates:
        table.add_row(*cells(gate), style=None if gate.passed else "red")
    console.print(table)
    for line in (*remarks(found), verdict(found)):
        console.print(line, highlight=False, markup=False)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise TraceError(
            f"cannot write here: {error.strerror or error}", path=str(path), next_step="Choose another path"
        ) from error
