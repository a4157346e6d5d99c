"""A grid of servers: the winner is the one that virtual time says, faults are rows, and a second run goes on with the first."""

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chatreel.cli import app
from replay.configurations import parse_grid
from replay.errors import PlanError
from replay.judge.search import Limit
from replay.judge.summary import Slo
from replay.sweeping import SweepConfig
from replay.tune import TuneConfig, run_tune
from replay.tuned import Tuned
from tracer.schema import Footer, Request
from tracer.tracefile import write_trace

ENGINE_GRID = "cheapest = ['kv_tokens']\n[grid]\nmax_num_seqs = [1, 16]\nkv_tokens = [4000, 60000]"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests of several lengths that share nothing, ten a second."""
    rows: list[Request] = [
        {"request_id": i, "arrival_ns": i * 10**8, "input_tokens": 200, "output_tokens": 10 + i * 37 % 30} for i in range(150)
    ]
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    write_trace(path, rows, Footer())
    return path


def tuned(folder: Path, trace: Path, grid: str, *, engine: str | None = None, **changes: Any) -> Tuned:
    sweep = SweepConfig(
        trace=trace,
        run_dir=folder,
        kind="rate",
        values=changes.pop("values", (8.0,)),
        engine=engine,
        max_s=60.0,
        resume=changes.pop("resume", False),
    )
    limits = [Limit(slo=Slo(metric="ttft", limit_ms=1000.0), share=0.9)]
    return run_tune(
        TuneConfig(
            grid=parse_grid(grid, "grid.toml", is_launched=engine is None), sweep=sweep, limits=limits, attain=0.9, **changes
        )
    )


def test_in_virtual_time_the_cheapest_of_the_best_is_taken(tmp_path: Path, trace: Path) -> None:
    found = tuned(tmp_path / "tune", trace, ENGINE_GRID, engine="laptop-demo", values=(6.0,))

    assert [row.failed for row in found.rows] == [None] * 4
    assert found.choice is not None and found.choice.meets
    taken = found.rows[found.choice.recommended].values
    assert taken["max_num_seqs"] == 16
    by_seqs = {row.values["max_num_seqs"]: row.loads[0].attainment.seen for row in found.rows}
    assert by_seqs[1] < 0.9 <= by_seqs[16]


def launching(grid: str, *more: str) -> str:
    program = [sys.executable, "-m", "chatreel", "serve", "--preset", "laptop-demo", "--port", "{port}", *more]
    return f"command = {program}\nready = 'http://127.0.0.1:{{port}}/v1/models'\ngrace_s = 3\n{grid}"


def test_launched_servers_are_measured_and_one_that_fails_is_a_row(tmp_path: Path, trace: Path) -> None:
    grid = launching("[grid]\nseqs = [16, 0]", "--max-num-seqs", "{seqs}")

    found = tuned(tmp_path / "tune", trace, grid, requests=20)

    good, bad = found.rows
    assert good.failed is None and good.loads[0].requests >= 10 and (good.ready_s or 0) > 0
    assert bad.failed is not None and "before it was ready" in bad.failed and bad.log_tail
    assert found.choice is not None and found.choice.recommended == 0
    assert (tmp_path / "tune" / "config-0" / "summary.json").exists()

    lines: list[str] = []
    again = run_again(tmp_path / "tune", trace, grid, lines)
    assert [row.number for row in again.rows] == [0, 1] and again.choice == found.choice
    assert sum("done before" in line for line in lines) == 2


def run_again(folder: Path, trace: Path, grid: str, lines: list[str]) -> Tuned:
    sweep = SweepConfig(trace=trace, run_dir=folder, kind="rate", values=(8.0,), max_s=60.0, resume=True)
    limits = [Limit(slo=Slo(metric="ttft", limit_ms=1000.0), share=0.9)]
    parsed = parse_grid(grid, "grid.toml", is_launched=True)
    return run_tune(TuneConfig(grid=parsed, sweep=sweep, limits=limits, attain=0.9, requests=20), lines.append)


def test_going_on_with_another_grid_is_refused(tmp_path: Path, trace: Path) -> None:
    tuned(tmp_path / "tune", trace, "[grid]\nmax_num_seqs = [16]", engine="laptop-demo", values=(2.0,))

    with pytest.raises(PlanError, match="not what was begun here: other lists"):
        tuned(tmp_path / "tune", trace, "[grid]\nmax_num_seqs = [32]", engine="laptop-demo", values=(2.0,), resume=True)
    with pytest.raises(PlanError, match="there is a run here already"):
        tuned(tmp_path / "tune", trace, "[grid]\nmax_num_seqs = [16]", engine="laptop-demo", values=(2.0,))


def test_the_command_says_what_to_take_and_exits_4_where_none_meets(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "grid.toml").write_text(ENGINE_GRID)
    command = ["tune", str(trace), "--grid", str(tmp_path / "grid.toml"), "--engine", "laptop-demo", "--attain", "0.9"]

    good = CliRunner().invoke(app, [*command, "--slo", "ttft:p90:1000ms", "--rate", "6", "-o", str(tmp_path / "good")])
    none = CliRunner().invoke(app, [*command, "--slo", "ttft:p90:1ms", "--rate", "6", "-o", str(tmp_path / "none")])

    assert (good.exit_code, none.exit_code) == (0, 4)
    report = (tmp_path / "good" / "tune.md").read_text()
    assert "Take max_num_seqs = 16, kv_tokens = " in report and "Simulated in virtual time" in report
    assert "None meets the limits" in (tmp_path / "none" / "tune.md").read_text()
