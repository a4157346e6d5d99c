"""Plain CSV whose header names its columns; which column is what is said by the user, or by usual names. Pure.

    ts,prompt_tokens,completion_tokens,user,model
    1700000000.25,374,44,u1,llama

`--map arrival=ts,input=prompt_tokens,output=completion_tokens,client=user,model=model`. Times are ISO stamps or numbers; the
unit of numbers is that of the column's name (`_ms`), else of their size where they count from 1970, else seconds or ms.
Other columns are not kept, since they may hold text; sessions and clients become numbers.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import Any, Literal

from tracer.blocks import DenseIds
from tracer.errors import TraceError
from tracer.formats import BadRow, Detected
from tracer.formats.azure import parse_stamp
from tracer.formats.layout import peek, unit_ns_of
from tracer.schema import Footer, Request

NAME = "csv"
HOLDS = frozenset(
    {"input_tokens", "output_tokens", "session_id", "client_id", "model", "kind", "cached_tokens", "ttft_ns", "end_ns"}
)
STEP_NS = 1
USUAL = {  # what a column may hold, and names that it usually has
    "arrival": ("arrival_s", "arrival", "timestamp", "ts", "time", "created_at", "start_time", "arrival_time", "arrived_at"),
    "input": ("input_tokens", "prompt_tokens", "input_length", "num_prefill_tokens", "input", "isl"),
    "output": ("output_tokens", "completion_tokens", "output_length", "num_decode_tokens", "output", "osl"),
    "session": ("session_id", "session", "conversation_id", "chat_id"),
    "client": ("client_id", "client", "user_id", "user"),
    "model": ("model", "model_name"),
    "kind": ("kind", "type"),
    "cached": ("cached_tokens", "cache_read_tokens"),
    "ttft": ("ttft_s", "ttft_ms", "ttft"),
    "duration": ("duration_s", "duration_ms", "latency_ms", "duration", "latency"),
}
NEEDED = ("arrival", "input", "output")
COUNTS: dict[str, Literal["input_tokens", "output_tokens", "cached_tokens"]] = {
    "input": "input_tokens",
    "output": "output_tokens",
    "cached": "cached_tokens",
}
MAX_COUNT = 2**31 - 1
MAX_NS = 2**62
_SUFFIXES = {"_ns": 1, "_us": 10**3, "_ms": 10**6, "_s": 10**9, "_sec": 10**9, "_seconds": 10**9}
_NUMBER = re.compile(r"\d{1,30}(\.\d{1,30})?", re.ASCII)
_SINCE_1970_S = 10**8  # smaller numbers count from some start: 1973 was before the first trace
_DELIMITERS = ",;\t|"

Columns = dict[str, int]  # what it holds -> where it stands


def looks_like(head: bytes) -> bool:
    """A header with usual names for time and lengths. Any log may have one: to be asked last."""
    header, _ = _header(head.split(b"\n", 1)[0])
    return all(name in guess(header) for name in NEEDED)


def guess(header: list[str]) -> dict[str, str]:
    """Columns by their usual names."""
    lower = {one.strip().lower(): one for one in header}
    found = ((what, next((lower[name] for name in names if name in lower), None)) for what, names in USUAL.items())
    return {what: name for what, name in found if name is not None}


def parse_map(text: str) -> dict[str, str]:
    """`arrival=ts,input=prompt_tokens`. Raises TraceError."""
    pairs = [one.partition("=") for one in text.split(",")]
    columns = {what.strip(): name.strip() for what, _, name in pairs}
    wrong = [what for what, name in columns.items() if what not in USUAL or not name]
    if wrong or len(columns) != len(pairs):
        raise TraceError(
            "--map is not understood",
            seen=repr(text),
            wanted=f"WHAT=COLUMN,..., each of {', '.join(USUAL)} at most once",
        )
    return columns


def _header(line: bytes) -> tuple[list[str], str]:
    text = line.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace").rstrip("\r\n")
    delimiter = max(_DELIMITERS, key=text.count)
    return _split(text, delimiter), delimiter


def _split(text: str, delimiter: str) -> list[str]:
    """Raises csv.Error."""
    return next(csv.reader([text], delimiter=delimiter, strict=True), []) if '"' in text else text.split(delimiter)


def read(lines: Iterable[bytes], found: Detected, bad: Callable[[BadRow], None]) -> Iterator[Request]:
    """Rows in file order. Where times count from 1970, `arrival_ns` counts from the first row. TraceError: no such column."""
    head, lines = peek(lines)
    if not head:
        return
    header, delimiter = _header(head[0])
    columns = _columns(header, found.columns or guess(header))
    units = _Units(header, columns, _cells(head[1:], delimiter, len(header)))
    found.time_unit_ns = 10**9
    left_out = len(header) - len(columns)
    found.notes["read_as"] = ", ".join(f"{what} from {header[at]}" for what, at in columns.items()) + f"; {units.said}"
    found.notes["read_as"] += f"; {left_out} other columns left out" if left_out else ""
    names: dict[str, DenseIds[str]] = {"session": DenseIds(), "client": DenseIds()}
    for number, line in enumerate(lines, 1):
        if number == 1 or not line.strip():
            continue
        try:
            cells = _split(line.decode().rstrip("\r\n"), delimiter)
            if len(cells) != len(header):
                raise ValueError(f"{len(cells)} columns, wanted {len(header)}")
            request = _request(cells, columns, units, names)
        except (ValueError, csv.Error) as error:
            bad(BadRow(number, str(error), ""))  # its text may be anybody's
            continue
        if units.is_clock:
            found.epoch_ns = request["arrival_ns"] if found.epoch_ns is None else found.epoch_ns
            request["arrival_ns"] -= found.epoch_ns
        while (request["arrival_ns"] + (found.epoch_ns or 0)) % found.time_unit_ns:
            found.time_unit_ns //= 1000
        yield request


def _columns(header: list[str], wanted: dict[str, str]) -> Columns:
    """Where the columns stand. Raises TraceError."""
    missing = [name for name in wanted.values() if name not in header] + [name for name in NEEDED if name not in wanted]
    if missing:
        raise TraceError(
            "a column is not there or not named",
            line=1,
            seen=", ".join(header)[:200],
            wanted=", ".join(missing),
            next_step="Say what is where: --map arrival=COLUMN,input=COLUMN,output=COLUMN",
        )
    return {what: header.index(name) for what, name in wanted.items()}


def _cells(lines: list[bytes], delimiter: str, width: int) -> list[list[str]]:
    """Of lines that are rows."""
    rows = []
    for line in lines:
        try:
            cells = _split(line.decode().rstrip("\r\n"), delimiter)
        except (ValueError, csv.Error):
            continue
        if len(cells) == width:
            rows.append(cells)
    return rows


class _Units:
    """How the first rows write their times."""

    def __init__(self, header: list[str], columns: Columns, rows: list[list[str]]) -> None:
        self._unit_ns = {what: unit for what, at in columns.items() if (unit := _unit_in(header[at])) is not None}
        texts = [cells[columns["arrival"]].strip() for cells in rows]
        numbers = [float(text) for text in texts if _NUMBER.fullmatch(text)]
        self.is_stamp = len(numbers) * 2 < len(texts)
        first = min(numbers, default=0.0)
        own = self._unit_ns.get("arrival") or (_since_1970_ns(first) if first >= _SINCE_1970_S else unit_ns_of(numbers))
        self._unit_ns["arrival"] = own
        self.is_clock = self.is_stamp or first * own >= _SINCE_1970_S * 10**9
        for what in ("ttft", "duration"):
            self._unit_ns.setdefault(what, 10**9 if self.is_clock else own)
        name = next(suffix for suffix, unit in _SUFFIXES.items() if unit == own).strip("_")
        self.said = "times are ISO stamps" if self.is_stamp else f"times in {name}" + (" since 1970" if self.is_clock else "")

    def ns(self, cell: str, what: str) -> int:
        """Raises ValueError."""
        text = cell.strip()
        if what == "arrival" and self.is_stamp:
            return parse_stamp(text)[0]
        if not _NUMBER.fullmatch(text):
            raise ValueError(f"{what} is {cell[:40]!r}, wanted a number of at least 0")
        ns = round(Decimal(text) * self._unit_ns[what])
        if ns > MAX_NS:
            raise ValueError(f"{what} is {cell[:40]!r}, too large")
        return ns


def _unit_in(name: str) -> int | None:
    return next((unit for suffix, unit in _SUFFIXES.items() if name.strip().lower().endswith(suffix)), None)


def _since_1970_ns(stamp: float) -> int:
    """Unit of a stamp by its size: each is a thousand times the other."""
    return next((10**power for power in (9, 6, 3) if stamp < 10 ** (20 - power)), 1)


def _request(cells: list[str], columns: Columns, units: _Units, names: dict[str, DenseIds[str]]) -> Request:
    """Raises ValueError."""
    request: Request = {"arrival_ns": units.ns(cells[columns["arrival"]], "arrival")}
    for what, column in COUNTS.items():
        if what in columns and (text := cells[columns[what]].strip()):
            request[column] = _count(text, what)
    request["input_tokens_count_source"] = request["output_tokens_count_source"] = "import"
    for what in columns.keys() - set(NEEDED) - COUNTS.keys():
        if (text := cells[columns[what]]).strip():
            request |= _named(what, text, units, names)
    return request


def _named(what: str, text: str, units: _Units, names: dict[str, DenseIds[str]]) -> Request:
    """Raises ValueError."""
    if what == "session":
        return {"session_id": names["session"][text]}
    if what == "client":
        return {"client_id": names["client"][text]}
    if what == "ttft":
        return {"ttft_ns": units.ns(text, what)}
    if what == "duration":
        return {"end_ns": units.ns(text, what)}
    return {"model": text} if what == "model" else {"kind": text}


def _count(text: str, what: str) -> int:
    if not (text.isascii() and text.removesuffix(".0").isdigit() and len(text) <= 12 and float(text) <= MAX_COUNT):
        raise ValueError(f"{what} is {text[:40]!r}, wanted 0 .. {MAX_COUNT}")
    return int(float(text))


def write(rows: Iterable[Request], footer: Footer) -> Iterator[bytes]:
    """All columns that can be read, under their first usual names; times in seconds, since 1970 where that is known."""
    yield _line(names[0] for names in USUAL.values())
    for row in rows:
        ttft_ns, end_ns = row.get("ttft_ns"), row.get("end_ns")
        values: dict[str, Any] = {
            "arrival": _seconds(row["arrival_ns"] + (footer.epoch_ns or 0)),
            "input": row.get("input_tokens"),
            "output": row.get("output_tokens"),
            "session": row.get("session_id"),
            "client": row.get("client_id"),
            "model": " ".join((row.get("model") or "").split()),
            "kind": " ".join((row.get("kind") or "").split()),
            "cached": row.get("cached_tokens"),
            "ttft": None if ttft_ns is None else _seconds(ttft_ns),
            "duration": None if end_ns is None else _seconds(end_ns),
        }
        yield _line(values[what] for what in USUAL)


def _seconds(ns: int) -> str:
    seconds, fraction = divmod(ns, 10**9)
    return f"{seconds}.{fraction:09d}".rstrip("0").rstrip(".")


def _line(cells: Iterable[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
