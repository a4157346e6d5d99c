"""A run exported as a trace is like its source, gate by gate; what was dropped on the way is found."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from replay.errors import PlanError
from replay.foretelling import PredictConfig, run_predict
from replay.outcome import Outcome
from replay.results import read_outcomes, write_outcomes
from replay.retracing import retrace
from replay.run import ReplayConfig, replay
from replay.sim.server import ServerConfig, serving
from replay.sweeping import SweepConfig, sweep
from synth.fidelity import COLUMNS, Fidelity, compare
from tracer.schema import Footer, Request
from tracer.tracefile import blocks, column, read_footer, read_table, write_trace

BLOCK = 16
TOKEN_S = 0.0025  # that the simulated server takes, more or less


def chats(sessions: int, turns: int) -> Iterator[Request]:
    """Below one system prompt; each turn carries the conversation so far and follows the answer after a pause."""
    rng = np.random.default_rng(5)
    next_id, begins_s = 10, 0.0
    rows: list[Request] = []
    for session in range(sessions):
        path, length = list(range(10)), 10 * BLOCK
        begins_s += rng.exponential(0.015)
        now_s = begins_s
        for turn in range(turns):
            think_s = rng.uniform(0.25, 0.6)
            now_s += think_s if turn else 0.0
            length += int(rng.integers(20, 120))
            answer = int(rng.integers(10, 30))
            whole = path + list(range(next_id, next_id + (length + answer) // BLOCK - len(path)))
            next_id += len(whole) - len(path)
            rows.append(
                {
                    "arrival_ns": int(now_s * 1e9),
                    "session_id": session,
                    "turn": turn,
                    "client_id": session % 3,
                    "kind": "chat",
                    "think_ns": int(think_s * 1e9) if turn else None,
                    "input_tokens": length,
                    "output_tokens": answer,
                    "input_blocks": whole[: length // BLOCK],
                    "output_blocks": whole[length // BLOCK :],
                }
            )
            path, length = whole, length + answer
            now_s += answer * TOKEN_S
    rows.sort(key=lambda row: row["arrival_ns"])
    return ({"request_id": i, **row} for i, row in enumerate(rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace, and a run of it at 1x and 2x."""
    folder = tmp_path_factory.mktemp("retracing")
    write_trace(folder / "source.parquet", chats(60, 3), Footer())

    async def run() -> None:
        async with serving(ServerConfig(port=0, preset="h100-llama3-1b")) as url:
            await replay(ReplayConfig(trace=folder / "source.parquet", target=url, run_dir=folder / "run", scales=(1.0, 2.0)))

    asyncio.run(run())
    return folder


def compared(first: Path, second: Path) -> Fidelity:
    one, other = ((read_table(path, COLUMNS), read_footer(path)) for path in (first, second))
    return compare(one, other)


def test_a_replay_at_1x_is_like_its_source(folder: Path, tmp_path: Path) -> None:
    done = retrace(folder / "run", tmp_path / "replayed.parquet", point=0)

    found = compared(folder / "source.parquet", tmp_path / "replayed.parquet")
    assert (done.requests, done.failed, done.not_sent, done.label) == (180, 0, 0, "1 by users")
    assert found.passed, [gate for gate in found.gates if not gate.passed]
    assert found["answered, of planned"] == 1
    assert found["hit curve, area"] < 0.002  # turns that wait for answers change places with those of other sessions
    assert found.real_curve[-1] == found.synth_curve[-1]
    assert {gate.name for gate in found.gates} >= {"input tokens, KS", "turns, variation", "reuse time, KS"}


