"""RAGPulse JSONL: prompts as lists of content ids by component, their lengths in files beside the trace. Pure.

    {"timestamp": "82", "input_length": 3112, "output_length": 192, "hash_ids": {"sys_prompt": [8302, 14332], "passages_ids":
     [7398], "history": [], "web_search": [], "user_input": [26923]}, "session_id": "1757476916095-afhwfadnh5ew"}

Components are not chained and of any length, so they become segments. Where their lengths are known they are also laid one
after the other, in the source's order, and cut into 16-token blocks; what the template adds between them is not known.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from tracer.blocks import DenseIds
from tracer.errors import TraceError
from tracer.formats import BadRow, Detected, source_extra
from tracer.formats.ids import LaidOut
from tracer.schema import BASE_BLOCK_TOKENS, Footer, Request, Segment

NAME = "ragpulse"
HOLDS = frozenset({"input_tokens", "output_tokens", "segments", "session_id"})
STEP_NS = 10**9
SIDE_FILES = ("1_sys_prompt.jsonl", "2_passages.jsonl", "3_history.jsonl", "4_user_input.jsonl", "5_web_search.jsonl")
COMPONENTS = {  # of the source, in its order: (role, kind)
    "sys_prompt": ("system", "system"),
    "passages_ids": ("user", "passage"),
    "history": ("user", "history"),
    "web_search": ("user", "web_search"),
    "user_input": ("user", "user"),
}
MAX_COUNT = 2**31 - 1
MAX_SECONDS = 4 * 10**9


class Row(msgspec.Struct):
    timestamp: str | int
    input_length: int
    output_length: int
    hash_ids: dict[str, list[int]]
    session_id: str


_KEYS = {"timestamp", "input_length", "output_length", "hash_ids", "session_id"}


def looks_like(head: bytes) -> bool:
    first = head.lstrip().split(b"\n", 1)[0]
    return first.startswith(b"{") and b'"passages_ids"' in first and b'"sys_prompt"' in first


def read(lines: Iterable[bytes], found: Detected, bad: Callable[[BadRow], None]) -> Iterator[Request]:
    """Rows in file order. Without the side files segments have no lengths, and there are no blocks."""
    found.block_tokens, found.tail_rule, found.time_unit_ns = BASE_BLOCK_TOKENS, "floor", 10**9
    lengths = _lengths(found.side_lines)
    found.notes["component_lengths"] = "known" if lengths else "unknown: no side files beside the trace"
    decode = msgspec.json.Decoder(Row).decode
    contents: DenseIds[int] = DenseIds()
    sessions: DenseIds[str] = DenseIds()
    blocks = LaidOut(BASE_BLOCK_TOKENS)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decode(line)
            seconds = _check(row)
        except (msgspec.MsgspecError, ValueError) as error:
            bad(BadRow(number, str(error), line.decode("utf-8", "replace").rstrip("\r\n")))
            continue
        segments = [
            Segment(role=COMPONENTS[name][0], kind=COMPONENTS[name][1], tokens=lengths.get(one, 0), content_id=contents[one])
            for name in COMPONENTS
            for one in row.hash_ids.get(name, ())
        ]
        request: Request = {
            "session_id": sessions[row.session_id],
            "arrival_ns": seconds * 10**9,
            "input_tokens": row.input_length,
            "input_tokens_count_source": "import",
            "output_tokens": row.output_length,
            "output_tokens_count_source": "import",
            "segments": segments,
            "source_extra": msgspec.json.encode(_extra(row, line)).decode(),
        }
        if lengths:
            path = blocks.path((one["content_id"], one["tokens"]) for one in segments)
            request["input_blocks"] = path[: row.input_length // BASE_BLOCK_TOKENS]
        yield request
    found.notes["content_ids"] = msgspec.json.encode(list(contents)).decode()


def _lengths(side_lines: dict[str, Sequence[bytes]]) -> dict[int, int]:
    """Tokens by content id, whatever its component: ids are of the whole trace."""
    found: dict[int, int] = {}
    for name, lines in side_lines.items():
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                value = msgspec.json.decode(line, type=dict[str, int])
                tokens = value.pop("token_length")
                (content,) = value.values()
            except (msgspec.MsgspecError, KeyError, ValueError) as error:
                raise TraceError(
                    "no length of a component",
                    path=name,
                    line=number,
                    seen=repr(line[:80].decode("utf-8", "replace")),
                    wanted='{"..._id": 7, "token_length": 84}',
                    next_step="Repair the file, or move it away to import without lengths",
                ) from error
            found[content] = tokens
    return found


def _check(row: Row) -> int:
    """The time in seconds. Raises ValueError for values that are out of range."""
    seconds = int(row.timestamp)
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"timestamp is {seconds}, wanted 0 .. {MAX_SECONDS} seconds")
    for name in ("input_length", "output_length"):
        if not 0 <= getattr(row, name) <= MAX_COUNT:
            raise ValueError(f"{name} is {getattr(row, name)}, wanted 0 .. {MAX_COUNT}")
    if unknown := row.hash_ids.keys() - COMPONENTS.keys():
        raise ValueError(f"hash_ids has {sorted(unknown)[0]!r}, wanted only {', '.join(COMPONENTS)}")
    return seconds


def _extra(row: Row, line: bytes) -> dict[str, Any]:
    extra: dict[str, Any] = {"session_id": row.session_id}
    if row.timestamp != str(int(row.timestamp)):
        extra["timestamp"] = row.timestamp
    missing = [name for name in COMPONENTS if name not in row.hash_ids]
    if missing:
        extra["missing"] = missing
    keys = {key: value for key, value in msgspec.json.decode(line).items() if key not in _KEYS}
    if keys:
        extra["keys"] = keys
    return extra


def write(rows: Iterable[Request], footer: Footer) -> Iterator[bytes]:
    """Components from segments. Raises TraceError for a request without any: the format has no other way to tell a prompt."""
    notes = footer.notes if footer.source_format == NAME else {}
    content_ids = msgspec.json.decode(notes["content_ids"], type=list[int]) if "content_ids" in notes else None
    zero_ns = int(notes.get("first_arrival_ns", 0))
    by_kind = {kind: name for name, (_, kind) in COMPONENTS.items()}
    for row in rows:
        extra = source_extra(row) if notes else {}
        if row.get("segments") is None:
            raise TraceError(
                "RAGPulse holds prompts as components, and this trace has none",
                seen=f"request {row['request_id']} without segments",
                next_step="Export to another format",
            )
        components: dict[str, list[int]] = {name: [] for name in COMPONENTS if name not in extra.get("missing", ())}
        for one in row["segments"] or []:
            content = one["content_id"]
            components[by_kind.get(one["kind"], "history")].append(content_ids[content] if content_ids else content)
        value = {
            "timestamp": extra.get("timestamp", str((row["arrival_ns"] + zero_ns) // 10**9)),
            "input_length": row.get("input_tokens") or 0,
            "output_length": row.get("output_tokens") or 0,
            "hash_ids": components,
            "session_id": extra.get("session_id", str(row.get("session_id"))),
            **extra.get("keys", {}),
        }
        yield msgspec.json.encode(value) + b"\n"
