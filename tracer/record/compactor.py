"""Segments to a trace file: sort by arrival, link sessions, number the ids densely.

Memory: 32 bytes per row, one dictionary entry per distinct block, and the linker's bounded tables; rows stay on disk.
"""

import os
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from tracer.analysis.arrivals import time_grid_ns
from tracer.blocks import DenseIds
from tracer.errors import TraceError
from tracer.record.messages import LIVE, Begun, Header, Row, Totals
from tracer.record.privacy import DIGEST_BYTES
from tracer.record.texts import NOTE, join_texts, texts_path
from tracer.record.writer import SegmentReader, lock_folder, read_record, segment_paths, segments_folder, series_folders
from tracer.retries import RetryLinker
from tracer.schema import COLUMNS, Footer, HashScheme, Request, Segment
from tracer.sessions import SessionLinker, Turn
from tracer.tracefile import TraceWriter, read_footer

LOCK_WAIT_S = 10.0  # a recorder that was killed leaves a worker that still writes for a moment
_OPEN_FILES = 16
_GRID_STAMPS = 100_000  # enough to see a grid
_SERIES_BIT = 40
_NAMES = {name for name, _, _ in COLUMNS}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactResult:
    path: Path
    rows: int
    losses: dict[str, int]


class _PeekRow(msgspec.Struct, tag="row"):
    flow: int
    arrival_ns: int


_peek = msgspec.msgpack.Decoder(_PeekRow | Begun | Totals).decode
_decode_row = msgspec.msgpack.Decoder(Row).decode


@dataclass(slots=True)
class _Index:
    """`flows` are made distinct by the number of the series, since each counts its own from one."""

    paths: list[Path]
    series: list[int]  # of each path
    header: Header | None = None
    arrivals_ns: "array[int]" = field(default_factory=lambda: array("q"))
    flows: "array[int]" = field(default_factory=lambda: array("q"))
    files: "array[int]" = field(default_factory=lambda: array("q"))
    offsets: "array[int]" = field(default_factory=lambda: array("q"))
    begun: "array[int]" = field(default_factory=lambda: array("q"))
    totals: dict[int, Counter[str]] = field(default_factory=dict)  # by series

    def losses(self) -> Counter[str]:
        return sum(self.totals.values(), Counter())


def compact(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    counts: Mapping[str, int] | None = None,
    keep_segments: bool = False,
) -> CompactResult:
    """Write the trace of a recording, given its segments folder or the trace path it was started with.

    Refuses while the recorder still writes, and where the trace exists. The segments are removed once the trace is
    complete. `counts`: totals that the segments may not hold yet.
    """
    folder = Path(source)
    if not folder.is_dir():
        folder = segments_folder(folder)
    if not folder.is_dir():
        raise TraceError("no recording here", path=str(source), wanted="a .segments folder")
    path = Path(out) if out is not None else folder.with_suffix(".parquet")
    for one in (path, texts_path(path)):
        if one.exists():
            raise TraceError("this trace exists already", path=str(one), next_step="Choose another -o path")
    with ExitStack() as locks:
        # Lengths and times alone can tell a known text, so the trace is its owner's (0600).
        locks.callback(os.umask, os.umask(0o077))
        for one in series_folders(folder):
            locks.callback(os.close, lock_folder(one, LOCK_WAIT_S))
        result = _compact(folder, path, counts or {})
        if texts_path(path).name == read_footer(path).notes.get(NOTE):
            join_texts(series_folders(folder), path)
    if not keep_segments:
        shutil.rmtree(folder)
    return result


def _compact(folder: Path, path: Path, counts: Mapping[str, int]) -> CompactResult:
    found = [(path, series) for series, one in enumerate(series_folders(folder)) for path in segment_paths(one)]
    index = _Index([path for path, _ in found], [series for _, series in found])
    for number in range(len(index.paths)):
        _scan(index, number)
    if index.header is None:
        raise TraceError(
            "nothing was recorded", path=str(folder), seen="no readable segment", wanted="at least one with a header"
        )
    losses = index.losses()
    for name, count in counts.items():
        losses[name] = max(losses[name], count)
    losses["requests_unfinished"] += len(np.setdiff1d(_column(index.begun), _column(index.flows)))
    kept = {name: count for name, count in sorted(losses.items()) if count}
    is_live = index.header.source_format == LIVE
    zero_ns = 0 if is_live else min(index.arrivals_ns, default=0)
    footer = _footer(index.header, kept, zero_ns)
    if index.header.keeps_text:
        footer = replace(footer, notes={NOTE: texts_path(path).name})
    if not is_live:  # many logs know whole seconds only
        footer = replace(footer, time_grid_ns=time_grid_ns(index.arrivals_ns[:_GRID_STAMPS]))
    with TraceWriter(path, footer) as writer:
        for row in _rows(index, zero_ns, is_live=is_live):
            writer.write(row)
    return CompactResult(path=path, rows=writer.rows_written, losses=kept)


