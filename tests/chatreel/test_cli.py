"""The command as a user meets it: help, exit codes, clear errors, data on stdout."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chatreel import docs
from chatreel.cli import app

ROOT = Path(__file__).resolve().parents[2]
MOONCAKE = '{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}\n'


def chatreel(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "chatreel", *arguments], capture_output=True, text=True, timeout=60)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    source, out = tmp_path / "m.jsonl", tmp_path / "m.parquet"
    source.write_text(MOONCAKE * 3)
    done = chatreel("import", str(source), "-o", str(out))
    assert done.returncode == 0, done.stderr
    return out


def test_cli_page_is_what_help_says() -> None:
    assert (ROOT / "docs/cli.md").read_text() == docs.cli_page(), "run scripts/generate-docs"


def test_column_table_is_what_the_schema_says() -> None:
    assert docs.trace_columns() in (ROOT / "docs/trace-format.md").read_text(), "run scripts/generate-docs"


def test_every_command_has_help_with_an_example() -> None:
    for name in docs.command_names(app):
        result = CliRunner().invoke(app, [name, "--help"])
        assert result.exit_code == 0
        assert "Example: chatreel" in result.output


def test_analysis_goes_to_stdout_as_json(trace: Path) -> None:
    done = chatreel("analyze", str(trace), "--json", "-")

    assert json.loads(done.stdout)["source_sharing"]["references"] == 9


def test_query_sees_the_trace_as_a_view(trace: Path) -> None:
    done = chatreel("query", str(trace), "select sum(input_tokens) as total from trace", "--csv")

    assert done.stdout.split() == ["total", "3090"]


def test_bad_sql_is_one_clear_line(trace: Path) -> None:
    done = chatreel("query", str(trace), "select nothing from trace")

    assert done.returncode == 1
    assert "the query failed" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_malformed_row_is_set_aside_with_its_line(tmp_path: Path) -> None:
    source = tmp_path / "m.jsonl"
    source.write_text(MOONCAKE + "{broken\n" + MOONCAKE)

    kept = chatreel("import", str(source), "-o", str(tmp_path / "t.parquet"))
    strict = chatreel("import", str(source), "-o", str(tmp_path / "u.parquet"), "--strict")

    assert kept.returncode == 0
    assert "line 2" in kept.stderr
    assert json.loads((tmp_path / "t.parquet.rejected.jsonl").read_text())["line"] == 2
    assert strict.returncode == 1
    assert "m.jsonl:2" in strict.stderr
    assert not (tmp_path / "u.parquet").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("analyze", "/nope.parquet"), 1, "no such file"),
        (("analyze", __file__), 1, "not a chatreel trace"),
        (("import", __file__, "-o", "/tmp/x.parquet"), 1, "format not recognised"),
        (("report", "/nope"), 1, "not a run folder"),
        (("generate", "--preset", "chatty", "-o", "/tmp/x.parquet"), 1, "no such preset"),
        (("serve", "--preset", "b300"), 1, "no such preset"),
        (("analyze", "--no-such-flag"), 2, "No such option"),
        (("replay", "x.parquet", "--target", "http://127.0.0.1:1", "--scale", "1,zwei"), 2, "no list of numbers"),
    ],
)
def test_faults_of_the_user_are_named(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = chatreel(*arguments)

    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unreachable_target_is_named_with_the_next_step(trace: Path, tmp_path: Path) -> None:
    done = chatreel("replay", str(trace), "--target", "http://127.0.0.1:1", "-o", str(tmp_path / "run"))

    assert done.returncode == 1
    assert "cannot be reached" in done.stderr
    assert "chatreel serve" in done.stderr


def test_a_capture_is_imported_like_a_public_trace(tmp_path: Path) -> None:
    source, out = tmp_path / "log.jsonl", tmp_path / "log.parquet"
    request = {"model": "m", "messages": [{"role": "user", "content": "CANARY " * 40}]}
    source.write_text("".join(json.dumps({"timestamp": 1700000000 + n, **request}) + "\n" for n in range(3)) + "{}\n")

    done = chatreel("import", str(source), "-o", str(out))

    assert done.returncode == 0
    assert "3 requests of format openai_jsonl" in done.stderr and "1 bad entries" in done.stderr
    shown = chatreel("analyze", str(out))
    assert "3 requests over 2.0 s" in shown.stdout
    assert not any(b"CANARY" in path.read_bytes() for path in tmp_path.iterdir() if path != source)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "one such --upstream URL"),
        (["--upstream", "http://a", "--upstream", "http://b"], "saw 2 that take every request"),
        (["--upstream", "http://a", "--host", "0.0.0.0"], "add --beyond-loopback"),
        (["--mode", "forward"], "Add --allow-host"),
        (["--mode", "forward", "--allow-host", "*"], "not a host"),
        (["--mode", "forward", "--allow-host", "x", "--upstream", "http://a"], "a forward proxy has no upstream"),
        (["--upstream", "http://a", "--tokenizer", "o200k", "--tokenizer", "cl100k"], "more than one tokenizer"),
        (["--upstream", "http://a", "--tokenizer", "m=nowhere"], "no such tokenizer"),
        (["--upstream", "http://a", "--key", "nowhere"], "no such key"),
    ],
)
def test_a_recorder_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = chatreel("record", "-o", str(tmp_path / "t.parquet"), "--port", "0", *arguments)

    assert done.returncode == 1
    assert words in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []
