"""`report` in every format and `query` on a run, as a user calls them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from chatreel.cli import app
from replay.errors import PlanError
from replay.sweeping import SweepConfig, run_sweep
from tracer.schema import Footer
from tracer.tracefile import write_trace


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reporting")
    rows = [{"request_id": i, "arrival_ns": i * 10**8, "input_tokens": 100, "output_tokens": 9} for i in range(80)]
    write_trace(folder / "t.parquet", rows, Footer())  # type: ignore[arg-type]
    values = (1.0, 2.0)
    return run_sweep(
        SweepConfig(
            trace=folder / "t.parquet", run_dir=folder / "run", kind="rate", values=values, engine="h100-llama3-8b", max_s=30,
            min_requests=20,
        )
    )  # fmt: skip


def report(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, words)], catch_exceptions=False)


def chatreel(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "chatreel", *map(str, words)], capture_output=True, text=True, check=False)


def test_every_format_goes_to_stdout_alone(run_dir: Path) -> None:
    said = {how: report(run_dir, "--format", how) for how in ("json", "csv", "md", "html")}

    assert {how: (done.exit_code, done.stderr) for how, done in said.items()} == dict.fromkeys(said, (0, ""))
    assert [one["scale"] for one in json.loads(said["json"].stdout)["points"]] == [1.0, 2.0]
    assert said["csv"].stdout.count("\n") == 3 and "latency_tpot_ms_p50" in said["csv"].stdout
    assert "| by rate | 1/s | 2/s |" in said["md"].stdout
    assert said["html"].stdout.startswith("<!doctype html>")


def test_several_runs_stand_below_each_other_and_a_page_has_one(run_dir: Path) -> None:
    assert report(run_dir, run_dir, "--format", "csv").stdout.count("\n") == 5

    with pytest.raises(PlanError, match="a page has one run"):
        report(run_dir, run_dir, "--format", "html")


def test_sql_sees_the_points_requests_and_samples_of_a_run(run_dir: Path) -> None:
    sql = "select p.scale, count(*) as n from points p join outcomes o on o.point = p.index group by 1 order by 1"
    done = chatreel("query", run_dir, sql, "--csv")
    lines = done.stdout.split()

    assert lines[0] == "scale,n" and lines[1].startswith("1.0,") and lines[2].startswith("2.0,")
    assert "points, outcomes and samples" in chatreel("query", run_dir, "select * from trace").stderr
