"""One request over the wire: stamped as its bytes arrive, folded into facts in small batches. Never raises for the target."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import httpx

from replay.edge.transport import CONNECT_S, Headers, Origin, Transport, message_of, origin_of
from replay.outcome import ErrorKind
from tracer.wire import APIS, COMPLETIONS, Api
from tracer.wire.alike import Alike
from tracer.wire.facts import ChunkFacts, StreamFacts
from tracer.wire.sse import SseParser

MAX_ERROR_CHARS = 300
FOLD_PIECES = 32  # so many socket reads of a stream are parsed at once: some 0.05 ms
FOLD_BYTES = 16_384  # or one read as large as this
LEARN_FROM = 8  # events that are parsed one by one before those like them are known by their bytes

TransportName = Literal["own", "httpx"]


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
    api: Api = APIS[COMPLETIONS]
    done: "Callable[[Exchange], None]" = lambda _: None  # called once, at the end
    is_read_later: bool = False  # a whole answer is read by `settle`, to be called after `done`: what is due next goes out first
    abort: Callable[[], object] = lambda: None
    _pieces: list[tuple[int, bytes]] = field(default_factory=list)  # (stamp, bytes as they came), not parsed yet
    _parser: SseParser | None = None  # None: the answer is no stream
    _is_whole: bool = False
    _is_settled: bool = False
    _alike: Alike = field(init=False)

    def __post_init__(self) -> None:
        self._alike = Alike(self.api.parse_chunk)

    def on_sent(self, now_ns: int, abort: Callable[[], object]) -> None:
        self.sent_ns, self.abort = now_ns, abort
        if self.end_ns:  # given up before there was a connection
            asyncio.get_running_loop().call_soon(abort)

    def on_head(self, status: int, headers: Headers, now_ns: int) -> None:
        self.http_status, self.first_byte_ns = status, now_ns
        if status < 400 and any(name.lower() == b"content-type" and b"event-stream" in value for name, value in headers):
            self._parser = SseParser()

    def on_data(self, data: bytes, now_ns: int) -> None:
        self._pieces.append((now_ns, data))
        if self._parser is not None and (len(self._pieces) >= FOLD_PIECES or len(data) >= FOLD_BYTES):
            self._fold(self._parser)

    def on_end(self, error: httpx.TransportError | None, now_ns: int) -> None:
        if self.end_ns:
            return  # given up before
        self.end_ns, self._is_whole = now_ns, error is None
        if error is not None or not self.is_read_later:
            self.settle()
        if error is not None:
            self.fail(_blame(error), str(error) or type(error).__name__)
        self.done(self)

    def settle(self) -> None:
        """Read what is left of an answer that has ended; again: nothing."""
        if self._is_settled:
            return
        self._is_settled = True
        if self._parser is not None:
            self._finish_stream(self._parser, self._is_whole)
        elif self._is_whole:
            self._finish_whole(b"".join(data for _, data in self._pieces))
        self._pieces.clear()

    def give_up(self, kind: ErrorKind, why: str) -> None:
        """Nobody waits for the answer any more: hang up, as a user does who goes away."""
        self.fail(kind, why)
        self.on_end(httpx.ReadError(why), time.monotonic_ns())
        self.abort()

    def fail(self, kind: ErrorKind, text: str) -> None:
        """The first fault counts."""
        if self.error_kind is None:
            self.error_kind, self.error_text = kind, text[:MAX_ERROR_CHARS]

    def _fold(self, parser: SseParser) -> None:
        pieces, self._pieces = self._pieces, []
        payloads: list[bytes] = []
        stamps: list[int] = []
        for now_ns, data in pieces:
            found = parser.feed_data(data)
            payloads += found
            stamps += [now_ns] * len(found)
        alike = self._alike
        if not alike.knows:
            head = len(payloads) if len(payloads) < 2 * LEARN_FROM or not alike.may_learn else LEARN_FROM
            self._add_parsed(payloads[:head], stamps[:head])
            payloads, stamps = payloads[head:], stamps[head:]
        if payloads:
            self._add_alike(payloads, stamps)

    def _add_alike(self, payloads: list[bytes], stamps: list[int]) -> None:
        """Runs of events that are known by their bytes, and what is between them."""
        texts = self._alike.texts(payloads)
        begin, count = 0, len(texts)
        while begin < count:
            end, is_known = begin + 1, bool(texts[begin])
            while end < count and bool(texts[end]) == is_known:
                end += 1
            if is_known:
                self._add_texts(b"".join(texts[begin:end]), stamps[begin:end])
            else:
                self._add_parsed(payloads[begin:end], stamps[begin:end])
            begin = end

    def _add_parsed(self, payloads: list[bytes], stamps: list[int]) -> None:
        found = self.api.parse_chunks(payloads)
        for facts, now_ns in zip(found, stamps, strict=True):
            self.add(facts, now_ns)
        if len(payloads) >= LEARN_FROM and self._alike.may_learn:
            self._alike.learn(payloads, found)

    def _add_texts(self, joined: bytes, stamps: list[int]) -> None:
        """`add` for events that each hold a piece of text and nothing else."""
        self.facts.add_texts(joined.decode())
        self.chunks += len(stamps)
        if self.first_answer_ns is None:
            self.first_answer_ns = stamps[0]
        if self.last_token_ns is not None:
            self.chunk_gaps_us.append((stamps[0] - self.last_token_ns) // 1000)
        self.chunk_gaps_us += [(later - now_ns) // 1000 for now_ns, later in pairwise(stamps)]
        self.last_token_ns = stamps[-1]

    def _finish_stream(self, parser: SseParser, is_whole: bool) -> None:
        self._fold(parser)
        for event in parser.finish():
            self.add(self.api.parse_chunk(event.data), self.end_ns)
        if self.facts.error is not None:
            self.fail("stream_error", self.facts.error)
        elif is_whole and self.chunks == 0:
            self.fail("no_tokens", "the stream ended without a token")
        elif is_whole and not self.facts.is_done and self.facts.finish_reason is None:
            self.fail("connection_lost", "the stream ended before its finish reason")

    def _finish_whole(self, body: bytes) -> None:
        facts = self.api.parse_response(body)
        text = body[:MAX_ERROR_CHARS].decode("utf-8", "replace")
        if self.http_status is not None and self.http_status >= 400:
            self.fail("http_status", f"HTTP {self.http_status}: {facts.error or text}")
        elif not facts.is_parsed:
            self.fail("bad_response", text)
        else:
            self.add(facts, self.end_ns)
            if facts.error is not None:
                self.fail("stream_error", facts.error)
            elif not facts.has_token:
                self.fail("no_tokens", "the answer is empty")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """All of a POST but its body, made once by httpx: URL, Host, authorisation and other headers."""

    request: httpx.Request
    origin: Origin
    head: bytes  # request line and headers, up to the value of Content-Length


class Client:
    """httpx's API in `http`, for what is asked seldom; `post` for the requests of a replay."""

    def __init__(self, http: httpx.AsyncClient, own: Transport | None) -> None:
        self.http = http
        self._own = own
        self._tasks: set[asyncio.Task[None]] = set()

    def endpoint(self, url: str) -> Endpoint:
        request = self.http.build_request("POST", url, headers={"Content-Type": "application/json"})
        request.headers.pop("Content-Length", None)
        head = message_of(request, b"").removesuffix(b"\r\n") + b"Content-Length: "
        return Endpoint(request=request, origin=origin_of(request.url), head=head)

    def post(self, endpoint: Endpoint, body: bytes, seen: Exchange) -> None:
        """Send one JSON body; `seen` hears of its answer, streamed or whole. Written at once where a connection is open."""
        if self._own is not None:
            self._own.send(endpoint.origin, b"%b%d\r\n\r\n%b" % (endpoint.head, len(body), body), seen)
            return
        task = asyncio.get_running_loop().create_task(_over_httpx(self.http, endpoint.request, body, seen))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def on_read(self, callback: Callable[[int], object]) -> None:
        """Call with the time of each socket read, so that what is due need not wait until all that was read is worked off."""
        if self._own is not None:
            self._own.on_read = callback

    async def exchange(self, endpoint: Endpoint, body: bytes, api: Api = APIS[COMPLETIONS]) -> Exchange:
        """`post`, and wait for its end."""
        ended: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
        self.post(endpoint, body, Exchange(api=api, done=ended.set_result))
        return await ended

    def reserve(self, endpoint: Endpoint, count: int) -> None:
        """So many requests are due soon: open connections for them."""
        if self._own is not None:
            self._own.reserve(endpoint.origin, count)


