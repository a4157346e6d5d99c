"""`chatreel predict` beside the offline replay of NVIDIA Dynamo's mocker: one trace, one engine, three loads.

    pip install --no-deps ai-dynamo==1.4.2 ai-dynamo-runtime==1.4.2 && pip install typing-extensions pydantic numpy   # in VENV
    python bench/simulators.py mooncake.parquet --peer-python VENV/bin/python --limit 2000

Both play the same requests (arrivals, lengths, block ids) on one vLLM-like engine with the same blocks, batch and budget.

own costs: ours of the preset, theirs of their built-in polynomials. same costs: theirs from a profile file (--planner
-profile-data) whose prefill time is linear in new tokens and whose decode time is linear in context; ours with the same
numbers. Both sum them up otherwise: a step of theirs is prefill + decode, the weights are read in decode only; ours reads
the weights once a step, the context of prompts too, and a token that is decoded costs as much compute as one of a prompt.
Hits are counted when a request is first admitted; theirs that is preempted hits itself later, and that does not count.
same passes: our scheduler with the time of a pass as theirs is, one step after the other; what is left is scheduling.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from replay.foretelling import SAMPLE_S
from replay.judge.metrics import percentiles
from replay.outcome import Outcome, Sample
from replay.plan.plan import Plan
from replay.plan.scale import scale_plan
from replay.run import planned
from replay.sim.engine import Engine, Request
from replay.sim.presets import Preset, StepCosts, preset_named
from replay.sim.virtual import play

PRESET = "h100-llama3-8b"
PEER = """
import json, sys
from dynamo.mocker import MockEngineArgs
from dynamo.replay import run_trace_replay
given = json.loads(sys.argv[1])
block_tokens = given.pop("trace_block_tokens")
paths = {name: given.pop(name) for name in ("trace", "rows")}
report = run_trace_replay([paths["trace"]], extra_engine_args=MockEngineArgs(**given), num_workers=1, replay_mode="offline",
    trace_block_size=block_tokens, report_jsonl_path=paths["rows"])
