"""Dynamo's request trace (`dynamo.request.trace.v1`) JSONL: what its frontend saw of each request when it ended. Pure.

    {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 1777312801000,
     "agent_context": {"session_id": "run-42"}, "request": {"request_id": "1", "model": "m", "output_tokens": 7,
     "request_received_ms": 1777312800000, "ttft_ms": 82.4, "total_time_ms": 1000.1, "replay": {"trace_block_size": 64,
     "input_length": 70, "input_sequence_hashes": [17, 4], "completion_sequence_hashes": [17, 9]}}}

Lines come as requests end. Its hashes have no key, so anybody could confirm a guessed prompt with them: they become dense
numbers, and an export writes those. Lines with payloads are left out; tool events stay with the request after them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from tracer.blocks import DenseIds
from tracer.formats import BadRow, Detected, source_extra
from tracer.formats.ids import FirstSeen
from tracer.formats.layout import is_whole, remainder, restored
from tracer.formats.targets import prompt_ids, sendable
from tracer.schema import Footer, Request

NAME = "dynamo_trace"
SCHEMA = "dynamo.request.trace.v1"
HOLDS = frozenset(
    {"input_tokens", "output_tokens", "input_blocks", "output_blocks", "session_id", "turn", "parent_request_id", "model"}
    | {"ttft_ns", "end_ns", "cached_tokens", "finish_reason"}
)
STEP_NS = 10**6
MAX_COUNT = 2**31 - 1
MAX_MS = 2**62 // 10**6


class Replay(msgspec.Struct):
    trace_block_size: int
    input_length: int
    input_sequence_hashes: list[int]
    completion_sequence_hashes: list[int] | None = None


class Finish(msgspec.Struct):
    finish_reason: str | None = None
    tool_calls: list[Any] = []


class Metrics(msgspec.Struct):
    request_id: str
    request_received_ms: int
    output_tokens: int
    input_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_ms: float | None = None
    total_time_ms: float | None = None
    model: str | None = None
    replay: Replay | None = None
    finish_reason_metadata: Finish | None = None


class Context(msgspec.Struct):
    session_id: str


class Record(msgspec.Struct):
    event_type: str
    request: Metrics | None = None
    agent_context: Context | None = None


def looks_like(head: bytes) -> bool:
    return f'"{SCHEMA}"'.encode() in head


def read(lines: Iterable[bytes], found: Detected, bad: Callable[[BadRow], None]) -> Iterator[Request]:
    """Rows in file order, which is that of their ends; `arrival_ns` counts from the first row's."""
    found.time_unit_ns, found.tail_rule = 10**6, "ceil"
    hashes: DenseIds[int] = DenseIds()
    sessions: DenseIds[str] = DenseIds()
    block_tokens: int | None = None
    events: list[Any] = []  # of tools, since the last request
    payloads = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw, inner, record = _parsed(line, block_tokens)
        except (msgspec.MsgspecError, ValueError) as error:
            in_clear = b"payload" in line
            bad(BadRow(number, str(error), "" if in_clear else line.decode("utf-8", "replace").rstrip("\r\n")))
            continue
        if record.event_type != "request_end":
            payloads += record.event_type == "request_payload"
            if record.event_type.startswith("tool_"):
                events.append(raw)
            continue
        assert record.request is not None
        if found.epoch_ns is None:
            found.epoch_ns = record.request.request_received_ms * 10**6
        if record.request.replay is not None:
            found.block_tokens = block_tokens = record.request.replay.trace_block_size
        request = _request(record, record.request, hashes, found.epoch_ns)
        if record.agent_context is not None:
            request["session_id"] = sessions[record.agent_context.session_id]
        kept = _kept(raw, inner, request, found.epoch_ns)
        if events:
            kept["before"], events = events, []
        request["source_extra"] = msgspec.json.encode(kept).decode()
        yield request
    if events:
        found.notes["after_the_last"] = msgspec.json.encode(events).decode()
    if payloads:
        found.notes["read_as"] = f"{payloads:,} payloads left out"


