"""An httpx transport for load: asyncio Protocol + httptools, one HTTP/1.1 exchange at a time on each connection.

httpx stays the API (requests, headers, TLS contexts, errors); what differs is below it. There is no connection cap and no scan of
a pool, bytes can be pushed to a `Sink` from inside `data_received`, stamped at the socket read, and a request on an open
connection is written at once, without a task. HTTP/2 and proxies are left to httpx's own transport.
"""

import asyncio
import select
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Protocol, cast

import httptools
import httpx

CONNECT_S = 10.0
KEEP_ALIVE_NS = 4_000_000_000  # uvicorn (vLLM, SGLang) and llama.cpp close idle connections after 5 s
SETTLE_NS = 2_000_000  # a server that closes after its answer though it says keep-alive (llama.cpp) has done so by then
CLOSES_SOON_NS = 100_000_000  # closed so soon after an answer: that is its way
CONNECTS_AT_ONCE = 256  # below the usual listen backlog; more at once would wait for SYN retransmits of 1 s

type Headers = list[tuple[bytes, bytes]]
type Origin = tuple[str, str, int]


class Sink(Protocol):
    """Where an exchange is pushed, always in this order; `on_end` comes exactly once. Times are CLOCK_MONOTONIC ns."""

    def on_sent(self, now_ns: int, abort: Callable[[], None]) -> None: ...
    def on_head(self, status: int, headers: Headers, now_ns: int) -> None: ...
    def on_data(self, data: bytes, now_ns: int) -> None: ...
    def on_end(self, error: httpx.TransportError | None, now_ns: int) -> None: ...


class Transport(httpx.AsyncBaseTransport):
    """Give it to `httpx.AsyncClient(transport=...)`; or call `send` with bytes that are ready and a sink.

    A pooled connection that the server has closed is not used: that is found out before any byte is sent. After the first
    byte there is no second try: a model server may be at work on the request already.
    """

    def __init__(self, verify: ssl.SSLContext | bool = True, read_timeout_s: float | None = None) -> None:
        self._verify = verify
        self._context: ssl.SSLContext | None = None
        self._read_timeout_s = read_timeout_s
        # Told the time of each socket read, before its bytes are looked at.
        self.on_read: Callable[[int], object] = lambda _: None
        self._idle: dict[Origin, dict[_Connection, None]] = {}  # last one in is the first one out: it is the warmest
        self.keep_alive: set[Origin] = set()  # a connection of theirs has served twice
        self.close_soon: set[Origin] = set()  # they close after an answer, whatever they say
        self.opened: set[_Connection] = set()
        self._sending: set[asyncio.Task[None]] = set()
        self._reserving: set[asyncio.Task[None]] = set()

    def send(self, origin: Origin, message: bytes, sink: Sink) -> None:
        """Write a whole request: at once on an open connection, else as soon as there is one. Never raises for the target."""
        connection = self._take(origin)
        if connection is not None:
            connection.send(message, sink, self._read_timeout_s)
            return
        self._spawn(self._send_on_new(origin, message, sink), self._sending)

    def reserve(self, origin: Origin, count: int) -> None:
        """Open connections ahead of need, so that `count` requests that are due soon find one each."""
        idle = self._idle.setdefault(origin, {})
        while idle and not next(iter(idle)).is_young():  # longest idle first
            oldest = next(iter(idle))
            del idle[oldest]
            oldest.abort()
        for _ in range(min(count - len(idle), CONNECTS_AT_ONCE) - len(self._reserving)):
            self._spawn(self._open_one(origin), self._reserving)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """For those who read: the body of the response is held until it is read."""
        message, origin = message_of(request, await request.aread()), origin_of(request.url)
        timeouts = request.extensions.get("timeout", {})
        pull = _Pull()
        connection = self._take(origin) or await self._connect(origin, timeouts.get("connect", CONNECT_S))
        connection.send(message, pull, timeouts.get("read", self._read_timeout_s), is_head=request.method == "HEAD")
        try:
            status, headers = await pull.head
        except asyncio.CancelledError:
            await pull.aclose()
            raise
        return httpx.Response(status, headers=headers, stream=pull, request=request)

    async def aclose(self) -> None:
        """Open exchanges end with an error; connections are closed."""
        tasks = self._sending | self._reserving
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self.opened):
            connection.abort()
        while self.opened:  # a closed socket is told about in the loop's next round
            await asyncio.sleep(0)

    def _take(self, origin: Origin) -> "_Connection | None":
        idle = self._idle.get(origin, {})
        is_trusted = origin in self.keep_alive and origin not in self.close_soon
        now_ns = time.monotonic_ns()
        while True:
            connection = next((one for one in reversed(idle) if is_trusted or one.is_settled(now_ns)), None)
            if connection is None:
                return None
            del idle[connection]
            if connection.is_usable():
                return connection
            connection.abort()

    def _spawn(self, work: Coroutine[None, None, None], among: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        among.add(task)
        task.add_done_callback(among.discard)

    async def _open_one(self, origin: Origin) -> None:
        with suppress(httpx.TransportError):  # the request will try again, and tell
            self.release(await self._connect(origin))

    async def _send_on_new(self, origin: Origin, message: bytes, sink: Sink) -> None:
        try:
            connection = await self._connect(origin)
        except httpx.TransportError as error:
            sink.on_end(error, time.monotonic_ns())
        except asyncio.CancelledError:
            sink.on_end(httpx.ConnectError("closed before it was connected"), time.monotonic_ns())
            raise
        else:
            connection.send(message, sink, self._read_timeout_s)

    async def _connect(self, origin: Origin, timeout_s: float | None = CONNECT_S) -> "_Connection":
        scheme, host, port = origin
        tls = self._tls() if scheme == "https" else None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(lambda: _Connection(origin, self), host, port, ssl=tls)
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no connection to {host}:{port} within {timeout_s:g} s") from error
        except OSError as error:  # ssl.SSLError is one
            raise httpx.ConnectError(str(error)) from error
        return connection

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            self._context = httpx.create_ssl_context(self._verify)
        return self._context

    def release(self, connection: "_Connection") -> None:
        """A connection is free again, or gone."""
        idle = self._idle.setdefault(connection.origin, {})
        if connection.is_open:
            idle[connection] = None
        else:
            idle.pop(connection, None)


def origin_of(url: httpx.URL) -> Origin:
    return url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80)


