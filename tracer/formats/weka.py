"""WEKA / cc-traces sessions (kv-cache-tester): one JSON object a session, sub-agents nested at the place of their start. Pure.

    {"id": ..., "block_size": 64, "hash_id_scope": "local", "requests": [{"t": 0.0, "type": "n", "in": 17869, "out": 426,
     "hash_ids": [1, 2, ...], ...}, {"t": 9.5, "type": "subagent", "agent_id": ..., "requests": [...]}, ...]}

A file holds one object, or one in each line. Times are seconds since the session's start, a sub-agent's since its own.
Chained ids of full 64-token blocks (floor rule) that mean nothing outside their session.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from tracer.blocks import DenseIds
from tracer.errors import TraceError
from tracer.formats import BadRow, Detected, source_extra
from tracer.schema import Footer, Request

NAME = "weka"
HOLDS = frozenset(
    {"input_tokens", "output_tokens", "input_blocks", "session_id", "turn", "model", "finish_reason", "stream", "end_ns"}
    | {"ttft_ns", "think_ns"}
)
STEP_NS = 1
BLOCK_TOKENS = 64
MAX_COUNT = 2**31 - 1
MAX_SECONDS = 10**9
_SHOWN = 80  # characters of a bad object


class Entry(msgspec.Struct, rename={"asked": "in", "answered": "out", "kind": "type"}):
    t: float
    kind: str
    asked: int
    answered: int
    hash_ids: list[int]
    model: str | None = None
    stop: str | None = None
    api_time: float | None = None
    think_time: float | None = None
    ttft: float | None = None


_SECONDS = {"api_time": "end_ns", "ttft": "ttft_ns", "think_time": "think_ns"}
_COLUMNS = {"t", "type", "in", "out", "hash_ids", "model", "stop", *_SECONDS}


def looks_like(head: bytes) -> bool:
    return head.lstrip().startswith(b"{") and b'"hash_id_scope"' in head and b'"requests"' in head


def read(lines: Iterable[bytes], found: Detected, bad: Callable[[BadRow], None]) -> Iterator[Request]:
    """Rows in file order, a sub-agent's where it was started; `wait_for` holds places in that order."""
    found.block_tokens, found.tail_rule, found.hash_scope = BLOCK_TOKENS, "floor", "local"
    found.time_unit_ns = 10**6
    frames: list[dict[str, Any]] = []
    place, blocks = 0, 0
    for number, text in _objects(lines, found):
        try:
            frame, entries = _session(text)
        except (msgspec.MsgspecError, ValueError) as error:
            bad(BadRow(number, str(error), text[:_SHOWN].decode("utf-8", "replace").rstrip("\r\n")))
            continue
        ids = _LocalIds(blocks)
        yield from _rows(entries, len(frames), place, ids)
        place += len(entries)
        blocks += len(ids)
        frames.append(frame)
    found.notes["sessions"] = msgspec.json.encode(frames).decode()