def _parsed(line: bytes, block_tokens: int | None) -> tuple[dict[str, Any], dict[str, Any], Record]:
    """The line, the record in it (itself, or under `event`), and that checked."""
    raw = msgspec.json.decode(line, type=dict[str, Any])
    inner = raw["event"] if isinstance(raw.get("event"), dict) else raw
    record = msgspec.convert(inner, Record)
    if record.event_type == "request_end":
        _check(record, block_tokens)
    return raw, inner, record


def _check(record: Record, block_tokens: int | None) -> None:
    """Raises ValueError for values that are out of range or contradict each other."""
    request = record.request
    if request is None:
        raise ValueError("request_end without request")
    replay = request.replay
    tokens = request.input_tokens if replay is None else replay.input_length
    for name, value in (("input_length", tokens), ("output_tokens", request.output_tokens), ("cached", request.cached_tokens)):
        if value is not None and not 0 <= value <= MAX_COUNT:
            raise ValueError(f"{name} is {value}, wanted 0 .. {MAX_COUNT}")
    for name in ("request_received_ms", "ttft_ms", "total_time_ms"):
        value = getattr(request, name)
        if value is not None and not 0 <= value <= MAX_MS:
            raise ValueError(f"{name} is {value}, wanted 0 .. {MAX_MS}")
    if replay is None:
        return
    size = replay.trace_block_size
    if not 0 < size <= MAX_COUNT or size != (block_tokens or size):
        raise ValueError(f"trace_block_size is {size}, wanted {block_tokens or 'a positive one'}")
    for name, count, covered in (
        ("input", len(replay.input_sequence_hashes), replay.input_length),
        ("completion", len(replay.completion_sequence_hashes or ()), replay.input_length + request.output_tokens),
    ):
        if (name == "input" or replay.completion_sequence_hashes is not None) and count != -(-covered // size):
            raise ValueError(f"{count} {name}_sequence_hashes for {covered} tokens, wanted {-(-covered // size)}")


def _request(record: Record, seen: Metrics, hashes: DenseIds[int], epoch_ns: int) -> Request:
    request: Request = {
        "arrival_ns": seen.request_received_ms * 10**6 - epoch_ns,
        "output_tokens": seen.output_tokens,
        "output_tokens_count_source": "usage",
    }
    replay, finish = seen.replay, seen.finish_reason_metadata
    tokens = seen.input_tokens if replay is None else replay.input_length
    if tokens is not None:
        request["input_tokens"], request["input_tokens_count_source"] = tokens, "usage"
    if seen.ttft_ms is not None:
        request["ttft_ns"] = round(seen.ttft_ms * 10**6)
    if seen.total_time_ms is not None:
        request["end_ns"] = round(seen.total_time_ms * 10**6)
    if seen.cached_tokens is not None:
        request["cached_tokens"] = seen.cached_tokens
    if seen.model is not None:
        request["model"] = seen.model
    if finish is not None and finish.finish_reason is not None:
        request["finish_reason"] = finish.finish_reason
    if finish is not None:
        request["tool_calls_out"] = len(finish.tool_calls)
    if replay is not None:
        full = replay.input_length // replay.trace_block_size
        ids = [hashes[one] for one in replay.input_sequence_hashes]
        request["input_blocks"] = ids[:full]
        if len(ids) > full:
            request["input_tail_id"] = ids[full]
        if replay.completion_sequence_hashes is not None:
            every = (replay.input_length + seen.output_tokens) // replay.trace_block_size
            request["output_blocks"] = [hashes[one] for one in replay.completion_sequence_hashes[full:every]]
    return request


def _kept(raw: dict[str, Any], inner: dict[str, Any], request: Request, epoch_ns: int) -> dict[str, Any]:
    """What the columns do not say, level by level; never a hash."""
    seen = dict(inner["request"])
    seen.pop("replay", None)
    kept = {
        "record": {key: value for key, value in inner.items() if key not in ("request", "schema", "event_type")},
        "request": remainder(seen, _metrics(request, epoch_ns)),
    }
    if raw is not inner:
        kept["around"] = {key: value for key, value in raw.items() if key != "event"}
    return kept


def _metrics(row: Request, epoch_ns: int) -> dict[str, Any]:
    value: dict[str, Any] = {
        "request_received_ms": (row["arrival_ns"] + epoch_ns) // 10**6,
        "output_tokens": row.get("output_tokens") or 0,
    }
    optional: dict[str, Any] = {
        "input_tokens": row.get("input_tokens"),
        "cached_tokens": row.get("cached_tokens"),
        "model": row.get("model"),
    }
    for name, ns in (("ttft_ms", row.get("ttft_ns")), ("total_time_ms", row.get("end_ns"))):
        optional[name] = None if ns is None else ns / 10**6
    return value | {key: one for key, one in optional.items() if one is not None}


def write(rows: Iterable[Request], footer: Footer, losses: Counter[str] | None = None) -> Iterator[bytes]:
    """The source's lines, with dense hashes; of another source one line a request, each in a session, in order of arrival."""
    numbers = FirstSeen()
    epoch_ns = footer.epoch_ns or 0
    is_own = is_whole(footer, NAME)
    for row in rows if is_own else sendable(rows, Counter() if losses is None else losses):
        if is_own:
            kept = source_extra(row)
            for event in kept.get("before", ()):
                yield msgspec.json.encode(event) + b"\n"
            request = restored(_metrics(row, epoch_ns), kept["request"])
            around = kept["record"]
        else:
            kept, request, around = {}, _foreign(row, epoch_ns), _record(row, epoch_ns)
        if row.get("input_blocks") is not None or not is_own:
            request["replay"] = _replay(row, footer.block_tokens, numbers)
        value = {"schema": SCHEMA, "event_type": "request_end", **around, "request": request}
        yield msgspec.json.encode({**kept["around"], "event": value} if "around" in kept else value) + b"\n"
    for event in msgspec.json.decode(footer.notes.get("after_the_last", "[]"), type=list[Any]) if is_own else ():
        yield msgspec.json.encode(event) + b"\n"


def _replay(row: Request, block_tokens: int, numbers: FirstSeen) -> dict[str, Any]:
    ids = prompt_ids(row, block_tokens, numbers)
    value: dict[str, Any] = {
        "trace_block_size": block_tokens,
        "input_length": row.get("input_tokens") or 0,
        "input_sequence_hashes": ids,
    }
    answer = row.get("output_blocks")
    tokens = (row.get("input_tokens") or 0) + (row.get("output_tokens") or 0)
    full = ids[: (row.get("input_tokens") or 0) // block_tokens]
    partial = [numbers.fresh()] if tokens % block_tokens else []
    if answer is not None and len(full) + len(answer) == tokens // block_tokens:
        value["completion_sequence_hashes"] = full + numbers.row(answer) + partial
    return value


def _foreign(row: Request, epoch_ns: int) -> dict[str, Any]:
    request = {"request_id": f"r{row['request_id']}", **_metrics(row, epoch_ns)}
    if row.get("finish_reason") is not None:
        request["finish_reason_metadata"] = {"finish_reason": row["finish_reason"]}
    return request


def _record(row: Request, epoch_ns: int) -> dict[str, Any]:
    session = row.get("session_id")
    return {
        "event_time_unix_ms": (epoch_ns + row["arrival_ns"] + (row.get("end_ns") or 0)) // 10**6,
        "agent_context": {"session_id": f"r{row['request_id']}" if session is None else f"s{session}"},
    }


def usage(path: str, footer: Footer, rows: int) -> str:
    del footer, rows
    return f"dynamo's request-trace converters and python -m dynamo.replay read {path}"