def message_of(request: httpx.Request, body: bytes) -> bytes:
    """The request as it goes over the wire; `httpx` has put Host and Content-Length (or chunked) among the headers."""
    length = [(b"Content-Length", b"%d" % len(body))] if "transfer-encoding" in request.headers else []
    fields = [(name, value) for name, value in request.headers.raw if name.lower() != b"transfer-encoding"] + length
    lines = b"".join(b"%b: %b\r\n" % field for field in fields)
    return b"%b %b HTTP/1.1\r\n%b\r\n%b" % (request.method.encode(), request.url.raw_path, lines, body)


class _Connection(asyncio.Protocol):
    def __init__(self, origin: Origin, pool: Transport) -> None:
        self.origin = origin
        self.is_open = False
        self._pool = pool
        self._sink: Sink | None = None
        self._headers: Headers = []
        self._body: list[bytes] = []  # of this read, not pushed yet: a read can hold hundreds of HTTP chunks
        self.on_body = self._body.append
        self._has_head = self._ends_with_connection = self._is_head_only = self._is_aborted = False
        self._has_served = False
        self._idle_since_ns = self._now_ns = time.monotonic_ns()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        self.is_open = True
        self._pool.opened.add(self)

    def data_received(self, data: bytes) -> None:
        self._now_ns = time.monotonic_ns()
        if self._sink is None:  # a server that talks unasked is not to be trusted with a request
            self.abort()
            return
        self._pool.on_read(self._now_ns)
        try:
            self._parser.feed_data(data)
            if self._body:
                self._push_body()
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._push_body()
            self._end(httpx.RemoteProtocolError(f"{type(error).__name__}: {error}"))

    def eof_received(self) -> None:
        self._now_ns = time.monotonic_ns()
        if self._sink is not None and self._ends_with_connection:
            self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._has_served and not self._is_aborted and (self._sink is None or not self._has_head):
            if time.monotonic_ns() - self._idle_since_ns < CLOSES_SOON_NS:
                self._pool.close_soon.add(self.origin)
        self._pool.opened.discard(self)
        self._pool.release(self)
        if self._timer is not None:
            self._timer.cancel()
        if error is not None:
            self._end(httpx.ReadError(f"{type(error).__name__}: {error}"))
        else:
            part = "sending a response" if not self._has_head else "sending complete message body"
            self._end(httpx.RemoteProtocolError(f"the server closed the connection without {part}"))

    def on_message_begin(self) -> None:
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._sink is None:  # 100 Continue, 103 Early Hints: the real head follows
            return
        names = {name.lower() for name, _ in self._headers}
        self._has_head = True
        if self._has_served:
            self._pool.keep_alive.add(self.origin)
        self._ends_with_connection = not names & {b"content-length", b"transfer-encoding"}
        self._sink.on_head(status, self._headers, self._now_ns)
        if self._is_head_only:
            self._end(None)

    def _push_body(self) -> None:
        if not self._body:
            return
        data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        if self._sink is not None:
            self._sink.on_data(data, self._now_ns)

    def on_message_complete(self) -> None:
        self._push_body()
        if self._has_head:
            self._end(None, keep=self._parser.should_keep_alive())

    def is_usable(self) -> bool:
        """Not old, and neither closed nor talking: the socket is asked, since the loop may not have read the close yet."""
        return self.is_young() and self.is_open and not self._transport.is_closing() and not self._poll.poll(0)

    def is_settled(self, now_ns: int) -> bool:
        """Long enough after an answer that the server would have closed it by now, if that is its way."""
        return not self._has_served or now_ns - self._idle_since_ns >= SETTLE_NS

    def is_young(self) -> bool:
        return time.monotonic_ns() - self._idle_since_ns < KEEP_ALIVE_NS

    def send(self, message: bytes, sink: Sink, read_timeout_s: float | None, is_head: bool = False) -> None:
        self._sink, self._is_head_only = sink, is_head
        self._has_head = self._ends_with_connection = False
        self._timeout_s = read_timeout_s
        self._now_ns = time.monotonic_ns()
        sink.on_sent(self._now_ns, self.abort)
        self._transport.write(message)
        if read_timeout_s is not None:
            self._watch(read_timeout_s)

    def abort(self) -> None:
        self._is_aborted = True
        self._transport.abort()

    def _watch(self, wait_s: float) -> None:
        """One timer serves many exchanges: it looks how long the last byte is ago, and sets itself again."""
        if self._timer is not None:
            if self._timer.when() <= self._loop.time() + wait_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_later(wait_s, self._check_silence)

    def _check_silence(self) -> None:
        self._timer = None
        if self._sink is None or self._timeout_s is None:
            return
        left_s = self._timeout_s - (time.monotonic_ns() - self._now_ns) / 1e9
        if left_s > 0:
            self._watch(left_s)
        else:
            self._end(httpx.ReadTimeout(f"no byte for {self._timeout_s:g} s"))

    def _end(self, error: httpx.TransportError | None, keep: bool = False) -> None:
        sink, self._sink = self._sink, None
        if sink is None:
            return
        if keep and self.is_open and not self._transport.is_closing():
            self._idle_since_ns, self._has_served = self._now_ns, True
            self._pool.release(self)
        else:
            self.abort()
        sink.on_end(error, time.monotonic_ns())


