"""One request against servers that behave, misbehave, and die: stamps, counts and the right blame."""

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from itertools import pairwise

import numpy as np
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.edge.client import Exchange, TransportName, client_for
from tracer.wire.openai import parse_chunk
from tracer.wire.sse import SseParser

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Ask = Callable[..., list[Exchange]]


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str, completion_tokens: int | None = None) -> bytes:
    usage = {"usage": {"prompt_tokens": 5, "completion_tokens": completion_tokens}} if completion_tokens else {}
    return event(choices=[{"index": 0, "text": text, "finish_reason": None}], **usage)


LAST = event(choices=[{"index": 0, "text": " z", "finish_reason": "length"}])
USAGE = event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}})
DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


async def read_request(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    await reader.readexactly(length)


def sends(*parts: bytes, pause_s: float = 0.0) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return script


@pytest.fixture(params=[("own", asyncio.run), ("own", uvloop.run), ("httpx", asyncio.run)], ids=["own", "own-uvloop", "httpx"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Both transports see the same servers and must tell the same story."""
    transport, run_loop = request.param

    def ask(
        script: Script, timeout_s: float = 5.0, requests: int = 1, body: bytes = b"{}", pause_s: float = 0.0
    ) -> list[Exchange]:
        async def run() -> list[Exchange]:
            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                try:
                    await script(reader, writer)
                finally:
                    writer.close()

            seen = []
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"
            async with server, client_for(timeout_s, {}, transport) as client:
                for _ in range(requests):
                    seen.append(await client.exchange(client.endpoint(url), body))
                    await asyncio.sleep(pause_s)
            return seen

        return run_loop(run())

    return ask


def test_a_whole_stream_is_counted_and_stamped_in_order(ask: Ask) -> None:
    role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])

    (seen,) = ask(sends(HEAD, role, token(" a"), token(" b"), LAST, USAGE, DONE, pause_s=0.01))

    assert seen.error_kind is None
    assert seen.chunks == 3
    assert len(seen.chunk_gaps_us) == 2
    assert seen.facts.usage is not None and seen.facts.usage.cached_tokens == 4
    assert seen.first_byte_ns is not None and seen.first_answer_ns is not None and seen.last_token_ns is not None
    assert seen.sent_ns is not None
    assert seen.sent_ns < seen.first_byte_ns <= seen.first_answer_ns < seen.last_token_ns < seen.end_ns


@pytest.mark.parametrize("size", [1, 7, 50])
def test_cuts_of_the_stream_do_not_matter(ask: Ask, size: int) -> None:
    body = token(" a", 1) + b": ping\n\n" + token(" b", 3) + LAST + USAGE + DONE
    pieces = [body[i : i + size] for i in range(0, len(body), size)]

    (seen,) = ask(sends(HEAD, *pieces))

    assert (seen.error_kind, seen.chunks, seen.facts.finish_reason) == (None, 3, "length")


def test_tokens_of_a_chunk_come_from_running_usage(ask: Ask) -> None:
    (seen,) = ask(sends(HEAD, token(" a", 1), token(" b c", 3), DONE))

    assert seen.chunk_tokens == [1, 2]


@pytest.mark.parametrize(
    ("parts", "kind", "words"),
    [
        (
            (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 28\r\n\r\n", b'{"error":{"message":"nope"}}'),
            "http_status",
            "400: nope",
        ),
        ((b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy",), "http_status", "503: busy"),
        ((HEAD, token(" a"), event(error={"message": "out of memory"})), "stream_error", "out of memory"),
        ((HEAD, DONE), "no_tokens", "without a token"),
        ((HEAD, token(" a")), "connection_lost", "before its finish reason"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnope",), "bad_response", "nope"),
        (
            (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nda",),
            "connection_lost",
            "",
        ),
    ],
)
def test_faults_of_the_target_are_named_and_never_raised(ask: Ask, parts: tuple[bytes, ...], kind: str, words: str) -> None:
    (seen,) = ask(sends(*parts))

    assert seen.error_kind == kind
    assert words in (seen.error_text or "")
    assert seen.end_ns > 0


def test_silence_is_a_time_out(ask: Ask) -> None:
    (seen,) = ask(sends(HEAD + token(" a"), b"", pause_s=4.0), timeout_s=0.3)

    assert seen.error_kind == "timeout"
    assert seen.first_answer_ns is not None


def test_a_stream_that_goes_on_is_no_silence(ask: Ask) -> None:
    (seen,) = ask(sends(HEAD, *[token(" a")] * 8, LAST, DONE, pause_s=0.1), timeout_s=0.4)

    assert (seen.error_kind, seen.chunks) == (None, 9)


@pytest.mark.parametrize("transport", ["own", "httpx"])
def test_a_refused_connection_is_the_connection(transport: TransportName) -> None:
    async def run() -> Exchange:
        async with client_for(2.0, {}, transport) as client:
            return await client.exchange(client.endpoint("http://127.0.0.1:1/v1/completions"), b"{}")

    assert asyncio.run(run()).error_kind == "connect"


ANSWER = b'{"choices":[{"index":0,"text":" a","finish_reason":"length"}]}'
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)


def test_a_connection_is_used_again(ask: Ask) -> None:
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for _ in range(3):
            await sends(WHOLE)(reader, writer)

    assert [one.error_kind for one in ask(script, requests=3, pause_s=0.01)] == [None] * 3
    assert connections == 1


def test_a_pooled_connection_that_the_server_closed_is_not_used(ask: Ask) -> None:
    """No byte was sent on it, so a new one is opened and nothing is said."""
    seen = ask(sends(WHOLE), requests=3, pause_s=0.02)

    assert [one.error_kind for one in seen] == [None] * 3


def test_after_the_first_byte_there_is_no_second_try(ask: Ask) -> None:
    """The server takes the second request and dies over it: it may have been at work, so it is not asked again."""
    taken = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        await read_request(reader)
        taken += 1
        writer.write(WHOLE)
        await writer.drain()
        await read_request(reader)
        taken += 1

    first, second = ask(script, requests=2, pause_s=0.01)

    assert (first.error_kind, second.error_kind) == (None, "connection_lost")
    assert taken == 2


def test_a_reset_is_a_lost_connection(ask: Ask) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await sends(HEAD + token(" a"))(reader, writer)
        await asyncio.sleep(0.05)
        linger_none = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_none)
        writer.transport.abort()

    (seen,) = ask(script)

    assert (seen.error_kind, seen.chunks) == ("connection_lost", 1)


def test_a_long_prompt_goes_out_whole(ask: Ask) -> None:
    got = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        got = len(await reader.readexactly(length))
        await asyncio.sleep(0.01)
        writer.write(HEAD + LAST + DONE)

    body = b'{"prompt":[' + b",".join([b"12345"] * 200_000) + b"]}"

    (seen,) = ask(script, body=body)

    assert seen.error_kind is None
    assert got == len(body)


def test_a_refusal_before_the_prompt_was_read_is_heard(ask: Ask) -> None:
    """413 and the connection closed, as servers do with a body over their limit."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig")
        await writer.drain()
        await asyncio.sleep(0.1)

    (seen,) = ask(script, body=b"x" * 30_000)

    assert (seen.error_kind, seen.http_status) == ("http_status", 413)


def test_an_interim_answer_is_passed_over(ask: Ask) -> None:
    (seen,) = ask(sends(b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE))

    assert (seen.error_kind, seen.http_status, seen.chunks) == (None, 200, 1)


def chunked(body: bytes, rng: np.random.Generator) -> bytes:
    cuts = np.unique(rng.integers(1, len(body), 12)).tolist()
    parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_random_cuts_of_any_framing_give_the_same_facts(ask: Ask, framing: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    body = token(" a", 1) + b": ping\r\n\r\n" + token(" b\u00e9", 3) + LAST + USAGE + DONE
    kind = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    whole = {
        "chunked": kind + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(body, rng),
        "length": kind + b"Content-Length: %d\r\n\r\n%b" % (len(body), body),
        "close": HEAD + body,
    }[framing]
    cuts = np.unique(rng.integers(1, len(whole), 40)).tolist()
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]

    (seen,) = ask(sends(*pieces))

    assert (seen.error_kind, seen.chunks, seen.facts.finish_reason, seen.chunk_tokens[:2]) == (None, 3, "length", [1, 2])
    assert seen.facts.usage is not None and seen.facts.usage.cached_tokens == 4


EVENTS = st.lists(
    st.one_of(
        st.sampled_from([" a", " b", '"', "\n", "", "é"]).map(lambda text: token(text)),
        st.sampled_from([token(" c", 7), LAST, USAGE, b": ping\n\n", event(choices=[{"delta": {"role": "assistant"}}])]),
    ),
    max_size=60,
)


@given(events=EVENTS, cuts=st.lists(st.integers(0, 6000), max_size=40))
@settings(deadline=None, max_examples=100)
def test_events_folded_together_count_as_they_do_one_by_one(events: list[bytes], cuts: list[int]) -> None:
    """Each event has the stamp of the read that completed it, however many are folded at once."""
    stream = b"".join(events) + DONE
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    together, single = Exchange(), Exchange()
    for seen in (together, single):
        seen.on_head(200, [(b"content-type", b"text/event-stream")], 1)
    parser = SseParser()

    for number, (begin, end) in enumerate(pairwise(edges)):
        now_ns = 1_000_000 * number * number
        together.on_data(stream[begin:end], now_ns)
        for payload in parser.feed_data(stream[begin:end]):
            single.add(parse_chunk(payload), now_ns)
    for seen in (together, single):
        seen.on_end(None, 10**12)

    for name in ("first_answer_ns", "last_token_ns", "chunk_gaps_us", "chunk_tokens", "chunks", "error_kind", "error_text"):
        assert getattr(together, name) == getattr(single, name)
    for name in ("finish_reason", "usage", "is_done", "has_all_token_ids"):
        assert getattr(together.facts, name) == getattr(single.facts, name)
    assert "".join(together.facts.text) == "".join(single.facts.text)
