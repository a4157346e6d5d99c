"""A scripted server for the recorder's tests: the model name picks the script. Runs in a thread with its own loop."""

import asyncio
import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

SSE = {"Content-Type": "text/event-stream"}


def event(**body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def word(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])


STREAM = [
    event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]),
    *(word(f" CANARY-answer{n}") for n in range(5)),
    b": ping\n\n",
    event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]),
    event(choices=[], usage={"prompt_tokens": 999, "completion_tokens": 5}),
    b"data: [DONE]\n\n",
]
WHOLE = json.dumps(
    {
        "choices": [{"index": 0, "message": {"content": "CANARY-answer"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 999, "completion_tokens": 5},
    }
).encode()


async def _stream(request: web.Request, chunks: list[bytes], gap_s: float = 0.0) -> web.StreamResponse:
    response = web.StreamResponse(headers=SSE)
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
        await asyncio.sleep(gap_s)
    return response


async def _answer(request: web.Request) -> web.StreamResponse:
    model = (await request.json())["model"]
    if model == "stream":
        return await _stream(request, STREAM)
    if model == "slow-stream":
        return await _stream(request, STREAM, gap_s=0.15)
    if model == "endless":
        return await _stream(request, [word(" on")] * 600, gap_s=0.05)
    if model == "silent":
        await asyncio.sleep(30)
    if model == "reset":
        response = await _stream(request, STREAM[:3])
        assert request.transport is not None
        request.transport.abort()
        return response
    if model == "gzip":
        body = gzip.compress(b"".join(STREAM))
        return web.Response(body=body, headers={**SSE, "Content-Encoding": "gzip"})
    if model == "error":
        return web.json_response({"error": {"message": "CANARY-error"}}, status=400)
    return web.Response(body=WHOLE, content_type="application/json")


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "stream"}]})


@contextmanager
def upstream() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", _answer)
    app.router.add_post("/v1/completions", _answer)
    app.router.add_get("/v1/models", _models)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    async def start() -> int:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        return int(runner.addresses[0][1])

    port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
