"""Trace files on disk: write rows in bounded memory, read them back whole, in batches, or lazily.

Block ids are delta-encoded before zstd: a tenth of the same trace as JSON lines (bench/trace_size.py).
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tracer.blocks import Blocks
from tracer.errors import TraceError
from tracer.schema import SCHEMA, SCHEMA_VERSION, Footer, Request

if TYPE_CHECKING:
    import polars as pl

FOOTER_KEY = b"chatreel"
ROW_GROUP_ROWS = 16_384  # some 20 MB of block ids at 200 ids a row: enough to compress well, small enough to stream

_DELTA = {
    "request_id": "DELTA_BINARY_PACKED",
    "arrival_ns": "DELTA_BINARY_PACKED",
    **{f"{name}.list.element": "DELTA_BINARY_PACKED" for name in ("input_blocks", "output_blocks", "wait_for")},
    **{f"{name}.list.element": "DELTA_BINARY_PACKED" for name in ("chunk_delta_us", "chunk_tokens")},
}


class TraceWriter:
    """Writes a trace row by row; the file appears under its name only when `close` has written the footer.

    Rows must come in arrival order; a row that does not is a `TraceError`. Leaving the `with` block by an
    exception removes the unfinished file.
    """

    def __init__(self, path: str | os.PathLike[str], footer: Footer) -> None:
        self.path = Path(path)
        self.footer = footer
        self._partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        self._rows: list[Request] = []
        self._last_arrival_ns = 0
        self.rows_written = 0
        try:
            self._file = pq.ParquetWriter(
                self._partial,
                SCHEMA,
                compression="zstd",
                use_dictionary=[f.name for f in SCHEMA if f.type == pa.string()],
                column_encoding=_DELTA,
                write_statistics=True,
            )
        except OSError as error:
            raise TraceError(
                f"cannot write here: {error.strerror or error}", path=str(self.path), next_step="Choose another -o path"
            ) from error

    def write(self, row: Request) -> None:
        arrival_ns = row["arrival_ns"]
        if arrival_ns < self._last_arrival_ns:
            raise TraceError(
                "rows must be sorted by arrival_ns",
                path=str(self.path),
                line=self.rows_written + len(self._rows) + 1,
                seen=str(arrival_ns),
                wanted=f">= {self._last_arrival_ns}",
            )
        self._last_arrival_ns = arrival_ns
        self._rows.append(row)
        if len(self._rows) >= ROW_GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._rows:
            return
        count = len(self._rows)
        present = set().union(*self._rows)  # most columns of most traces are absent
        columns = [
            pa.array([row.get(f.name) for row in self._rows], type=f.type) if f.name in present else pa.nulls(count, f.type)
            for f in SCHEMA
        ]
        self._file.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))
        self.rows_written += len(self._rows)
        self._rows.clear()

    def write_columns(self, table: pa.Table) -> None:
        """Many rows at once, in arrival order; columns that are not there are absent."""
        self._flush()
        arrival = column(table, "arrival_ns")
        if len(arrival) and (arrival[0] < self._last_arrival_ns or bool((np.diff(arrival) < 0).any())):
            raise TraceError("rows must be sorted by arrival_ns", path=str(self.path))
        columns = [
            table[one.name].cast(one.type) if one.name in table.column_names else pa.nulls(len(arrival), one.type)
            for one in SCHEMA
        ]
        self._file.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), row_group_size=ROW_GROUP_ROWS)
        self.rows_written += len(arrival)
        self._last_arrival_ns = int(arrival[-1]) if len(arrival) else self._last_arrival_ns

    def close(self) -> None:
        self._flush()
        self._file.add_key_value_metadata({FOOTER_KEY: self.footer.to_json()})
        self._file.close()
        self._partial.replace(self.path)

    def abandon(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, kind: object, _error: object, _traceback: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def write_trace(path: str | os.PathLike[str], rows: Iterable[Request], footer: Footer) -> int:
    """Write rows, which must be in arrival order, and return how many there were."""
    with TraceWriter(path, footer) as writer:
        for row in rows:
            writer.write(row)
    return writer.rows_written


def _open(path: str | os.PathLike[str]) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, pre_buffer=False)  # buffered, it keeps what was read: 70 MB more by a million rows
    except FileNotFoundError as error:
        raise TraceError("no such file", path=str(path), next_step="Check the path") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise TraceError(
            "not a chatreel trace",
            path=str(path),
            seen=_first_bytes(path),
            wanted="a Parquet file",
            next_step="For a public trace or a log, run `chatreel import FILE -o trace.parquet` first",
        ) from error


def _first_bytes(path: str | os.PathLike[str]) -> str:
    try:
        with open(path, "rb") as file:
            return repr(file.read(16))
    except OSError as error:
        return str(error.strerror)


def read_footer(path: str | os.PathLike[str]) -> Footer:
    with _open(path) as file:
        return _footer_of(file, path)


def _footer_of(file: pq.ParquetFile, path: str | os.PathLike[str]) -> Footer:
    raw = (file.metadata.metadata or {}).get(FOOTER_KEY)
    if raw is None:
        raise TraceError(
            "a Parquet file, but not a chatreel trace",
            path=str(path),
            seen="no `chatreel` footer",
            next_step="Make one with `chatreel record`, `chatreel import` or `chatreel generate`",
        )
    try:
        footer = Footer.from_json(raw)
    except msgspec.DecodeError as error:
        raise TraceError("trace footer cannot be read", path=str(path), seen=str(error)) from error
    if footer.schema_version > SCHEMA_VERSION:
        raise TraceError(
            "trace was written by a newer chatreel",
            path=str(path),
            seen=f"schema version {footer.schema_version}",
            wanted=f"<= {SCHEMA_VERSION}",
            next_step="Upgrade chatreel",
        )
    return footer


def count_requests(path: str | os.PathLike[str]) -> int:
    with _open(path) as file:
        return cast(int, file.metadata.num_rows)


def iter_requests(path: str | os.PathLike[str], columns: list[str] | None = None, batch_rows: int = 4096) -> Iterator[Request]:
    """Rows in arrival order, a batch in memory at a time. Columns left out of `columns` are absent from the rows."""
    with _open(path) as file:
        _footer_of(file, path)
        for batch in file.iter_batches(batch_size=batch_rows, columns=columns):
            yield from cast(list[Request], batch.to_pylist())


def read_table(path: str | os.PathLike[str], columns: list[str] | None = None) -> pa.Table:
    """Columns as Arrow data (all of them by default)."""
    with _open(path) as file:
        _footer_of(file, path)
        return file.read(columns=columns)


def iter_tables(path: str | os.PathLike[str], columns: list[str], batch_rows: int = 4096) -> Iterator[pa.Table]:
    """Columns as Arrow data, a batch in memory at a time."""
    with _open(path) as file:
        for batch in file.iter_batches(batch_size=batch_rows, columns=columns, use_threads=False):
            yield pa.Table.from_batches([batch])


@dataclass(frozen=True, slots=True, kw_only=True)
class ListExtent:
    """Of a column of integer lists: at most so many values in all of them, none larger than `largest` (-1: no value)."""

    values: int
    largest: int


def list_extent(path: str | os.PathLike[str], name: str) -> ListExtent:
    """From the file's own statistics, without reading the column; read it where they are missing."""
    values, largest = 0, -1
    with _open(path) as file:
        paths = [file.metadata.schema.column(i).path for i in range(file.metadata.num_columns)]
        leaf = next(i for i, one in enumerate(paths) if one.split(".")[0] == name)
        for number in range(file.metadata.num_row_groups):
            chunk = file.metadata.row_group(number).column(leaf)
            known = chunk.statistics
            values += chunk.num_values
            if known is not None and known.has_min_max:
                largest = max(largest, known.max)
            elif known is None or known.num_values:
                read = pc.max(file.read_row_group(number, columns=[name]).column(0).combine_chunks().flatten()).as_py()
                largest = max(largest, -1 if read is None else read)
    return ListExtent(values=values, largest=largest)


def scan(path: str | os.PathLike[str]) -> "pl.LazyFrame":
    """A lazy Polars frame; nothing is read before `.collect()`."""
    read_footer(path)
    import polars as pl  # a third of the time that a short command takes to start

    return pl.scan_parquet(Path(path))


def column(table: pa.Table, name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """An integer column as int64; null becomes -1, which no column holds as a value."""
    filled = table[name].combine_chunks().cast(pa.int64()).fill_null(-1)
    return cast(np.ndarray[Any, np.dtype[np.int64]], filled.to_numpy(zero_copy_only=False))


def blocks(table: pa.Table, name: str) -> Blocks:
    """A list column of block ids as offsets and values; a null list is an empty one."""
    combined = table[name].combine_chunks()
    lengths = pc.list_value_length(combined).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(combined) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Blocks(offsets=offsets, ids=combined.flatten().to_numpy(zero_copy_only=False).astype(np.int32, copy=False))
