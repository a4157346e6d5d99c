"""Memory of the recorder with many streams open at once.

    python bench/recorder_memory.py --streams 9000

Loopback only. Each stream gets one chunk, then all wait; the limit of open files must allow three per stream.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from aiohttp import web

from tracer.limits import lift_file_limit
from tracer.record import RecordConfig, start_recorder

CHUNK = b'data: {"choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": null}]}\n\n'
BODY = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi " * 50}]}).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY)
CONNECTING = 100  # at a time


def resident_mb(pid: int | str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


async def run(streams: int, folder: Path) -> None:
    release = asyncio.Event()
    places = asyncio.Semaphore(CONNECTING)

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(CHUNK)
        await release.wait()
        await response.write(CHUNK + b"data: [DONE]\n\n")
        return response

    async def client(port: int, is_open: "asyncio.Future[None]") -> None:
        async with places:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD + BODY)
            await reader.readuntil(b"word")
        is_open.set_result(None)
        await reader.readuntil(b"[DONE]")
        writer.close()

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    config = RecordConfig(upstream=f"http://127.0.0.1:{runner.addresses[0][1]}", out=str(folder / "t.parquet"))
    recorder = await asyncio.to_thread(start_recorder, config)
    proxy = recorder.process.pid
    worker = Path(f"/proc/{proxy}/task/{proxy}/children").read_text().split()[0]
    print(f"at start: proxy {resident_mb(proxy):.0f} MB, worker {resident_mb(worker):.0f} MB")
    opened = [asyncio.get_running_loop().create_future() for _ in range(streams)]
    clients = [asyncio.create_task(client(int(recorder.url.rpartition(":")[2]), one)) for one in opened]
    await asyncio.wait_for(asyncio.gather(*opened), 300)
    print(f"{streams:,} streams open: proxy {resident_mb(proxy):.0f} MB, worker {resident_mb(worker):.0f} MB")
    release.set()
    await asyncio.wait_for(asyncio.gather(*clients), 300)
    result = await asyncio.to_thread(recorder.stop, 120)
    print(f"{result.rows:,} rows, losses {result.losses}")
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=3000)

    lift_file_limit()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(parser.parse_args().streams, Path(folder)))


if __name__ == "__main__":
    main()
