"""mitmproxy, embedded: forward every byte as it comes, and tell the channel what went by.

The only file that imports mitmproxy, and lazily: importing this module costs nothing. Whatever fails in here is counted
and the traffic goes on.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tracer.errors import TraceError
from tracer.record.corked import OnConnection, corked
from tracer.record.messages import Answered, Finished, Piece, Started
from tracer.record.routes import AllowList, Routes
from tracer.wire import endpoint_of
from tracer.wire.usage import UsageStripper, with_usage

if TYPE_CHECKING:
    from mitmproxy.http import Headers, HTTPFlow
    from mitmproxy.master import Master

SESSION_HEADER = "x-session-id"
CREDENTIAL_HEADERS = ("authorization", "x-api-key", "api-key")
_SESSION = SESSION_HEADER.encode()
_CREDENTIALS = tuple(name.encode() for name in CREDENTIAL_HEADERS)
SILENCE_S = 3600  # a long queue or prefill sends nothing; mitmproxy's default cuts after 600 s
BACKLOG = 1024
REFUSED = 403
GAVE_UP = 502  # what mitmproxy tells a client whose upstream has not answered
LAST_WRITE_S = 0.2  # the end-of-body marker goes out after the hook that tells us of the end


class Sink(Protocol):
    def started(self, message: Started) -> None: ...
    def answered(self, message: Answered) -> None: ...
    def received(self, message: Piece) -> None: ...
    def finished(self, message: Finished) -> None: ...


@dataclass(slots=True)
class _Live:
    number: int
    arrival_ns: int
    endpoint: str
    upstream: str
    dispatch_ns: int | None = None  # since arrival
    bytes_in: int | None = None
    bytes_out: int = 0
    stripper: UsageStripper | None = None  # of usage that we asked for, not the client


@dataclass(slots=True)
class RecorderAddon:
    """Hooks. `now_ns` counts from the start of the recording."""

    sink: Sink
    now_ns: Callable[[], int]
    routes: Routes | AllowList | None  # None: requests go where they go
    forces_usage: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    seen: int = 0  # requests of the recorded endpoints
    under_way: set[str] = field(default_factory=set)  # flow ids, of all endpoints
    _live: dict[str, _Live] = field(default_factory=dict)

    def http_connect(self, flow: "HTTPFlow") -> None:
        """The client of a forward proxy wants a tunnel; what passes in it is decrypted and comes as requests."""
        if isinstance(self.routes, AllowList) and not self.routes.allows(flow.request.host, flow.request.port):
            self._refuse(flow)

    def http_connect_error(self, flow: "HTTPFlow") -> None:
        if flow.response is None or flow.response.status_code != REFUSED:
            self.counts["upstreams_unreachable"] += 1

    def requestheaders(self, flow: "HTTPFlow") -> None:
        self.under_way.add(flow.id)
        endpoint = endpoint_of(flow.request.path) if flow.request.method == "POST" else None
        upstream = self._direct(flow)
        if upstream is None:
            self._refuse(flow)
            return
        if endpoint is None:
            self.counts["passed_through"] += 1
            return
        self.seen += 1
        now_ns = self.now_ns()
        self._live[flow.id] = _Live(self.seen, now_ns, endpoint, upstream)

    def _direct(self, flow: "HTTPFlow") -> str | None:
        """Name of the upstream that the request goes to from here; None: it may not go there."""
        request = flow.request
        if isinstance(self.routes, AllowList):
            is_allowed = self.routes.allows_request(request.host, request.port, request.host_header)
            return f"{request.host}:{request.port}" if is_allowed else None
        if self.routes is None:
            return f"{request.host}:{request.port}"
        host_header = request.host_header or "" if self.routes.others else ""
        upstream, path = self.routes.pick(host_header, request.path)
        if path != request.path:
            request.path = path
        if self.routes.others:
            request.scheme, request.host, request.port = upstream.scheme, upstream.host, upstream.port
            request.host_header = upstream.name
        return upstream.name

    def _refuse(self, flow: "HTTPFlow") -> None:
        from mitmproxy.http import Response

        self.counts["refused"] += 1
        flow.response = Response.make(REFUSED, b"chatreel: this host is not on the list of allowed ones\n")

    def request(self, flow: "HTTPFlow") -> None:
        live = self._live.get(flow.id)
        if live is None:
            return
        try:
            self._start(flow, live)
            if self.forces_usage:
                _ask_usage(flow, live)
        except Exception:
            self.counts["hook_failures"] += 1

    def responseheaders(self, flow: "HTTPFlow") -> None:
        if flow.response is None or flow.response.status_code == 101:
            return
        live = self._live.get(flow.id)
        if live is None:
            flow.response.stream = True
            return
        flow.response.stream = self._forward(live)
        try:
            headers = _by_name(flow.response.headers)
            if live.stripper is not None and not _can_strip(headers):
                live.stripper = None
            kind, encoding = headers.get(b"content-type", b""), headers.get(b"content-encoding", b"")
            self.sink.answered(
                Answered(
                    flow=live.number,
                    status=flow.response.status_code,
                    content_type=kind.decode("latin-1"),
                    encoding=encoding.decode("latin-1"),
                )
            )
        except Exception:
            self.counts["hook_failures"] += 1

    def response(self, flow: "HTTPFlow") -> None:
        self._end(flow, None)

    def error(self, flow: "HTTPFlow") -> None:
        self._end(flow, _break(flow))

    def _start(self, flow: "HTTPFlow", live: _Live) -> None:
        headers, body = _by_name(flow.request.headers), flow.request.raw_content or b""
        live.dispatch_ns, live.bytes_in = self.now_ns() - live.arrival_ns, len(body)
        credentials = (headers.get(name) for name in _CREDENTIALS)
        self.sink.started(
            Started(
                flow=live.number,
                arrival_ns=live.arrival_ns,
                endpoint=live.endpoint,
                body=body,
                encoding=headers.get(b"content-encoding", b"").decode("latin-1"),
                credential=next((value for value in credentials if value), b""),
                session_header=headers.get(_SESSION, b""),
                upstream=live.upstream,
            )
        )

    def _forward(self, live: _Live) -> Callable[[bytes], bytes | list[bytes]]:
        """mitmproxy drops a chunk whose callable raises, and ends the body at an empty one: so neither ever happens.

        It calls with b"" once, at the end. An empty list passes nothing on.
        """

        received, now_ns, number = self.sink.received, self.now_ns, live.number

        def forward(data: bytes) -> bytes | list[bytes]:
            try:
                if data:
                    live.bytes_out += len(data)
                    received(Piece(number, now_ns(), data))
                if live.stripper is not None:
                    passing = live.stripper.feed(data) if data else live.stripper.finish()
                    return [passing] if passing else []
            except Exception:
                self.counts["hook_failures"] += 1
            return data

        return forward

    def _end(self, flow: "HTTPFlow", broken: str | None) -> None:
        self.under_way.discard(flow.id)
        live = self._live.pop(flow.id, None)
        if live is None:
            return
        try:
            self.sink.finished(
                Finished(
                    flow=live.number,
                    arrival_ns=live.arrival_ns,
                    endpoint=live.endpoint,
                    upstream=live.upstream,
                    dispatch_ns=live.dispatch_ns,
                    bytes_in=live.bytes_in,
                    status=_status(flow, broken),
                    bytes_out=live.bytes_out,
                    at_ns=self.now_ns(),
                    broken=broken,
                )
            )
        except Exception:
            self.counts["hook_failures"] += 1


def _ask_usage(flow: "HTTPFlow", live: _Live) -> None:
    """Only a stream that comes in plain can be cleaned of the usage event again."""
    if flow.request.headers.get("content-encoding", "identity") != "identity":
        return
    body = with_usage(live.endpoint, flow.request.raw_content or b"")
    if body is not None:
        flow.request.content = body  # sets its length too
        flow.request.headers["accept-encoding"] = "identity"
        live.stripper = UsageStripper()


def _by_name(headers: "Headers") -> dict[bytes, bytes]:
    """One pass over all of them costs less than two look-ups by mitmproxy's own class."""
    return {name.lower(): value for name, value in headers.fields}


