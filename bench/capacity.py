"""Does the bracket of `chatreel capacity` hold the true capacity? Virtual time, one trace, one search a seed.

    python bench/capacity.py --seeds 20 -o /tmp/capacity            # half an hour; it goes on where it was cut off

The truth comes from long runs of the whole trace, over and over, without the search's windows, runs and stops: the load at
which the share of requests that meet all limits crosses what is wanted. Misses come in rare clusters, so one long run is not
enough: ten passes of one seed said 9.54 +- 0.11/s, a hundred of ten seeds 9.32 +- 0.08. `--intervals` also asks how often
each end of an interval of two to five of these passes misses the share of all of them.
"""

import argparse
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import msgspec
import numpy as np

from chatreel.capacity_report import parse_limits
from replay.capacity import Capacity, CapacityConfig, run_capacity
from replay.judge import metrics
from replay.judge.search import BLOCKS, LEAST_RUNS, Limit, interval
from replay.outcome import Outcome
from replay.plan.load import as_long_as, at_rate
from replay.plan.plan import Plan
from replay.run import planned
from replay.sim.presets import Preset, preset_named
from replay.sim.virtual import play
from replay.sweeping import SweepConfig
from synth.generating import generate_trace
from synth.model import load_workload

REQUESTS, RATE_PER_S = 3000, 10.0  # of the trace
TRUTH_NEAR = 0.04  # the loads on both sides of the true capacity are so near to each other
DRAWS = 4_000  # sets of runs, for each interval
MOST_RUNS = 5  # as `capacity` makes of a load on an engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    engine: str
    preset: Preset
    plan: Plan
    limits: list[Limit]
    attain: float
    passes: int  # over the trace with each seed, after a first one that does not count
    seeds: int  # of arrivals


def margin(case: Case, load: float, path: Path) -> tuple[float, float]:
    """(share that meets all limits - share wanted, the least of that and of each limit by itself; its standard error).

    Seeds are independent of each other, passes of one seed need not be. `path`: which requests met all limits, a row a pass.
    """
    wanted = [(case.attain, [one.slo for one in case.limits])] + [(one.share, [one.slo]) for one in case.limits]
    count = len(case.plan)
    long = as_long_as(case.plan, count * (case.passes + 1))
    met = np.zeros((len(wanted), case.seeds, case.passes + 1, count), dtype=bool)
    for seed in range(case.seeds):
        moved = at_rate(long, load, "poisson", np.random.default_rng([12345, seed]), waits=False)
        for one in play(moved, case.preset, replicas=1, router="rr", sample_s=10.0):
            if isinstance(one, Outcome):
                met[:, seed].reshape(len(wanted), -1)[:, one.request_id] = [metrics.meets(one, slos) for _, slos in wanted]
    np.save(path, met[0, :, 1:].reshape(-1, count))
    by_seed = met[:, :, 1:].mean(axis=(2, 3))
    margins = by_seed.mean(axis=1) - [share for share, _ in wanted]
    least = int(margins.argmin())
    return float(margins[least]), float(by_seed[least].std(ddof=1)) / sqrt(case.seeds)


def truth(case: Case, start: float, path: Path) -> tuple[float, float]:
    """(true capacity, its standard error). `path`: what is known so far, load by load."""
    found = msgspec.json.decode(path.read_bytes(), type=dict[float, tuple[float, float]]) if path.exists() else {}

    def is_met(load: float) -> bool:
        if load not in found:
            found[load] = margin(case, load, path.with_name(f"met-{load:.3f}.npy"))
            path.write_bytes(msgspec.json.encode(found))
        return found[load][0] >= 0

    low = high = start
    while not is_met(low):
        low, high = low / 1.3, low
    while is_met(high):
        low, high = high, high * 1.3
    while high / low > 1 + TRUTH_NEAR:
        middle = sqrt(low * high)
        low, high = (middle, high) if is_met(middle) else (low, middle)
    for load, (above, error) in sorted(found.items()):
        print(f"  {load:.3f}/s: margin {above:+.4f} +- {error:.4f}")
    (above, error), (below, _) = found[low], found[high]
    slope = (above - below) / (high - low)
    return low + above / slope, error / slope