@asynccontextmanager
async def client_for(timeout_s: float, headers: dict[str, str], transport: TransportName = "own") -> AsyncIterator[Client]:
    """A client without a connection cap: a hidden cap would turn an open loop into a closed one.

    `httpx` is httpx's own transport, as a cross-check. It scans its pool for each request (encode/httpcore issue 1035); with a
    few idle connections at most that scan stays short.
    """
    timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s))
    own = Transport(read_timeout_s=timeout_s) if transport == "own" else None
    below = own or httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None, max_keepalive_connections=16))
    headers = {"Accept-Encoding": "identity", **headers}  # a compressing proxy would hold tokens back
    async with httpx.AsyncClient(transport=below, timeout=timeout, headers=headers) as http:
        yield Client(http, own)


async def _over_httpx(http: httpx.AsyncClient, template: httpx.Request, body: bytes, seen: Exchange) -> None:
    request = http.build_request("POST", template.url, content=body, headers=template.headers)
    task = asyncio.current_task()
    assert task is not None
    seen.on_sent(time.monotonic_ns(), task.cancel)
    error: httpx.TransportError | None = None
    try:
        response = await http.send(request, stream=True)
        seen.on_head(response.status_code, response.headers.raw, time.monotonic_ns())
        try:
            async for data in response.aiter_raw():
                seen.on_data(data, time.monotonic_ns())
        finally:
            await response.aclose()
    except httpx.TransportError as fault:
        error = fault
    except asyncio.CancelledError:
        error = httpx.ReadError("given up")
    seen.on_end(error, time.monotonic_ns())


def _blame(error: httpx.TransportError) -> ErrorKind:
    match error:
        case httpx.ConnectError() | httpx.ConnectTimeout():
            return "connect"
        case httpx.TimeoutException():
            return "timeout"
        case _:
            return "connection_lost"
