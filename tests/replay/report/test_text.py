"""The terminal summary, held word for word."""

import io
import os
from pathlib import Path

from rich.console import Console

from replay.judge.summary import Slo
from replay.report.reading import judge_run
from replay.report.text import print_summary

GOLDEN = Path(__file__).parent / "golden"


def printed(summary, width=100):
    out = io.StringIO()
    print_summary(summary, Console(file=out, width=width))
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def same_as(name, text):
    """`UPDATE_GOLDEN=1 pytest` writes the file anew; look at the difference before it goes in."""
    if os.environ.get("UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(text)
    return text == (GOLDEN / name).read_text()


def test_kv_fills_at_5x(kv_fills_at_5x):
    text = printed(judge_run(kv_fills_at_5x.write(), [Slo(metric="ttft", limit_ms=500)]))

    assert same_as("kv_fills_at_5x.txt", text)
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text


def test_a_server_that_tells_nothing_and_a_late_client(story):
    story.at(1).requests(60, every_ms=100, cached=None, chunk_tokens=None, token_count_source="chunks")
    story.at(2).requests(120, every_ms=50, cached=None, chunk_tokens=None, token_count_source="chunks", late_ms=40.0)

    assert same_as("tells_nothing.txt", printed(judge_run(story.write())))


def test_many_scales_are_printed_in_tables_that_fit(story):
    for scale in (1, 1, 2, 3, 4, 5, 6, 8, 10):
        story.at(scale).requests(60, every_ms=100).server(kv=0.3)

    text = printed(judge_run(story.write()))

    assert text.count("verdict") == 3
    assert "1x #1" in text and "1x #2" in text and "10x" in text
    assert "…" not in text


def test_words_of_a_server_can_neither_style_nor_drive_the_terminal(story, outcome):
    scale = story.at(1).requests(60, every_ms=100)
    scale.outcomes[9] = outcome(9, planned_ms=900.0, error="http_status", error_text="[bold]no[/bold] [/] \x1b[2J\x07")

    text = printed(judge_run(story.write()))

    assert "[bold]no[/bold] [/]" in text
    assert not set(text) & {"\x1b", "\x07"}


def test_gpus_have_rows_only_where_they_were_read(story):
    point = story.at(1).requests(120, every_ms=50)
    point.server(kv=0.5, gpu_count=2, gpu_busy=0.8, gpu_memory_active=0.5, gpu_power_w=800.0)
    story.at(2).requests(120, every_ms=50).server(kv=0.5)

    text = printed(judge_run(story.write()))

    assert "memory bandwidth p50 / max" in text and "50.0% / 50.0%" in text
    assert "energy, J per output token" in text and "tensor cores" not in text


def test_several_targets_are_told_apart(story, outcome):
    urls = ["http://a:8000", "http://b:8000"]
    scale = story.at(1, servers=[{"url": url, "planned": 30, "hit_rate_predicted": 0.6} for url in urls])
    scale.requests(60, every_ms=100)
    scale.outcomes = [outcome(i, planned_ms=i * 100.0, server=i % 2, cached=500 + 200 * (i % 2)) for i in range(60)]

    text = printed(judge_run(story.write()))

    assert [line.split()[-3:] for line in text.splitlines() if "target" in line and "answered" in line] == [["30", "/", "30"]] * 2
    assert [line.split()[-1] for line in text.splitlines() if "  hit rate, usage" in line] == ["50.0%", "70.0%"]
    assert "target 0: http://a:8000\ntarget 1: http://b:8000\n" in text
