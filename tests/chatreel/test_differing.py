"""`chatreel diff` as a user types it, on two predicted runs."""

import json

import pytest
from typer.testing import CliRunner

from chatreel.cli import app
from replay.foretelling import PredictConfig, run_predict


def chatreel(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    trace = folder / "chat.parquet"
    assert chatreel("generate", "--preset", "chat", "-n", 500, "--rate", 10, "--seed", 1, "-o", trace).exit_code == 0
    for name, kv_tokens, scale in (("roomy", 200_000, 1.0), ("tight", 8_000, 1.0), ("other", 200_000, 3.0)):
        run_predict(
            PredictConfig(trace=trace, engine="h100-llama3-8b", scales=(scale,), run_dir=folder / name, kv_tokens=kv_tokens)
        )
    return folder


def test_a_smaller_cache_is_worse_and_exits_with_4(runs):
    found = chatreel("diff", runs / "roomy", runs / "tight", "--slo", "ttft:200")

    assert found.exit_code == 4
    assert "prefix hit rate at 1x" in found.output
    rows = json.loads(chatreel("diff", runs / "roomy", runs / "tight", "--slo", "ttft:200", "--json").output)["differences"]
    assert {row["verdict"] for row in rows if row["figure"] in ("prefix hit rate", "SLO attainment")} == {"worse"}


def test_the_same_run_is_not_worse(runs):
    found = chatreel("diff", runs / "roomy", runs / "roomy")

    assert found.exit_code == 0
    assert "nothing got worse" in found.output


def test_what_cannot_be_compared_is_refused(runs):
    for other, wanted in ((runs / "other", "no point in common"), (runs, "not a run folder")):
        found = chatreel("diff", runs / "roomy", other)
        assert found.exit_code == 1
        assert wanted in str(found.exception or found.output)
