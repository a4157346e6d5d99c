"""`chatreel compare`: exit codes, JSON, and the page."""

import json
from pathlib import Path

import pytest

from chatreel.comparing import run_compare
from synth.generating import generate_from, generate_trace
from synth.model import load_workload


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    path = tmp_path / "chat.parquet"
    generate_trace(load_workload(preset="chat", overrides={"requests": 800}), 1, path)
    return path


def test_a_redrawn_trace_passes_and_the_page_overlays_both_curves_without_a_network(chat: Path, tmp_path: Path) -> None:
    more, page = tmp_path / "more <b>.parquet", tmp_path / "f.html"
    generate_from(chat, more, 3)

    assert run_compare(chat, more, page, None) == 0

    text = page.read_text()
    assert "real: chat" in text and "more <b>" not in text
    assert "All 12 gates pass" in text
    assert "http://" not in text.split("<script>")[0] and text.count('id="chart-') == 3


def test_random_traffic_misses_with_exit_code_4_and_json_says_which(
    chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control = tmp_path / "random.parquet"
    generate_trace(load_workload(preset="random", overrides={"requests": 800}), 1, control)

    assert run_compare(chat, control, None, Path("-")) == 4

    found = json.loads(capsys.readouterr().out)
    by_name = {gate["name"]: gate for gate in found["gates"]}
    assert not found["passed"]
    assert by_name["hit curve, largest error"]["value"] > 0.5
