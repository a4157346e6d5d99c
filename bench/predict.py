"""`chatreel predict` against a replay in real time of the same trace on `chatreel serve`, and its speed.

    python bench/predict.py compare            # some minutes: the replay runs in real time
    python bench/predict.py speed TRACE.parquet --limit 2000

compare: percentiles of both runs as a report gives them, their ratio, hit rates and preemptions. speed: virtual seconds
per second on one core.
"""

import argparse
import asyncio
import cProfile
import multiprocessing
import pstats
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from replay.foretelling import SAMPLE_S, PredictConfig, run_predict
from replay.judge.summary import Point
from replay.outcome import Outcome
from replay.plan.predict import predict
from replay.report.reading import judge_run
from replay.results import write_outcomes
from replay.run import ReplayConfig, planned, replay
from replay.sim.presets import preset_named
from replay.sim.server import ServerConfig, run_server
from replay.sim.virtual import play
from synth.generating import generate_trace
from synth.model import load_workload

PRESET, KV_TOKENS = "h100-llama3-8b", 60_000
FIGURES = {"TTFT": "ttft_schedule_ms", "TPOT": "tpot_ms", "E2E": "e2e_schedule_ms"}


def compare(workload: str, preset: str, kv_tokens: int, rate_per_s: float, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dials = {"duration_s": seconds, "arrivals.requests_per_s": rate_per_s, "think_s": {"mean": 5}}
        generate_trace(load_workload(preset=workload, overrides=dials), 1, folder / "t.parquet")
        ours, theirs = multiprocessing.Pipe()
        config = ServerConfig(preset=preset, port=0, kv_tokens=kv_tokens)
        server = multiprocessing.Process(target=run_server, args=(config, theirs.send), daemon=True)
        server.start()
        url = ours.recv()
        scales = (1.0, 2.0)
        asyncio.run(replay(ReplayConfig(trace=folder / "t.parquet", target=url, run_dir=folder / "real", scales=scales)))
        server.terminate()
        begin = time.perf_counter()
        run_predict(
            PredictConfig(trace=folder / "t.parquet", run_dir=folder / "sim", engine=preset, scales=scales, kv_tokens=kv_tokens)
        )
        print(f"both scales predicted in {time.perf_counter() - begin:.1f} s\n")
        real, sim = (judge_run(folder / part).points for part in ("real", "sim"))
    print("| scale | | real time | predicted | predicted / real |\n|---|---|---|---|---|")
    for one, other in zip(real, sim, strict=True):
        _rows(one, other)


def _rows(real: Point, sim: Point) -> None:
    for name, figure in FIGURES.items():
        for rank in ("p50", "p90", "p99"):
            a, b = (getattr(getattr(one.latency, figure), rank) for one in (real, sim))
            print(f"| {real.scale:g}x | {name} {rank}, ms | {a:.2f} | {b:.2f} | {b / a:.3f} |")
    a, b = real.cache.hit_rate_usage or 0.0, sim.cache.hit_rate_usage or 0.0
    print(f"| {real.scale:g}x | prefix hit rate | {a:.2%} | {b:.2%} | {b - a:+.4f} |")
    print(f"| {real.scale:g}x | preemptions | {real.cache.preemptions} | {sim.cache.preemptions} | |")


def speed(trace: Path, limit: int | None, preset: str, with_profile: bool) -> None:
    """The whole command, then its stages one by one; the rest of the command is samples, scaling and opening files."""
    with tempfile.TemporaryDirectory() as name:
        begin = time.perf_counter()
        run_predict(PredictConfig(trace=trace, run_dir=Path(name) / "run", engine=preset, scales=(1.0,), limit=limit))
        seconds = time.perf_counter() - begin
        point = judge_run(Path(name) / "run").points[0]
        stages = _stages(trace, limit, preset, Path(name) / "again.parquet")
    print(
        f"{point.completed:,} requests, {point.duration_s:,.0f} virtual s in {seconds:.1f} s: {point.duration_s / seconds:,.0f} "
        f"x real time; {point.output_tokens_per_s * point.duration_s / seconds:,.0f} answer tokens/s"
    )
    for stage, took_s in stages.items():
        print(f"  {stage:<8} {took_s:6.2f} s  {took_s / sum(stages.values()):4.0%}")
    if with_profile:
        profile(trace, limit, preset)


def profile(trace: Path, limit: int | None, preset: str, rows: int = 16) -> None:
    """Where the time goes, by function; the profiler itself makes calls of Python functions dearer."""
    profiler = cProfile.Profile()
    with tempfile.TemporaryDirectory() as name:
        config = PredictConfig(trace=trace, run_dir=Path(name) / "run", engine=preset, scales=(1.0,), limit=limit)
        profiler.runcall(run_predict, config)
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    whole_s = sum(own_s for _, _, own_s, _, _ in stats.values())
    print("\n| function | calls | own time, s | share |\n|---|---|---|---|")
    costly = sorted(stats.items(), key=lambda item: -item[1][2])
    for (file, _, function), (_, calls, own_s, _, _) in costly[:rows]:
        print(f"| {Path(file).name} {function} | {calls:,} | {own_s:.2f} | {own_s / whole_s:.1%} |")


def _stages(trace: Path, limit: int | None, preset: str, path: Path) -> dict[str, float]:
    marks = [time.perf_counter()]
    plan = planned(trace, 0, limit=limit, dequantise=True, open_loop=False)
    marks.append(time.perf_counter())
    engine = preset_named(preset)
    predict(plan, engine.kv_blocks * engine.block_tokens, answers_reused=True)
    marks.append(time.perf_counter())
    everything = list(play(plan, engine, replicas=1, router="prefix", sample_s=SAMPLE_S))
    marks.append(time.perf_counter())
    write_outcomes(path, (one for one in everything if isinstance(one, Outcome)))
    marks.append(time.perf_counter())
    return dict(zip(("load", "predict", "engine", "write"), (b - a for a, b in pairwise(marks)), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["compare", "speed"])
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--preset", default=PRESET)
    parser.add_argument("--workload", default="chat", help="compare: a preset of chatreel generate")
    parser.add_argument("--kv-tokens", type=int, default=KV_TOKENS, help="compare")
    parser.add_argument("--rate", type=float, default=12, help="compare: requests per second at 1x")
    parser.add_argument("--seconds", type=float, default=60, help="compare")
    parser.add_argument("--profile", action="store_true", help="speed: where the time goes, by function")
    options = parser.parse_args()
    if options.what == "compare":
        compare(options.workload, options.preset, options.kv_tokens, options.rate, options.seconds)
    else:
        speed(options.trace, options.limit, options.preset, options.profile)


if __name__ == "__main__":
    main()
