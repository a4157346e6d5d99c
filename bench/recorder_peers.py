"""Processes that bench/recorder.py starts: a tiny fast upstream, and a mitmproxy that records nothing. Each prints its port.

python bench/recorder_peers.py upstream | plain UPSTREAM_URL
"""

import asyncio
import re
import sys
import tempfile
import time

CHUNKS = 200
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
GAP = re.compile(rb"x-gap-ms: *(\d+)", re.IGNORECASE)
ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"m","choices":[{"index":0,"message":{"role":'
    b'"assistant","content":"Certainly, that is so."},"finish_reason":"stop"}],"usage":{"prompt_tokens":120,'
    b'"completion_tokens":6,"total_tokens":126}}'
)
EVENT = (
    b'data: {"id":"%019d","object":"chat.completion.chunk","created":1700000000,"model":"some/model-of-70b","system_fingerprint"'
    b':"fp_00","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)
LAST = b'data: {"id":"end","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Upstream(asyncio.Protocol):
    """Answers at once, or streams: `x-gap-ms` is the pace, 0 as fast as the client reads."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.buffer = bytearray()
        self.needed = 0
        self.is_paused = False
        self.left = 0

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.needed and (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            self.needed = end + 4 + int(LENGTH.search(self.buffer)[1])
        if self.needed and len(self.buffer) >= self.needed:
            self.answer(bytes(self.buffer[:300]), b'"stream": true' in self.buffer[-40:])
            del self.buffer[: self.needed]
            self.needed = 0

    def answer(self, head: bytes, is_stream: bool) -> None:
        if not is_stream:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER) + ANSWER
            )
            return
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        self.loop = asyncio.get_running_loop()
        self.gap_s = int(GAP.search(head)[1]) / 1000
        self.left, self.next_s = CHUNKS, self.loop.time() + self.gap_s
        self.loop.call_at(self.next_s, self.stream)

    def stream(self) -> None:
        if self.transport.is_closing() or self.is_paused:
            return
        self.transport.write(chunk(EVENT % time.monotonic_ns()))
        self.left -= 1
        if not self.left:
            self.transport.write(chunk(LAST) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            return
        self.next_s += self.gap_s
        self.loop.call_at(self.next_s, self.stream) if self.gap_s else self.loop.call_soon(self.stream)

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        if self.left:
            self.loop.call_soon(self.stream)


async def serve_upstream() -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Plain:
    """Stream through, keep nothing."""

    def responseheaders(self, flow) -> None:
        flow.response.stream = True

    def running(self) -> None:
        print(self.server.listen_addrs()[0][1], flush=True)


async def serve_plain(upstream: str) -> None:
    """The same add-ons and options as the recorder's, and no more."""
    from mitmproxy import options
    from mitmproxy.addons import block, core, disable_h2c, next_layer, proxyserver, tlsconfig
    from mitmproxy.master import Master

    with tempfile.TemporaryDirectory() as folder:
        master = Master(options.Options(mode=[f"reverse:{upstream}"], listen_host="127.0.0.1", listen_port=0, confdir=folder))
        plain = Plain()
        plain.server = proxyserver.Proxyserver()
        others = (core.Core(), block.Block(), disable_h2c.DisableH2C(), next_layer.NextLayer(), tlsconfig.TlsConfig())
        master.addons.add(*others, plain.server, plain)
        master.options.update(connection_strategy="lazy", tcp_timeout=3600, websocket=False)
        await master.run()


if __name__ == "__main__":
    asyncio.run(serve_upstream() if sys.argv[1] == "upstream" else serve_plain(sys.argv[2]))
