"""Part of a trace: a span of time, some sessions or models, or the first requests.

Ids stay those of the whole (blocks, sessions, contents), so that slices can be put together again. Only request numbers
count anew; a reference to a request outside the slice is null, and `source_extra` keeps it for the merge. There too stands a
row's number in the whole, where a slice has gaps.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
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
NUMBER = "request_of_whole"  # in source_extra, where requests before it are left out


class SliceOf(msgspec.Struct, frozen=True, kw_only=True):
    """In a footer's notes under `slice_of`: where a slice stands in the trace that it is of."""

    trace: str  # names the whole, so that slices of one trace know each other
    requests: int  # of the whole
    start_ns: int  # of the slice's zero, since the whole's
    first_request: int | None  # in the whole; None where requests in between were left out: then each row says its own number
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


def number_in_whole(row: Request, within: SliceOf) -> int:
    own = row["request_id"]
    return int(source_extra(row)[NUMBER]) if within.first_request is None else within.first_request + own


def _write(path: Path, out_path: Path, is_wanted: Keep, from_ns: int, *, is_span: bool) -> int:
    refuse_same(path, out_path)
    footer = read_footer(path)
    outer = slice_of(footer) or _the_whole(path, footer)
    first = None
    if is_span and outer.first_request is not None:
        first = next((outer.first_request + row["request_id"] for row in _numbers(path) if is_wanted(row)), None)
    within = msgspec.structs.replace(outer, start_ns=outer.start_ns + from_ns, first_request=first)
    epoch_ns = None if footer.epoch_ns is None else footer.epoch_ns + from_ns
    notes = footer.notes | {"slice_of": msgspec.json.encode(within).decode()}
    number_of: dict[int, int] = {}
    whole_of = array("q")
    with TraceWriter(out_path, replace(footer, epoch_ns=epoch_ns, notes=notes)) as writer:
        for row in iter_requests(path):
            whole_of.append(number_in_whole(row, outer))
            if is_wanted(row):
                number_of[row["request_id"]] = len(number_of)
                _cut(row, number_of, whole_of, marked=first is None)
                row["arrival_ns"] -= from_ns
                writer.write(row)
        if not number_of:
            raise TraceError(
                "no request is left", path=str(path), next_step="Take a wider slice; `chatreel analyze` shows the span"
            )
    return writer.rows_written


def _numbers(path: Path) -> Iterator[Request]:
    return iter_requests(path, ["request_id", "arrival_ns"])


def _the_whole(path: Path, footer: Footer) -> SliceOf:
    """Named by what its footer says and how many rows it has."""
    count = count_requests(path)
    name = hashlib.sha256(footer.to_json() + str(count).encode()).hexdigest()[:16]
    return SliceOf(trace=name, requests=count, start_ns=0, first_request=0, epoch_ns=footer.epoch_ns)


def _cut(row: Request, number_of: dict[int, int], whole_of: Sequence[int], *, marked: bool) -> None:
    """The row under its new number, references to requests that are not there set aside. Both maps: by number in the source."""
    extra = source_extra(row)
    outside: dict[str, Any] = {}
    if marked:
        extra[NUMBER] = whole_of[row["request_id"]]
    row["request_id"] = number_of[row["request_id"]]
    for name in REFERRING:
        other = row.get(name)
        if isinstance(other, int):
            row[name] = number_of.get(other)  # type: ignore[literal-required]
            if other not in number_of:
                outside[name] = whole_of[other]
    if (waits := row.get("wait_for")) is not None:
        row["wait_for"] = inside = [number_of[one] for one in waits if one in number_of]
        if len(inside) < len(waits):
            outside["wait_for"] = [whole_of[one] for one in waits]
    if outside:
        extra[OUTSIDE] = {**outside, **extra.get(OUTSIDE, {})}
    if outside or marked:
        row["source_extra"] = msgspec.json.encode(extra).decode()
