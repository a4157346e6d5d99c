"""Preemptions of `chatreel serve` in real time beside the same engine in virtual time: the same engine? how far do runs differ?

    python bench/realtime.py run DIR --runs 5      # a load that fills the KV, in real time, again and again
    python bench/realtime.py tell DIR              # what the engine did with the arrivals that the server noted; predictions

`run`: server on core 0, client on core 1. It notes every arrival and every step. `tell` gives a new engine the same arrivals:
every step must be the same, to the last bit. Then the plan in virtual time, arrivals late by what HTTP took.
"""

import argparse
import asyncio
import multiprocessing
import os
import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from replay.judge.metrics import tpot_ms
from replay.outcome import Outcome, Sample
from replay.plan.plan import Plan
from replay.plan.scale import scale_plan
from replay.progress import Progress
from replay.results import read_outcomes
from replay.run import ReplayConfig, planned, point_seeds, replay
from replay.sim import server as serving
from replay.sim.engine import Engine, Request, Step
from replay.sim.presets import Preset, preset_named
from replay.sim.tuning import ttft_ms, values_of
from replay.sim.virtual import play
from synth.generating import generate_trace
from synth.model import load_workload

PRESET = "h100-llama3-8b"
COLUMNS = ("preemptions", "TTFT p50, ms", "TPOT p50, ms", "hit rate")


class Noting(Engine):
    """Notes what the server gave it and what it did."""

    notes: list[tuple[Any, ...]]

    def __init__(self, preset: Preset) -> None:
        super().__init__(preset)
        self.notes = []

    def submit(self, request: Request) -> None:
        super().submit(request)
        self.notes.append(("arrival", request.arrival_s, len(request.prompt), len(request.answer), list(request.names)))

    def abort(self, request: Request) -> None:
        if request.finish_reason is None:
            self.notes.append(("abort",))
        super().abort(request)

    def step(self) -> Step:
        step = super().step()
        self.notes.append(told(step))
        return step


def told(step: Step) -> tuple[Any, ...]:
    figures = (step.computed_tokens, len(step.tokens), len(step.finished), len(step.admitted), len(step.preempted))
    return ("step", step.start_s, step.end_s, *figures)


def serve(kv_tokens: int, notes: Path, ready: Any) -> None:
    os.sched_setaffinity(0, {0})
    serving.Engine = Noting  # type: ignore[misc]
    engines: list[Noting] = []
    init = serving.Simulator.__init__

    def noted(self: serving.Simulator, config: serving.ServerConfig) -> None:
        init(self, config)
        self._start_ns = start_ns
        engines.append(self.engine)  # type: ignore[arg-type]

    serving.Simulator.__init__ = noted  # type: ignore[method-assign]
    start_ns = time.monotonic_ns()
    serving.run_server(serving.ServerConfig(preset=PRESET, port=0, kv_tokens=kv_tokens), ready.send)
    notes.write_bytes(pickle.dumps((start_ns, engines[0].notes)))


def run(folder: Path, options: argparse.Namespace) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "t.parquet"
    if not trace.exists():
        dials = {"duration_s": options.seconds, "arrivals.requests_per_s": options.rate, "think_s": {"mean": 5}}
        generate_trace(load_workload(preset="chat", overrides=dials), 1, trace)
    os.sched_setaffinity(0, {1})
    for _ in range(options.runs):
        number = len(list(folder.glob("run-*")))
        ours, theirs = multiprocessing.Pipe()
        server = multiprocessing.Process(target=serve, args=(options.kv, folder / f"notes-{number}.pickle", theirs))
        server.start()
        config = ReplayConfig(trace=trace, target=ours.recv(), run_dir=folder / f"run-{number}", scales=(1.0,))
        starts_ns: list[int] = []

        def see(progress: Progress, starts_ns: list[int] = starts_ns) -> None:
            assert progress.last_sample is not None
            starts_ns.append(time.monotonic_ns() - progress.last_sample.t_ns)

        asyncio.run(replay(config, see))
        (folder / f"start-{number}.txt").write_text(str(min(starts_ns)))
        server.terminate()
        server.join()
        print(f"run {number}", flush=True)