class _Pull(httpx.AsyncByteStream):
    """A sink for those who read: a response's body as httpx hands it out."""

    def __init__(self) -> None:
        self.head: asyncio.Future[tuple[int, Headers]] = asyncio.get_running_loop().create_future()
        self._parts: list[bytes] = []
        self._error: httpx.TransportError | None = None
        self._has_ended = False
        self._changed = asyncio.Event()

    def on_sent(self, now_ns: int, abort: Callable[[], None]) -> None:
        self._abort = abort

    def on_head(self, status: int, headers: Headers, now_ns: int) -> None:
        if not self.head.done():
            self.head.set_result((status, headers))

    def on_data(self, data: bytes, now_ns: int) -> None:
        self._parts.append(data)
        self._changed.set()

    def on_end(self, error: httpx.TransportError | None, now_ns: int) -> None:
        self._error, self._has_ended = error, True
        self._changed.set()
        if error is not None and not self.head.done():
            self.head.set_exception(error)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            parts, self._parts = self._parts, []
            for part in parts:
                yield part
            if self._parts:
                continue
            if self._error is not None:
                raise self._error
            if self._has_ended:
                return
            self._changed.clear()
            await self._changed.wait()

    async def aclose(self) -> None:
        if not self._has_ended:
            self._abort()
