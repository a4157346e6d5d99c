"""`chatreel materialize` by the command: every format's shape, the check, and what goes wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chatreel.cli import app
from synth.corpus import Corpus
from synth.generating import generate_trace
from synth.model import load_workload
from tracer.tokens import encode_chat, load_tokenizer
from tracer.tracefile import iter_requests


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "chat.parquet"
    overrides = {"requests": 120, "system_prompts.count": 2, "input_tokens": {"min": 40, "max": 300}}
    generate_trace(load_workload(preset="chat", overrides=overrides), 1, path)
    return path


def run(trace: Path, out: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["materialize", str(trace), "-o", str(out), "--check", "1000", *options])


def test_every_prompt_is_exact_and_said_so(trace: Path, tmp_path: Path) -> None:
    done = run(trace, tmp_path / "d.jsonl")

    assert done.exit_code == 0, done.output
    assert "120 of 120 prompts exact in length and sharing" in done.output
    lines = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    rows = list(iter_requests(trace))
    tokenizer = load_tokenizer("cl100k")
    for line, row in zip(lines, rows, strict=True):
        assert sum(map(len, encode_chat(tokenizer, line["messages"]))) == row["input_tokens"]
        assert (line["max_tokens"], line["session"]) == (row["output_tokens"], row["session_id"])
        assert len(line["messages"]) == 2 * row["turn"] + 1


@pytest.mark.parametrize("name", ["openai", "vllm_custom", "aiperf", "aiperf_multi", "sharegpt"])
def test_every_format_is_exact_and_repeatable(trace: Path, tmp_path: Path, name: str) -> None:
    first, second, other = (tmp_path / part for part in "abc")
    done = run(trace, first, "--format", name)
    run(trace, second, "--format", name, "--workers", "1")
    run(trace, other, "--format", name, "--seed", "5")

    assert "120 of 120 prompts exact" in done.output
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()


def test_shapes_that_other_tools_read(trace: Path, tmp_path: Path) -> None:
    for name in ("vllm_custom", "aiperf", "aiperf_multi", "sharegpt"):
        run(trace, tmp_path / name, "--format", name)
    rows = list(iter_requests(trace))
    sessions = {row["session_id"] for row in rows}

    custom = [json.loads(line) for line in (tmp_path / "vllm_custom").read_text().splitlines()]
    timed = [json.loads(line) for line in (tmp_path / "aiperf").read_text().splitlines()]
    multi = [json.loads(line) for line in (tmp_path / "aiperf_multi").read_text().splitlines()]
    shared = json.loads((tmp_path / "sharegpt").read_text())

    assert [line["output_tokens"] for line in custom] == [row["output_tokens"] for row in rows]
    assert len(load_tokenizer("cl100k").encode(custom[0]["prompt"])) == rows[0]["input_tokens"]
    assert [line["timestamp"] for line in timed] == [row["arrival_ns"] / 1e6 for row in rows]
    assert len(multi) == len(shared) == len(sessions)
    assert sum(len(line["turns"]) for line in multi) == len(rows)
    assert all("delay" in turn for line in multi for turn in line["turns"][1:])
    for one in shared:
        assert [said["from"] for said in one["conversations"]] == ["human", "gpt"] * (len(one["conversations"]) // 2)


def test_a_limit_and_rows_without_lengths(trace: Path, tmp_path: Path) -> None:
    done = run(trace, tmp_path / "d", "--limit", "7", "--format", "sharegpt")

    assert "7 prompts" in done.output
    assert json.loads((tmp_path / "d").read_text())


def test_what_is_wrong_is_named(trace: Path, tmp_path: Path) -> None:
    for options, words in (
        (("--format", "parrot"), "no such format"),
        (("--tokenizer", "none"), "no such tokenizer"),
    ):
        assert words in str(run(trace, tmp_path / "d", *options).exception)
    assert "cannot write here" in str(run(trace, tmp_path / "none" / "d").exception)
    assert not (tmp_path / "d").exists()


def test_prompts_shorter_than_their_template_are_told_and_are_a_miss(tmp_path: Path) -> None:
    generate_trace(load_workload(preset="random", overrides={"requests": 20, "input_tokens": 6}), 1, tmp_path / "t.parquet")

    done = run(tmp_path / "t.parquet", tmp_path / "d")

    assert done.exit_code == 4
    assert "20 prompts are shorter than the template" in done.output and "0 of 20 prompts exact" in done.output


@pytest.mark.parametrize("name", ["openai", "vllm_custom", "aiperf", "aiperf_multi", "sharegpt"])
def test_a_text_of_ones_own_is_exact_in_every_format_and_said_so(trace: Path, tmp_path: Path, name: str) -> None:
    corpus = ["--corpus", str(Path(__file__).resolve().parents[2] / "README.md"), "--format", name]
    first, second, other = (tmp_path / part for part in "abc")

    done = run(trace, first, *corpus)
    run(trace, second, *corpus, "--workers", "1")
    run(trace, other, *corpus, "--seed", "5")

    assert done.exit_code == 0, done.output
    assert "all of 120 prompts exact in length and sharing" in done.output and "README.md: " in done.output
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
    if name == "openai":
        lines = [json.loads(line) for line in first.read_text().splitlines()]
        for line, row in zip(lines, iter_requests(trace), strict=True):
            assert sum(map(len, encode_chat(load_tokenizer("cl100k"), line["messages"]))) == row["input_tokens"]


def test_a_text_that_comes_out_otherwise_is_refused_and_nothing_is_written(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Corpus.filled
    monkeypatch.setattr(Corpus, "filled", lambda self, number, tokens: page(self, number, tokens) + ("!" if tokens == 16 else ""))
    readme = Path(__file__).resolve().parents[2] / "README.md"

    done = run(trace, tmp_path / "d.jsonl", "--corpus", str(readme), "--format", "sharegpt")

    assert done.exit_code == 1
    assert "README.md" in str(done.exception) and "of 120 prompts" in str(done.exception)
    assert list(tmp_path.iterdir()) == []
