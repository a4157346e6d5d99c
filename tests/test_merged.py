"""What packing several user messages into one request does to a server; nothing but the engine knows the outcome."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from replay.outcome import Sample
from replay.plan.build import COLUMNS, build_plan
from replay.sim.presets import PRESETS
from replay.sim.virtual import play
from synth.generating import generate_trace
from synth.model import load_workload
from tracer.tracefile import read_footer, read_table

DURATION_S = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    answer_tokens: int
    hit_rate: float
    kv_usage: float  # mean over time
    half_full_s: float  # first time at which running requests hold half of the KV memory
    preemptions: int


def replayed(preset: str, folder: Path) -> Outcome:
    path = folder / f"{preset}.parquet"
    dials = {"duration_s": DURATION_S, "arrivals.requests_per_s": 24}  # user messages
    report = generate_trace(load_workload(preset=preset, overrides=dials), 0, path)
    plan = build_plan(read_table(path, COLUMNS), read_footer(path), np.random.default_rng(0))
    plan = replace(plan, think_ns=np.full(len(plan), -1))  # open loop: both get the same messages at the same times
    played = play(plan, PRESETS["h100-llama3-8b"], replicas=1, router="rr", sample_s=0.05)
    found = [one for one in played if isinstance(one, Sample)]
    end_s, usage = np.array([one.t_ns for one in found]) / 1e9, np.array([one.kv_usage for one in found])
    half_full = np.flatnonzero(usage >= 0.5)
    return Outcome(
        answer_tokens=report.output_tokens,
        hit_rate=(found[-1].prefix_hits_tokens or 0) / (found[-1].prefix_queries_tokens or 1),
        kv_usage=float(usage.mean()),
        half_full_s=float(end_s[half_full[0]]) if len(half_full) else np.inf,
        preemptions=round(found[-1].preemptions or 0),
    )


def test_of_the_same_messages_packed_ones_hit_less_fill_kv_memory_sooner_and_are_preempted(tmp_path: Path) -> None:
    chat, merged = replayed("chat", tmp_path), replayed("merged", tmp_path)

    assert merged.answer_tokens == chat.answer_tokens
    assert merged.hit_rate < chat.hit_rate / 2
    assert merged.kv_usage > 2 * chat.kv_usage
    assert merged.half_full_s < chat.half_full_s
    assert chat.preemptions == 0 and merged.preemptions >= 10
