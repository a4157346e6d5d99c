"""Outcomes on disk: a line a request while it runs, which survives a kill; one Parquet file a share when it has ended."""

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from replay.outcome import Outcome

ROWS_AT_ONCE = 16_384
READ_ROWS = 1024  # with some hundred chunks each

_TYPES = {"chunk_gaps_us": pa.list_(pa.int64()), "chunk_tokens": pa.list_(pa.int32()), "answer_spliced": pa.bool_()}
_TEXTS = ("token_count_source", "finish_reason", "error_kind", "error_text", "retried")
_NAMES = Outcome.__struct_fields__
_CHUNKS = ("chunk_gaps_us", "chunk_tokens")
SCHEMA = pa.schema([(name, _TYPES.get(name, pa.string() if name in _TEXTS else pa.int64())) for name in _NAMES])
_decode = msgspec.json.Decoder(Outcome).decode


def log_path(run_dir: Path, point: int, share: int) -> Path:
    return run_dir / f"point-{point}.outcomes-{share}.jsonl"


def compact(log: Path) -> Path:
    """A finished log as Parquet, beside it; the log is removed. Memory is that of some thousand rows."""
    path = log.with_suffix(".parquet")
    with open(log, "rb") as lines:
        write_outcomes(path, (_decode(line) for line in lines))
    log.unlink()
    return path


def write_outcomes(path: Path, outcomes: Iterator[Outcome]) -> None:
    """The file is there when it is whole."""
    partial = path.with_suffix(".partial")
    with pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer:
        while batch := list(islice(outcomes, ROWS_AT_ONCE)):
            columns = [_column([getattr(one, name) for one in batch], field) for name, field in zip(_NAMES, SCHEMA, strict=True)]
            writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
    partial.replace(path)


def _column(values: list[Any], field: pa.Field) -> pa.Array:
    if field.name not in _CHUNKS:
        return pa.array(values, field.type)
    # Lists are nearly all there is to write; flat and with their offsets they are written sooner.
    lengths = np.fromiter((len(one or ()) for one in values), dtype=np.int32, count=len(values))
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int32)]).astype(np.int32)
    flat = np.fromiter(
        chain.from_iterable(one or () for one in values), field.type.value_type.to_pandas_dtype(), int(offsets[-1])
    )
    absent = pa.array([one is None for one in values], pa.bool_())
    return pa.ListArray.from_arrays(offsets, flat, type=field.type, mask=absent)


def read_outcomes(run_dir: Path, point: int, *, with_chunks: bool = True) -> tuple[list[Outcome], int]:
    """(all shares' outcomes in the order of their end, lines that a kill has torn).

    Without the lists of their chunks, nearly all of a run, a million take some 1.2 GB; but a share that was killed is read whole.
    """
    outcomes, torn = [], 0
    names = [name for name in _NAMES if with_chunks or name not in _CHUNKS]
    for path in sorted(run_dir.glob(f"point-{point}.outcomes*.parquet")):
        outcomes += list(_from_parquet(path, names))
    for path in sorted(run_dir.glob(f"point-{point}.outcomes*.jsonl")):
        rows, bad = read_lines(path, Outcome)
        outcomes += rows
        torn += bad
    outcomes.sort(key=lambda one: one.end_ns or 0)
    return outcomes, torn


def iter_outcomes(run_dir: Path, point: int) -> Iterator[Outcome]:
    """The same ones whole, in no order, a few of them in memory at a time."""
    for path in sorted(run_dir.glob(f"point-{point}.outcomes*.parquet")):
        yield from _from_parquet(path, list(_NAMES))
    for path in sorted(run_dir.glob(f"point-{point}.outcomes*.jsonl")):
        yield from read_lines(path, Outcome)[0]


def read_lines[Row](path: Path, kind: type[Row]) -> tuple[list[Row], int]:
    """(rows, lines that are none)."""
    decode = msgspec.json.Decoder(kind).decode
    rows, torn = [], 0
    try:
        with open(path, "rb") as file:
            for line in file:
                try:
                    rows.append(decode(line))
                except msgspec.DecodeError:
                    torn += 1
    except FileNotFoundError:
        return [], 0
    return rows, torn


def _from_parquet(path: Path, names: list[str]) -> Iterator[Outcome]:
    file = pq.ParquetFile(path, pre_buffer=False)
    names = [name for name in names if name in file.schema_arrow.names]  # an older run lacks those that came later
    for batch in file.iter_batches(READ_ROWS, columns=names):
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield Outcome(**dict(zip(names, row, strict=True)))
