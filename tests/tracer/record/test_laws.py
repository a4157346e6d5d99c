"""Laws of the way through: however a stream is cut the row is the same, and whatever comes every byte goes on."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mitmproxy.http import Headers

from tracer.record.addon import RecorderAddon
from tracer.record.exchange import Exchange
from tracer.record.messages import Answered, Ended, Finished, Piece, Row, Started
from tracer.record.privacy import Hasher
from tracer.record.routes import parse_routes
from tracer.record.rows import RowBuilder
from tracer.record.worker import facts_of
from tracer.tokens import load_tokenizer
from tracer.wire import APIS, CHAT, COMPLETIONS, MESSAGES, RESPONSES

HASHER = Hasher(bytes(32))


def lines(*events: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events)


def delta(index: int = 0, **more: object) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": more, "finish_reason": None}]}


CALL = {"index": 0, "id": "c1", "function": {"name": "look", "arguments": '{"q":'}}
STREAMS = {
    CHAT: b": ping\r\n\r\n"
    + lines(delta(role="assistant", content=""), delta(reasoning="hm"), delta(content="grün"), delta(1, content="other"))
    + lines(delta(tool_calls=[CALL]), {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    + lines({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}})
    + b"data: [DONE]\n\n",
    COMPLETIONS: lines({"choices": [{"index": 0, "text": " a", "finish_reason": None}]})
    + b'data: {"choices": [{"index": 0,\r\ndata: "text": " b", "finish_reason": "length"}]}\r\n\r\ndata: [DONE]\n\n',
    RESPONSES: b"event: response.output_text.delta\n"
    + lines({"type": "response.output_text.delta", "delta": "a b"})
    + lines({"type": "response.completed", "response": {"id": "r", "status": "completed", "usage": {"output_tokens": 2}}}),
    MESSAGES: lines({"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}})
    + lines({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a b"}}, {"type": "ping"})
    + lines(
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}, {"type": "message_stop"}
    ),
}
BODY = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi"})


class Rows:
    """A sink that makes the row at once, as the worker would."""

    def __init__(self) -> None:
        self.builder = RowBuilder(load_tokenizer("cl100k"), HASHER, chunk_times=False)
        self.made: list[Row] = []

    def started(self, message: Started) -> None:
        self.pending = self.builder.start(message)
        self.exchange = Exchange(message.arrival_ns, message.endpoint)

    def answered(self, message: Answered) -> None:
        self.exchange.answered(message.status, message.content_type, message.encoding)

    def received(self, message: Piece) -> None:
        self.exchange.received(message.at_ns, message.data)

    def finished(self, message: Finished) -> None:
        assert self.exchange.bytes_out == message.bytes_out
        facts = facts_of(self.exchange, message)
        head = {"flow": message.flow, "arrival_ns": message.arrival_ns, "endpoint": message.endpoint}
        self.made.append(self.builder.end(self.pending, Ended(**head, facts=facts)))


def through(
    endpoint: str, pieces: list[bytes], headers: dict[str, str] | None = None, **options: Any
) -> tuple[bytes, Row, RecorderAddon]:
    """(what went on, the row, the add-on)."""
    sink = Rows()
    addon = RecorderAddon(sink, lambda: 0, parse_routes(["http://h"]), **options)
    request = SimpleNamespace(method="POST", path=endpoint, headers=Headers(), host_header="h", raw_content=BODY.encode())
    named = {"content-type": "text/event-stream", **(headers or {})}
    told = Headers([(name.encode(), value.encode()) for name, value in named.items()])
    response = SimpleNamespace(status_code=200, headers=told, stream=False)
    flow: Any = SimpleNamespace(id="f", request=request, response=response, error=None)
    addon.requestheaders(flow)
    addon.request(flow)
    addon.responseheaders(flow)
    on: list[bytes] = []
    for piece in (*pieces, b""):
        passed = response.stream(piece)
        assert passed or not piece or options, "nothing may be swallowed"
        on += [passed] if isinstance(passed, bytes) else passed
    addon.response(flow)
    return b"".join(on), sink.made[0], addon


def cut(data: bytes, at: list[int]) -> list[bytes]:
    places = sorted({place % (len(data) + 1) for place in at} | {0, len(data)})
    return [data[a:b] for a, b in zip(places, places[1:], strict=False)]


@pytest.mark.parametrize("endpoint", APIS)
@settings(deadline=None, max_examples=60)
@given(at=st.lists(st.integers(0, 10_000), max_size=30), every=st.booleans())
def test_cuts_change_neither_row_nor_bytes(endpoint: str, at: list[int], every: bool) -> None:
    stream = STREAMS[endpoint]
    _, whole, _ = through(endpoint, [stream])

    passed, row, addon = through(endpoint, [stream[i : i + 1] for i in range(len(stream))] if every else cut(stream, at))

    assert passed == stream
    timeless = [{name: value for name, value in one.row.items() if name != "itl_summary"} for one in (whole, row)]
    assert timeless[0] == timeless[1]
    assert (whole.input_hashes, whole.output_hashes, whole.leaves) == (row.input_hashes, row.output_hashes, row.leaves)
    assert row.row["output_tokens"] and "error_kind" not in row.row
    assert not addon.counts


@pytest.mark.parametrize("endpoint", APIS)
@settings(deadline=None, max_examples=80)
@given(
    pieces=st.lists(
        st.binary(min_size=1, max_size=40) | st.sampled_from([*STREAMS.values(), b"data: ", b"\n\n", b"{", b"\x1f\x8b"]),
        max_size=8,
    ),
    kind=st.sampled_from(["text/event-stream", "application/json", "", "text/event-stream; charset=latin-1"]),
    encoding=st.sampled_from(["", "gzip", "br", "zstd", "deflate", "strange"]),
)
def test_no_input_makes_the_proxy_drop_a_byte(endpoint: str, pieces: list[bytes], kind: str, encoding: str) -> None:
    passed, row, addon = through(endpoint, pieces, {"content-type": kind, "content-encoding": encoding})

    assert passed == b"".join(pieces)
    assert row.row["bytes_out"] == len(passed)
    assert not addon.counts
