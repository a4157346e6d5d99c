"""BurstGPT CSV: times and lengths, in the newer releases also conversations and how long answers took. Pure.

    Timestamp,[Session ID,Elapsed time,]Model,Request tokens,Response tokens,Total tokens,Log Type
    45.0,ChatGPT,1808,18,1826,Conversation log

Times are seconds since the start of the collection, which need not be that of the file. No response token: it failed.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal

import msgspec

from tracer.blocks import DenseIds
from tracer.formats import BadRow, Detected, source_extra
from tracer.schema import Footer, Request

NAME = "burstgpt"
HOLDS = frozenset({"input_tokens", "output_tokens", "session_id", "end_ns", "model", "kind", "error_kind"})
STEP_NS = 1
LONG = ("Timestamp", "Session ID", "Elapsed time", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
SHORT = tuple(name for name in LONG if name not in ("Session ID", "Elapsed time"))
HEADERS = {",".join(names).encode(): names for names in (LONG, SHORT)}
FAILED = "no_tokens"
MAX_COUNT = 2**31 - 1
MAX_SECONDS = 4 * 10**9
_SECONDS = re.compile(r"\d+(\.\d+)?([eE][+-]?\d{1,3})?", re.ASCII)
_SPECIAL = re.compile('[,"\r\n]')

Cells = dict[str, str]  # by column


def looks_like(head: bytes) -> bool:
    return _header(head.split(b"\n", 1)[0]) is not None


def _header(line: bytes) -> tuple[str, ...] | None:
    return HEADERS.get(line.removeprefix(b"\xef\xbb\xbf").strip())


def read(lines: Iterable[bytes], found: Detected, bad: Callable[[BadRow], None]) -> Iterator[Request]:
    """Rows in file order; `arrival_ns` counts from the source's zero. What the columns do not give back stays as text."""
    found.time_unit_ns = 10**9
    names: tuple[str, ...] = LONG
    sessions: DenseIds[str] = DenseIds()
    for number, line in enumerate(lines, 1):
        if number == 1:
            header = _header(line)
            if header is None:
                bad(BadRow(1, f"no header, wanted {' or '.join(one.decode() for one in HEADERS)}", _shown(line)))
            names = header or LONG
            found.notes |= {"line_end": "crlf" if line.endswith(b"\r\n") else "lf", "columns": str(len(names))}
            continue
        if not line.strip():
            continue
        try:
            cells = _split(line, names)
            request = _request(cells)
        except (ValueError, csv.Error) as error:
            bad(BadRow(number, str(error), _shown(line)))
            continue
        if session := cells.get("Session ID"):
            request["session_id"] = sessions[session]
        for column, note in (("Timestamp", "stamps"), ("Elapsed time", "elapsed")):
            if text := cells.get(column):
                found.notes.setdefault(note, "whole" if text.isdigit() else "float")
        again = _cells(request, 0, found.notes)
        kept = {column: text for column, text in cells.items() if text != again[column]}
        if kept:
            request["source_extra"] = msgspec.json.encode({"cells": kept}).decode()
        while request["arrival_ns"] % found.time_unit_ns:
            found.time_unit_ns //= 1000
        yield request


def _shown(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r\n")


def _split(line: bytes, names: tuple[str, ...]) -> Cells:
    """Raises ValueError (bytes that are no text among them) or csv.Error."""
    text = line.decode().removesuffix("\n").removesuffix("\r")
    if "\r" in text:
        raise ValueError("a line end inside the row")
    cells = next(csv.reader([text], strict=True)) if '"' in text else text.split(",")
    if len(cells) != len(names):
        raise ValueError(f"{len(cells)} columns, wanted {len(names)}")
    return dict(zip(names, cells, strict=True))


def _request(cells: Cells) -> Request:
    """Raises ValueError for cells that are no numbers or out of range."""
    asked, answered = (_count(cells[name], name) for name in ("Request tokens", "Response tokens"))
    _count(cells["Total tokens"], "Total tokens")
    request: Request = {
        "arrival_ns": _ns(cells["Timestamp"], "Timestamp"),
        "input_tokens": asked,
        "input_tokens_count_source": "import",
        "output_tokens": answered,
        "output_tokens_count_source": "import",
    }
    if cells["Model"]:
        request["model"] = cells["Model"]
    if cells["Log Type"]:
        request["kind"] = cells["Log Type"]
    if elapsed := cells.get("Elapsed time"):
        request["end_ns"] = _ns(elapsed, "Elapsed time")
    if not answered:
        request["error_kind"] = FAILED
    return request


def _count(cell: str, name: str) -> int:
    if not (cell.isascii() and cell.isdigit() and len(cell) <= 10 and int(cell) <= MAX_COUNT):
        raise ValueError(f"{name} is {cell[:40]!r}, wanted 0 .. {MAX_COUNT}")
    return int(cell)


def _ns(cell: str, name: str) -> int:
    seconds = Decimal(cell) if _SECONDS.fullmatch(cell) else Decimal(-1)
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"{name} is {cell[:40]!r}, wanted 0 .. {MAX_SECONDS} seconds")
    return round(seconds * 10**9)


def _cells(row: Request, zero_ns: int, notes: dict[str, str]) -> Cells:
    """All eight, as the columns give them; sessions' names are kept beside them."""
    asked, answered = row.get("input_tokens") or 0, row.get("output_tokens") or 0
    end_ns = row.get("end_ns")
    return {
        "Timestamp": _seconds(row["arrival_ns"] + zero_ns, notes.get("stamps")),
        "Session ID": "",
        "Elapsed time": "" if end_ns is None else _seconds(end_ns, notes.get("elapsed")),
        "Model": row.get("model") or "",
        "Request tokens": str(asked),
        "Response tokens": str(answered),
        "Total tokens": str(asked + answered),
        "Log Type": row.get("kind") or "",
    }


def _seconds(ns: int, style: str | None) -> str:
    return str(ns // 10**9) if style == "whole" and ns % 10**9 == 0 else str(ns / 10**9)


def write(rows: Iterable[Request], footer: Footer) -> Iterator[bytes]:
    """The header and one line a row, with the source's columns and line ends where it was such a file.

    Of another source: eight columns; a request that failed has no response tokens, one with a session is of a conversation.
    """
    is_own = footer.source_format == NAME
    notes = footer.notes if is_own else {}
    names = SHORT if notes.get("columns") == str(len(SHORT)) else LONG
    end = "\r\n" if notes.get("line_end") == "crlf" else "\n"
    zero_ns = int(notes.get("first_arrival_ns", 0))
    yield (",".join(names) + end).encode()
    for row in rows:
        cells = _cells(row, zero_ns, notes)
        cells |= source_extra(row).get("cells", {}) if is_own else _foreign(row)
        yield (",".join(_quoted(cells[name]) for name in names) + end).encode()


def _foreign(row: Request) -> Cells:
    session = row.get("session_id")
    cells = {
        "Session ID": "" if session is None else str(session),
        "Model": " ".join((row.get("model") or "").split()),
        "Log Type": "API log" if session is None else "Conversation log",
    }
    if row.get("error_kind") is not None:
        cells |= {"Response tokens": "0", "Total tokens": str(row.get("input_tokens") or 0)}
    return cells


def _quoted(cell: str) -> str:
    if not _SPECIAL.search(cell):
        return cell
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([cell])
    return line.getvalue()
