"""Rows of a trace kept for drawing its sharing groups again: one readable JSON file, a row a line. Pure.

It holds what `bootstrap.COLUMNS` names, and no text, for a trace has none. Block ids are numbered afresh in order of first
use, and stand as runs: [first, how many]. Drawing from it gives what drawing from the trace gives.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from synth import bootstrap
from tracer.blocks import DenseIds
from tracer.errors import TraceError
from tracer.schema import SCHEMA, Footer

WARNING = (
    "THIS FILE HOLDS ROWS OF THE SOURCE TRACE: when each request came, its lengths and settings, its session and client, and "
    "numbers that say which requests share how much of a prompt. It holds no text, and no hash of any. Share it only where you "
    "would share the trace; without --bootstrap `chatreel fit` writes a model without any row."
)
KEY = "chatreel_bootstrap"
LISTS = ("input_blocks", "output_blocks")
type Row = dict[str, Any]


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    chatreel_bootstrap: int = 1
    warning: str = WARNING
    source: str = ""
    footer: Footer
    rows: list[Row]


def to_lines(table: pa.Table, footer: Footer, source: str) -> Iterator[bytes]:
    """Columns `bootstrap.COLUMNS`; of the footer, what drawing needs."""
    encode = msgspec.json.encode
    needed = Footer(
        block_tokens=footer.block_tokens,
        tail_rule=footer.tail_rule,
        time_grid_ns=footer.time_grid_ns,
        hashes=footer.hashes,
        source_format=footer.source_format,
    )
    yield b'{\n "%b": 1,\n "warning": %b,\n' % (KEY.encode(), encode(WARNING))
    yield b' "source": %b,\n "footer": %b,\n "rows": [' % (encode(source), encode(needed))
    ids: DenseIds[int] = DenseIds()
    present = [name for name in table.column_names if table[name].null_count < len(table)]
    between = b"\n  "
    for batch in table.select(present).to_batches(1024):
        for row in batch.to_pylist():
            yield between + encode(_freshened(row, ids))
            between = b",\n  "
    yield b"\n ]\n}\n"


def _freshened(row: Row, ids: DenseIds[int]) -> Row:
    kept = {name: value for name, value in row.items() if value is not None}
    for name in ("input_blocks", "input_tail_id", "output_blocks"):
        if name == "input_tail_id" and name in kept:
            kept[name] = ids[kept[name]]
        elif name in kept:
            kept[name] = _runs([ids[one] for one in kept[name]])
    return kept


def _runs(ids: list[int]) -> list[list[int]]:
    if not ids:
        return []
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    edges = [0, *breaks.tolist(), len(ids)]
    return [[ids[begin], end - begin] for begin, end in zip(edges[:-1], edges[1:], strict=True)]


def is_kept(head: bytes) -> bool:
    """Whether a file that begins like this is one of these."""
    return f'"{KEY}"'.encode() in head


def from_json(raw: bytes, path: str | None = None) -> tuple[pa.Table, Footer, str]:
    """Columns `bootstrap.COLUMNS`, footer, name of the source. `TraceError` where it is not what `to_lines` writes."""

    def wrong(seen: object) -> TraceError:
        wanted = "what `chatreel fit --bootstrap` writes"
        return TraceError("not a file of kept rows", path=path, seen=str(seen), wanted=wanted, next_step="Fit the trace again")

    try:
        kept = msgspec.json.decode(raw, type=Kept)
    except msgspec.DecodeError as error:
        raise wrong(error) from error
    unknown = {name for row in kept.rows for name in row} - set(bootstrap.COLUMNS)
    if unknown:
        raise wrong(f"unknown column {sorted(unknown)[0]}")
    for number, row in enumerate(kept.rows):
        try:
            for name in LISTS:
                if name in row:
                    row[name] = [one for first, count in row[name] for one in range(first, first + count)]
        except (TypeError, ValueError) as error:
            raise wrong(f"row {number}: blocks that are no runs of [first, how many]: {str(row[name])[:60]}") from error
    columns = {}
    for name in bootstrap.COLUMNS:
        kind = SCHEMA.field(name)
        try:
            columns[name] = pa.array([row.get(name) for row in kept.rows], type=kind.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise wrong(f"{name}: {error}") from error
        if not kind.nullable and columns[name].null_count:
            raise wrong(f"a row without {name}")
    arrival = columns["arrival_ns"].to_numpy(zero_copy_only=False)
    if (np.diff(arrival) < 0).any():
        raise wrong("rows that are not in order of arrival_ns")
    return pa.table(columns), kept.footer, kept.source
