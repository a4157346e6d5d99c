"""Mooncake JSONL (FAST'25 release): `timestamp` in ms, lengths in tokens, `hash_ids` of chained 512-token blocks. Pure.

The last id names a partial block when `input_length` is no multiple of 512: ceil(input / 512) ids in every row.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from tracer.blocks import DenseIds
from tracer.formats import BadRow, Detected
from tracer.schema import Footer, Request

NAME = "mooncake"
BLOCK_TOKENS = 512


class Row(msgspec.Struct):
    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: str | int | None = None


_KNOWN = set(Row.__struct_fields__)


def looks_like(head: bytes) -> bool:
    first = head.split(b"\n", 1)[0]
    return first.lstrip().startswith(b"{") and b'"hash_ids"' in first and b'"input_length"' in first


def read(lines: Iterable[bytes], found: Detected, bad: Callable[[BadRow], None]) -> Iterator[Request]:
    """Rows in file order; `arrival_ns` counts from the file's own zero."""
    decode = msgspec.json.Decoder(Row).decode
    sessions: DenseIds[str | int] = DenseIds()
    seen: DenseIds[int] = DenseIds()  # new ids are dense in first-seen order; the source's are kept if they are already
    is_dense = True
    ceil_rows = floor_rows = 0
    found.block_tokens, found.time_unit_ns = BLOCK_TOKENS, 1_000_000
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decode(line)
            _check(row)
        except (msgspec.MsgspecError, ValueError) as error:
            bad(BadRow(number, str(error), line.decode("utf-8", "replace").rstrip("\n")))
            continue
        full = row.input_length // BLOCK_TOKENS
        has_tail_id = len(row.hash_ids) > full
        ceil_rows += has_tail_id
        floor_rows += not has_tail_id and bool(row.input_length % BLOCK_TOKENS)
        for one in row.hash_ids:
            is_dense &= seen[one] == one
        ids = [seen[one] for one in row.hash_ids]
        request: Request = {
            "arrival_ns": _ns(row.timestamp),
            "input_tokens": row.input_length,
            "input_tokens_count_source": "import",
            "output_tokens": row.output_length,
            "output_tokens_count_source": "import",
            "input_blocks": ids[:full],
        }
        if has_tail_id:
            request["input_tail_id"] = ids[full]
        if row.session_id is not None:
            request["session_id"] = sessions[row.session_id]
        extra = _extra(line, row, ids)
        if extra:
            request["source_extra"] = msgspec.json.encode(extra).decode()
        yield request
    found.tail_rule = "ceil" if ceil_rows and not floor_rows else "floor" if floor_rows and not ceil_rows else None
    found.notes["ids_dense"] = str(is_dense).lower()


def _check(row: Row) -> None:
    """Raises ValueError for a row whose values contradict each other."""
    full, total = divmod(row.input_length, BLOCK_TOKENS)
    if row.input_length < 0 or row.output_length < 0 or row.timestamp < 0:
        raise ValueError(f"negative value: input {row.input_length}, output {row.output_length}, timestamp {row.timestamp}")
    if len(row.hash_ids) not in {full, full + (total > 0)}:
        raise ValueError(
            f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens, wanted {full + (total > 0)} (blocks of 512)"
        )
    if any(not 0 <= one < 2**63 for one in row.hash_ids):
        raise ValueError("hash_ids must lie in 0 .. 2^63-1")


def _ns(timestamp_ms: int | float) -> int:
    return timestamp_ms * 1_000_000 if isinstance(timestamp_ms, int) else round(timestamp_ms * 1e6)


def _extra(line: bytes, row: Row, ids: list[int]) -> dict[str, Any]:
    """What no column holds: unknown keys, a float time stamp, ids that had to be renumbered."""
    extra: dict[str, Any] = {}
    if line.count(b'":') > 4:
        extra = {key: value for key, value in msgspec.json.decode(line).items() if key not in _KNOWN}
        if row.session_id is not None:
            extra["session_id"] = row.session_id
    if isinstance(row.timestamp, float):
        extra["timestamp"] = row.timestamp
    if ids != row.hash_ids:
        extra["hash_ids"] = row.hash_ids
    return extra


def write(rows: Iterable[Request], footer: Footer) -> Iterator[bytes]:
    """Mooncake lines. Blocks of another size become every k-th id, renumbered; the partial last one gets a fresh id."""
    factor = BLOCK_TOKENS // footer.block_tokens if footer.block_tokens < BLOCK_TOKENS else 1
    dense: DenseIds[int | tuple[str, int]] = DenseIds()
    for row in rows:
        tokens = row.get("input_tokens") or 0
        extra = msgspec.json.decode(row.get("source_extra") or "{}")
        ids: list[int | tuple[str, int]] = list((row.get("input_blocks") or [])[factor - 1 :: factor])
        if factor > 1:
            ids = ids[: tokens // BLOCK_TOKENS]
            if tokens % BLOCK_TOKENS:
                ids.append(("tail", row["request_id"]))
            hash_ids = [dense[one] for one in ids]
        else:
            tail = row.get("input_tail_id")
            hash_ids = [*(row.get("input_blocks") or []), *([tail] if tail is not None else [])]
        value = {
            "timestamp": extra.pop("timestamp", row["arrival_ns"] // 1_000_000),
            "input_length": tokens,
            "output_length": row.get("output_tokens") or 0,
            "hash_ids": extra.pop("hash_ids", hash_ids),
            **{key: value for key, value in extra.items() if key != "line"},
        }
        yield msgspec.json.encode(value) + b"\n"
