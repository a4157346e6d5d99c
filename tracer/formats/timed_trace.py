"""vLLM's `timed_trace` JSONL (vllm bench serve): Mooncake's four keys, blocks of any size, times in seconds. Pure.

    {"timestamp": 0.25, "input_length": 41, "output_length": 132, "hash_ids": [0, 1, 2]}

The tool is told block size and unit by options (16 tokens and seconds unless told otherwise); here they are found out.
It makes as many tokens as the ids cover, at most input_length: a row without ids is an empty prompt there.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from tracer.formats import BadRow, Detected, source_extra
from tracer.formats.ids import ChainedIds, FirstSeen
from tracer.formats.layout import block_tokens_of, is_count, is_whole, objects, peek, remainder, restored, unit_ns_of
from tracer.formats.targets import prompt_ids, sendable
from tracer.schema import Footer, Request

NAME = "timed_trace"
HOLDS = frozenset({"input_tokens", "output_tokens", "input_blocks"})
STEP_NS = 1
BLOCK_TOKENS = 16  # the tool's own default
MOONCAKE_TOKENS = 512
MAX_COUNT = 2**31 - 1
MAX_STAMP_NS = 2**62


class Row(msgspec.Struct):
    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None


_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


def looks_like(head: bytes) -> bool:
    """Mooncake's keys with blocks that are not Mooncake's, or without blocks."""
    rows = [row for row in objects(head.split(b"\n")) if all(key in row for key in _KEYS[:3]) and "chat_id" not in row]
    counts = list(_counts(rows))
    if counts:
        return block_tokens_of(counts, MOONCAKE_TOKENS) != MOONCAKE_TOKENS
    return any("hash_ids" not in row for row in rows)


def _counts(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    for row in rows:
        tokens, ids = row.get("input_length"), row.get("hash_ids")
        if type(tokens) is int and isinstance(ids, list):
            yield tokens, len(ids)


def read(lines: Iterable[bytes], found: Detected, bad: Callable[[BadRow], None]) -> Iterator[Request]:
    """Rows in file order; `arrival_ns` counts from the file's own zero."""
    head, lines = peek(lines)
    rows = list(objects(head))
    found.block_tokens = block_tokens_of(list(_counts(rows)), BLOCK_TOKENS)
    stamps = [row["timestamp"] for row in rows if isinstance(row.get("timestamp"), int | float)]
    found.time_unit_ns = unit_ns = unit_ns_of(stamps)
    found.notes["timestamp_unit"] = "s" if unit_ns == 10**9 else "ms"
    found.notes["read_as"] = f"time stamps in {found.notes['timestamp_unit']}, blocks of {found.block_tokens} tokens"
    decode = msgspec.json.Decoder(Row).decode
    chained = ChainedIds()
    ceil_rows = floor_rows = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decode(line)
            _check(row, unit_ns, found.block_tokens)
        except (msgspec.MsgspecError, ValueError) as error:
            bad(BadRow(number, str(error), line.decode("utf-8", "replace").rstrip("\r\n")))
            continue
        full, rest = divmod(row.input_length, found.block_tokens)
        if rest and row.hash_ids is not None:
            ceil_rows += len(row.hash_ids) > full
            floor_rows += len(row.hash_ids) == full
        request = _request(row, unit_ns, full, chained)
        kept = remainder(msgspec.json.decode(line, type=dict[str, Any]), _columns(request, unit_ns, 0, _named(request)))
        if kept:
            request["source_extra"] = msgspec.json.encode(kept).decode()
        while request["arrival_ns"] % found.time_unit_ns:
            found.time_unit_ns //= 1000
        yield request
    if ceil_rows + floor_rows and not (ceil_rows and floor_rows):
        found.tail_rule = "ceil" if ceil_rows else "floor"


def _check(row: Row, unit_ns: int, block_tokens: int) -> None:
    """Raises ValueError for a row whose values are out of range or contradict each other."""
    for name in ("input_length", "output_length"):
        if not 0 <= getattr(row, name) <= MAX_COUNT:
            raise ValueError(f"{name} is {getattr(row, name)}, wanted 0 .. {MAX_COUNT}")
    if not 0 <= row.timestamp <= MAX_STAMP_NS // unit_ns:
        raise ValueError(f"timestamp is {row.timestamp}, wanted 0 .. {MAX_STAMP_NS // unit_ns}")
    if row.hash_ids is not None and not is_count(row.input_length, len(row.hash_ids), block_tokens):
        raise ValueError(
            f"{len(row.hash_ids)} hash_ids for input_length {row.input_length}, "
            f"wanted {-(-row.input_length // block_tokens)} (one per {block_tokens} tokens)"
        )


def _request(row: Row, unit_ns: int, full: int, chained: ChainedIds) -> Request:
    request: Request = {
        "arrival_ns": round(row.timestamp * unit_ns),
        "input_tokens": row.input_length,
        "input_tokens_count_source": "import",
        "output_tokens": row.output_length,
        "output_tokens_count_source": "import",
    }
    if row.hash_ids is not None:
        ids = chained.path(row.hash_ids)
        request["input_blocks"] = ids[:full]
        if len(ids) > full:
            request["input_tail_id"] = ids[full]
    return request


def _named(row: Request, numbers: FirstSeen | None = None) -> list[int]:
    """The ids that the row has."""
    tail = row.get("input_tail_id")
    ids = [*(row.get("input_blocks") or []), *(() if tail is None else (tail,))]
    return ids if numbers is None else numbers.row(ids)


def _columns(row: Request, unit_ns: int, zero_ns: int, ids: list[int]) -> dict[str, Any]:
    return {
        "timestamp": (row["arrival_ns"] + zero_ns) / unit_ns,
        "input_length": row.get("input_tokens") or 0,
        "output_length": row.get("output_tokens") or 0,
        "hash_ids": ids,
    }


def write(rows: Iterable[Request], footer: Footer, losses: Counter[str] | None = None) -> Iterator[bytes]:
    """The source's rows; of another source seconds since the start, with an id for each block of the trace's own size."""
    numbers = FirstSeen()
    if is_whole(footer, NAME):
        unit_ns = 10**6 if footer.notes.get("timestamp_unit") == "ms" else 10**9
        zero_ns = int(footer.notes.get("first_arrival_ns", 0))
        for row in rows:
            again = _columns(row, unit_ns, zero_ns, _named(row, numbers))
            yield msgspec.json.encode(restored(again, source_extra(row))) + b"\n"
        return
    for row in sendable(rows, Counter() if losses is None else losses):
        yield msgspec.json.encode(_columns(row, 10**9, 0, prompt_ids(row, footer.block_tokens, numbers))) + b"\n"


def usage(path: str, footer: Footer, rows: int) -> str:
    is_ms = is_whole(footer, NAME) and footer.notes.get("timestamp_unit") == "ms"
    unit = " --timed-trace-sec-multiplier 0.001" if is_ms else ""
    return (
        f"vllm bench serve --backend vllm --dataset-name timed_trace --dataset-path {path} --self-timed --num-prompts {rows} "
        f"--no-oversample --timed-trace-chunk-hash-size {footer.block_tokens}{unit} --ignore-eos"
    )