def how_often_passed(folder: Path) -> None:
    """Each end of the intervals of runs that were drawn from all passes at a load."""
    rng = np.random.default_rng(7)
    print("\n| load | share | runs | above the truth, % | below it, % | above at one of the looks so far, % | width |")
    print("|---|---|---|---|---|---|---|")
    for path in sorted(folder.glob("met-*.npy")):
        passes = np.load(path)
        true, blocks = float(passes.mean()), passes.reshape(len(passes), BLOCKS, -1)
        met, sent = blocks.sum(axis=2).astype(np.float64), blocks.shape[2] * np.ones((MOST_RUNS, BLOCKS))
        above, below, ever, width = np.zeros((4, MOST_RUNS + 1))
        for _ in range(DRAWS):
            runs, is_passed = met[rng.choice(len(met), MOST_RUNS, replace=False)], False
            for looked in range(LEAST_RUNS, MOST_RUNS + 1):
                low, high = interval(runs[:looked], sent[:looked])
                is_passed |= low > true
                above[looked] += low > true
                below[looked] += high < true
                ever[looked] += is_passed
                width[looked] += high - low
        for looked in range(LEAST_RUNS, MOST_RUNS + 1):
            seen = " | ".join(f"{100 * one[looked] / DRAWS:.2f}" for one in (above, below, ever))
            print(f"| {path.stem[4:]} | {true:.4f} | {looked} | {seen} | {width[looked] / DRAWS:.4f} |", flush=True)


def searched(case: Case, trace: Path, folder: Path, seed: int) -> Capacity:
    path = folder / f"seed-{seed}" / "capacity.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Capacity)
    sweep = SweepConfig(
        trace=trace,
        run_dir=path.parent,
        kind="rate",
        values=(1.0,),
        engine=case.engine,
        max_s=3600.0,
        seed=seed,
        resume=path.parent.exists(),
    )
    found = run_capacity(CapacityConfig(sweep=sweep, limits=case.limits, attain=case.attain, repeats=MOST_RUNS))
    for big in path.parent.glob("point-*"):
        big.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="h100-llama3-8b")
    parser.add_argument("--slo", action="append")
    parser.add_argument("--attain", type=float, default=0.99)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--truth-seeds", type=int, default=10)
    parser.add_argument("--intervals", action="store_true", help="instead of searches")
    parser.add_argument("-o", "--out", type=Path, default=Path("capacity-bench"))
    options = parser.parse_args()
    trace = options.out / "chat.parquet"
    if not trace.exists():
        options.out.mkdir(parents=True, exist_ok=True)
        dials = {"requests": REQUESTS, "arrivals.requests_per_s": RATE_PER_S}
        generate_trace(load_workload(preset="chat", overrides=dials), 1, trace)
    case = Case(
        engine=options.preset,
        preset=preset_named(options.preset),
        plan=planned(trace, 0, limit=None, dequantise=True, open_loop=False),
        limits=parse_limits(options.slo or ["ttft:p99:500ms", "tpot:p99:10ms"]),
        attain=options.attain,
        passes=options.passes,
        seeds=options.truth_seeds,
    )
    capacity, error = truth(case, RATE_PER_S, options.out / "truth.json")
    print(f"true capacity {capacity:.3f}/s +- {error:.3f} (standard error), {options.preset}\n")
    if options.intervals:
        how_often_passed(options.out)
        return
    print("| seed | surely met | surely missed | about | holds the truth | runs | requests |\n|---|---|---|---|---|---|---|")
    held = 0
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        found = searched(case, trace, options.out, seed)
        low, high = found.bracket.low or 0.0, found.bracket.high or float("inf")
        held += low <= capacity <= high
        tried = f"{sum(one.runs for one in found.tried)} | {sum(one.requests for one in found.tried):,}"
        about = f"{found.bracket.estimate or 0:.2f}"
        print(
            f"| {seed} | {low:.2f} | {high:.2f} | {about} | {'yes' if low <= capacity <= high else 'NO'} | {tried} |", flush=True
        )
    print(f"\n{held} of {options.seeds} brackets hold the true capacity")


if __name__ == "__main__":
    main()
