"""Files of public formats to trace files and back: the edge around formats/."""

import hashlib
import heapq
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

import msgspec

from tracer.analysis.arrivals import time_grid_ns
from tracer.errors import TraceError
from tracer.formats import BadRow, Detected, azure, mooncake
from tracer.schema import Footer, HashScheme, Request
from tracer.tracefile import TraceWriter, iter_requests, read_footer

FORMATS: dict[str, ModuleType] = {mooncake.NAME: mooncake, azure.NAME: azure}
HEAD_BYTES = 65_536
SORT_RUN_ROWS = 100_000
PROGRESS_ROWS = 2_000

OnProgress = Callable[[int, int], None]  # bytes read, bytes in all


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    source_format: str
    rows: int
    bad_rows: int
    first_bad: BadRow | None
    quarantine: Path | None  # bad rows with line and reason, JSON lines
    footer: Footer


def import_trace(
    path: Path,
    out_path: Path,
    *,
    source_format: str | None = None,
    strict: bool = False,
    producer: str = "chatreel",
    on_progress: OnProgress | None = None,
) -> ImportReport:
    """Read a public trace into a trace file.

    A bad row is counted and goes to OUT.rejected.jsonl; with `strict` it is a TraceError. Two passes over the file: the
    first finds what the footer must say (grid, tail rule, order), so that memory stays flat for millions of rows.
    """
    name = source_format or detect(path)
    if name not in FORMATS:
        raise TraceError("no such format", seen=repr(name), wanted=", ".join(FORMATS))
    found, arrivals, digest = _survey(path, FORMATS[name], strict)
    if not arrivals.rows:
        raise TraceError(f"no usable row of format {name}", path=str(path), seen=arrivals.first_bad_text(), wanted="rows")
    footer = Footer(
        producer=producer,
        source_format=name,
        source_sha256=digest,
        epoch_ns=found.epoch_ns,
        time_unit_ns=found.time_unit_ns,
        time_grid_ns=time_grid_ns(arrivals.stamps_ns),
        block_tokens=found.block_tokens,
        tail_rule="ceil" if found.tail_rule == "ceil" else "floor" if found.tail_rule == "floor" else None,
        hashes=HashScheme(chained=True, scope="global"),
        losses={key: value for key, value in (("bad_rows", arrivals.bad), ("inversions", arrivals.inversions)) if value},
        notes={**found.notes, "first_arrival_ns": str(arrivals.first_ns)},
    )
    quarantine = out_path.with_name(out_path.name + ".rejected.jsonl") if arrivals.bad else None
    _copy(path, out_path, FORMATS[name], footer, arrivals, quarantine, on_progress)
    return ImportReport(
        source_format=name,
        rows=arrivals.rows,
        bad_rows=arrivals.bad,
        first_bad=arrivals.first_bad,
        quarantine=quarantine,
        footer=footer,
    )


def detect(path: Path) -> str:
    """Name of the format that the first line shows. Raises TraceError."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise TraceError("cannot be read", path=str(path), seen=error.strerror, next_step="Check the path") from error
    for name, module in FORMATS.items():
        if module.looks_like(head):
            return name
    wanted = 'a Mooncake JSONL line ({"timestamp": ..., "hash_ids": ...}) or an Azure CSV header (TIMESTAMP,ContextTokens,...)'
    if head.startswith(b"PAR1"):
        raise TraceError("this is a Parquet file already", path=str(path), next_step="Use it directly: `chatreel analyze FILE`")
    raise TraceError("format not recognised", path=str(path), line=1, seen=repr(head.split(b"\n", 1)[0][:80]), wanted=wanted)


class _Arrivals:
    """What the first pass learns of the rows' times, in memory that does not grow with the trace."""

    def __init__(self) -> None:
        self.rows = self.bad = self.inversions = 0
        self.first_bad: BadRow | None = None
        self.first_ns = 2**63 - 1
        self.stamps_ns: list[int] = []  # the first 100k stamps; enough to see a grid
        self._last_ns = -(2**63)

    def add(self, arrival_ns: int) -> None:
        self.rows += 1
        self.inversions += arrival_ns < self._last_ns
        self._last_ns = arrival_ns
        self.first_ns = min(self.first_ns, arrival_ns)
        if len(self.stamps_ns) < SORT_RUN_ROWS:
            self.stamps_ns.append(arrival_ns)

    def reject(self, row: BadRow) -> None:
        self.bad += 1
        self.first_bad = self.first_bad or row

    def first_bad_text(self) -> str:
        return f"line {self.first_bad.line}: {self.first_bad.reason}" if self.first_bad else "an empty file"