def _objects(lines: Iterable[bytes], found: Detected) -> Iterator[tuple[int, bytes]]:
    """(line, JSON text): a line each where the first one is whole, else all lines together."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        return
    try:
        msgspec.json.decode(first[1], type=msgspec.Raw)
    except msgspec.DecodeError:
        found.notes["layout"] = "document"
        yield first[0], first[1] + b"".join(line for _, line in numbered)
        return
    found.notes["layout"] = "lines" if first[1].endswith(b"\n") else "document"
    yield first
    yield from numbered


Placed = tuple[dict[str, Any], Entry, tuple[int, ...], float, str | None]  # raw, checked, path, agent's start, agent


def _session(text: bytes) -> tuple[dict[str, Any], list[Placed]]:
    """The object without its requests (sub-agents' frames under `markers`), and the requests."""
    whole = msgspec.json.decode(text, type=dict[str, Any])
    requests = whole.pop("requests", None)
    if not isinstance(requests, list):
        raise ValueError(f"requests is {requests!r:.40}, wanted a list")
    size = whole.get("block_size", BLOCK_TOKENS)
    if size != BLOCK_TOKENS:
        raise ValueError(f"block_size is {size}, wanted {BLOCK_TOKENS}")
    entries: list[Placed] = []
    markers: dict[str, Any] = {}
    for at, one in enumerate(requests):
        if isinstance(one, dict) and one.get("type") == "subagent":
            marker = dict(one)
            nested = marker.pop("requests", [])
            start = msgspec.convert(marker.get("t"), float)
            markers[str(at)] = {**marker, "nested": len(nested)}
            agent = str(marker.get("agent_id", at))
            entries += [(inner, _entry(inner), (at, k), start, agent) for k, inner in enumerate(nested)]
        else:
            entries.append((one, _entry(one), (at,), 0.0, None))
    return {"session": whole, "markers": markers, "requests": len(requests)}, entries


def _entry(raw: Any) -> Entry:
    """Raises ValueError or ValidationError for one whose values are out of range or contradict each other."""
    entry = msgspec.convert(raw, Entry)
    for name, value in (("in", entry.asked), ("out", entry.answered)):
        if not 0 <= value <= MAX_COUNT:
            raise ValueError(f"{name} is {value}, wanted 0 .. {MAX_COUNT}")
    for name, seconds in (("t", entry.t), *((name, getattr(entry, name)) for name in _SECONDS)):
        if seconds is not None and not 0 <= seconds <= MAX_SECONDS:
            raise ValueError(f"{name} is {seconds}, wanted 0 .. {MAX_SECONDS} seconds")
    if len(entry.hash_ids) != entry.asked // BLOCK_TOKENS:
        raise ValueError(
            f"{len(entry.hash_ids)} hash_ids for in {entry.asked}, wanted {entry.asked // BLOCK_TOKENS} "
            f"(one per {BLOCK_TOKENS} full tokens)"
        )
    return entry


class _LocalIds:
    """A session's ids as the trace's own: chained, dense in first-seen order after those of earlier sessions."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._names: dict[tuple[int, int], int] = {}  # (name of the block before, source id)

    def __len__(self) -> int:
        return len(self._names)

    def path(self, source_ids: list[int]) -> list[int]:
        above, names = -1, self._names
        found = []
        for one in source_ids:
            above = names.setdefault((above, one), self._first + len(names))
            found.append(above)
        return found


def _rows(entries: list[Placed], session: int, first_place: int, ids: _LocalIds) -> Iterator[Request]:
    main: int | None = None  # place of the main agent's last request
    turn = 0
    last_of: dict[str, tuple[int, float]] = {}  # place and end of the last request of sub-agents that main has not joined yet
    for k, (raw, entry, path, start, agent) in enumerate(entries):
        place, at = first_place + k, start + entry.t
        blocks = ids.path(entry.hash_ids)
        waits = [] if main is None else [main]
        if agent is not None:
            waits = [last_of[agent][0]] if agent in last_of else waits
            last_of[agent] = place, at + (entry.api_time or 0.0)
        else:
            done = [name for name, (_, end) in last_of.items() if end <= at]
            waits += [last_of.pop(name)[0] for name in done]
            main = place
        row: Request = {
            "session_id": session,
            "arrival_ns": round(at * 1e9),
            "kind": "subagent" if agent is not None else "chat",
            "input_tokens": entry.asked,
            "input_tokens_count_source": "import",
            "output_tokens": entry.answered,
            "output_tokens_count_source": "import",
            "input_blocks": blocks,
            "stream": entry.kind == "s",
            "source_extra": msgspec.json.encode(_extra(raw, entry, path, blocks, ids)).decode(),
        }
        if waits:
            row["wait_for"], row["parent_request_id"] = waits, waits[0]
        if agent is not None:
            row["agent_id"] = agent
        else:
            row["turn"], turn = turn, turn + 1
        if entry.model is not None:
            row["model"] = entry.model
        if entry.stop is not None:
            row["finish_reason"] = entry.stop
        for name, column in _SECONDS.items():
            seconds = getattr(entry, name)
            if seconds is not None:
                row[column] = round(seconds * 1e9)  # type: ignore[literal-required]
        yield row


def _extra(raw: dict[str, Any], entry: Entry, path: tuple[int, ...], blocks: list[int], ids: _LocalIds) -> dict[str, Any]:
    """Where the request stood, and what no column holds."""
    extra: dict[str, Any] = {"path": path, "t": entry.t}
    rest = {key: value for key, value in raw.items() if key not in _COLUMNS}
    nulls = [key for key in _COLUMNS if key in raw and raw[key] is None]
    if entry.kind not in ("n", "s"):
        rest["type"] = entry.kind
    rest |= {name: raw[name] for name in _SECONDS if raw.get(name) is not None and round(raw[name] * 1e9) / 1e9 != raw[name]}
    if [block - ids._first + 1 for block in blocks] != entry.hash_ids:
        rest["hash_ids"] = entry.hash_ids
    if rest or nulls:
        extra["rest"] = rest | dict.fromkeys(nulls)
    return extra


def write(rows: Iterable[Request], footer: Footer) -> Iterator[bytes]:
    """One object a session. Of another source: its sessions (a request without one is its own), ids counted from 1 in each.

    Raises TraceError if the trace's blocks do not fit into 64 tokens.
    """
    factor, rest = divmod(BLOCK_TOKENS, footer.block_tokens)
    if rest:
        raise TraceError(
            "these blocks cannot be written as WEKA's",
            seen=f"{footer.block_tokens} tokens a block",
            wanted=f"a divisor of {BLOCK_TOKENS}",
        )
    if footer.source_format == NAME:
        yield from _write_own(rows, footer)
        return
    sessions: dict[int, list[Request]] = {}
    for row in rows:
        session = row.get("session_id")
        sessions.setdefault(-1 - row["request_id"] if session is None else session, []).append(row)
    for number, own in enumerate(sessions.values()):
        numbers: DenseIds[tuple[int, int]] = DenseIds()
        requests = []
        for row in own:
            full = (row.get("input_tokens") or 0) // BLOCK_TOKENS
            ids = [numbers[-1, one] + 1 for one in (row.get("input_blocks") or [])[factor - 1 :: factor][:full]]
            ids += [numbers[row["request_id"], k] + 1 for k in range(full - len(ids))]  # that no other request has
            value = _request(row, ids, (row["arrival_ns"] - own[0]["arrival_ns"]) / 1e9)
            requests.append({"model": "unknown", **value})  # AIPerf and inference-perf refuse a request without one
        models = sorted({row.get("model") or "" for row in own} - {""})
        frame = {"id": f"trace_{number:04d}", "models": models, "block_size": BLOCK_TOKENS, "hash_id_scope": "local"}
        yield msgspec.json.encode({**frame, "tool_tokens": 0, "system_tokens": 0, "requests": requests}) + b"\n"


def _request(row: Request, ids: list[int], t: float) -> dict[str, Any]:
    value: dict[str, Any] = {
        "t": t,
        "type": "s" if row.get("stream") else "n",
        "in": row.get("input_tokens") or 0,
        "out": row.get("output_tokens") or 0,
        "hash_ids": ids,
    }
    value |= {name: row[name] for name in ("model",) if row.get(name) is not None}
    if row.get("finish_reason") is not None:
        value["stop"] = row["finish_reason"]
    for name, column in _SECONDS.items():
        ns = row.get(column)
        if isinstance(ns, int):
            value[name] = ns / 1e9
    return value


def _write_own(rows: Iterable[Request], footer: Footer) -> Iterator[bytes]:
    """The source's objects again, request by request at its own place."""
    frames = msgspec.json.decode(footer.notes.get("sessions", "[]"), type=list[dict[str, Any]])
    lists: list[list[Any]] = [[None] * frame["requests"] for frame in frames]
    for frame, requests in zip(frames, lists, strict=True):
        for at, marker in frame["markers"].items():
            nested = [None] * marker["nested"]
            requests[int(at)] = {key: value for key, value in marker.items() if key != "nested"} | {"requests": nested}
    numbers: list[DenseIds[int]] = [DenseIds() for _ in frames]
    for row in rows:
        extra, session = source_extra(row), row["session_id"]
        assert session is not None
        ids = [numbers[session][one] + 1 for one in row.get("input_blocks") or []]
        value = {**_request(row, ids, extra["t"]), **extra.get("rest", {})}
        at, *inner = extra["path"]
        if inner:
            lists[session][at]["requests"][inner[0]] = value
        else:
            lists[session][at] = value
    end = b"\n" if footer.notes.get("layout") == "lines" else b""
    for frame, requests in zip(frames, lists, strict=True):
        yield msgspec.json.encode({**frame["session"], "requests": [one for one in requests if one is not None]}) + end
