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


def test_dials_of_a_model_by_the_command_and_those_that_it_does_not_have(tmp_path: Path) -> None:
    trace, model, drawn = (str(tmp_path / name) for name in ("t.parquet", "m.json", "d.parquet"))
    CliRunner().invoke(app, ["generate", "--preset", "chat", "-n", "400", "-o", trace])
    CliRunner().invoke(app, ["fit", trace, "-o", model])

    flags = "--turns x2 --think 5 --input x0.5 --output 50:400 --burstiness 2 --hit-rate 0.88@200k --rate 3".split()
    made = CliRunner().invoke(app, ["generate", model, *flags, "-o", drawn])
    refused = CliRunner().invoke(app, ["generate", model, "--zipf", "2", "-o", drawn])
    no_factor = CliRunner().invoke(app, ["generate", "--preset", "chat", "--turns", "x2", "-o", drawn])

    assert made.exit_code == 0, made.output
    assert "turns of a session on average" in made.output and "(wanted 0.88)" in made.output
    assert refused.exit_code == 1 and "--zipf is no dial of a fitted model" in str(refused.exception)
    assert no_factor.exit_code == 1 and "factors are for fitted models" in str(no_factor.exception)


def test_a_file_that_is_no_model_and_a_place_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text("{")
    broken = CliRunner().invoke(app, ["generate", str(tmp_path / "m.json"), "-o", str(tmp_path / "d.parquet")])
    trace = str(tmp_path / "t.parquet")
    CliRunner().invoke(app, ["generate", "--preset", "chat", "-n", "50", "-o", trace])
    nowhere = CliRunner().invoke(app, ["fit", trace, "-o", str(tmp_path / "none" / "m.json")])

    assert broken.exit_code == 1 and "not a model file" in str(broken.exception)
    assert nowhere.exit_code == 1 and "cannot write here" in str(nowhere.exception)
