"""`chatreel calibrate` on engines whose costs are hidden from it.

    python bench/calibrate.py hidden     # runs in virtual time: are the costs found?
    python bench/calibrate.py real       # some minutes: replays in real time against chatreel serve, its preset changed

Found / true of each cost, in brackets where the run does not tell it; the held-back third as measured, and errors there.
"""

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from replay.calibration import Calibration, Cost, calibrate
from replay.foretelling import PredictConfig, run_predict
from replay.run import ReplayConfig, replay
from replay.sim.engines import engine_named, write_engine
from replay.sim.fitting import NAMES
from replay.sim.presets import Preset, StepCosts
from replay.sim.server import ServerConfig, run_server
from synth.generating import generate_trace
from synth.model import load_workload

# Name: costs, limits, workload, its dials, scales.
ODD = StepCosts(overhead_s=2.1e-3, token_overhead_s=4e-5, weights_s=6.3e-3, context_token_s=9e-7, token_s=1.1e-4, pair_s=2e-8)
HIDDEN: dict[str, tuple[Preset, str, dict[str, object], tuple[float, ...]]] = {
    "laptop-demo, light": (
        replace(engine_named("laptop-demo"), request_overhead_s=3e-3),
        "chat",
        {"duration_s": 240, "arrivals.requests_per_s": 1},
        (1.0,),
    ),
    "odd, chunks of 512, 2 scales": (
        replace(
            engine_named("laptop-demo"),
            given_costs=ODD,
            request_overhead_s=4e-3,
            kv_tokens=120_000,
            max_num_batched_tokens=512,
            max_num_seqs=32,
        ),
        "chat",
        {"duration_s": 240, "arrivals.requests_per_s": 1.5},
        (1.0, 1.5),
    ),
    "h100:llama3-8b, flat": (
        replace(engine_named("h100:llama3-8b"), request_overhead_s=2e-3),
        "chat",
        {"duration_s": 120, "arrivals.requests_per_s": 6},
        (1.0,),
    ),
    "h100:llama3-8b, KV full, preempting": (
        replace(engine_named("h100:llama3-8b"), request_overhead_s=2e-3, kv_tokens=60_000),
        "chat",
        {"duration_s": 120, "arrivals.requests_per_s": 12},
        (1.0, 2.0),
    ),
    "a100:llama3-8b, overloaded": (
        replace(engine_named("a100:llama3-8b"), request_overhead_s=8e-3, max_num_seqs=48, max_num_batched_tokens=2048),
        "chat",
        {"duration_s": 120, "arrivals.requests_per_s": 16},
        (1.0,),
    ),
}
# For real time: tens of steps a second at most a few dozen answers, or the client of a laptop is measured.
REAL_DIALS = {"duration_s": 60, "arrivals.requests_per_s": 3, "think_s": {"mean": 5}}
REAL: dict[str, tuple[Preset, tuple[float, ...]]] = {
    "light and moderate": (replace(engine_named("laptop-demo"), given_costs=ODD, kv_tokens=200_000), (1.0,)),
    "mild overload": (replace(engine_named("laptop-demo"), given_costs=ODD, kv_tokens=200_000, max_num_seqs=16), (1.0,)),
    "overload": (replace(engine_named("laptop-demo"), given_costs=ODD, kv_tokens=200_000, max_num_seqs=16), (1.5,)),
}
FIGURES = ("TTFT p50, ms", "TTFT p90, ms", "TPOT p50, ms", "TPOT p90, ms", "hit rate")


def hidden() -> None:
    print("| engine | " + " | ".join(name.removesuffix("_s") for name in NAMES) + " | simulations, s |")
    print("|---" * (len(NAMES) + 2) + "|")
    found = {}
    for name, (engine, workload, dials, scales) in HIDDEN.items():
        with tempfile.TemporaryDirectory() as folder:
            trace, file = Path(folder) / "t.parquet", Path(folder) / "engine.toml"
            generate_trace(load_workload(preset=workload, overrides=dials), 1, trace)
            write_engine(file, engine, name, [])
            run = run_predict(PredictConfig(trace=trace, run_dir=Path(folder) / "run", engine=str(file), scales=scales))
            begin = time.perf_counter()
            found[name] = calibrate(run)
            seconds = time.perf_counter() - begin
        true = {**asdict(engine.costs), "request_overhead_s": engine.request_overhead_s}
        cells = [_ratio(one, true[one.name]) for one in found[name].costs]
        print(f"| {name} | " + " | ".join(cells) + f" | {found[name].simulations}, {seconds:.0f} |", flush=True)
    _held_back(found)


def _ratio(cost: Cost, true: float) -> str:
    if not true:
        return f"({cost.seconds * 1e6:.2g} µs for 0)"
    return f"{cost.seconds / true:.3f}" if cost.is_told else f"({cost.seconds / true:.2f})"


def _held_back(found: dict[str, Calibration]) -> None:
    print("\n| held back | " + " | ".join(FIGURES) + " | limits |")
    print("|---" * (len(FIGURES) + 2) + "|")
    for name, one in found.items():
        errors = {figure.name: figure for figure in one.held_back}
        cells = [
            f"{errors[one].measured:.4g}, " + (f"{errors[one].error:+.4f}" if "rate" in one else f"{errors[one].error:+.1%}")
            for one in FIGURES
        ]
        print(f"| {name} | " + " | ".join(cells) + f" | {'; '.join(one.notes[-2:])} |")


def real(only: str | None) -> None:
    found = {}
    for name, (engine, scales) in REAL.items():
        if only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            trace, file = Path(folder) / "t.parquet", Path(folder) / "engine.toml"
            generate_trace(load_workload(preset="chat", overrides=REAL_DIALS), 1, trace)
            write_engine(file, engine, name, [])
            ours, theirs = multiprocessing.Pipe()
            server = multiprocessing.Process(
                target=run_server, args=(ServerConfig(preset=str(file), port=0), theirs.send), daemon=True
            )
            server.start()
            config = ReplayConfig(trace=trace, target=ours.recv(), run_dir=Path(folder) / "run", scales=scales)
            run = asyncio.run(replay(config))
            server.terminate()
            found[name] = calibrate(run)
        true = asdict(engine.costs)
        ratios = [
            f"{one.name} {one.seconds / true[one.name]:.3f} ±{one.relative_error:.3f}"
            for one in found[name].costs
            if true.get(one.name)
        ]
        before_ms = found[name].engine.request_overhead_s * 1e3
        print(f"{name}: {', '.join(ratios)}, request_overhead {before_ms:.2f} ms", flush=True)
    _held_back(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["hidden", "real"])
    parser.add_argument("--only", choices=list(REAL), help="real: one of them")
    arguments = parser.parse_args()
    hidden() if arguments.what == "hidden" else real(arguments.only)
