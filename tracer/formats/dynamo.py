"""Dynamo's Mooncake rows (`python -m dynamo.replay`), agentic ones too: whole prompts, sessions, what waits for what. Pure.

    {"request_id": "a1", "session_id": "a", "timestamp": 12.5, "input_length": 41, "output_length": 9, "hash_ids": [0]}
    {"request_id": "a2", "session_id": "a", "delay": 800.0, "wait_for": ["a1"], "tool_wait_ms": 200.0, "input_length": 70, ...}

Times are ms as floats. Turns of a session come a delay after the answer before them; rows with `wait_for` come delay and
tool wait after the answers named. The block size is not in the file: Dynamo is told it, here it is found out.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from tracer.blocks import DenseIds
from tracer.formats import BadRow, Detected, source_extra
from tracer.formats.ids import ChainedIds, FirstSeen
from tracer.formats.layout import block_tokens_of, is_count, is_whole, objects, peek, remainder, restored
from tracer.formats.targets import prompt_ids, sendable
from tracer.schema import Footer, Request

NAME = "dynamo"
HOLDS = frozenset(
    {"input_tokens", "output_tokens", "input_blocks", "session_id", "turn", "parent_request_id", "wait_for", "think_ns"}
    | {"tool_wait_ns", "kind"}
)
STEP_NS = 1
BLOCK_TOKENS = 512
MAX_COUNT = 2**31 - 1
MAX_STAMP_MS = 2**62 // 10**6
ALIASES = {"input_tokens": "input_length", "output_tokens": "output_length", "created_time": "timestamp", "delay_ms": "delay"}
_OWN = {"request_id", "wait_for", "tool_wait_ms", "strict_priority", "policy_class", "output_token_ids", *ALIASES}


class Row(msgspec.Struct):
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None
    timestamp: int | float | None = None
    delay: int | float | None = None
    tool_wait_ms: int | float | None = None
    request_id: str | None = None
    session_id: str | None = None
    request_kind: str | None = None
    wait_for: list[str] = []


def looks_like(head: bytes) -> bool:
    """Block ids beside keys of its own, or sessions whose turns repeat the prompt before them."""
    first_of: dict[str, Any] = {}
    for row in objects(head.split(b"\n")):
        ids, session = row.get("hash_ids"), row.get("session_id")
        if not isinstance(ids, list) or "chat_id" in row:
            continue
        if row.keys() & _OWN:
            return True
        if isinstance(session, str) and ids:
            if "delay" in row and first_of.get(session) == ids[0]:
                return True
            first_of.setdefault(session, ids[0])
    return False


def read(lines: Iterable[bytes], found: Detected, bad: Callable[[BadRow], None]) -> Iterator[Request]:
    """Rows in file order. One that waits for answers comes after them as if they took no time: their ends are not known."""
    head, lines = peek(lines)
    found.block_tokens, found.time_unit_ns = _block_tokens(head), 10**6
    found.notes["read_as"] = f"whole prompts, blocks of {found.block_tokens} tokens"
    chained, links, order = ChainedIds(), _Links(), 0
    ceil_rows = floor_rows = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = msgspec.json.decode(line, type=dict[str, Any])
            row = msgspec.convert({ALIASES.get(key, key): value for key, value in raw.items()}, Row)
            _check(row, found.block_tokens)
        except (msgspec.MsgspecError, ValueError) as error:
            bad(BadRow(number, str(error), line.decode("utf-8", "replace").rstrip("\r\n")))
            continue
        request = _request(row)
        links.add(request, row, order)
        order += 1
        full, rest = divmod(row.input_length, found.block_tokens)
        if row.hash_ids is not None:
            ids = chained.path(row.hash_ids)
            request["input_blocks"] = ids[:full]
            if len(ids) > full:
                request["input_tail_id"] = ids[full]
            ceil_rows += rest > 0 and len(ids) > full
            floor_rows += rest > 0 and len(ids) == full
        kept = remainder(raw, _columns(request, 0, _named(request)))
        request["source_extra"] = msgspec.json.encode(kept).decode()
        if any(isinstance(value, float) for value in (row.timestamp, row.delay, row.tool_wait_ms)):
            found.time_unit_ns = 1
        yield request
    if ceil_rows + floor_rows and not (ceil_rows and floor_rows):
        found.tail_rule = "ceil" if ceil_rows else "floor"


def _block_tokens(head: list[bytes]) -> int:
    counts = []
    for row in objects(head):
        tokens, ids = row.get("input_length", row.get("input_tokens")), row.get("hash_ids")
        if type(tokens) is int and isinstance(ids, list):
            counts.append((tokens, len(ids)))
    return block_tokens_of(counts, BLOCK_TOKENS)


def _check(row: Row, block_tokens: int) -> None:
    """Raises ValueError for a row whose values are out of range or contradict each other."""
    for name in ("input_length", "output_length"):
        if not 0 <= getattr(row, name) <= MAX_COUNT:
            raise ValueError(f"{name} is {getattr(row, name)}, wanted 0 .. {MAX_COUNT}")
    for name in ("timestamp", "delay", "tool_wait_ms"):
        value = getattr(row, name)
        if value is not None and not 0 <= value <= MAX_STAMP_MS:
            raise ValueError(f"{name} is {value}, wanted 0 .. {MAX_STAMP_MS} ms")
    if row.hash_ids is not None and not is_count(row.input_length, len(row.hash_ids), block_tokens):
        raise ValueError(
            f"{len(row.hash_ids)} hash_ids for input_length {row.input_length}, "
            f"wanted {-(-row.input_length // block_tokens)} (one per {block_tokens} tokens)"
        )


def _request(row: Row) -> Request:
    request: Request = {
        "arrival_ns": round((row.timestamp or 0) * 10**6),
        "input_tokens": row.input_length,
        "input_tokens_count_source": "import",
        "output_tokens": row.output_length,
        "output_tokens_count_source": "import",
    }
    if row.delay is not None or row.tool_wait_ms is not None:
        request["think_ns"] = round(((row.delay or 0) + (row.tool_wait_ms or 0)) * 10**6)
    if row.tool_wait_ms is not None:
        request["tool_wait_ns"] = round(row.tool_wait_ms * 10**6)
    if row.request_kind is not None:
        request["kind"] = row.request_kind
    return request


class _Links:
    """Places and times of the rows so far, by name and by session."""

    def __init__(self) -> None:
        self._named: dict[str, tuple[int, int]] = {}  # place, arrival
        self._last: dict[str, tuple[int, int, int]] = {}  # of a session: place, arrival, turn
        self._sessions: DenseIds[str] = DenseIds()

    def add(self, request: Request, row: Row, place: int) -> None:
        waits = [self._named[name] for name in row.wait_for if name in self._named]
        last = self._last.get(row.session_id) if row.session_id is not None else None
        before = [arrival for _, arrival in waits] or ([last[1]] if last else [])
        if before and (row.timestamp is None or row.delay is not None or waits):
            request["arrival_ns"] = max(request["arrival_ns"], max(before) + (request.get("think_ns") or 0))
        if waits:
            request["wait_for"] = [one for one, _ in waits]
        if last is not None:
            request["parent_request_id"] = last[0]
        if row.session_id is not None:
            request["session_id"], request["turn"] = self._sessions[row.session_id], last[2] + 1 if last else 0
            self._last[row.session_id] = place, request["arrival_ns"], request["turn"] or 0
        if row.request_id is not None:
            self._named[row.request_id] = place, request["arrival_ns"]


def _named(row: Request) -> list[int]:
    tail = row.get("input_tail_id")
    return [*(row.get("input_blocks") or []), *(() if tail is None else (tail,))]


def _columns(row: Request, zero_ns: int, ids: list[int]) -> dict[str, Any]:
    """What the columns say of a row, apart from names and links."""
    return {
        "timestamp": (row["arrival_ns"] + zero_ns) / 10**6,
        "input_length": row.get("input_tokens") or 0,
        "output_length": row.get("output_tokens") or 0,
        "hash_ids": ids,
    }


def write(rows: Iterable[Request], footer: Footer, losses: Counter[str] | None = None) -> Iterator[bytes]:
    """The source's rows. Of another source: turns wait for the one before them, and requests for those they waited for."""
    numbers = FirstSeen()
    if is_whole(footer, NAME):
        zero_ns = int(footer.notes.get("first_arrival_ns", 0))
        for row in rows:
            again = _columns(row, zero_ns, numbers.row(_named(row)))
            yield msgspec.json.encode(restored(again, source_extra(row))) + b"\n"
        return
    last_of: dict[int, tuple[int, int | None]] = {}  # of a session: request, end
    left_out: set[int] = set()
    next_id = 0
    for row in sendable(rows, Counter() if losses is None else losses):
        left_out.update(range(next_id, row["request_id"]))
        next_id = row["request_id"] + 1
        value: dict[str, Any] = {"request_id": f"r{row['request_id']}"}
        value |= _columns(row, 0, prompt_ids(row, footer.block_tokens, numbers))
        session, end_ns = row.get("session_id"), row.get("end_ns")
        waits = [one for one in row.get("wait_for") or [] if one < row["request_id"] and one not in left_out]
        if session is not None:
            last = last_of.get(session)
            value["session_id"] = f"s{session}"
            if last is not None:
                waits = waits or [last[0]]
                value |= _pause(row, last[1])
            last_of[session] = row["request_id"], None if end_ns is None else row["arrival_ns"] + end_ns
        if waits:
            value["wait_for"] = [f"r{one}" for one in waits]
        if row.get("kind") is not None:
            value["request_kind"] = row["kind"]
        yield msgspec.json.encode(value) + b"\n"


def _pause(row: Request, end_ns: int | None) -> dict[str, float]:
    """Delay and tool wait after the last answer, where they are known."""
    think_ns, tool_ns = row.get("think_ns"), row.get("tool_wait_ns")
    if think_ns is None and end_ns is not None:
        think_ns = max(row["arrival_ns"] - end_ns, 0)
    if think_ns is None:
        return {}
    delay = {"delay": max(think_ns - (tool_ns or 0), 0) / 10**6}
    return delay if tool_ns is None else delay | {"tool_wait_ms": tool_ns / 10**6}


def usage(path: str, footer: Footer, rows: int) -> str:
    del rows
    return f"python -m dynamo.replay {path} with a trace block size of {footer.block_tokens} tokens"