def test_every_row_says_what_the_server_saw(folder: Path, tmp_path: Path) -> None:
    retrace(folder / "run", tmp_path / "replayed.parquet", point=0)

    source, table = read_table(folder / "source.parquet"), read_table(tmp_path / "replayed.parquet")
    outcomes = sorted(read_outcomes(folder / "run", 0)[0], key=lambda one: one.sent_ns or 0)
    assert column(table, "arrival_ns").tolist() == [one.sent_ns for one in outcomes]
    assert column(table, "cached_tokens").tolist() == [one.cached_tokens for one in outcomes]
    assert (column(table, "ttft_ns") > 0).all() and (column(table, "end_ns") > column(table, "ttft_ns")).all()
    assert blocks(table, "input_blocks").lengths.sum() == blocks(source, "input_blocks").lengths.sum()
    assert blocks(table, "output_blocks").lengths.sum() == blocks(source, "output_blocks").lengths.sum()
    later = table.filter(table["turn"].to_numpy() > 0)
    parents = table.take(later["parent_request_id"])
    assert (parents["session_id"].to_numpy() == later["session_id"].to_numpy()).all()
    assert (parents["turn"].to_numpy() + 1 == later["turn"].to_numpy()).all()
    assert set(table["itl_summary"][0].as_py()) >= {"p50_us", "unit"}


def test_a_scaled_point_has_the_copies_and_must_be_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="which point"):
        retrace(folder / "run", tmp_path / "x.parquet")

    assert retrace(folder / "run", tmp_path / "twice.parquet", point=1).requests == 360
    assert read_footer(tmp_path / "twice.parquet").notes["scale"] == "2"


def test_requests_that_were_dropped_are_found(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_bytes((folder / "run" / "run.json").read_bytes())
    kept = [one for one in read_outcomes(folder / "run", 0)[0] if one.request_id % 20 != 3]
    write_outcomes(run / "point-0.outcomes-0.parquet", iter(kept))

    done = retrace(run, tmp_path / "replayed.parquet", point=0)

    found = compared(folder / "source.parquet", tmp_path / "replayed.parquet")
    assert done.not_sent == 9
    assert not found.passed and found["answered, of planned"] == pytest.approx(171 / 180)
    assert read_footer(tmp_path / "replayed.parquet").losses == {"requests not sent": 9}


def test_a_point_of_a_sweep_is_drawn_again(folder: Path, tmp_path: Path) -> None:
    config = SweepConfig(
        trace=folder / "source.parquet", run_dir=tmp_path / "sweep", kind="concurrency", values=(2.0,), engine="h100-llama3-8b",
        min_requests=60, max_s=20,
    )  # fmt: skip
    asyncio.run(sweep(config))
    before = sorted(path.name for path in (tmp_path / "sweep").iterdir())

    done = retrace(tmp_path / "sweep", tmp_path / "closed.parquet")

    assert done.requests >= 60 and done.label == "2 by concurrency"
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == before


def test_another_trace_is_refused(folder: Path, tmp_path: Path) -> None:
    write_trace(tmp_path / "other.parquet", chats(3, 1), Footer())

    with pytest.raises(PlanError, match="not the trace of the run"):
        retrace(folder / "run", tmp_path / "x.parquet", point=0, trace=tmp_path / "other.parquet")


def test_hang_ups_of_a_run_are_hang_ups_of_its_trace(tmp_path: Path) -> None:
    rows: list[Request] = [
        {"request_id": i, "arrival_ns": i * 10**8, "input_tokens": 200, "output_tokens": 20, "max_tokens": 20} for i in range(4)
    ]
    rows[1] |= {"max_tokens": 900, "client_abort_ns": 3 * 10**8}
    rows[2] |= {"output_tokens": None, "max_tokens": 900, "client_abort_ns": 10**6}
    write_trace(tmp_path / "source.parquet", rows, Footer())

    def predicted(trace: str) -> list[Outcome]:
        run_predict(PredictConfig(trace=tmp_path / trace, run_dir=tmp_path / f"run-{trace}", scales=(1.0,)))
        return sorted(read_outcomes(tmp_path / f"run-{trace}", 0)[0], key=lambda one: one.request_id)

    first = predicted("source.parquet")
    retrace(tmp_path / "run-source.parquet", tmp_path / "again.parquet")
    second = predicted("again.parquet")

    table = read_table(tmp_path / "again.parquet")
    assert table["client_abort_ns"].to_pylist() == [None, 3 * 10**8, 10**6, None]
    assert table["max_tokens"].to_pylist() == [20, 900, 900, 20]
    assert [one.error_kind for one in second] == [None, "client_abort", "client_abort", None]
    assert [(one.end_ns, one.output_tokens) for one in second] == [(one.end_ns, one.output_tokens) for one in first]
