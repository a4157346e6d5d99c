"""Captures to trace files, through the worker that records live traffic: what it never writes is not written here either."""

import heapq
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import cast

import msgspec

from tracer.captures import (
    Capture,
    Captured,
    Rejected,
    gateway_csv,
    goreplay,
    har,
    langfuse,
    litellm,
    mitm,
    openai_jsonl,
    otel,
    sglang,
)
from tracer.errors import TraceError
from tracer.importing import reading, writing
from tracer.record.compactor import compact
from tracer.record.messages import Counted, Ended, Started, WorkerConfig
from tracer.record.privacy import create_key, load_key
from tracer.record.worker import Worker, build
from tracer.record.writer import segments_folder
from tracer.schema import Footer
from tracer.tracefile import read_footer
from tracer.wire import COMPLETIONS

# In the order in which they are asked whether they know a file: the looser come last.
CAPTURES: dict[str, Capture] = {
    one.NAME: one
    for one in cast(tuple[Capture, ...], (mitm, goreplay, sglang, har, otel, langfuse, litellm, gateway_csv, openai_jsonl))
}
HEAD_BYTES = 65_536
MAX_HELD_BYTES = 64 << 20  # of captured requests that wait for their turn in time
MAX_REPORTED = 100_000  # rejected entries in the file beside the trace


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    source_format: str
    rows: int
    bad_entries: int  # faults: also in `quarantine`
    losses: dict[str, int]  # all that was counted, by name
    secrets_in_source: int  # requests whose credentials or cookies stand in the source in clear: warn
    first_bad: Rejected | None
    quarantine: Path | None  # place and reason, JSON lines; no text of the capture
    key_path: Path
    footer: Footer


def import_capture(
    path: Path,
    out_path: Path,
    *,
    source_format: str | None = None,
    tokenizer: str = "cl100k",
    key_path: Path | None = None,
    strict: bool = False,
    producer: str | None = None,
) -> CaptureReport:
    """Read a capture of LLM traffic (also gzipped) into a trace file.

    A bad entry is counted and named in OUT.rejected.jsonl; with `strict` it is a TraceError. `key_path`: an existing key,
    to make traces that can be compared; else a new one is made beside `out_path`. An import that fails leaves no file.
    """
    name = source_format or detect_capture(path)
    if name not in CAPTURES:
        raise TraceError("no such capture format", seen=repr(name), wanted=" or ".join(CAPTURES))
    rejected = out_path.with_name(out_path.name + ".rejected.jsonl")
    log = _Log(path, strict)
    with _laid_out(path, out_path, key_path) as (folder, key):
        config = WorkerConfig(
            folder=str(folder),
            key_path=str(key),
            tokenizer=tokenizer,
            chunk_times=False,
            epoch_ns=0,
            producer=producer or f"chatreel {metadata.version('chatreel')}",
            source_format=name,
        )
        worker = build(config, 0)
        try:
            rows = _drive(worker, name, path, log)
        finally:
            worker.close()
        _refuse_failed_disk(worker, folder)
        if not rows:
            raise _nothing(name, path, log)
        result = compact(folder, out_path)
    log.write(rejected)
    return CaptureReport(
        source_format=name,
        rows=result.rows,
        bad_entries=log.faults,
        losses=result.losses,
        secrets_in_source=log.secrets,
        first_bad=log.first,
        quarantine=rejected if log.faults else None,
        key_path=key,
        footer=read_footer(out_path),
    )


def detect_capture(path: Path) -> str:
    """Name of the format that the first bytes show. Raises TraceError."""
    with _placing_errors(path), reading(path) as (file, _):
        head = file.read(HEAD_BYTES)
    for name, module in CAPTURES.items():
        if module.looks_like(head):
            return name
    raise TraceError(
        "no capture that is known",
        path=str(path),
        wanted="one of " + ", ".join(CAPTURES),
        next_step="If it is one of these all the same, name it with --format",
    )


@dataclass(slots=True)
class _Log:
    """What became no row, and what the user must know of the source."""

    path: Path
    strict: bool
    counts: Counter[str] = field(default_factory=Counter)
    faults: int = 0
    secrets: int = 0
    first: Rejected | None = None
    lines: list[bytes] = field(default_factory=list)

    def reject(self, entry: Rejected) -> None:
        self.counts[entry.counted_as] += 1
        if not entry.is_fault:
            return
        if self.strict:
            raise TraceError(
                f"{entry.place}: {entry.reason}", path=str(self.path), next_step="Leave out --strict to set such entries aside"
            )
        self.faults += 1
        self.first = self.first or entry
        if len(self.lines) < MAX_REPORTED:
            self.lines.append(msgspec.json.encode({"place": entry.place, "reason": entry.reason}) + b"\n")

    def write(self, out_path: Path) -> None:
        out_path.unlink(missing_ok=True)  # of an earlier import to the same place
        if self.lines:
            with writing(out_path), open(out_path, "wb") as file:
                file.writelines(self.lines)


