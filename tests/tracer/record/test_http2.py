"""HTTP/2 clients of the forward proxy: they speak it where the upstream does, and many streams are under way at once."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import RequestReceived, StreamEnded

from tracer.record import RecordConfig, start_recorder
from tracer.tracefile import iter_requests, read_footer

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "CANARY " * 40}]}
STREAMS = 12  # at once, more than the connections that mitmproxy lets one client connection have


def word(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"


PIECES = [word("one"), word(" two"), word(" three"), b"data: [DONE]\n\n"]


@asynccontextmanager
async def http1_upstream(tls: ssl.SSLContext) -> AsyncIterator[int]:
    """No answer goes on before all STREAMS requests are there."""
    all_there = asyncio.Barrier(STREAMS)

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(PIECES[0])
        await all_there.wait()
        for piece in PIECES[1:]:
            await response.write(piece)
        return response

    app = web.Application()
    app.router.add_post(CHAT, answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


@asynccontextmanager
async def http2_upstream(tls: ssl.SSLContext, connections: list[int]) -> AsyncIterator[int]:
    """As the other one, over HTTP/2; `connections` gets an entry for each."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = H2Connection(H2Configuration(client_side=False))
        connection.initiate_connection()
        writer.write(connection.data_to_send())
        connections.append(0)
        posts: set[int] = set()
        open_streams: list[int] = []
        while data := await reader.read(65536):
            for event in connection.receive_data(data):
                if isinstance(event, RequestReceived):
                    if dict(event.headers)[b":method"] == b"GET":
                        connection.send_headers(event.stream_id, [(":status", "404")], end_stream=True)
                        continue
                    posts.add(event.stream_id)
                    connection.send_headers(event.stream_id, [(":status", "200"), ("content-type", "text/event-stream")])
                    connection.send_data(event.stream_id, PIECES[0])
                elif isinstance(event, StreamEnded) and event.stream_id in posts:
                    open_streams.append(event.stream_id)
            if len(open_streams) == STREAMS:
                for piece in PIECES[1:]:
                    for stream in open_streams:
                        connection.send_data(stream, piece, end_stream=piece is PIECES[-1])
                open_streams.clear()
            writer.write(connection.data_to_send())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()


@pytest.mark.parametrize(("version", "alpn"), [("HTTP/2", "h2"), ("HTTP/1.1", "http/1.1")])
def test_a_client_gets_http2_where_the_upstream_has_it_and_no_stream_waits_for_another(
    tmp_path: Path, authority: tuple[str, ssl.SSLContext], version: str, alpn: str
) -> None:
    upstream_ca, tls = authority
    connections: list[int] = []
    tls.set_alpn_protocols([alpn])

    async def run() -> tuple[list[httpx.Response], str]:
        upstream = http2_upstream(tls, connections) if alpn == "h2" else http1_upstream(tls)
        async with upstream as port, asyncio.timeout(90):
            hosts = [f"127.0.0.1:{port}", "127.0.0.1:9"]
            out, ca = str(tmp_path / "t.parquet"), tmp_path / "ca"
            config = RecordConfig(forward=True, allow_hosts=hosts, upstream_ca=upstream_ca, ca_folder=str(ca), out=out)
            with await asyncio.to_thread(start_recorder, config) as recorder:
                trusted = ssl.create_default_context(cafile=str(ca / "mitmproxy-ca-cert.pem"))
                async with httpx.AsyncClient(proxy=recorder.url, verify=trusted, http2=True, timeout=20) as client:
                    url = f"https://127.0.0.1:{port}{CHAT}"
                    await client.get(f"https://127.0.0.1:{port}/")  # now the client knows which version it is to be
                    told = await asyncio.gather(*(client.post(url, json=BODY) for _ in range(STREAMS)))
                    with pytest.raises(httpx.ProxyError, match="502"):
                        await client.post(f"https://127.0.0.1:9{CHAT}", json=BODY)
                return told, (await asyncio.to_thread(recorder.stop)).path

    told, path = asyncio.run(run())

    rows = list(iter_requests(path))
    assert [(one.status_code, one.http_version, one.content) for one in told] == [(200, version, b"".join(PIECES))] * STREAMS
    assert len(connections) == (1 if alpn == "h2" else 0)
    assert [(row["http_status"], row["output_tokens"], row["error_kind"]) for row in rows] == [(200, 3, None)] * STREAMS
    assert all(row["ttft_ns"] < row["end_ns"] and row["input_blocks"] for row in rows)
    assert read_footer(path).losses == {"passed_through": 1, "upstreams_unreachable": 1}
