"""AIPerf's `mooncake_trace` JSONL: Mooncake's keys in float ms, any block size, sessions with delays. Pure.

    {"session_id": "a", "timestamp": 1000.5, "input_length": 300, "output_length": 40, "hash_ids": [0]}
    {"session_id": "a", "delay": 2000, "input_length": 150, "output_length": 20}

The rows of a session are turns, and each holds only what it adds: AIPerf sends it after all that went before, the server's
answers too. Read here, a turn's prompt is therefore the turns and answers before it and its own tokens. Where a file has
sessions, contents are laid end to end and cut into 16-token blocks; else the file's own blocks are kept.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tracer.blocks import DenseIds
from tracer.formats import BadRow, Detected, source_extra
from tracer.formats.ids import ChainedIds, FirstSeen, LaidOut
from tracer.formats.layout import block_tokens_of, is_whole, objects, peek, remainder, restored
from tracer.formats.targets import prompt_ids, sendable
from tracer.schema import BASE_BLOCK_TOKENS, Footer, Request

NAME = "aiperf"
HOLDS = frozenset({"input_tokens", "output_tokens", "input_blocks"})
STEP_NS = 1
BLOCK_TOKENS = 512  # AIPerf's default for this format
MAX_COUNT = 2**31 - 1
MAX_STAMP_MS = 2**62 // 10**6
TEXTS = ("text_input", "messages", "tools", "payload")  # prompts in clear: not kept


class Row(msgspec.Struct):
    input_length: int | None = None
    output_length: int | None = None
    hash_ids: list[int] | None = None
    timestamp: int | float | None = None
    delay: int | float | None = None
    session_id: str | None = None


@dataclass(slots=True)
class _Session:
    number: int
    place: int = -1  # of its last turn
    turns: int = 0
    arrival_ns: int = 0
    tokens: int | None = 0  # of all turns and answers so far; None: not known
    contents: list[tuple[Hashable, int]] = field(default_factory=list)


def looks_like(head: bytes) -> bool:
    """Lengths with a delay, or without any time, or a literal prompt."""
    return any(
        "text_input" in row or ("input_length" in row and ("delay" in row or "timestamp" not in row))
        for row in objects(head.split(b"\n")[:200])
    )


def read(lines: Iterable[bytes], found: Detected, bad: Callable[[BadRow], None]) -> Iterator[Request]:
    """Rows in file order. A turn without a time comes its delay after the turn before, as if that took no time."""
    head, lines = peek(lines)
    rows = list(objects(head))
    counts = [(row["input_length"], len(row["hash_ids"])) for row in rows if _has_ids(row)]
    size = block_tokens_of(counts, BLOCK_TOKENS)
    layout = _SessionLayout(size) if any("session_id" in row for row in rows) else _RowLayout(size)
    found.block_tokens, found.time_unit_ns = layout.block_tokens, 10**6
    names: DenseIds[str] = DenseIds()
    sessions: dict[str, _Session] = {}
    decode = msgspec.json.Decoder(Row).decode
    place = texts = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decode(line)
            raw = msgspec.json.decode(line, type=dict[str, Any])
            _check(row, raw)
        except (msgspec.MsgspecError, ValueError) as error:
            in_clear = any(b'"%s"' % name.encode() in line for name in TEXTS)
            bad(BadRow(number, str(error), "" if in_clear else line.decode("utf-8", "replace").rstrip("\r\n")))
            continue
        session = None
        if row.session_id is not None:
            session = sessions.setdefault(row.session_id, _Session(names[row.session_id]))
        texts += row.input_length is None
        request = _request(row, session)
        layout.place(request, row, session, place)
        ids = layout.source_ids(request, row)
        again = _columns(request, 0, ids if ids == row.hash_ids else None)
        kept = remainder({key: value for key, value in raw.items() if key not in TEXTS}, again)
        request["source_extra"] = msgspec.json.encode(kept).decode()
        if isinstance(row.timestamp, float) or isinstance(row.delay, float):
            found.time_unit_ns = 1
        place += 1
        yield request
    found.notes["read_as"] = layout.said(size) + (f"; {texts:,} prompts in clear, not kept: lengths unknown" if texts else "")


def _has_ids(row: dict[str, Any]) -> bool:
    return type(row.get("input_length")) is int and isinstance(row.get("hash_ids"), list)


def _check(row: Row, raw: dict[str, Any]) -> None:
    """Raises ValueError for a row whose values are out of range or contradict each other."""
    if (row.input_length is not None) + sum(key in raw for key in TEXTS if key != "tools") != 1:
        raise ValueError("wanted one of input_length, text_input, messages and payload")
    for name in ("input_length", "output_length"):
        value = getattr(row, name)
        if value is not None and not 0 <= value <= MAX_COUNT:
            raise ValueError(f"{name} is {value}, wanted 0 .. {MAX_COUNT}")
    for name in ("timestamp", "delay"):
        value = getattr(row, name)
        if value is not None and not 0 <= value <= MAX_STAMP_MS:
            raise ValueError(f"{name} is {value}, wanted 0 .. {MAX_STAMP_MS} ms")


def _request(row: Row, session: _Session | None) -> Request:
    """The row but for its prompt; `session` then stands behind it."""
    arrival_ns = 0 if session is None else session.arrival_ns
    if row.timestamp is not None:
        arrival_ns = round(row.timestamp * 10**6)
    elif row.delay is not None:
        arrival_ns += round(row.delay * 10**6)
    request: Request = {"arrival_ns": arrival_ns}
    if row.delay is not None:
        request["think_ns"] = round(row.delay * 10**6)
    if row.output_length is not None:
        request["output_tokens"], request["output_tokens_count_source"] = row.output_length, "import"
    if session is not None:
        request["session_id"], request["turn"], session.arrival_ns = session.number, session.turns, arrival_ns
        if session.turns:
            request["parent_request_id"] = session.place
        session.turns += 1
    return request


class _RowLayout:
    """Each row is a whole prompt, and its ids are the blocks."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._chained = ChainedIds()

    def place(self, request: Request, row: Row, session: _Session | None, place: int) -> None:
        del session, place
        if row.input_length is None:
            return
        request["input_tokens"], request["input_tokens_count_source"] = row.input_length, "import"
        if row.hash_ids is not None:
            full = row.input_length // self.block_tokens
            ids = self._chained.path(row.hash_ids)
            request["input_blocks"] = ids[:full]
            if len(ids) == full + 1:
                request["input_tail_id"] = ids[full]

    def source_ids(self, request: Request, row: Row) -> list[int] | None:
        return _named(request) if row.hash_ids is not None else None

    def said(self, block_tokens: int) -> str:
        return f"whole prompts, blocks of {block_tokens} tokens"


