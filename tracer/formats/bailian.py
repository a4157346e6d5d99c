"""Bailian (Qwen) JSONL: chats linked to the turn before, lengths in tokens, `hash_ids` of 16-token blocks. Pure.

    {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 41, "output_length": 132, "type": "text",
     "turn": 2, "hash_ids": [1089, 1090, 1091]}

Times are seconds, turns count from 1, a chat that begins a conversation has the parent -1. The last, partial block has an id
too. The release does not say whether ids are chained, so they are chained here.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from tracer.errors import TraceError
from tracer.formats import BadRow, Detected, source_extra
from tracer.formats.ids import ChainedIds, FirstSeen
from tracer.schema import Footer, Request

NAME = "bailian"
HOLDS = frozenset({"input_tokens", "output_tokens", "input_blocks", "session_id", "turn", "parent_request_id", "kind", "media"})
STEP_NS = 1
BLOCK_TOKENS = 16
MAX_COUNT = 2**31 - 1
MAX_SECONDS = 4 * 10**9
NO_PARENT = -1


class Row(msgspec.Struct):
    chat_id: int
    parent_chat_id: int
    timestamp: int | float
    input_length: int
    output_length: int
    kind: str = msgspec.field(name="type")
    turn: int
    hash_ids: list[int]


_LINKS = ("chat_id", "parent_chat_id")


def looks_like(head: bytes) -> bool:
    """One of the first lines has the links between chats beside block ids."""
    wanted = (b'"chat_id"', b'"parent_chat_id"', b'"hash_ids"')
    return any(line.lstrip().startswith(b"{") and all(key in line for key in wanted) for line in head.split(b"\n"))


def read(lines: Iterable[bytes], found: Detected, bad: Callable[[BadRow], None]) -> Iterator[Request]:
    """Rows in file order; `arrival_ns` counts from the file's own zero. A session is a tree of chats below one root."""
    found.block_tokens, found.time_unit_ns = BLOCK_TOKENS, 10**9
    decode = msgspec.json.Decoder(Row).decode
    chained, chats = ChainedIds(), _Chats()
    ceil_rows = floor_rows = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decode(line)
            _check(row)
        except (msgspec.MsgspecError, ValueError) as error:
            bad(BadRow(number, str(error), line.decode("utf-8", "replace").rstrip("\r\n")))
            continue
        full, rest = divmod(row.input_length, BLOCK_TOKENS)
        ceil_rows += rest > 0 and len(row.hash_ids) > full
        floor_rows += rest > 0 and len(row.hash_ids) == full
        ids = chained.path(row.hash_ids)
        request = _request(row, ids)
        parent, request["session_id"] = chats.add(row.chat_id, row.parent_chat_id)
        if parent is not None:
            request["parent_request_id"] = parent
        request["source_extra"] = msgspec.json.encode(_extra(request, ids, line)).decode()
        while request["arrival_ns"] % found.time_unit_ns:
            found.time_unit_ns //= 1000
        yield request
    if ceil_rows + floor_rows and not (ceil_rows and floor_rows):
        found.tail_rule = "ceil" if ceil_rows else "floor"


def _check(row: Row) -> None:
    """Raises ValueError for a row whose values are out of range or contradict each other."""
    for name in ("input_length", "output_length"):
        if not 0 <= getattr(row, name) <= MAX_COUNT:
            raise ValueError(f"{name} is {getattr(row, name)}, wanted 0 .. {MAX_COUNT}")
    if not 0 <= row.timestamp <= MAX_SECONDS:
        raise ValueError(f"timestamp is {row.timestamp}, wanted 0 .. {MAX_SECONDS} seconds")
    full, rest = divmod(row.input_length, BLOCK_TOKENS)
    if len(row.hash_ids) not in {full, full + (rest > 0)}:
        raise ValueError(
            f"{len(row.hash_ids)} hash_ids for input_length {row.input_length}, "
            f"wanted {full + (rest > 0)} (one per {BLOCK_TOKENS} tokens)"
        )


class _Chats:
    """Places and sessions of the chats so far. Chats whose parent the file lacks share its session all the same."""

    def __init__(self) -> None:
        self._place: dict[int, int] = {}
        self._session: dict[int, int] = {}  # of chats, and of parents only heard of
        self._rows = self._sessions = 0

    def add(self, chat: int, parent: int) -> tuple[int | None, int]:
        """(the parent's place, the session)."""
        place = self._place.get(parent) if parent != NO_PARENT else None
        known = self._session.get(chat) if parent == NO_PARENT else self._session.get(parent, self._session.get(chat))
        session = self._sessions if known is None else known
        self._sessions += known is None
        if parent != NO_PARENT:
            self._session.setdefault(parent, session)
        self._session[chat] = session
        self._place[chat] = self._rows
        self._rows += 1
        return place, session


