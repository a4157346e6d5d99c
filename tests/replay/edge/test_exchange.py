"""One request against servers that behave, misbehave, and die: stamps, counts and the right blame."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from replay.edge.client import Exchange, exchange, http_client

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


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


def ask(script: Script, timeout_s: float = 5.0, requests: int = 1) -> list[Exchange]:
    async def run() -> list[Exchange]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await script(reader, writer)
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"
        async with server, http_client(timeout_s, {}) as client:
            return [await exchange(client, url, b"{}") for _ in range(requests)]

    return asyncio.run(run())


def test_a_whole_stream_is_counted_and_stamped_in_order() -> None:
    role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])

    (seen,) = ask(sends(HEAD, role, token(" a"), token(" b"), LAST, USAGE, DONE, pause_s=0.01))

    assert seen.error_kind is None
    assert seen.chunks == 3
    assert len(seen.chunk_gaps_us) == 2
    assert seen.facts.usage is not None and seen.facts.usage.cached_tokens == 4
    assert seen.first_byte_ns is not None and seen.first_answer_ns is not None and seen.last_token_ns is not None
    assert seen.sent_ns is not None
    assert seen.sent_ns < seen.first_byte_ns < seen.first_answer_ns < seen.last_token_ns < seen.end_ns


@pytest.mark.parametrize("size", [1, 7, 50])
def test_cuts_of_the_stream_do_not_matter(size: int) -> None:
    body = token(" a", 1) + b": ping\n\n" + token(" b", 3) + LAST + USAGE + DONE
    pieces = [body[i : i + size] for i in range(0, len(body), size)]

    (seen,) = ask(sends(HEAD, *pieces))

    assert (seen.error_kind, seen.chunks, seen.facts.finish_reason) == (None, 3, "length")


def test_tokens_of_a_chunk_come_from_running_usage() -> None:
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
def test_faults_of_the_target_are_named_and_never_raised(parts: tuple[bytes, ...], kind: str, words: str) -> None:
    (seen,) = ask(sends(*parts))

    assert seen.error_kind == kind
    assert words in (seen.error_text or "")
    assert seen.end_ns > 0


def test_silence_is_a_time_out() -> None:
    (seen,) = ask(sends(HEAD + token(" a"), b"", pause_s=4.0), timeout_s=2.0)

    assert seen.error_kind == "timeout"
    assert seen.first_answer_ns is not None


def test_a_refused_connection_is_the_connection() -> None:
    async def run() -> Exchange:
        async with http_client(2.0, {}) as client:
            return await exchange(client, "http://127.0.0.1:1/v1/completions", b"{}")

    assert asyncio.run(run()).error_kind == "connect"


def test_a_connection_that_went_stale_is_tried_once_more() -> None:
    """The server answers, keeps the connection open, and drops it when the next request comes."""
    answer = b'{"choices":[{"index":0,"text":" a","finish_reason":"length"}]}'
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))
        await writer.drain()
        await read_request(reader)

    first, second = ask(script, requests=2)

    assert (first.error_kind, second.error_kind) == (None, None)
    assert connections == 2


def test_a_long_prompt_goes_out_whole() -> None:
    body = b'{"prompt":[' + b",".join([b"12345"] * 200_000) + b"]}"

    async def run() -> Exchange:
        server = await asyncio.start_server(lambda r, w: _answer_and_close(r, w), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"
        async with server, http_client(5.0, {}) as client:
            return await exchange(client, url, body)

    assert asyncio.run(run()).error_kind is None


async def _answer_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await sends(HEAD, LAST, DONE)(reader, writer)
    writer.close()
