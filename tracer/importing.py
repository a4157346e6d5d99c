"""Files of public formats to trace files and back: the edge around formats/."""

import gzip
import hashlib
import heapq
import os
import tempfile
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from tracer.analysis.arrivals import time_grid_ns
from tracer.errors import TraceError
from tracer.formats import (
    BadRow,
    Detected,
    Format,
    aiperf,
    aiperf_sessions,
    azure,
    bailian,
    burstgpt,
    dynamo,
    dynamo_trace,
    guidellm,
    inference_perf,
    mooncake,
    named_csv,
    ragpulse,
    source_extra,
    timed_trace,
    weka,
)
from tracer.formats.ids import FirstSeen
from tracer.formats.layout import is_whole
from tracer.formats.targets import Target
from tracer.schema import COLUMNS, Footer, HashScheme, Request
from tracer.tracefile import TraceWriter, iter_requests, read_footer

# In the order in which they are asked whether they know a file: the looser come last.
FORMATS: dict[str, Format] = {
    one.NAME: one
    for one in cast(
        tuple[Format, ...],
        (azure, burstgpt, weka, ragpulse, bailian, dynamo_trace, dynamo, aiperf, timed_trace, mooncake, named_csv),
    )
}
TARGETS: dict[str, Target] = {  # files for load generators; some are read as well
    one.NAME: one
    for one in cast(tuple[Target, ...], (aiperf, aiperf_sessions, guidellm, timed_trace, inference_perf, dynamo, dynamo_trace))
}
HEAD_BYTES = 65_536
SORT_RUN_ROWS = 100_000
PROGRESS_ROWS = 2_000
PLACE = "place_in_source"  # in source_extra, only where the source was not sorted by time