def _survey(path: Path, module: ModuleType, strict: bool) -> tuple[Detected, _Arrivals, str]:
    found, arrivals, digest = Detected(), _Arrivals(), hashlib.sha256()

    def reject(row: BadRow) -> None:
        if strict:
            raise TraceError(
                row.reason,
                path=str(path),
                line=row.line,
                seen=repr(row.text[:80]),
                next_step="Leave out --strict to set such rows aside",
            )
        arrivals.reject(row)

    with open(path, "rb") as file:
        for row in module.read(_hashed(file, digest.update), found, reject):
            arrivals.add(row["arrival_ns"])
    return found, arrivals, digest.hexdigest()


def _hashed(lines: Iterable[bytes], update: Callable[[bytes], None]) -> Iterator[bytes]:
    for line in lines:
        update(line)
        yield line


def _copy(
    path: Path,
    out_path: Path,
    module: ModuleType,
    footer: Footer,
    arrivals: _Arrivals,
    quarantine: Path | None,
    on_progress: OnProgress | None,
) -> None:
    rejected: BinaryIO | None = open(quarantine, "wb") if quarantine else None
    try:

        def reject(row: BadRow) -> None:
            assert rejected is not None
            value = {"line": row.line, "reason": row.reason, "text": row.text}
            rejected.write(msgspec.json.encode(value) + b"\n")

        with open(path, "rb") as file, TraceWriter(out_path, footer) as writer:
            rows: Iterator[Request] = module.read(file, Detected(), reject)
            if arrivals.inversions:
                rows = _sorted(_numbered(rows), out_path.parent)
            size = os.fstat(file.fileno()).st_size
            for number, row in enumerate(rows):
                row["arrival_ns"] -= arrivals.first_ns
                writer.write({"request_id": number, **row})
                if on_progress is not None and number % PROGRESS_ROWS == 0:
                    on_progress(file.tell() if not arrivals.inversions else size, size)
    finally:
        if rejected is not None:
            rejected.close()


def _numbered(rows: Iterable[Request]) -> Iterator[Request]:
    """Keep the place in the source, so that an export can give its order back."""
    for place, row in enumerate(rows):
        extra = msgspec.json.decode(row.get("source_extra") or "{}")
        row["source_extra"] = msgspec.json.encode({**extra, "line": place}).decode()
        yield row


def _sorted(rows: Iterator[Request], folder: Path) -> Iterator[Request]:
    """By arrival, equal times in source order: sorted runs on disk, merged."""
    by_arrival = itemgetter("arrival_ns")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        runs: list[Path] = []
        while run := [row for _, row in zip(range(SORT_RUN_ROWS), rows, strict=False)]:
            run.sort(key=by_arrival)
            runs.append(Path(scratch) / str(len(runs)))
            runs[-1].write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in run))
        yield from heapq.merge(*(_run(one) for one in runs), key=by_arrival)


def _run(path: Path) -> Iterator[Request]:
    with open(path, "rb") as file:
        for line in file:
            yield msgspec.json.decode(line)


def export_trace(path: Path, out_path: Path, target_format: str) -> int:
    """Write a trace in a public format; returns the rows. What that format cannot hold is left out."""
    if target_format not in FORMATS:
        raise TraceError("no such format", seen=repr(target_format), wanted=", ".join(FORMATS))
    footer = read_footer(path)
    rows: Iterable[Request] = iter_requests(path)
    first_ns = int(footer.notes.get("first_arrival_ns", 0))
    if footer.losses.get("inversions"):
        rows = sorted(rows, key=lambda row: msgspec.json.decode(row.get("source_extra") or "{}").get("line", 0))
    count = 0
    with open(out_path, "wb") as file:
        for line in FORMATS[target_format].write(_moved(rows, first_ns), footer):
            file.write(line)
            count += 1
    return count - (target_format == azure.NAME)


def _moved(rows: Iterable[Request], by_ns: int) -> Iterator[Request]:
    for row in rows:
        row["arrival_ns"] += by_ns
        yield row
