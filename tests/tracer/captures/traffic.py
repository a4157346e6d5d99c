"""Traffic that the captures of these tests hold, and what live recording makes of it."""

import json
from pathlib import Path
from typing import Any

from tracer.record.compactor import compact
from tracer.record.exchange import Exchange
from tracer.record.messages import Ended, Row, Started, WorkerConfig
from tracer.record.privacy import Hasher, load_key
from tracer.record.rows import RowBuilder
from tracer.record.worker import build
from tracer.record.writer import segments_folder
from tracer.tokens import load_tokenizer
from tracer.tracefile import iter_requests
from tracer.wire import CHAT, COMPLETIONS

EPOCH_S = 1_760_000_000
EPOCH_NS = EPOCH_S * 10**9
SECRET = "Bearer CANARY-secret"
SYSTEM = "CANARY-system. You answer with care and at length. " * 6
CL100K = load_tokenizer("cl100k")
USAGE = {
    "prompt_tokens": 91,
    "completion_tokens": 7,
    "total_tokens": 98,
    "prompt_tokens_details": {"cached_tokens": 64},
    "completion_tokens_details": {"reasoning_tokens": 3},
}


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    """System, then user and assistant in turn."""
    roles = ["system"] + ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, (SYSTEM, *texts), strict=False)]
    return {"model": "m-1", "messages": messages, "max_tokens": 50, "temperature": 0.5, "top_p": 0.9, **more}


def answer(text: str = "CANARY-answer of a few words", usage: dict[str, Any] | None = USAGE) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage}


def completion(text: str = " CANARY-answer of words") -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": "length"}], "usage": USAGE}


def stream(*pieces: str) -> bytes:
    events: list[Any] = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
    events += [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    events += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": USAGE}]
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"


def live_row(
    key: Path,
    request: dict[str, Any] | bytes,
    response: dict[str, Any] | bytes | None,
    endpoint: str = CHAT,
    *,
    status: int = 200,
    content_type: str = "application/json",
    encoding: str = "",
    end_ns: int = 2_000_000_000,
    broken: str | None = None,
    **started: Any,
) -> Row:
    """The row that the recorder's worker makes of these bytes."""
    builder = RowBuilder(CL100K, Hasher(load_key(key)), chunk_times=False)
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    said = response if isinstance(response, bytes) else json.dumps(response).encode() if response is not None else b""
    exchange = Exchange(0, endpoint)
    exchange.dispatched(0, len(body))
    exchange.answered(status, content_type, encoding)
    exchange.received(end_ns // 2, said)
    facts = exchange.broke(end_ns, broken) if broken else exchange.ended(end_ns)
    pending = builder.start(Started(flow=0, arrival_ns=0, endpoint=endpoint, body=body, **started))
    return builder.end(pending, Ended(flow=0, arrival_ns=0, endpoint=endpoint, facts=facts))


def recorded(out: Path, key: Path, turns: list[tuple[int, str, bytes, bytes]]) -> list[dict[str, Any]]:
    """Rows of the trace that live recording makes of (arrival in s, credential, request, response), 2 s each."""
    folder = segments_folder(out)
    folder.mkdir()
    config = WorkerConfig(
        folder=str(folder), key_path=str(key), tokenizer="cl100k", chunk_times=False, epoch_ns=EPOCH_NS, producer="live"
    )
    worker = build(config, 0)
    for flow, (at_s, credential, request, response) in enumerate(turns):
        arrival_ns = at_s * 10**9
        exchange = Exchange(arrival_ns, CHAT)
        exchange.dispatched(arrival_ns, len(request))
        exchange.answered(200, "application/json")
        exchange.received(arrival_ns + 10**9, response)
        facts = exchange.ended(arrival_ns + 2 * 10**9)
        head = {"flow": flow, "arrival_ns": arrival_ns, "endpoint": CHAT}
        worker.take(Started(**head, body=request, credential=credential.encode()))
        worker.take(Ended(**head, facts=facts, upstream="gpu:8000"))
    worker.close()
    compact(folder, out)
    return rows_of(out)


LINKS = {"request_id", "arrival_ns", "client_id", "session_id", "turn", "parent_request_id", "think_ns"}


def assert_same_row(imported: dict[str, Any], live: Row, *, unknown: set[str] = frozenset()) -> None:
    """All columns but the links, and those that the format cannot know, which must be null."""
    skipped = LINKS | {"input_blocks", "input_tail_id", "output_blocks", "segments", "upstream"}
    seen = {name: value for name, value in imported.items() if value is not None and name not in skipped}
    want = {name: value for name, value in live.row.items() if name not in skipped | unknown}
    assert seen == want
    parts = [(one["role"], one["kind"], one["tokens"]) for one in imported["segments"] or []]
    assert parts == [(role, kind, tokens) for role, kind, tokens, _ in live.parts]
    assert len(imported["input_blocks"] or []) == len(live.input_hashes) // 8
    assert (imported["input_tail_id"] is not None) == bool(live.input_tail)
    assert len(imported["output_blocks"] or []) == len(live.output_hashes) // 8


def rows_of(trace: Path) -> list[dict[str, Any]]:
    return list(iter_requests(trace))


def assert_no_canary(folder: Path, *sources: Path) -> None:
    """In no byte of any file but the sources; a trace's pages are compressed, so its values are looked at too."""
    for path in folder.rglob("*"):
        if path.is_file() and path not in sources:
            assert b"CANARY" not in path.read_bytes(), path
            if path.suffix == ".parquet":
                assert "CANARY" not in json.dumps(rows_of(path))


__all__ = ["COMPLETIONS"]
