"""Mooncake JSONL (FAST'25 release): `timestamp` in ms, lengths in tokens, `hash_ids` of chained 512-token blocks. Pure.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..., 59]}

The release gives a partial last block an id too: ceil(input / 512) of them. Rows without that one are read as well.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from tracer.errors import TraceError
from tracer.formats import BadRow, Detected, source_extra
from tracer.formats.ids import ChainedIds, FirstSeen
from tracer.schema import Footer, Request

NAME = "mooncake"
HOLDS = frozenset({"input_tokens", "output_tokens", "input_blocks"})
STEP_NS = 10**6
BLOCK_TOKENS = 512
MAX_COUNT = 2**31 - 1
MAX_STAMP_NS = 2**62
TOO_FAST_PER_MS = 1.0  # no public trace has 1,000 requests a second; one that seems to has its stamps in seconds
ENOUGH_ROWS = 20


class Row(msgspec.Struct):
    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: str | int | None = None


_KEYS = {"timestamp", "input_length", "output_length", "hash_ids"}


def looks_like(head: bytes) -> bool:
    """One of the first lines has Mooncake's keys, and none of Bailian's or RAGPulse's own, who use the same four."""
    wanted = [b'"%s"' % key.encode() for key in _KEYS]
    lines = [line.lstrip() for line in head.split(b"\n")]
    likely = (line for line in lines if line.startswith(b"{") and all(key in line for key in wanted))
    return any(b'"chat_id"' not in line and b'"passages_ids"' not in line for line in likely)


def read(lines: Iterable[bytes], found: Detected, bad: Callable[[BadRow], None]) -> Iterator[Request]:
    """Rows in file order; `arrival_ns` counts from the file's own zero.

    A row's ids are renamed where the source's are not dense or not chained; `source_extra` then keeps the old ones.
    """
    stamp_ns = 10**9 if found.in_seconds else 10**6
    found.block_tokens, found.time_unit_ns = BLOCK_TOKENS, stamp_ns
    decode = msgspec.json.Decoder(Row).decode
    chained = ChainedIds()
    sessions: dict[str | int, int] = {}
    rows = ceil_rows = floor_rows = 0
    first, last = float("inf"), 0.0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decode(line)
            _check(row, stamp_ns)
        except (msgspec.MsgspecError, ValueError) as error:
            bad(BadRow(number, str(error), line.decode("utf-8", "replace").rstrip("\r\n")))
            continue
        rows += 1
        if isinstance(row.timestamp, float):
            found.time_unit_ns = 1
        first, last = min(first, row.timestamp), max(last, row.timestamp)
        if row.input_length % BLOCK_TOKENS:
            has_tail_id = len(row.hash_ids) > row.input_length // BLOCK_TOKENS
            ceil_rows += has_tail_id
            floor_rows += not has_tail_id
        request = _request(row, stamp_ns, chained.path(row.hash_ids), line)
        if row.session_id is not None:
            request["session_id"] = sessions.setdefault(row.session_id, len(sessions))
        yield request
    if ceil_rows + floor_rows and not (ceil_rows and floor_rows):
        found.tail_rule = "ceil" if ceil_rows else "floor"
    found.in_seconds |= rows >= ENOUGH_ROWS and last > first and rows / (last - first) > TOO_FAST_PER_MS
    found.notes["timestamp_unit"] = "s" if found.in_seconds else "ms"


def _check(row: Row, stamp_ns: int) -> None:
    """Raises ValueError for a row whose values are out of range or contradict each other."""
    for name in ("input_length", "output_length"):
        if not 0 <= getattr(row, name) <= MAX_COUNT:
            raise ValueError(f"{name} is {getattr(row, name)}, wanted 0 .. {MAX_COUNT}")
    if not 0 <= row.timestamp <= MAX_STAMP_NS // stamp_ns:
        raise ValueError(f"timestamp is {row.timestamp}, wanted 0 .. {MAX_STAMP_NS // stamp_ns}")
    full, rest = divmod(row.input_length, BLOCK_TOKENS)
    if len(row.hash_ids) not in {full, full + (rest > 0)}:
        raise ValueError(
            f"{len(row.hash_ids)} hash_ids for input_length {row.input_length}, "
            f"wanted {full + (rest > 0)} (one per {BLOCK_TOKENS} tokens)"
        )


def _request(row: Row, stamp_ns: int, ids: list[int], line: bytes) -> Request:
    full = row.input_length // BLOCK_TOKENS
    stamp = row.timestamp
    request: Request = {
        "arrival_ns": stamp * stamp_ns if isinstance(stamp, int) else round(stamp * stamp_ns),
        "input_tokens": row.input_length,
        "input_tokens_count_source": "import",
        "output_tokens": row.output_length,
        "output_tokens_count_source": "import",
        "input_blocks": ids[:full],
    }
    if len(ids) > full:
        request["input_tail_id"] = ids[full]
    extra = _extra(row, ids, line)
    if extra:
        request["source_extra"] = msgspec.json.encode(extra).decode()
    return request


def _extra(row: Row, ids: list[int], line: bytes) -> dict[str, Any]:
    """What no column holds: a float time stamp, ids that had to be renamed, keys beyond the four."""
    extra: dict[str, Any] = {}
    if isinstance(row.timestamp, float):
        extra["timestamp"] = row.timestamp
    if ids != row.hash_ids:
        extra["hash_ids"] = row.hash_ids
    if line.count(b":") > len(_KEYS):  # each key has one; most files stop at the four
        keys = {key: value for key, value in msgspec.json.decode(line).items() if key not in _KEYS}
        if keys:
            extra["keys"] = keys
    return extra


def write(rows: Iterable[Request], footer: Footer) -> Iterator[bytes]:
    """Mooncake lines, ids dense in the order written.

    Smaller blocks become every k-th id, and sharing below 512 tokens is lost. Blocks that the trace does not name (the
    partial last one of a trace of ours, all of a trace without prefixes) get ids that no other request has.
    Raises TraceError if the trace's blocks do not fit into 512 tokens.
    """
    factor, rest = divmod(BLOCK_TOKENS, footer.block_tokens)
    if rest:
        raise TraceError(
            "these blocks cannot be written as Mooncake's",
            seen=f"{footer.block_tokens} tokens a block",
            wanted=f"a divisor of {BLOCK_TOKENS}",
        )
    is_own = footer.source_format == NAME
    stamp_ns = 10**9 if is_own and footer.notes.get("timestamp_unit") == "s" else 10**6
    zero_ns = int(footer.notes.get("first_arrival_ns", 0)) if is_own else 0
    numbers = FirstSeen()
    for row in rows:
        extra = source_extra(row) if is_own else {}
        hash_ids = _hash_ids(row, factor, is_own, numbers)
        value = {
            "timestamp": extra.get("timestamp", (row["arrival_ns"] + zero_ns) // stamp_ns),
            "input_length": row.get("input_tokens") or 0,
            "output_length": row.get("output_tokens") or 0,
            "hash_ids": extra.get("hash_ids", hash_ids),
            **extra.get("keys", {}),
        }
        yield msgspec.json.encode(value) + b"\n"


def _hash_ids(row: Request, factor: int, is_own: bool, numbers: FirstSeen) -> list[int]:
    full, rest = divmod(row.get("input_tokens") or 0, BLOCK_TOKENS)
    ids = numbers.row((row.get("input_blocks") or [])[factor - 1 :: factor][:full])
    tail = row.get("input_tail_id")
    if factor == 1 and tail is not None:
        ids.append(numbers[tail])
    if not is_own:
        ids += [numbers.fresh() for _ in range(full + (rest > 0) - len(ids))]
    return ids
