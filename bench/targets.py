"""Several targets: the hit rate predicted for each cache beside the one it reports, by route.

    python bench/targets.py

Two simulated servers of 6,000 tokens of KV in this process; 240 requests at 20/s below eight system prompts of 800 tokens, in
sessions of two turns.
"""

import asyncio
import tempfile
from pathlib import Path

import numpy as np

from replay.plan.route import Router
from replay.report.reading import judge_run
from replay.run import ReplayConfig, replay
from replay.sim.server import ServerConfig, serving
from tracer.schema import Footer, Request
from tracer.tracefile import write_trace

ROUTES: tuple[Router, ...] = ("prefix", "sticky", "rr")


def requests(seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    rows: list[Request] = []
    for number in range(240):
        system, own = int(rng.integers(8)) * 50, 1000 + 10 * number
        rows.append(
            {
                "request_id": number,
                "arrival_ns": number * 50_000_000,
                "session_id": number // 2,
                "turn": number % 2,
                "input_tokens": 965,
                "output_tokens": 20,
                "input_blocks": [*range(system, system + 50), *range(own, own + 10)],
            }
        )
    return rows


async def played(folder: Path, route: Router) -> None:
    one = ServerConfig(port=0, kv_tokens=6000)
    async with serving(one) as first, serving(one) as second:
        config = ReplayConfig(
            trace=folder / "t.parquet", target=first, other_targets=(second,), router=route, run_dir=folder / route, scales=(1.0,)
        )
        await replay(config)


def main() -> None:
    print("route | both | target 0 (requests) | target 1 (requests)\n---|---|---|---")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_trace(folder / "t.parquet", requests(1), Footer())
        for route in ROUTES:
            asyncio.run(played(folder, route))
            point = judge_run(folder / route).points[0]
            each = [f"{one.hit_rate_predicted:.3f} / {one.hit_rate_usage:.3f} ({one.planned})" for one in point.servers]
            print(route, f"{point.cache.hit_rate_predicted:.3f} / {point.cache.hit_rate_usage:.3f}", *each, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
