"""The loop closes: a generated trace, replayed through the recorder, is recorded as what it was."""

import asyncio
from pathlib import Path

import numpy as np
import pyarrow as pa

from replay.results import read_outcomes
from replay.run import ReplayConfig, replay
from replay.sim.server import ServerConfig, serving
from synth.generating import generate_trace
from synth.model import load_workload
from tracer.analysis.reuse import hit_curve, touches_as_engine
from tracer.record.recording import RecordConfig, start_recorder
from tracer.tracefile import read_footer, read_table

PROBE_ROWS = 1  # the replay first asks the server whether it takes token ids; the recorder sees that as well
WORKLOAD = {
    "requests": 100,
    "arrivals.requests_per_s": 9,
    "turns": {"mean": 2.5, "max": 4},
    "think_s": {"mean": 0.3, "max": 1},
    "system_prompts.count": 3,
    "input_tokens": {"p50": 120, "p99": 600},
    "output_tokens": {"p50": 20, "p99": 60},
    # Slower than the simulated server, so that each answer has come before its next turn is due.
    "service.ttft_s": 0.2,
    "service.tpot_s": 0.02,
}


def test_recording_a_replay_gives_back_lengths_sessions_and_hit_curve(tmp_path: Path) -> None:
    """Open loop, since the order of requests makes the curve, and closed-loop turns move with the server's speed."""
    generated = tmp_path / "generated.parquet"
    generate_trace(load_workload(preset="chat", overrides=WORKLOAD), 7, generated)

    for attempt in range(3):  # a host that stalls sends turns before their answers have come: that is another load
        recorded = tmp_path / f"recorded-{attempt}.parquet"
        asyncio.run(_replay_through_recorder(generated, recorded, tmp_path / f"run-{attempt}"))
        if all(one.answer_spliced is not False for one in read_outcomes(tmp_path / f"run-{attempt}", 0)[0]):
            break

    wanted, seen = read_table(generated), read_table(recorded).slice(PROBE_ROWS)
    for column in ("input_tokens", "output_tokens"):
        assert sorted(seen[column].to_pylist()) == sorted(wanted[column].to_pylist())
    assert len(seen["session_id"].unique()) == len(wanted["session_id"].unique())
    assert seen["http_status"].unique().to_pylist() == [200]
    assert seen["error_kind"].null_count == len(seen)
    assert _largest_difference([wanted, seen], [generated, recorded]) <= 0.01


def _largest_difference(tables: list[pa.Table], paths: list[Path]) -> float:
    a, b = (hit_curve(touches_as_engine(*pair)) for pair in zip(tables, map(read_footer, paths), strict=True))
    sizes = np.unique(np.geomspace(1, max(a.unique, b.unique), 100).astype(int)).tolist()
    return max(abs(a.hit_rate_at(size) - b.hit_rate_at(size)) for size in sizes)


async def _replay_through_recorder(generated: Path, recorded: Path, run_dir: Path) -> None:
    async with serving(ServerConfig(port=0)) as url:
        recorder = await asyncio.to_thread(start_recorder, RecordConfig(upstream=url, out=str(recorded)))
        with recorder:
            await replay(ReplayConfig(trace=generated, target=recorder.url, run_dir=run_dir, scales=(1.0,), open_loop=True))
            await asyncio.to_thread(recorder.stop)
