"""One request over the wire: httpx's API over aiohttp's transport, stamped as bytes arrive. Never raises for the target.

httpx's own pool scans every connection for every request, which costs a core at a few hundred streams (encode/httpcore
issue 1035); aiohttp's transport does not.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from replay.outcome import ErrorKind
from tracer.wire.facts import ChunkFacts, StreamFacts
from tracer.wire.openai import parse_chunk, parse_response
from tracer.wire.sse import SseParser

MAX_ERROR_CHARS = 300
PIECE_BYTES = 1 << 18
STALE_NS = 50_000_000  # a server that took a request and then died answers later than that


@dataclass(slots=True)
class Exchange:
    """What was seen of one request; times are absolute CLOCK_MONOTONIC ns, None where it never came so far."""

    sent_ns: int | None = None
    first_byte_ns: int | None = None
    first_reasoning_ns: int | None = None
    first_answer_ns: int | None = None
    last_token_ns: int | None = None
    end_ns: int = 0
    chunk_gaps_us: list[int] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)  # as long as the gaps + 1 if every chunk said its count
    facts: StreamFacts = field(default_factory=StreamFacts)
    http_status: int | None = None
    error_kind: ErrorKind | None = None
    error_text: str | None = None
    chunks: int = 0

    def age_ns(self) -> int:
        return time.monotonic_ns() - (self.sent_ns or 0)

    def fail(self, kind: ErrorKind, text: str) -> None:
        if self.error_kind is None:
            self.error_kind, self.error_text = kind, text[:MAX_ERROR_CHARS]

    def add(self, facts: ChunkFacts, now_ns: int) -> None:
        """Fold one event in. A token counts when it is there: an empty or role-only chunk is not one."""
        before = self.facts.usage.completion_tokens if self.facts.usage else 0
        self.facts.add(facts)
        if not facts.has_token:
            return
        self.chunks += 1
        count = _tokens_in(facts, before)
        if count is not None:
            self.chunk_tokens.append(count)
        if self.last_token_ns is not None:
            self.chunk_gaps_us.append((now_ns - self.last_token_ns) // 1000)
        self.last_token_ns = now_ns
        if facts.reasoning and self.first_reasoning_ns is None:
            self.first_reasoning_ns = now_ns
        if (not facts.reasoning or facts.text) and self.first_answer_ns is None:
            self.first_answer_ns = now_ns


def _tokens_in(facts: ChunkFacts, before: int | None) -> int | None:
    if facts.token_ids is not None:
        return len(facts.token_ids)
    if facts.usage is not None and facts.usage.completion_tokens is not None and before is not None:
        return facts.usage.completion_tokens - before
    return None


@asynccontextmanager
async def http_client(timeout_s: float, headers: dict[str, str]) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a connection cap: a hidden cap would turn an open loop into a closed one."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    session = aiohttp.ClientSession(connector=connector, auto_decompress=False, read_bufsize=2**20)
    timeout = httpx.Timeout(timeout_s, connect=min(10.0, timeout_s))
    async with (
        session,
        httpx.AsyncClient(transport=AiohttpTransport(client=session), timeout=timeout, headers=headers) as client,
    ):
        yield client


async def exchange(client: httpx.AsyncClient, url: str, body: bytes) -> Exchange:
    """Send one JSON body and read its answer, streamed or whole. Faults of the target become `error_kind`."""
    seen = Exchange(sent_ns=time.monotonic_ns())
    try:
        try:
            await _attempt(client, url, body, seen)
        except httpx.TransportError as error:
            if not _is_stale(error, seen):
                raise
            await _attempt(client, url, body, seen)
    except httpx.TransportError as error:
        seen.fail(*_blame(error))
    seen.end_ns = time.monotonic_ns()
    return seen


def _blame(error: httpx.TransportError) -> tuple[ErrorKind, str]:
    """httpx-aiohttp maps every lost connection to ConnectTimeout, so aiohttp's own error decides."""
    cause = error.__cause__
    text = f"{type(cause or error).__name__}: {cause or error}"
    if isinstance(cause, TimeoutError) and not isinstance(cause, aiohttp.ConnectionTimeoutError):
        return "timeout", text
    if isinstance(cause, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError) or cause is None:
        return ("connect" if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) else "connection_lost"), text
    return "connection_lost", text


def _is_stale(error: httpx.TransportError, seen: Exchange) -> bool:
    """A kept-alive connection that the server had closed while it was idle: nothing came back, so one retry is safe."""
    return _blame(error)[0] == "connection_lost" and seen.http_status is None and seen.age_ns() < STALE_NS


async def _attempt(client: httpx.AsyncClient, url: str, body: bytes, seen: Exchange) -> None:
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    content = body if len(body) <= PIECE_BYTES else _pieces(body)
    request = client.build_request("POST", url, content=content, headers=headers)
    seen.sent_ns = time.monotonic_ns()
    response = await client.send(request, stream=True)
    try:
        seen.http_status = response.status_code
        if response.status_code >= 400:
            text = (await response.aread()).decode("utf-8", "replace")
            seen.first_byte_ns = time.monotonic_ns()
            seen.fail("http_status", f"HTTP {response.status_code}: {parse_response(text.encode()).error or text}")
        elif "event-stream" in response.headers.get("content-type", ""):
            await _read_stream(response, seen)
        else:
            await _read_whole(response, seen)
    finally:
        await response.aclose()


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    """A long prompt, a piece at a time: written whole it would hold up the event loop, and every token stamp with it."""
    for start in range(0, len(body), PIECE_BYTES):
        yield body[start : start + PIECE_BYTES]


async def _read_stream(response: httpx.Response, seen: Exchange) -> None:
    parser = SseParser()
    async for chunk in response.aiter_raw():
        now_ns = time.monotonic_ns()
        if seen.first_byte_ns is None:
            seen.first_byte_ns = now_ns
        for event in parser.feed(chunk):
            seen.add(parse_chunk(event.data), now_ns)
    for event in parser.finish():
        seen.add(parse_chunk(event.data), time.monotonic_ns())
    if seen.facts.error is not None:
        seen.fail("stream_error", seen.facts.error)
    elif seen.chunks == 0:
        seen.fail("no_tokens", "the stream ended without a token")
    elif not seen.facts.is_done and seen.facts.finish_reason is None:
        seen.fail("connection_lost", "the stream ended before its finish reason")


async def _read_whole(response: httpx.Response, seen: Exchange) -> None:
    body = await response.aread()
    now_ns = seen.first_byte_ns = time.monotonic_ns()
    facts = parse_response(body)
    if not facts.is_parsed:
        seen.fail("bad_response", body[:MAX_ERROR_CHARS].decode("utf-8", "replace"))
        return
    seen.add(facts, now_ns)
    if facts.error is not None:
        seen.fail("stream_error", facts.error)
    elif not facts.has_token:
        seen.fail("no_tokens", "the answer is empty")
