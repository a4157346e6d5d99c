"""Several upstreams behind one recorder, and the forward proxy that reads TLS but goes to allowed hosts only."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from tracer.record import RecordConfig, start_recorder
from tracer.tracefile import iter_requests, read_footer

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def echo(request: web.Request) -> web.Response:
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    choice = {"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}
    return web.json_response({"choices": [choice], "usage": usage, "path": request.path, "host": request.host})


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", echo)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def test_requests_go_to_the_upstream_of_their_path_or_host(tmp_path: Path) -> None:
    async def run() -> tuple[list[Any], Any]:
        async with serving() as main, serving() as small, serving() as hosted:
            config = RecordConfig(
                upstream=f"http://127.0.0.1:{main}",
                more_upstreams=[f"/small=http://127.0.0.1:{small}", f"chat.example=http://127.0.0.1:{hosted}/openai"],
                out=str(tmp_path / "t.parquet"),
            )
            with await asyncio.to_thread(start_recorder, config) as recorder:
                async with httpx.AsyncClient(base_url=recorder.url) as client:
                    told = [
                        (await client.post(path, json=BODY, headers=headers)).json()
                        for path, headers in [(CHAT, {}), (f"/small{CHAT}", {}), (CHAT, {"Host": "chat.example"})]
                    ]
                result = await asyncio.to_thread(recorder.stop)
            names = [f"127.0.0.1:{port}" for port in (main, small, hosted)]
            assert [(one["path"], one["host"]) for one in told] == list(zip([CHAT, CHAT, f"/openai{CHAT}"], names, strict=True))
            return names, result

    names, result = asyncio.run(run())

    assert [row["upstream"] for row in iter_requests(result.path)] == names


def test_a_forward_proxy_records_allowed_hosts_over_tls_and_refuses_all_others(
    tmp_path: Path, authority: tuple[str, ssl.SSLContext]
) -> None:
    upstream_ca, server_tls = authority

    async def run() -> tuple[int, Any]:
        async with serving(server_tls) as allowed, serving() as plain, serving() as secret:
            config = RecordConfig(
                forward=True,
                allow_hosts=[f"127.0.0.1:{allowed}", f"127.0.0.1:{plain}"],
                upstream_ca=upstream_ca,
                ca_folder=str(tmp_path / "ca"),
                out=str(tmp_path / "t.parquet"),
            )
            with await asyncio.to_thread(start_recorder, config) as recorder:
                trusted = ssl.create_default_context(cafile=str(tmp_path / "ca" / "mitmproxy-ca-cert.pem"))
                async with httpx.AsyncClient(proxy=recorder.url, verify=trusted) as client:
                    tunnelled = await client.post(f"https://127.0.0.1:{allowed}{CHAT}", json=BODY)
                    direct = await client.post(f"http://127.0.0.1:{plain}{CHAT}", json=BODY)
                    refused = await client.get(f"http://127.0.0.1:{secret}/")
                    disguised = await client.get(f"http://127.0.0.1:{plain}/", headers={"Host": f"127.0.0.1:{secret}"})
                    with pytest.raises(httpx.ProxyError, match="403"):
                        await client.get(f"https://127.0.0.1:{secret}/")
                result = await asyncio.to_thread(recorder.stop)
            assert tunnelled.json()["path"] == direct.json()["path"] == CHAT
            assert (refused.status_code, disguised.status_code) == (403, 403)
            return allowed, result

    allowed, result = asyncio.run(run())

    rows = list(iter_requests(result.path))
    assert [row["upstream"] for row in rows][0] == f"127.0.0.1:{allowed}"
    assert [(row["http_status"], row["input_tokens"]) for row in rows] == [(200, 3)] * 2
    assert read_footer(result.path).losses["refused"] == 3
    assert (tmp_path / "ca").stat().st_mode & 0o077 == 0
