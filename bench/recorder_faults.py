"""A recorder under load while everything around it breaks: what was served, recorded, lost.

    python bench/recorder_faults.py --minutes 3

Bounded, loopback only. Faults, at fixed shares of the run: the worker is killed (-9), the disk is full for a while, the
upstream resets a part of its streams, the proxy is killed (-9) and a new recorder started on the same port.
"""

import argparse
import asyncio
import json
import os
import resource
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
from aiohttp import web

from tracer.record import RecordConfig, RecorderProcess, compact, start_recorder
from tracer.tracefile import iter_requests

CHUNK = b'data: {"choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": null}]}\n\n'
LAST = (
    b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], '
    b'"usage": {"prompt_tokens": 9, "completion_tokens": 20}}\n\ndata: [DONE]\n\n'
)


class Upstream:
    """Twenty chunks, 10 ms apart. `resets`: every how many streams one is cut off in the middle; 0: none."""

    def __init__(self) -> None:
        self.resets = 0
        self.streams = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.streams += 1
        cut = self.resets and self.streams % self.resets == 0
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(20):
            if cut and number == 7 and request.transport is not None:
                request.transport.abort()
                return response
            if request.transport is None or request.transport.is_closing():
                return response  # the proxy died
            await response.write(CHUNK)
            await asyncio.sleep(0.01)
        await response.write(LAST)
        return response


async def user(client: httpx.AsyncClient, number: int, until: float, seen: Counter[str]) -> None:
    turn = 0
    while time.monotonic() < until:
        turn += 1
        text = f"user {number} asks question {turn} " + "and more " * 40
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]}
        try:
            answer = await client.post("/v1/chat/completions", json=body)
            seen["served" if answer.content.endswith(LAST) else "broken"] += 1
        except httpx.ConnectError:
            seen["refused"] += 1  # nobody listens: the proxy is dead
            await asyncio.sleep(0.2)
        except httpx.HTTPError:
            seen["broken"] += 1


def workers_of(recorder: RecorderProcess) -> list[int]:
    children = Path(f"/proc/{recorder.process.pid}/task/{recorder.process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"tracer.record.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def break_things(recorder: RecorderProcess, again: RecordConfig, upstream: Upstream, length_s: float) -> RecorderProcess:
    """Returns the recorder that listens at the end."""

    async def at(share: float, what: str) -> None:
        await asyncio.sleep(max(began + share * length_s - time.monotonic(), 0))
        print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)

    began = time.monotonic()
    await at(0.15, "kill -9 of the worker")
    os.kill(workers_of(recorder)[0], signal.SIGKILL)
    await at(0.30, "the disk is full")
    worker = workers_of(recorder)[0]
    limits = resource.prlimit(worker, resource.RLIMIT_FSIZE)
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (4096, limits[1]))
    await at(0.45, "the disk has room again")
    resource.prlimit(worker, resource.RLIMIT_FSIZE, limits)
    await at(0.55, "the upstream resets every 20th stream")
    upstream.resets = 20
    await at(0.70, "it does so no more")
    upstream.resets = 0
    await at(0.80, "kill -9 of the proxy; a new recorder on its port")
    os.kill(recorder.process.pid, signal.SIGKILL)
    recorder.kill()
    return await asyncio.to_thread(start_recorder, again)


async def run(minutes: float, users: int, folder: Path) -> None:
    upstream, seen, length_s = Upstream(), Counter[str](), 60 * minutes
    app = web.Application()
    app.router.add_post("/v1/chat/completions", upstream.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    target = f"http://127.0.0.1:{runner.addresses[0][1]}"
    recorder = await asyncio.to_thread(start_recorder, RecordConfig(upstream=target, out=str(folder / "first.parquet")))
    port = int(recorder.url.rpartition(":")[2])
    again = RecordConfig(upstream=target, out=str(folder / "second.parquet"), port=port)
    until = time.monotonic() + length_s
    async with httpx.AsyncClient(base_url=recorder.url, timeout=30) as client, asyncio.TaskGroup() as group:
        for number in range(users):
            group.create_task(user(client, number, until, seen))
        breaking = group.create_task(break_things(recorder, again, upstream, length_s))
    second = await asyncio.to_thread(breaking.result().stop)
    await runner.cleanup()
    first = await asyncio.to_thread(compact, folder / "first.segments")
    report(seen, [first.path, Path(second.path)], Counter(first.losses) + Counter(second.losses))


def report(seen: Counter[str], traces: list[Path], losses: Counter[str]) -> None:
    rows = [row for path in traces for row in iter_requests(path)]
    whole = sum(row["finish_reason"] == "stop" and row["error_kind"] is None for row in rows)
    print(f"\nclients: {json.dumps(dict(seen))}")
    print(f"rows: {len(rows):,}, of them whole {whole:,}, with an error kind {dict(Counter(row['error_kind'] for row in rows))}")
    print(f"counted as lost: {json.dumps({name: count for name, count in losses.items() if count})}")
    print(f"served but in no trace: {seen['served'] - whole:,} ({(seen['served'] - whole) / seen['served']:.2%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--users", type=int, default=16, help="requests under way at any time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(given.minutes, given.users, Path(folder)))


if __name__ == "__main__":
    main()