class _SessionLayout:
    """A row adds to the turns before it in its session."""

    block_tokens = BASE_BLOCK_TOKENS

    def __init__(self, source_block_tokens: int) -> None:
        self._source_block_tokens = source_block_tokens
        self._blocks = LaidOut(BASE_BLOCK_TOKENS)

    def place(self, request: Request, row: Row, session: _Session | None, place: int) -> None:
        session = session or _Session(-1)
        session.place = place
        if row.input_length is None or session.tokens is None:
            session.tokens = None
            return
        added = list(self._contents(row, place))
        session.contents += added
        tokens = session.tokens + row.input_length
        request["input_tokens"], request["input_tokens_count_source"] = min(tokens, MAX_COUNT), "import"
        request["input_blocks"] = self._blocks.path(session.contents)
        answer = row.output_length or 0
        session.contents.append((("answer", place), answer))
        session.tokens = tokens + answer

    def _contents(self, row: Row, place: int) -> Iterator[tuple[Hashable, int]]:
        left = row.input_length or 0
        for one in row.hash_ids or ():
            tokens = min(left, self._source_block_tokens)
            if tokens:
                yield (one, tokens), tokens
            left -= tokens
        if left:
            yield ("own", place), left

    def source_ids(self, request: Request, row: Row) -> None:
        del request, row

    def said(self, block_tokens: int) -> str:
        return f"turns of a session add to those before, as AIPerf sends them; ids of {block_tokens} tokens"


def _named(row: Request) -> list[int]:
    tail = row.get("input_tail_id")
    return [*(row.get("input_blocks") or []), *(() if tail is None else (tail,))]


def _columns(row: Request, zero_ns: int, ids: list[int] | None) -> dict[str, Any]:
    """What the columns say of a row. `ids` None: they are kept elsewhere, and with them the length of what a turn adds."""
    think_ns, output_tokens = row.get("think_ns"), row.get("output_tokens")
    again: dict[str, Any] = {"timestamp": (row["arrival_ns"] + zero_ns) / 10**6}
    if think_ns is not None:
        again["delay"] = think_ns / 10**6
    if output_tokens is not None:
        again["output_length"] = output_tokens
    if ids is not None:
        again |= {"input_length": row.get("input_tokens") or 0, "hash_ids": ids}
    return again


def write(rows: Iterable[Request], footer: Footer, losses: Counter[str] | None = None) -> Iterator[bytes]:
    """The source's rows. Of another source: each request alone at its time, whole, with an id for each block."""
    numbers = FirstSeen()
    if is_whole(footer, NAME):
        yield from _write_own(rows, footer, numbers)
        return
    for row in sendable(rows, Counter() if losses is None else losses):
        value = {
            "timestamp": row["arrival_ns"] / 10**6,
            "input_length": row["input_tokens"],
            "output_length": row["output_tokens"],
            "hash_ids": prompt_ids(row, footer.block_tokens, numbers),
        }
        yield msgspec.json.encode(value) + b"\n"


def _write_own(rows: Iterable[Request], footer: Footer, numbers: FirstSeen) -> Iterator[bytes]:
    zero_ns = int(footer.notes.get("first_arrival_ns", 0))
    for row in rows:
        kept = source_extra(row)
        ids = numbers.row(_named(row))
        is_kept = row.get("input_blocks") is None or "input_length" in kept.get("keys", {})
        yield msgspec.json.encode(restored(_columns(row, zero_ns, None if is_kept else ids), kept)) + b"\n"


def usage(path: str, footer: Footer, rows: int) -> str:
    del rows
    return (
        f"aiperf profile --custom-dataset-type mooncake_trace --input-file {path} --fixed-schedule "
        f"--isl-block-size {footer.block_tokens} --extra-inputs ignore_eos:true"
    )
