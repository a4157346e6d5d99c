"""`chatreel calibrate`: an engine whose parameters are hidden is found again from what a client saw of it."""

from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest

from replay import calibration
from replay.calibration import calibrate
from replay.errors import PlanError
from replay.foretelling import PredictConfig, run_predict
from replay.outcome import Outcome
from replay.results import read_outcomes
from replay.sim.engines import engine_named, write_engine
from replay.sim.presets import StepCosts
from tests.replay.test_replay import chats
from tracer.schema import Footer
from tracer.tracefile import write_trace

HIDDEN = StepCosts(overhead_s=2.1e-3, token_overhead_s=4e-5, weights_s=6.3e-3, context_token_s=9e-7, token_s=1.1e-4, pair_s=2e-8)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hidden")
    write_trace(folder / "chats.parquet", chats(sessions=60, turns=3, gap_s=0.1), Footer())
    engine = replace(
        engine_named("laptop-demo"), given_costs=HIDDEN, request_overhead_s=4e-3, max_num_seqs=12, max_num_batched_tokens=512
    )
    write_engine(folder / "hidden.toml", engine, "hidden", [])
    config = PredictConfig(
        trace=folder / "chats.parquet", run_dir=folder / "run", engine=str(folder / "hidden.toml"), scales=(1.0, 2.0)
    )
    return run_predict(config)


def test_the_costs_of_the_hidden_engine_are_found_and_so_are_ttft_and_tpot_of_the_held_back_part(run_dir: Path) -> None:
    found = calibrate(run_dir)

    costs = {one.name: one for one in found.costs}
    for name, value in {**asdict(HIDDEN), "request_overhead_s": 4e-3}.items():
        if not name.startswith("expert"):
            assert costs[name].seconds == pytest.approx(value, rel=0.05) and costs[name].is_told, name
    errors = {one.name: one.error for one in found.held_back}
    assert abs(errors["TTFT p50, ms"]) < 0.02 and abs(errors["TPOT p50, ms"]) < 0.005
    assert abs(errors["hit rate"]) < 0.002
    assert found.engine.max_num_seqs == 12  # seen: requests waited with KV to spare
    assert found.engine.kv_tokens == 60_000


def test_a_server_that_does_not_say_what_it_had_cached_is_fitted_too(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(folder: Path, point: int) -> tuple[list[Outcome], int]:
        outcomes, torn = read_outcomes(folder, point)
        return [msgspec.structs.replace(one, cached_tokens=None) for one in outcomes], torn

    monkeypatch.setattr(calibration, "read_outcomes", silent)

    found = calibrate(run_dir, max_num_batched_tokens=512)

    errors = {one.name: one.error for one in found.held_back}
    assert abs(errors["TTFT p50, ms"]) < 0.05 and abs(errors["TPOT p50, ms"]) < 0.03
    assert "hit rate" not in errors  # nothing to compare with
    assert found.engine.costs.token_s == pytest.approx(HIDDEN.token_s, rel=0.1)


def test_stretches_in_between_are_held_back_and_runs_are_fitted_together(run_dir: Path) -> None:
    found = calibrate(run_dir, run_dir, hold_back="interleaved", max_num_batched_tokens=512)

    assert found.engine.costs.token_s == pytest.approx(HIDDEN.token_s, rel=0.05)
    errors = {one.name: one.error for one in found.held_back}
    assert abs(errors["TTFT p50, ms"]) < 0.02 and abs(errors["TPOT p50, ms"]) < 0.005


def test_runs_of_different_servers_are_not_fitted_together(run_dir: Path, tmp_path: Path) -> None:
    facts = msgspec.json.decode((run_dir / "run.json").read_bytes())
    (tmp_path / "run.json").write_bytes(msgspec.json.encode({**facts, "kv_capacity_tokens": 16}))

    with pytest.raises(PlanError, match="different servers"):
        calibrate(run_dir, tmp_path)


def test_a_run_without_its_trace_says_so(run_dir: Path, tmp_path: Path) -> None:
    facts = msgspec.json.decode((run_dir / "run.json").read_bytes())
    (tmp_path / "run.json").write_bytes(msgspec.json.encode({**facts, "trace": str(tmp_path / "gone.parquet")}))

    with pytest.raises(PlanError, match="--trace"):
        calibrate(tmp_path)
    with pytest.raises(PlanError, match="not a run folder"):
        calibrate(tmp_path / "nowhere")