print(json.dumps({"seconds": report["wall_time_ms"] / 1e3, "hit_rate": report["first_admission_prefix_cache_reused_ratio"]}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    seconds: float
    virtual_s: float
    answered: int
    refused: int
    ttft_ms: tuple[float, float]  # p50, p99; as the others
    tpot_ms: tuple[float, float]
    e2e_ms: tuple[float, float]
    hit_rate: float
    preemptions: int | None


def ranks(values: Iterable[float]) -> tuple[float, float]:
    found = percentiles(values)
    return (found.p50, found.p99) if found else (float("nan"), float("nan"))


class AsTheirPasses(Engine):
    """A pass lasts as theirs: new prompt tokens at the cost of a token, and then what a decode of the batch takes."""

    def _step_s(self, work: list[tuple[Request, int]]) -> float:
        costs = self.costs
        decoded = [one.computed + count for one, count in work if one.first_token_s is not None and count == 1]
        prompt_tokens = sum(count for _, count in work) - len(decoded)
        decode_s = costs.overhead_s + costs.weights_s + sum(decoded) * costs.context_token_s if decoded else 0.0
        return prompt_tokens * costs.token_overhead_s + decode_s


def ours(plan: Plan, preset: Preset, engine: Engine | None = None) -> Figures:
    begin = time.perf_counter()
    engines = None if engine is None else [engine]
    seen = list(play(plan, preset, replicas=1, router="rr", sample_s=SAMPLE_S, engines=engines))
    seconds = time.perf_counter() - begin
    outcomes = [one for one in seen if isinstance(one, Outcome)]
    last = next(one for one in reversed(seen) if isinstance(one, Sample))
    done = [one for one in outcomes if one.error_kind is None]
    first_ns = {one.request_id: (one.first_answer_ns or 0) - one.planned_ns for one in done}
    whole_ns = {one.request_id: (one.end_ns or 0) - one.planned_ns for one in done}
    later = [one for one in done if (one.output_tokens or 0) > 1]
    tpot_ms = [(whole_ns[one.request_id] - first_ns[one.request_id]) / ((one.output_tokens or 0) - 1) / 1e6 for one in later]
    return Figures(
        seconds=seconds,
        virtual_s=last.t_ns / 1e9,
        answered=len(done),
        refused=len(outcomes) - len(done),
        ttft_ms=ranks(value / 1e6 for value in first_ns.values()),
        tpot_ms=ranks(tpot_ms),
        e2e_ms=ranks(value / 1e6 for value in whole_ns.values()),
        hit_rate=sum(one.cached_tokens or 0 for one in done) / sum(one.input_tokens or 0 for one in done),
        preemptions=int(last.preemptions or 0),
    )


def theirs(plan: Plan, preset: Preset, python: Path, costs: StepCosts | None, folder: Path) -> Figures:
    """`costs`: as the profile says; None: their own."""
    given: dict[str, object] = {
        "trace": str(folder / "trace.jsonl"),
        "rows": str(folder / "rows.jsonl"),
        "trace_block_tokens": plan.block_tokens,
        "block_size": preset.block_tokens,
        "num_gpu_blocks": preset.kv_blocks,
        "max_num_seqs": preset.max_num_seqs,
        "max_num_batched_tokens": preset.max_num_batched_tokens,
    }
    if costs is not None:
        write_profile(folder / "profile.npz", costs)
        given["planner_profile_data"] = str(folder / "profile.npz")
    write_mooncake(folder / "trace.jsonl", plan)
    (folder / "rows.jsonl").unlink(missing_ok=True)
    said = json.loads(subprocess.run([python, "-c", PEER, json.dumps(given)], check=True, capture_output=True, text=True).stdout)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    done = [one for one in rows if one["output_length"]]
    later = [one for one in done if one["output_length"] > 1]
    return Figures(
        seconds=said["seconds"],
        virtual_s=max(one["terminal_time_ms"] for one in done) / 1e3,
        answered=len(done),
        refused=len(plan) - len(done),
        ttft_ms=ranks(one["ttft_ms"] for one in done),
        tpot_ms=ranks((one["last_token_ms"] - one["first_token_ms"]) / (one["output_length"] - 1) for one in later),
        e2e_ms=ranks(one["e2e_latency_ms"] for one in done),
        hit_rate=said["hit_rate"],
        preemptions=None,
    )


def write_mooncake(path: Path, plan: Plan) -> None:
    """Block ids as in the plan; a last part of a block has an id of its own, so nobody shares it."""
    highest = int(plan.blocks.ids.max(initial=0)) + 1
    with open(path, "w") as file:
        for row in range(len(plan)):
            ids = plan.blocks[row].tolist()
            if len(ids) * plan.block_tokens < int(plan.input_tokens[row]):
                ids.append(highest + row)
            record = {"timestamp": float(plan.planned_ns[row]) / 1e6, "hash_ids": ids}
            lengths = {"input_length": int(plan.input_tokens[row]), "output_length": int(plan.output_tokens[row])}
            file.write(json.dumps({**record, **lengths}) + "\n")


def write_profile(path: Path, costs: StepCosts) -> None:
    """Milliseconds; between and beyond these points they go on in a straight line."""
    tokens, context = np.array([0.0, 1e6]), np.array([0.0, 1e7])
    decode_ms = (costs.overhead_s + costs.weights_s + context * costs.context_token_s) * 1e3
    np.savez(
        path,
        prefill_isl=tokens,
        prefill_ttft_ms=tokens * costs.token_overhead_s * 1e3,
        decode_active_kv_tokens=context,
        decode_context_length=tokens,
        decode_itl=np.stack([decode_ms, decode_ms], axis=1),
    )


def linear(costs: StepCosts) -> StepCosts:
    """Costs that both can express: no roofline, no pairs; a token's compute adds to the time of reading."""
    return replace(costs, token_s=0.0, pair_s=0.0, token_overhead_s=costs.token_s)


def row(load: str, what: str, whose: str, one: Figures) -> str:
    def both(pair: tuple[float, float]) -> str:
        return f"{pair[0]:,.1f} / {pair[1]:,.1f}"

    figures = [both(one.ttft_ms), both(one.tpot_ms), both(one.e2e_ms), f"{one.hit_rate:.4f}"]
    counts = [str(one.answered), str(one.refused), "-" if one.preemptions is None else str(one.preemptions)]
    speed = [f"{one.seconds:.2f}", f"{one.virtual_s / one.seconds:,.0f}"]
    return "| " + " | ".join([load, what, whose, *speed, *counts[:2], *figures, counts[2]]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--peer-python", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=2000)
    parser.add_argument("--scale", type=float, action="append", help="load by time; repeat it")
    parser.add_argument("--kv-tokens", type=int)
    options = parser.parse_args()
    whole = planned(options.trace, 0, limit=options.limit, dequantise=True, open_loop=True)
    preset = replace(preset_named(PRESET), kv_tokens=options.kv_tokens)
    same = replace(preset, given_costs=linear(preset.costs))
    print(f"{PRESET}: {preset.kv_blocks:,} blocks of {preset.block_tokens}; same costs: {asdict(same.costs)}\n")
    print(
        "| load | costs | simulator | seconds | x real time | answered | refused | TTFT p50 / p99, ms | TPOT p50 / p99, ms | "
        "E2E p50 / p99, ms | hit rate | preemptions |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        for scale in options.scale or [0.5, 1.0, 2.0]:
            plan = scale_plan(whole, scale, "time", np.random.default_rng(0))
            load = f"{scale:g}x"
            print(row(load, "own", "chatreel", ours(plan, preset)), flush=True)
            print(row(load, "own", "Dynamo", theirs(plan, preset, options.peer_python, None, Path(name))), flush=True)
            print(row(load, "same", "chatreel", ours(plan, same)), flush=True)
            print(row(load, "same passes", "chatreel", ours(plan, same, AsTheirPasses(same))), flush=True)
            print(row(load, "same", "Dynamo", theirs(plan, same, options.peer_python, same.costs, Path(name))), flush=True)


if __name__ == "__main__":
    main()
