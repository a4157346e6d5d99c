"""What `chatreel calibrate` prints and writes."""

from pathlib import Path

import pytest
from rich.console import Console

from chatreel import predicting
from replay.calibration import Calibration, Cost, Figure
from replay.sim.engines import measured, read_engine
from replay.sim.presets import StepCosts


def test_costs_that_the_run_does_not_tell_are_called_guesses_in_the_table_and_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = StepCosts(overhead_s=1e-3, weights_s=5e-3, context_token_s=4e-7, token_s=8e-5, pair_s=1e-8)
    found = Calibration(
        engine=measured("mine", costs, max_model_len=4096, kv_tokens=10_000),
        name="mine, calibrated",
        costs=[
            Cost(name="weights_s", seconds=5e-3, relative_error=0.01),
            Cost(name="token_s", seconds=8e-5, relative_error=0.4),
            Cost(name="pair_s", seconds=1e-8, relative_error=float("inf")),
        ],
        fitted=[Figure(name="TTFT p50, ms", measured=100.0, predicted=101.0)],
        held_back=[Figure(name="TTFT p50, ms", measured=100.0, predicted=104.0)],
        simulations=1,
        notes=["kv_tokens = 10000: given"],
    )
    monkeypatch.setattr(predicting, "calibrate", lambda *_, **__: found)
    out = Console(record=True, width=120)

    predicting.run_calibrate([Path("run")], tmp_path / "mine.toml", None, None, "last", {}, out, Console(stderr=True, quiet=True))

    lines = out.export_text().splitlines()
    assert next(line for line in lines if line.startswith("TTFT")).endswith("+4.0%")
    assert next(line for line in lines if line.startswith("weights")).split() == ["weights", "5000", "1.0%"]
    assert "barely told" in next(line for line in lines if line.startswith("token"))
    assert "a guess" in next(line for line in lines if line.startswith("pair"))
    assert "# pair_s: not told by this run: a guess" in (tmp_path / "mine.toml").read_text()
    assert read_engine(tmp_path / "mine.toml").costs == costs