OnProgress = Callable[[int, int], None]  # bytes read, bytes in all


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    source_format: str
    rows: int
    bad_rows: int
    inversions: int  # rows that came before their predecessor in time; they were sorted
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
    columns: dict[str, str] | None = None,
    on_progress: OnProgress | None = None,
) -> ImportReport:
    """Read a public trace (also gzipped) into a trace file. `columns`: of plain CSV, what is in which column.

    A bad row is counted and goes to OUT.rejected.jsonl; with `strict` it is a TraceError. One pass over the file, in memory
    that stays flat for millions of rows; a second one only where rows turn out not to be in order of time, or time not to be
    in the unit that the format is said to have.
    """
    name = source_format or detect(path)
    if name not in FORMATS:
        raise TraceError("no such format", seen=repr(name), wanted=" or ".join(FORMATS))
    _refuse_same(path, out_path)
    job = _Job(path, out_path, name, strict, producer, columns or {}, on_progress)
    job.rejected.unlink(missing_ok=True)  # of an earlier import to the same place
    try:
        footer, survey = _straight(job)
    except _NeedsSurvey:
        job.rejected.unlink(missing_ok=True)
        footer, survey = _surveyed(job)
    except TraceError as error:
        error.path = error.path or str(path)  # a format knows no path
        raise
    return ImportReport(
        source_format=name,
        rows=survey.rows,
        bad_rows=survey.bad_rows,
        inversions=survey.inversions,
        first_bad=survey.first_bad,
        quarantine=job.rejected if survey.bad_rows else None,
        footer=footer,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    rows: int  # written
    losses: dict[str, int]  # what the file does not say, and in how many requests
    usage: str | None  # the tool's options, where the file is for a tool


def export_trace(path: Path, out_path: Path, target_format: str) -> ExportReport:
    """Write a trace in a public format or for a tool. What it cannot hold is left out, and counted.

    In order of time; back to its own format, a source comes in its own order.
    """
    if target_format not in FORMATS and target_format not in TARGETS:
        raise TraceError("no such format", seen=repr(target_format), wanted=" or ".join({**FORMATS, **TARGETS}))
    _refuse_same(path, out_path)
    footer = read_footer(path)
    tally = _Tally(FORMATS.get(target_format) or TARGETS[target_format], footer)
    rows = iter_requests(path)
    if footer.losses.get("inversions") and footer.source_format == target_format:
        rows = _sorted(rows, out_path.parent, lambda row: int(source_extra(row).get(PLACE, row["request_id"])))
    if target_format in TARGETS:
        lines = TARGETS[target_format].write(tally.watched(rows), footer, tally.losses)
    else:
        lines = FORMATS[target_format].write(tally.watched(rows), footer)
    partial = out_path.with_name(f".{out_path.name}.{os.getpid()}.partial")
    try:
        with writing(out_path), open(partial, "wb") as file:
            file.writelines(lines)
        partial.replace(out_path)
    finally:
        partial.unlink(missing_ok=True)
    count = tally.rows - sum(number for what, number in tally.losses.items() if what.endswith("left out"))
    usage = TARGETS[target_format].usage(str(out_path), footer, count) if target_format in TARGETS else None
    return ExportReport(rows=count, losses=dict(tally.losses), usage=usage)


_NOT_MISSED = frozenset({"request_id", "arrival_ns", "source_extra", "input_tail_id", "group_id"})  # derived, or ours alone


class _Tally:
    """Counts what goes by and the target has no place for. A source in its own format loses nothing."""

    def __init__(self, target: Format | Target, footer: Footer) -> None:
        self.rows = 0
        self.losses: Counter[str] = Counter()
        is_source = footer.source_format == target.NAME
        self._is_own = is_source and (target.NAME not in TARGETS or is_whole(footer, target.NAME))
        self._missed = [name for name, _, _ in COLUMNS if name not in target.HOLDS | _NOT_MISSED and "count_source" not in name]
        self._step_ns = target.STEP_NS
        size = getattr(target, "BLOCK_TOKENS", None)
        is_coarser = target.NAME not in TARGETS and "input_blocks" in target.HOLDS and size and footer.block_tokens < size
        self._coarser = f"sharing below {size} tokens" if is_coarser else None

    def watched(self, rows: Iterable[Request]) -> Iterator[Request]:
        losses, missed, step_ns = self.losses, self._missed, self._step_ns
        for row in rows:
            self.rows += 1
            if not self._is_own:
                losses.update(name for name in missed if row.get(name) is not None)
                losses.update([f"times finer than {step_ns / 10**6:g} ms"] if row["arrival_ns"] % step_ns else ())
                losses.update([self._coarser] if self._coarser and row.get("input_blocks") else ())
            yield row


def detect(path: Path) -> str:
    """Name of the format that the first lines show. Raises TraceError."""
    with reading(path) as (file, _):
        head = file.read(HEAD_BYTES)
    for name, module in FORMATS.items():
        if name != named_csv.NAME and module.looks_like(head):
            return name
    if head.startswith(b"PAR1"):
        raise TraceError("this is a Parquet file already", path=str(path), next_step="Use it directly: `chatreel analyze FILE`")
    raise TraceError(
        "format not recognised",
        path=str(path),
        line=1,
        seen=repr(head.split(b"\n", 1)[0][:80].decode("utf-8", "replace")),
        wanted="one of " + ", ".join(FORMATS),
        next_step="If it is one of these all the same, name it with --format; CSV of your own: say --map arrival=COLUMN,...",
    )


class _Survey:
    """What the first pass learns of the rows' times, in memory that does not grow with the trace."""

    def __init__(self) -> None:
        self.rows = self.bad_rows = self.inversions = 0
        self.first_bad: BadRow | None = None
        self.first_ns = 2**63 - 1
        self.stamps_ns: list[int] = []  # the first 100k stamps; enough to see a grid
        self.sha256 = hashlib.sha256()
        self._last_ns = -(2**63)

    def add(self, arrival_ns: int) -> None:
        self.rows += 1
        self.inversions += arrival_ns < self._last_ns
        self._last_ns = arrival_ns
        self.first_ns = min(self.first_ns, arrival_ns)
        if len(self.stamps_ns) < SORT_RUN_ROWS:
            self.stamps_ns.append(arrival_ns)

    def reject(self, row: BadRow) -> None:
        self.bad_rows += 1
        self.first_bad = self.first_bad or row

    def hashed(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        for line in lines:
            self.sha256.update(line)
            yield line


@dataclass(frozen=True, slots=True)
class _Job:
    source: Path
    out: Path
    source_format: str
    strict: bool
    producer: str
    columns: dict[str, str]
    on_progress: OnProgress | None

    @property
    def rejected(self) -> Path:
        return self.out.with_name(self.out.name + ".rejected.jsonl")

    def read(self, file: Iterable[bytes], found: Detected, bad: Callable[[BadRow], None]) -> Iterator[Request]:
        return FORMATS[self.source_format].read(file, found, bad)

    def detected(self, in_seconds: bool = False) -> Detected:
        """A fresh one; files that the format says belong to the source are read from beside it."""
        names = getattr(FORMATS[self.source_format], "SIDE_FILES", ())
        sides = {name: path for name in names if (path := self.source.with_name(name)).exists()}
        side_lines: dict[str, Sequence[bytes]] = {name: _lines(path) for name, path in sides.items()}
        return Detected(in_seconds=in_seconds, side_lines=side_lines, columns=self.columns)

    def rejecting(self, then: Callable[[BadRow], None]) -> Callable[[BadRow], None]:
        """What to do with a bad row: stop, or go on with `then`."""
        return self._stop if self.strict else then

    def _stop(self, row: BadRow) -> None:
        raise TraceError(
            row.reason,
            path=str(self.source),
            line=row.line,
            seen=repr(row.text[:80]),
            next_step="Leave out --strict to set such rows aside",
        )


class _NeedsSurvey(Exception):
    """The rows cannot be written as they come; nothing has been."""


def _straight(job: _Job) -> tuple[Footer, _Survey]:
    """Rows go out as they come in. Raises _NeedsSurvey at the first one that is earlier than its predecessor."""
    found, survey = job.detected(), _Survey()
    with (
        TraceWriter(job.out, Footer()) as writer,
        _set_aside(job.rejected) as set_aside,
        reading(job.source) as (file, raw),
        _progress(job, raw) as progress,
    ):

        def reject(row: BadRow) -> None:
            survey.reject(row)
            set_aside(row)

        for number, row in enumerate(job.read(survey.hashed(file), found, job.rejecting(reject))):
            survey.add(row["arrival_ns"])
            if survey.inversions:
                raise _NeedsSurvey
            row["request_id"] = number
            row["arrival_ns"] -= survey.first_ns
            writer.write(row)
            progress(number)
        if found.in_seconds:
            raise _NeedsSurvey
        _require_rows(job, survey)
        writer.footer = _footer(job.source_format, job.producer, found, survey)
    return writer.footer, survey


def _surveyed(job: _Job) -> tuple[Footer, _Survey]:
    """Two passes: the first finds what the footer must say (unit, grid, tail rule, order)."""
    found, survey = _survey(job, job.detected())
    if found.in_seconds:
        found, survey = _survey(job, job.detected(in_seconds=True))
    _require_rows(job, survey)
    footer = _footer(job.source_format, job.producer, found, survey)
    with (
        TraceWriter(job.out, footer) as writer,
        _set_aside(job.rejected) as set_aside,
        reading(job.source) as (file, raw),
        _progress(job, raw) as progress,
    ):
        rows = job.read(file, job.detected(in_seconds=found.in_seconds), set_aside)
        if survey.inversions:
            rows = _renumbered(_sorted(_placed(rows), job.out.parent, lambda row: row["arrival_ns"]))
        for number, row in enumerate(rows):
            row["request_id"] = number
            row["arrival_ns"] -= survey.first_ns
            writer.write(row)
            progress(number)
    return footer, survey


def _survey(job: _Job, found: Detected) -> tuple[Detected, _Survey]:
    survey = _Survey()
    with reading(job.source) as (file, _):
        for row in job.read(survey.hashed(file), found, job.rejecting(survey.reject)):
            survey.add(row["arrival_ns"])
    return found, survey


def _require_rows(job: _Job, survey: _Survey) -> None:
    if not survey.rows:
        raise TraceError(
            f"no usable row of format {job.source_format}",
            path=str(job.source),
            line=survey.first_bad.line if survey.first_bad else None,
            seen=survey.first_bad.reason if survey.first_bad else "no row at all",
            next_step=f"The formats known are {', '.join(FORMATS)}",
        )


@contextmanager
def _progress(job: _Job, file: BinaryIO) -> Iterator[Callable[[int], None]]:
    """What to call with each row's number."""
    size, tell = os.fstat(file.fileno()).st_size, job.on_progress or (lambda done, size: None)

    def progress(number: int) -> None:
        if number % PROGRESS_ROWS == 0:
            tell(file.tell(), size)

    yield progress
    tell(size, size)


def _footer(name: str, producer: str, found: Detected, survey: _Survey) -> Footer:
    counts = {"bad_rows": survey.bad_rows, "inversions": survey.inversions}
    return Footer(
        producer=producer,
        source_format=name,
        source_sha256=survey.sha256.hexdigest(),
        epoch_ns=None if found.epoch_ns is None else found.epoch_ns + survey.first_ns,
        time_unit_ns=found.time_unit_ns,
        time_grid_ns=time_grid_ns(survey.stamps_ns),
        block_tokens=found.block_tokens,
        tail_rule=found.tail_rule,
        hashes=HashScheme(scope=found.hash_scope),
        losses={key: count for key, count in counts.items() if count},
        notes=found.notes | ({"first_arrival_ns": str(survey.first_ns)} if found.epoch_ns is None else {}),
    )


@contextmanager
def _set_aside(path: Path) -> Iterator[Callable[[BadRow], None]]:
    """A sink for bad rows, with line and reason; the file appears with the first of them."""
    file: BinaryIO | None = None

    def set_aside(row: BadRow) -> None:
        nonlocal file
        if file is None:
            with writing(path):
                file = open(path, "wb")
        value = {"line": row.line, "reason": row.reason, "text": row.text}
        file.write(msgspec.json.encode(value) + b"\n")

    try:
        yield set_aside
    finally:
        if file is not None:
            file.close()


def _lines(path: Path) -> list[bytes]:
    with reading(path) as (file, _):
        return file.readlines()


def _refuse_same(path: Path, out_path: Path) -> None:
    if out_path.exists() and out_path.samefile(path):
        raise TraceError("source and result are the same file", path=str(path), next_step="Choose another -o path")


def _placed(rows: Iterable[Request]) -> Iterator[Request]:
    """Keep the place in the source, so that an export can give its order back."""
    for place, row in enumerate(rows):
        row["source_extra"] = msgspec.json.encode({**source_extra(row), PLACE: place}).decode()
        yield row


def _sorted(rows: Iterable[Request], folder: Path, key: Callable[[Request], int]) -> Iterator[Request]:
    """Equal keys stay in order. Runs of 100k rows are sorted in memory and merged from disk."""
    rows = iter(rows)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".sorting-") as scratch:
        runs: list[Path] = []
        while run := [row for _, row in zip(range(SORT_RUN_ROWS), rows, strict=False)]:
            run.sort(key=key)
            runs.append(Path(scratch) / str(len(runs)))
            runs[-1].write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in run))
        yield from heapq.merge(*(_run(one) for one in runs), key=key)