def _can_strip(headers: dict[bytes, bytes]) -> bool:
    """A length that was promised must be kept, and what is packed cannot be cut."""
    is_stream = b"event-stream" in headers.get(b"content-type", b"")
    return is_stream and b"content-length" not in headers and headers.get(b"content-encoding", b"identity") == b"identity"


def _break(flow: "HTTPFlow") -> str:
    if flow.error is not None and "Client disconnected" in flow.error.msg:
        return "client_abort"
    if flow.response is not None or flow.server_conn.timestamp_tcp_setup:
        return "connection_lost"
    return "connect"


def _status(flow: "HTTPFlow", broken: str | None) -> int | None:
    """What the client has been told, if anything."""
    if flow.response is not None:
        return flow.response.status_code
    return GAVE_UP if broken != "client_abort" else None


def load_mitmproxy() -> None:
    """Half a second's work, which may be done ahead."""
    from mitmproxy import master, options  # noqa: F401
    from mitmproxy.addons import block, core, disable_h2c, next_layer, proxyserver, tlsconfig  # noqa: F401


class Proxy:
    """A running proxy. `await start()`, then `await stop(...)` once."""

    def __init__(self, host: str, port: int, addon: RecorderAddon, ca_folder: Path, upstream_ca: str | None) -> None:
        """`ca_folder` gets a certificate authority if it holds none; the one in the user's home is never touched."""
        self._host, self._port = host, port
        self._addon = addon
        self._master: Master | None = None
        self._task: asyncio.Task[None] | None = None
        self._ca_folder, self._upstream_ca = ca_folder, upstream_ca

    async def start(self, *, share_port: bool = False) -> str:
        """Returns the URL to send requests to. `share_port`: others of this user listen there too (SO_REUSEPORT)."""
        from mitmproxy import options
        from mitmproxy.addons import block, core, disable_h2c, next_layer, proxyserver, tlsconfig
        from mitmproxy.master import Master

        try:
            self._ca_folder.mkdir(mode=0o700, exist_ok=True)  # its key decrypts whatever trusts it
        except OSError as error:
            raise TraceError(f"cannot write here: {error.strerror}", path=str(self._ca_folder)) from error
        routes = self._addon.routes
        assert routes is not None
        master = Master(
            options.Options(
                mode=["regular" if isinstance(routes, AllowList) else f"reverse:{routes.default.origin}"],
                listen_host=self._host,
                listen_port=self._port,
                confdir=str(self._ca_folder),
                ssl_verify_upstream_trusted_ca=self._upstream_ca,
            )
        )
        server = proxyserver.Proxyserver()
        # The whole default set costs as much as the proxy itself; Block refuses clients with public addresses.
        others = (core.Core(), block.Block(), disable_h2c.DisableH2C(), next_layer.NextLayer(), tlsconfig.TlsConfig())
        master.addons.add(*others, server, self._addon)
        master.options.update(tcp_timeout=SILENCE_S, websocket=False)
        if isinstance(routes, AllowList):
            # Eager: the client gets HTTP/2 if the upstream has it. Over an HTTP/1 upstream, mitmproxy would let a client's
            # connection have five requests under way and make all others wait.
            master.options.update(connection_strategy="eager")
        else:
            # Lazy: a dead upstream is a 502 and an `error` hook; with eager the client gets a reset and we hear nothing.
            master.options.update(connection_strategy="lazy", http2=False)
        if isinstance(routes, Routes) and routes.others:
            master.options.update(keep_host_header=True)  # so that the hook sees which host was meant; it sets its own
        self._master = master
        running = asyncio.Event()
        master.addons.add(_Running(running))
        _call_straight(master)
        with _listening(share_port):
            self._task = asyncio.create_task(master.run())
            await running.wait()
        addresses = server.listen_addrs()
        if not addresses:
            await self.stop(0)
            raise TraceError("cannot listen here", seen=f"{self._host}:{self._port}", next_step="Choose another --port or --host")
        host, port = addresses[0][:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def stop(self, drain_s: float) -> None:
        """Close the port, let requests under way end until the deadline, then cut what is left."""
        assert self._master is not None and self._task is not None
        self._master.options.update(server=False)
        deadline = time.monotonic() + drain_s
        while self._addon.under_way and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if drain_s > 0:
            await asyncio.sleep(LAST_WRITE_S)
        self._master.shutdown()
        await self._task


@dataclass(slots=True)
class _Running:
    event: asyncio.Event

    def running(self) -> None:
        self.event.set()


def _call_straight(master: "Master") -> None:
    """Hooks of connections and flows go to the add-ons that have them, and to no others.

    mitmproxy looks through all of them anew, twice a hook and with a guard around each, since they may come and go: a sixth
    of all its time. Ours are fixed by now, none has an `update` hook, and what one raises is logged as mitmproxy would.
    """
    from mitmproxy.addonmanager import safecall
    from mitmproxy.exceptions import AddonHalt
    from mitmproxy.hooks import Hook

    chain = master.addons.chain
    callables: dict[str, list[Callable[..., Any]]] = {}

    async def handle(hook: Hook) -> None:
        found = callables.get(hook.name)
        if found is None:
            found = [call for addon in chain if (call := getattr(addon, hook.name, None)) is not None]
            callables[hook.name] = found
        if not found:
            return
        arguments = hook.args()
        try:
            for call in found:
                with safecall():
                    awaitable = call(*arguments)
                    if awaitable is not None:
                        await awaitable
        except AddonHalt:
            return

    master.addons.handle_lifecycle = handle  # type: ignore[assignment, method-assign]


@contextmanager
def _listening(share_port: bool) -> Iterator[None]:
    """mitmproxy has no option for these. With asyncio's backlog of 100, bursts of connections wait a second for a SYN retry."""
    original = asyncio.start_server

    def start_server(on_connection: OnConnection, *args: Any, **options: Any) -> Any:
        return original(corked(on_connection), *args, backlog=BACKLOG, reuse_port=share_port, **options)

    asyncio.start_server = start_server  # type: ignore[assignment]
    try:
        yield
    finally:
        asyncio.start_server = original