def _drive(worker: Worker, name: str, path: Path, log: _Log) -> int:
    """Feed the worker; returns the requests read."""
    count = 0

    def counted(found: Iterable[Captured]) -> Iterator[Captured]:
        nonlocal count
        for captured in found:
            count += 1
            log.secrets += captured.has_secrets
            yield captured

    with reading(path) as (file, _), _placing_errors(path):
        for message in _in_time_order(counted(CAPTURES[name].read(file, log.reject))):
            try:
                worker.take(message)
            except Exception as error:  # as in live recording: one odd request must not cost the others
                log.reject(Rejected(f"request {message.flow}", f"could not be recorded ({type(error).__name__})"))
    worker.take(Counted(counts=dict(log.counts)))
    return count


def _in_time_order(found: Iterable[Captured]) -> Iterator[Started | Ended]:
    """As the recorder would have heard of them, so that a raw prompt meets the answer that it continues.

    Captures are nearly sorted, so a bounded window is enough; further apart, such links are lost, and nothing else.
    """
    waiting: list[tuple[int, int, Started | Ended]] = []
    held = number = 0
    for flow, captured in enumerate(found):
        started, ended = _messages(flow, captured)
        end_ns = captured.arrival_ns + max(captured.facts.end_ns or 0, 0)
        heapq.heappush(waiting, (captured.arrival_ns, number, started))
        heapq.heappush(waiting, (end_ns, number + 1, ended))
        number += 2
        held += _size(started) + _size(ended)
        while held > MAX_HELD_BYTES:
            _, _, message = heapq.heappop(waiting)
            held -= _size(message)
            yield message
    while waiting:
        yield heapq.heappop(waiting)[2]


def _messages(flow: int, captured: Captured) -> tuple[Started, Ended]:
    endpoint = captured.endpoint
    started = Started(
        flow=flow,
        arrival_ns=captured.arrival_ns,
        endpoint=endpoint if captured.has_prompt else COMPLETIONS,  # where no prompt is none, not an empty chat
        body=captured.body or None,
        encoding=captured.encoding,
        credential=captured.credential or captured.identity,
        session_header=captured.session,
    )
    ended = Ended(
        flow=flow,
        arrival_ns=captured.arrival_ns,
        endpoint=endpoint,
        facts=captured.facts,
        upstream=captured.upstream or None,
    )
    return started, ended


def _size(message: Started | Ended) -> int:
    if isinstance(message, Started):
        return 500 + len(message.body or b"")
    facts = message.facts
    return 500 + len(facts.text) + len(facts.reasoning) + len(facts.tool_text) + 8 * len(facts.token_ids or ())


def _refuse_failed_disk(worker: Worker, folder: Path) -> None:
    report = worker.report()
    if report.disk_error or report.counts.get("rows_lost_on_disk"):
        raise TraceError(f"cannot write here: {report.disk_error or 'rows were lost'}", path=str(folder))


def _nothing(name: str, path: Path, log: _Log) -> TraceError:
    counts = ", ".join(f"{counted} {count:,}" for counted, count in sorted(log.counts.items()))
    return TraceError(
        f"no usable request in this {name} capture",
        path=str(path),
        seen=f"{log.first.place}: {log.first.reason}" if log.first else counts or "no entry at all",
        next_step=f"The formats known are {', '.join(CAPTURES)}: name one with --format",
    )


@contextmanager
def _laid_out(path: Path, out: Path, key_path: Path | None) -> Iterator[tuple[Path, Path]]:
    """(segments folder, key file). Whatever goes wrong meanwhile leaves nothing behind."""
    if out.suffix != ".parquet":
        raise TraceError("a trace is a Parquet file", seen=str(out), wanted="a path that ends in .parquet")
    if out.exists():
        raise TraceError("this trace exists already", path=str(out), next_step="Choose another -o path")
    folder, key = segments_folder(out), key_path or out.with_suffix(".key")
    if folder.exists():
        raise TraceError("an unfinished recording stands here", path=str(folder), next_step="Choose another -o path")
    with reading(path):
        pass
    if key_path is None:
        create_key(key)
    else:
        load_key(key)
    try:
        with writing(folder):
            folder.mkdir(mode=0o700)
        yield folder, key
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if key_path is None:
            key.unlink(missing_ok=True)
        raise


@contextmanager
def _placing_errors(path: Path) -> Iterator[None]:
    """Readers know no path."""
    try:
        yield
    except TraceError as error:
        error.path = error.path or str(path)
        raise