def _request(row: Row, ids: list[int]) -> Request:
    full = row.input_length // BLOCK_TOKENS
    request: Request = {
        "arrival_ns": round(row.timestamp * 10**9),
        "kind": row.kind,
        "input_tokens": row.input_length,
        "input_tokens_count_source": "import",
        "output_tokens": row.output_length,
        "output_tokens_count_source": "import",
        "input_blocks": ids[:full],
    }
    if len(ids) > full:
        request["input_tail_id"] = ids[full]
    if 1 <= row.turn <= MAX_COUNT:
        request["turn"] = row.turn - 1
    return request


def _extra(request: Request, ids: list[int], line: bytes) -> dict[str, Any]:
    """The links, and each value that the columns do not give back: renamed ids, stamps finer than 1 ns, further keys."""
    raw = msgspec.json.decode(line, type=dict[str, Any])
    again = _columns(request, ids, 0)
    keys = {key: value for key, value in raw.items() if key not in _LINKS and (key not in again or again[key] != value)}
    extra = {key: raw[key] for key in _LINKS}
    return extra | {"keys": keys} if keys else extra


def _columns(row: Request, ids: list[int], zero_ns: int) -> dict[str, Any]:
    """What the columns say, apart from the links."""
    turn = row.get("turn")
    return {
        "timestamp": (row["arrival_ns"] + zero_ns) / 10**9,
        "input_length": row.get("input_tokens") or 0,
        "output_length": row.get("output_tokens") or 0,
        "type": row.get("kind") or "",
        "turn": 1 if turn is None else turn + 1,
        "hash_ids": ids,
    }


def write(rows: Iterable[Request], footer: Footer) -> Iterator[bytes]:
    """Bailian lines, ids dense in the order written; those of the source, where the whole of such a file is written.

    Of another source: chats are request numbers, and a request without a parent follows the one before it in its session.
    Smaller blocks become every k-th id; blocks without a name get ids that no other request has.
    Raises TraceError if the trace's blocks do not fit into 16 tokens.
    """
    factor, rest = divmod(BLOCK_TOKENS, footer.block_tokens)
    if rest:
        raise TraceError(
            "these blocks cannot be written as Bailian's",
            seen=f"{footer.block_tokens} tokens a block",
            wanted=f"a divisor of {BLOCK_TOKENS}",
        )
    is_own = footer.source_format == NAME
    zero_ns = int(footer.notes.get("first_arrival_ns", 0)) if is_own else 0
    left_out = {"hash_ids"} if "slice_of" in footer.notes else set()  # the others' dense ids would collide with these
    numbers, turns = FirstSeen(), _Turns()
    for row in rows:
        columns = _columns(row, _hash_ids(row, factor, is_own, numbers), zero_ns)
        extra = source_extra(row) if is_own else {}
        if "chat_id" in extra:
            links = {key: extra[key] for key in _LINKS}
            keys = {key: value for key, value in extra.get("keys", {}).items() if key not in left_out}
        else:
            links, keys = turns.links(row), {"type": "image" if "image" in (row.get("media") or []) else "text"}
            keys["turn"] = turns.turn(row, links["parent_chat_id"])
        yield msgspec.json.encode({**links, **columns, **keys}) + b"\n"


class _Turns:
    """Links and turns for requests that have none of Bailian's."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # session -> its last request
        self._turn: dict[int, int] = {}

    def links(self, row: Request) -> dict[str, int]:
        session, parent = row.get("session_id"), row.get("parent_request_id")
        if session is not None:
            parent = self._last.get(session) if parent is None else parent
            self._last[session] = row["request_id"]
        return {"chat_id": row["request_id"], "parent_chat_id": NO_PARENT if parent is None else parent}

    def turn(self, row: Request, parent: int) -> int:
        turn = row.get("turn")
        own = self._turn.get(parent, 0) + 1 if turn is None else turn + 1
        self._turn[row["request_id"]] = own
        return own


def _hash_ids(row: Request, factor: int, is_own: bool, numbers: FirstSeen) -> list[int]:
    full, rest = divmod(row.get("input_tokens") or 0, BLOCK_TOKENS)
    ids = numbers.row((row.get("input_blocks") or [])[factor - 1 :: factor][:full])
    tail = row.get("input_tail_id")
    if factor == 1 and tail is not None and len(ids) == full:
        ids.append(numbers[tail])
    if not is_own:
        ids += [numbers.fresh() for _ in range(full + (rest > 0) - len(ids))]
    return ids