def _scan(index: _Index, number: int) -> None:
    series = index.series[number]
    totals = index.totals.setdefault(series, Counter())
    with open(index.paths[number], "rb") as file:
        reader = SegmentReader(file)
        for record, (offset, payload) in enumerate(reader):
            if record == 0:
                _check_header(index, number, payload)
                continue
            match _peek(payload):
                case _PeekRow(flow=flow, arrival_ns=arrival_ns):
                    index.arrivals_ns.append(arrival_ns)
                    index.flows.append(series << _SERIES_BIT | flow)
                    index.files.append(number)
                    index.offsets.append(offset)
                case Begun(flow=flow):
                    index.begun.append(series << _SERIES_BIT | flow)
                case Totals(counts=counts):
                    for name, count in counts.items():
                        totals[name] = max(totals[name], count)
    if reader.torn_bytes:
        totals["torn_segments"] += 1
        totals["torn_bytes"] += reader.torn_bytes


def _check_header(index: _Index, number: int, payload: bytes) -> None:
    header = msgspec.msgpack.decode(payload, type=Header)
    if index.header is not None and header != index.header:
        raise TraceError(
            "segments of different recordings in one folder",
            path=str(index.paths[number]),
            seen=f"key {header.key_id}, tokenizer {header.tokenizer}",
            wanted=f"key {index.header.key_id}, tokenizer {index.header.tokenizer}",
            next_step="Put each recording in a folder of its own",
        )
    index.header = header


def _footer(header: Header, losses: dict[str, int], zero_ns: int) -> Footer:
    return Footer(
        producer=header.producer,
        source_format=header.source_format,
        epoch_ns=header.epoch_ns + zero_ns,
        block_tokens=header.block_tokens,
        hashes=HashScheme(tokenizer=header.tokenizer, template=header.template, key_id=header.key_id, scope="global"),
        losses=losses,
    )


def _rows(index: _Index, zero_ns: int, *, is_live: bool) -> Iterator[Request]:
    """`zero_ns`: the arrival at which the trace begins."""
    blocks: DenseIds[bytes] = DenseIds()
    clients: DenseIds[bytes] = DenseIds()
    contents: DenseIds[bytes] = DenseIds()
    linker, retries = SessionLinker(), RetryLinker()
    for request_id, record in enumerate(_in_arrival_order(index)):
        row = {name: value for name, value in record.row.items() if name in _NAMES}
        link = linker.link(_turn(request_id, record, row.get("end_ns"), is_live=is_live))
        row |= {
            "request_id": request_id,
            "arrival_ns": record.arrival_ns - zero_ns,
            "client_id": clients[record.client] if record.client is not None else None,
            "retry_of": _retry(retries, request_id, record) if record.body is not None else None,
            "session_id": link.session_id,
            "turn": link.turn,
            "parent_request_id": link.parent_request_id,
            "think_ns": link.think_ns,
        }
        if record.input_hashes or record.input_tail:
            row["input_blocks"] = _ids(blocks, record.input_hashes)
            row["input_tail_id"] = blocks[record.input_tail] if record.input_tail else None
            row["output_blocks"] = _ids(blocks, record.output_hashes)
        if record.parts:
            row["segments"] = [
                Segment(role=role, kind=kind, tokens=tokens, content_id=contents[content])
                for role, kind, tokens, content in record.parts
            ]
        yield cast(Request, row)


def _retry(retries: RetryLinker, request_id: int, record: Row) -> int | None:
    end_ns, has_failed = record.row.get("end_ns"), record.row.get("error_kind") is not None
    took_ns = end_ns if isinstance(end_ns, int) else 0
    return retries.link(request_id, record.body or b"", record.arrival_ns, record.arrival_ns + took_ns, has_failed=has_failed)


def _turn(request_id: int, record: Row, end_ns: object, *, is_live: bool) -> Turn:
    return Turn(
        request_id=request_id,
        arrival_ns=record.arrival_ns,
        end_ns=record.arrival_ns + end_ns if isinstance(end_ns, int) else None,
        end_is_unknown=end_ns is None and not is_live and "error_kind" not in record.row,
        client=record.client,
        session_key=record.session,
        leaves=record.leaves,
        extends=record.extends,
    )


def _ids(blocks: "DenseIds[bytes]", joined: bytes) -> list[int]:
    return [blocks[joined[at : at + DIGEST_BYTES]] for at in range(0, len(joined), DIGEST_BYTES)]


def _in_arrival_order(index: _Index) -> Iterator[Row]:
    """A request written twice, because the disk failed in between and could not be cut, counts once."""
    order = np.lexsort((_column(index.flows), _column(index.arrivals_ns)))
    previous = -1
    with _Files(index.paths) as file_of:
        for at in order.tolist():
            if index.flows[at] == previous:
                continue
            previous = index.flows[at]
            file = file_of(index.files[at])
            file.seek(index.offsets[at])
            payload = read_record(file)
            if payload is not None:
                yield _decode_row(payload)


def _column(values: "array[int]") -> NDArray[np.int64]:
    return np.frombuffer(values, dtype=np.int64)


class _Files:
    """Keeps the few segments open that arrival order jumps between."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._open: dict[int, BinaryIO] = {}

    def __enter__(self) -> Callable[[int], BinaryIO]:
        return self._get

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    def _get(self, number: int) -> BinaryIO:
        if number not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            self._open[number] = open(self._paths[number], "rb")
        return self._open[number]
