"""`fit --bootstrap`: kept rows say what they are, and drawing from them is drawing from the trace."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chatreel.cli import app
from synth.generating import generate_from, generate_trace, holds_rows, keep_trace
from synth.model import load_workload
from tests.synth.test_group_bootstrap import MOONCAKE, needs
from tracer.errors import TraceError
from tracer.importing import import_trace
from tracer.schema import Footer
from tracer.tracefile import read_table, write_trace


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "chat.parquet"
    generate_trace(load_workload(preset="chat", overrides={"requests": 300, "system_prompts.count": 3}), 1, path)
    return path


@pytest.mark.parametrize("wishes", [{}, {"scale": 2.5}, {"requests": 500}, {"duration_s": 60.0}])
def test_drawing_from_kept_rows_gives_the_same_bytes_as_from_the_trace(
    chat: Path, tmp_path: Path, wishes: dict[str, float]
) -> None:
    assert keep_trace(chat, tmp_path / "kept.json") == 300

    generate_from(chat, tmp_path / "direct", 5, **wishes)  # type: ignore[arg-type]
    generate_from(tmp_path / "kept.json", tmp_path / "by_file", 5, **wishes)  # type: ignore[arg-type]

    assert (tmp_path / "by_file").read_bytes() == (tmp_path / "direct").read_bytes()


@needs(MOONCAKE)
def test_a_trace_with_a_grid_and_coarse_blocks_survives_too(tmp_path: Path) -> None:
    import_trace(MOONCAKE, tmp_path / "mooncake.parquet")
    keep_trace(tmp_path / "mooncake.parquet", tmp_path / "kept.json")

    for source in ("mooncake.parquet", "kept.json"):
        generate_from(tmp_path / source, tmp_path / f"of {source}", 2)

    assert (tmp_path / "of kept.json").read_bytes() == (tmp_path / "of mooncake.parquet").read_bytes()


def test_the_file_is_readable_numbers_ids_afresh_and_says_loudly_what_it_holds(tmp_path: Path) -> None:
    rows = [
        {
            "request_id": 0,
            "arrival_ns": 0,
            "input_tokens": 50,
            "output_tokens": 3,
            "input_blocks": [7, 9, 11],
            "input_tail_id": 4,
        },
        {"request_id": 1, "arrival_ns": 5, "input_tokens": 48, "input_blocks": [7, 9, 30]},
    ]
    write_trace(tmp_path / "t.parquet", rows, Footer())  # type: ignore[arg-type]

    keep_trace(tmp_path / "t.parquet", tmp_path / "kept.json")

    whole = json.loads((tmp_path / "kept.json").read_text())
    assert list(whole) == ["chatreel_bootstrap", "warning", "source", "footer", "rows"]
    assert whole["warning"].startswith("THIS FILE HOLDS ROWS") and "no text" in whole["warning"]
    assert [row["input_blocks"] for row in whole["rows"]] == [[[0, 3]], [[0, 2], [4, 1]]]
    assert whole["rows"][0]["input_tail_id"] == 3
    assert len((tmp_path / "kept.json").read_text().splitlines()) == 6 + 2 + 2  # a row a line


def test_by_the_command_it_warns_and_draws_and_has_no_dials(chat: Path, tmp_path: Path) -> None:
    model, drawn = str(tmp_path / "m.json"), str(tmp_path / "d.parquet")

    fitted = CliRunner().invoke(app, ["fit", str(chat), "--bootstrap", "-o", model])
    made = CliRunner().invoke(app, ["generate", model, "-n", "600", "--seed", "2", "-o", drawn])
    direct = CliRunner().invoke(app, ["generate", "--from", str(chat), "-n", "600", "--seed", "2", "-o", drawn + "2"])
    refused = CliRunner().invoke(app, ["generate", model, "--turns", "x2", "-o", drawn])

    assert fitted.exit_code == made.exit_code == direct.exit_code == 0, fitted.output
    assert "warning" in fitted.output and "holds 300 rows of chat.parquet" in fitted.output
    assert read_table(drawn).equals(read_table(drawn + "2"))
    assert refused.exit_code == 1 and "without --bootstrap has dials" in str(refused.exception)


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ('"rows": [', '"rows": 3, "x": [', "not a file of kept rows"),
        ('"turn":', '"twist":', "unknown column twist"),
        ('"input_blocks":[[', '"input_blocks":[[0],[', r"row 0: blocks that are no runs"),
        ('"input_tokens":', '"input_tokens":"many","n":', "input_tokens"),
        ('"arrival_ns":', '"ttft_ns":', "a row without arrival_ns"),
        ('"arrival_ns":', '"arrival_ns":90000000', "not in order of arrival_ns"),
        ('"request_id"', "request_id", "not a file of kept rows"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(chat: Path, tmp_path: Path, before: str, after: str, problem: str) -> None:
    keep_trace(chat, tmp_path / "kept.json")
    text = (tmp_path / "kept.json").read_text()
    assert before in text
    (tmp_path / "kept.json").write_text(text.replace(before, after, 1))

    with pytest.raises(TraceError, match=problem) as raised:
        generate_from(tmp_path / "kept.json", tmp_path / "out", 0)

    assert raised.value.path == str(tmp_path / "kept.json")


def test_what_cannot_be_drawn_from_or_written_is_told_when_it_is_kept(chat: Path, tmp_path: Path) -> None:
    write_trace(tmp_path / "empty", [], Footer())
    with pytest.raises(TraceError, match="no request"):
        keep_trace(tmp_path / "empty", tmp_path / "kept.json")
    with pytest.raises(TraceError, match="cannot write here"):
        keep_trace(chat, tmp_path / "none" / "kept.json")
    assert not holds_rows(chat) and not holds_rows(tmp_path / "none")
