"""The loop closes: a generated trace, replayed through the recorder, is recorded as what it was."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from replay.outcome import Outcome
from replay.run import ReplayConfig, replay
from replay.sim.server import ServerConfig, serving
from synth.generating import generate_trace
from synth.model import load_workload
from tracer.analysis.reuse import hit_curve, touches_as_engine
from tracer.record.recording import RecordConfig, start_recorder
from tracer.tracefile import read_footer, read_table

PROBE_ROWS = 1  # the replay first asks the server whether it takes token ids; the recorder sees that as well
WORKLOAD = {
    "turns": {"mean": 2.5, "max": 4},
    "think_s": {"mean": 0.3, "max": 1},
    "system_prompts.count": 3,
    "input_tokens": {"p50": 120, "p99": 600},
    "output_tokens": {"p50": 20, "p99": 60},
    # What the simulated server takes, so that later turns come when the generator placed them.
    "service.ttft_s": 0.0118,
    "service.tpot_s": 0.01335,
}


def test_recording_a_replay_gives_back_lengths_sessions_and_hit_curve(tmp_path: Path) -> None:
    """Compared in the order of sending: on a busy machine two requests that are milliseconds apart change places."""
    wanted, seen = _recorded_replay(tmp_path, requests=90, requests_per_s=12)

    outcomes = (tmp_path / "run" / "point-0.outcomes.jsonl").read_bytes().splitlines()
    sent = sorted((msgspec.json.decode(line, type=Outcome) for line in outcomes), key=lambda one: one.sent_ns or 0)
    in_order = wanted.take(pa.array([one.source_request_id for one in sent]))
    _assert_equal_shape(in_order, seen)
    assert _largest_difference(in_order, seen, tmp_path) <= 0.01


@pytest.mark.slow
def test_at_an_easy_rate_the_curve_is_that_of_the_generated_trace(tmp_path: Path) -> None:
    wanted, seen = _recorded_replay(tmp_path, requests=300, requests_per_s=4)

    _assert_equal_shape(wanted, seen)
    assert _largest_difference(wanted, seen, tmp_path) <= 0.01


def _recorded_replay(folder: Path, requests: int, requests_per_s: float) -> tuple[pa.Table, pa.Table]:
    generated, recorded = folder / "generated.parquet", folder / "recorded.parquet"
    overrides = {**WORKLOAD, "requests": requests, "arrivals.requests_per_s": requests_per_s}
    generate_trace(load_workload(preset="chat", overrides=overrides), 7, generated)
    asyncio.run(_replay_through_recorder(generated, recorded, folder / "run"))
    return read_table(generated), read_table(recorded).slice(PROBE_ROWS)


def _assert_equal_shape(wanted: pa.Table, seen: pa.Table) -> None:
    for column in ("input_tokens", "output_tokens"):
        assert sorted(seen[column].to_pylist()) == sorted(wanted[column].to_pylist())
    assert len(seen["session_id"].unique()) == len(wanted["session_id"].unique())
    assert seen["http_status"].unique().to_pylist() == [200]
    assert seen["error_kind"].null_count == len(seen)


def _largest_difference(wanted: pa.Table, seen: pa.Table, folder: Path) -> float:
    footers = (read_footer(folder / name) for name in ("generated.parquet", "recorded.parquet"))
    a, b = (hit_curve(touches_as_engine(*pair)) for pair in zip((wanted, seen), footers, strict=True))
    sizes = np.unique(np.geomspace(1, max(a.unique, b.unique), 100).astype(int)).tolist()
    return max(abs(a.hit_rate_at(size) - b.hit_rate_at(size)) for size in sizes)


async def _replay_through_recorder(generated: Path, recorded: Path, run_dir: Path) -> None:
    async with serving(ServerConfig(port=0)) as url:
        recorder = await asyncio.to_thread(start_recorder, RecordConfig(upstream=url, out=str(recorded)))
        with recorder:
            await replay(ReplayConfig(trace=generated, target=recorder.url, run_dir=run_dir, scales=(1.0,)))
            await asyncio.to_thread(recorder.stop)