def tell(folder: Path, options: argparse.Namespace) -> None:
    preset = replace(preset_named(PRESET), kv_tokens=options.kv)
    plan = planned(folder / "t.parquet", 0, limit=None, dequantise=True, open_loop=False)
    plan = scale_plan(plan, 1.0, "users", np.random.default_rng(point_seeds(0, 0)[0]))
    print(f"{len(plan)} requests, {preset.kv_blocks * preset.block_tokens:,} tokens of KV\n")
    print("| | " + " | ".join(COLUMNS) + " | same arrivals in virtual time |\n|---" + "|---" * (len(COLUMNS) + 1) + "|")
    delays = Delays([], [], [])
    real = []
    for path in sorted(folder.glob("notes-*.pickle")):
        start_ns, notes = pickle.loads(path.read_bytes())
        number = path.stem.removeprefix("notes-")
        outcomes, _ = read_outcomes(folder / f"run-{number}", 0)
        steps = [one for one in notes if one[0] == "step"]
        real.append(figures(sum(one[-1] for one in steps), outcomes))
        requests, verdict = again(notes, preset)
        add_delays(delays, requests, outcomes, (start_ns - int((folder / f"start-{number}.txt").read_text())) / 1e9)
        print(row(f"real {number}", real[-1]) + f" {verdict} |")
    print(row("real, mean", np.mean(real, axis=0)) + " |")
    print(row("real, standard deviation", np.std(real, axis=0, ddof=1)) + " |")
    print(row("predicted", virtual(plan, preset)) + " |")
    middle_s = float(np.median(delays.before_s) + np.median(delays.back_s))
    late = [virtual(plan, replace(preset, request_overhead_s=middle_s * one)) for one in np.linspace(0.8, 1.2, options.runs)]
    print(row(f"predicted, {middle_s * 1e3:.2f} ms late, and 20 % less to more: mean", np.mean(late, axis=0)) + " |")
    print(row("standard deviation", np.std(late, axis=0, ddof=1)) + " |\n")
    for name, values in delays._asdict().items():
        p10, p50, p90, p99 = np.percentile(values, (10, 50, 90, 99)) * 1e3
        print(f"{name.removesuffix('_s')}: p10 {p10:.2f}, p50 {p50:.2f}, p90 {p90:.2f}, p99 {p99:.2f} ms")


def again(notes: list[tuple[Any, ...]], preset: Preset) -> tuple[list[Request], str]:
    """What a new engine does that is given the same arrivals, and how it differs from what was noted."""
    engine = Engine(preset)
    arrivals = [one for one in notes if one[0] == "arrival"]
    requests: list[Request] = []
    steps = different = 0
    for one in (one for one in notes if one[0] == "step"):
        while len(requests) < len(arrivals) and (engine.idle or arrivals[len(requests)][1] <= engine.next_step_s):
            _, arrival_s, prompt, answer, names = arrivals[len(requests)]
            requests.append(Request(prompt=range(prompt), answer=range(answer), arrival_s=arrival_s, names=names))
            engine.submit(requests[-1])
        different += told(engine.step()) != one
        steps += 1
    aborted = sum(one[0] == "abort" for one in notes)
    verdict = f"{different} of {steps} steps differ" if different else f"all {steps} steps equal"
    return requests, verdict + (f", {aborted} aborted" if aborted else "")


class Delays(NamedTuple):
    before_s: list[float]  # sent until the engine has it
    back_s: list[float]  # first token of the engine until the client has it
    after_s: list[float]  # last token until the end of the answer, from where the next turn thinks


def add_delays(delays: Delays, requests: list[Request], outcomes: list[Outcome], server_later_s: float) -> None:
    """A request and an outcome belong together that have as many tokens and come in the same order."""
    by_size: dict[tuple[int, int], list[Request]] = {}
    for request in requests:
        by_size.setdefault((len(request.prompt), len(request.answer)), []).append(request)
    for one in sorted(outcomes, key=lambda one: one.sent_ns or 0):
        request = by_size[one.input_tokens or 0, one.output_tokens or 0].pop(0)
        assert request.first_token_s is not None
        delays.before_s.append(request.arrival_s + server_later_s - (one.sent_ns or 0) / 1e9)
        delays.back_s.append((one.first_token_ns or 0) / 1e9 - request.first_token_s - server_later_s)
        delays.after_s.append(((one.end_ns or 0) - (one.last_token_ns or 0)) / 1e9)


def virtual(plan: Plan, preset: Preset) -> tuple[float, ...]:
    found = list(play(plan, preset, replicas=1, router="rr", sample_s=1e9))
    last = [one for one in found if isinstance(one, Sample)][-1]
    return figures(last.preemptions or 0, [one for one in found if isinstance(one, Outcome)])


def figures(preemptions: float, outcomes: list[Outcome]) -> tuple[float, ...]:
    hits = sum(one.cached_tokens or 0 for one in outcomes) / sum(one.input_tokens or 0 for one in outcomes)
    middles = [float(np.median(values_of(one, outcomes))) for one in (ttft_ms, tpot_ms)]
    return preemptions, *middles, hits


def row(name: str, values: Any) -> str:
    return f"| {name} | " + " | ".join(f"{one:.4g}" for one in values) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "tell"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rate", type=float, default=40)
    parser.add_argument("--kv", type=int, default=40_000)
    options = parser.parse_args()
    {"run": run, "tell": tell}[options.what](options.folder, options)


if __name__ == "__main__":
    main()
