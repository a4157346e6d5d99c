"""`chatreel fit` and what `generate` makes of the model, by the commands themselves."""

from pathlib import Path

from typer.testing import CliRunner

from chatreel.cli import app
from tracer.tracefile import count_requests


def test_a_trace_is_learned_and_drawn_from_by_two_commands(tmp_path: Path) -> None:
    trace, model, drawn = (str(tmp_path / name) for name in ("t.parquet", "m.json", "d.parquet"))
    assert CliRunner().invoke(app, ["generate", "--preset", "chat", "-n", "300", "-o", trace]).exit_code == 0

    learned = CliRunner().invoke(app, ["fit", trace, "-o", model])
    made = CliRunner().invoke(app, ["generate", model, "-n", "600", "-o", drawn])

    assert learned.exit_code == 0 and "300 requests" in learned.output and "a next turn" in learned.output
    assert made.exit_code == 0, made.output
    assert 400 < count_requests(drawn) < 800


def test_a_dial_that_a_model_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text("{}")

    refused = CliRunner().invoke(app, ["generate", str(tmp_path / "m.json"), "--turns", "3", "-o", str(tmp_path / "d.parquet")])

    assert refused.exit_code == 1
    assert "m.json" in str(refused.exception) and refused.exception.seen == "turns"  # type: ignore[union-attr]


def test_a_file_that_is_no_model_and_a_place_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text("{")
    broken = CliRunner().invoke(app, ["generate", str(tmp_path / "m.json"), "-o", str(tmp_path / "d.parquet")])
    trace = str(tmp_path / "t.parquet")
    CliRunner().invoke(app, ["generate", "--preset", "chat", "-n", "50", "-o", trace])
    nowhere = CliRunner().invoke(app, ["fit", trace, "-o", str(tmp_path / "none" / "m.json")])

    assert broken.exit_code == 1 and "not a model file" in str(broken.exception)
    assert nowhere.exit_code == 1 and "cannot write here" in str(nowhere.exception)
