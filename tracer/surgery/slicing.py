"""Part of a trace: a span of time, some sessions or models, or the first requests.

Ids stay those of the whole (blocks, sessions, contents), so that slices can be put together again. Only request numbers
count anew; a reference to a request outside the slice is null, and `source_extra` keeps it for the merge.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tracer.errors import TraceError
from tracer.formats import source_extra
from tracer.schema import Footer, Request
from tracer.tracefile import TraceWriter, count_requests, iter_requests, read_footer

Keep = Callable[[Request], bool]
REFERRING = ("parent_request_id", "retry_of")
OUTSIDE = "outside_slice"  # in source_extra: references as in the whole trace


class SliceOf(msgspec.Struct, frozen=True, kw_only=True):
    """In a footer's notes under `slice_of`: where a slice stands in the trace that it is of."""

    trace: str  # names the whole, so that slices of one trace know each other
    start_ns: int  # of the slice's zero, since the whole's
    first_request: int | None  # in the whole; None where requests between the first and the last were left out
    epoch_ns: int | None  # of the whole


def slice_trace(path: Path, out_path: Path, *, from_ns: int = 0, to_ns: int | None = None, keep: Keep | None = None) -> int:
    """Requests with from_ns <= arrival < to_ns that `keep` accepts, with `from_ns` as the new zero of time; returns how many.

    Raises TraceError if there are none.
    """

    def is_wanted(row: Request) -> bool:
        in_time = from_ns <= row["arrival_ns"] and (to_ns is None or row["arrival_ns"] < to_ns)
        return in_time and (keep is None or keep(row))

    return _write(path, out_path, is_wanted, from_ns, is_span=keep is None)


def head(path: Path, out_path: Path, count: int) -> int:
    """The first `count` requests."""
    if count < 1:
        raise TraceError("no requests asked for", seen=str(count), wanted="1 or more")
    return _write(path, out_path, lambda row: row["request_id"] < count, 0, is_span=True)


def slice_of(footer: Footer) -> SliceOf | None:
    text = footer.notes.get("slice_of")
    return msgspec.json.decode(text, type=SliceOf) if text else None


def refuse_same(path: Path, out_path: Path) -> None:
    if out_path.exists() and out_path.samefile(path):
        raise TraceError("source and result are the same file", path=str(path), next_step="Choose another -o path")


def _write(path: Path, out_path: Path, is_wanted: Keep, from_ns: int, *, is_span: bool) -> int:
    refuse_same(path, out_path)
    footer = read_footer(path)
    first = next(
        (row["request_id"] for row in iter_requests(path, ["request_id", "arrival_ns"]) if is_span and is_wanted(row)), 0
    )
    outer = slice_of(footer) or SliceOf(trace=_identity(path, footer), start_ns=0, first_request=0, epoch_ns=footer.epoch_ns)
    is_whole = is_span and outer.first_request is not None
    within = msgspec.structs.replace(
        outer, start_ns=outer.start_ns + from_ns, first_request=(outer.first_request or 0) + first if is_whole else None
    )
    epoch_ns = None if footer.epoch_ns is None else footer.epoch_ns + from_ns
    notes = footer.notes | {"slice_of": msgspec.json.encode(within).decode()}
    number_of: dict[int, int] = {}
    with TraceWriter(out_path, replace(footer, epoch_ns=epoch_ns, notes=notes)) as writer:
        for row in iter_requests(path):
            if is_wanted(row):
                number_of[row["request_id"]] = len(number_of)
                _cut(row, number_of, outer.first_request)
                row["arrival_ns"] -= from_ns
                writer.write(row)
        if not number_of:
            raise TraceError(
                "no request is left", path=str(path), next_step="Take a wider slice; `chatreel analyze` shows the span"
            )
    return writer.rows_written


def _identity(path: Path, footer: Footer) -> str:
    """Names a trace by what its footer says and how many rows it has."""
    return hashlib.sha256(footer.to_json() + str(count_requests(path)).encode()).hexdigest()[:16]


def _cut(row: Request, number_of: dict[int, int], outer_first: int | None) -> None:
    """The row under its new number, references to requests that are not there set aside."""
    row["request_id"] = number_of[row["request_id"]]
    outside: dict[str, Any] = {}
    for name in REFERRING:
        other = row.get(name)
        if isinstance(other, int):
            row[name] = number_of.get(other)  # type: ignore[literal-required]
            if other not in number_of:
                outside[name] = other + (outer_first or 0)
    if (waits := row.get("wait_for")) is not None:
        row["wait_for"] = inside = [number_of[one] for one in waits if one in number_of]
        if len(inside) < len(waits):
            outside["wait_for"] = [one + (outer_first or 0) for one in waits]
    if outside and outer_first is not None:
        extra = source_extra(row)
        row["source_extra"] = msgspec.json.encode({**extra, OUTSIDE: {**outside, **extra.get(OUTSIDE, {})}}).decode()
