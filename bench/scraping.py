"""What reading /metrics costs the client, and what it does to the schedule.

    python bench/scraping.py

A page as vLLM writes it (one engine and eight) and the simulated server, in a process of their own; a replay whose requests are
due 100 a second, with that page read hardly ever, 4 and 10 times a second, and with one that takes a second.
"""

import asyncio
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from aiohttp import web

from replay.edge.client import client_for
from replay.edge.scrape import Scraper
from replay.outcome import Sample
from replay.results import read_lines, read_outcomes
from replay.run import ReplayConfig, run_replay
from replay.sim.server import ServerConfig, serving
from tracer.schema import Footer
from tracer.tracefile import write_trace

HISTOGRAMS, BUCKETS, READINGS, REQUESTS, RATE = 19, 26, 300, 1000, 100


def page(engines: int) -> str:
    lines = []
    for engine in range(engines):
        labels = f'engine="{engine}",model_name="meta-llama/Llama-3.1-8B-Instruct"'
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total"):
            lines += [f"# HELP vllm:{name} Words.", f"# TYPE vllm:{name} gauge", f"vllm:{name}{{{labels}}} 0.5"]
        for number in range(HISTOGRAMS):
            name = f"vllm:histogram_{number}_of_something_seconds"
            lines += [f"# HELP {name} Words.", f"# TYPE {name} histogram"]
            lines += [f'{name}_bucket{{{labels},le="{edge}"}} 12345.0' for edge in range(BUCKETS)]
    return "\n".join(lines) + "\n"


def serve(pipe: Connection) -> None:
    async def run() -> None:
        async def answer(request: web.Request) -> web.Response:
            await asyncio.sleep(float(request.query.get("wait", 0)))
            return web.Response(text=pages[int(request.query.get("engines", 1))])

        pages = {engines: page(engines) for engines in (1, 8)}
        app = web.Application()
        app.router.add_get("/metrics", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with serving(ServerConfig(port=0, preset="h100-llama3-1b")) as url:
            pipe.send((f"http://127.0.0.1:{runner.addresses[0][1]}/metrics", url))
            await asyncio.Event().wait()

    asyncio.run(run())


async def cost(url: str) -> float:
    """Microseconds of CPU a reading."""
    async with client_for(10, {}) as client:
        scraper = Scraper(client.http, [url])
        await scraper.read()
        before = time.thread_time_ns()
        for _ in range(READINGS):
            await scraper.read()
        return (time.thread_time_ns() - before) / READINGS / 1e3


def lateness(folder: Path, name: str, target: str, urls: tuple[str, ...], hz: float) -> str:
    config = ReplayConfig(
        trace=folder / "t.parquet", target=target, run_dir=folder / name, scales=(1.0,), metrics_urls=urls, metrics_hz=hz
    )
    run_replay(config)
    late = [(one.sent_ns - one.planned_ns) / 1e6 for one in read_outcomes(folder / name, 0)[0] if one.sent_ns is not None]
    samples, _ = read_lines(folder / name / "point-0.samples.jsonl", Sample)
    p50, p99 = np.percentile(late, [50, 99])
    skipped = sum(bool(one.metrics_late) for one in samples)
    return f"{name:28} lateness p50 {p50:.2f} p99 {p99:.2f} max {max(late):.2f} ms; {len(samples)} samples, {skipped} skipped"


def main() -> None:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    metrics, target = ours.recv()
    for engines in (1, 8):
        size = len(page(engines))
        print(
            f"{engines} engines, {size / 1e3:.0f} kB: {asyncio.run(cost(f'{metrics}?engines={engines}')):.0f} us of CPU a reading"
        )
    rng = np.random.default_rng(1)
    times = np.cumsum(rng.exponential(1 / RATE, REQUESTS))
    rows = [{"request_id": i, "arrival_ns": int(t * 1e9), "input_tokens": 200, "output_tokens": 8} for i, t in enumerate(times)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_trace(folder / "t.parquet", rows, Footer())  # type: ignore[arg-type]
        print(lateness(folder, "0.1 a second", target, (f"{metrics}?engines=1",), 0.1))
        print(lateness(folder, "4 a second", target, (f"{metrics}?engines=1",), 4.0))
        print(lateness(folder, "10 a second", target, (f"{metrics}?engines=1",), 10.0))
        print(lateness(folder, "10 a second, eight engines", target, (f"{metrics}?engines=8",), 10.0))
        print(lateness(folder, "10 a second, page takes 1 s", target, (f"{metrics}?engines=1&wait=1",), 10.0))
    process.terminate()


if __name__ == "__main__":
    main()