def _run(path: Path) -> Iterator[Request]:
    with open(path, "rb") as file:
        for line in file:
            yield msgspec.json.decode(line)


def _renumbered(rows: Iterable[Request]) -> Iterator[Request]:
    """Block ids in the order in which the sorted rows show them; other requests by their new numbers."""
    numbers, number_of = FirstSeen(), _Places()
    for number, row in enumerate(rows):
        number_of.keep(int(source_extra(row)[PLACE]), number)
        _relink(row, number_of)
        if blocks := row.get("input_blocks"):
            row["input_blocks"] = numbers.row(blocks)
        tail = row.get("input_tail_id")
        if tail is not None:
            row["input_tail_id"] = numbers[tail]
        if answered := row.get("output_blocks"):
            row["output_blocks"] = numbers.row(answered)
        yield row


class _Places:
    """From place in the source to request number, 8 bytes each."""

    def __init__(self) -> None:
        self._numbers = array("q")

    def keep(self, place: int, number: int) -> None:
        if place >= len(self._numbers):
            self._numbers.extend([-1] * (place + 1 - len(self._numbers)))
        self._numbers[place] = number

    def number(self, place: int) -> int | None:
        """None: it comes later in time, so nothing can have waited for it."""
        number = self._numbers[place] if place < len(self._numbers) else -1
        return number if number >= 0 else None


def _relink(row: Request, number_of: _Places) -> None:
    parent, waits = row.get("parent_request_id"), row.get("wait_for")
    if parent is not None:
        row["parent_request_id"] = number_of.number(parent)
    if waits is not None:
        row["wait_for"] = [number for place in waits if (number := number_of.number(place)) is not None]


@contextmanager
def reading(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """A file and the bytes on disk that it comes from, which differ where it is gzipped. Raises TraceError."""
    try:
        raw = open(path, "rb")
        is_gzip = raw.peek(2)[:2] == b"\x1f\x8b"
    except OSError as error:
        raise TraceError("cannot be read", path=str(path), seen=error.strerror, next_step="Check the path") from error
    with raw:
        if not is_gzip:
            yield raw, raw
            return
        try:
            with gzip.open(raw, "rb") as plain:
                yield cast(BinaryIO, plain), raw
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(
                "compressed file is cut or damaged", path=str(path), next_step="Decompress what is left of it"
            ) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TraceError(
            "cannot write here", path=str(path), seen=error.strerror or str(error), next_step="Choose another -o path"
        ) from error
