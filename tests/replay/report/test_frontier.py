"""The frontier of a grid: rows in order, words, a chart that can be drawn."""

from io import StringIO
from pathlib import Path

from rich.console import Console

from replay.grid import needed
from replay.report.frontier import charts, page, print_grid, rows, words, write_grid
from tests.replay.test_grid import cell

CELLS = [cell(gpus=2, replicas=2, attainment=0.99, goodput_per_s=1.9), cell(), cell(scale=2.0, attainment=0.1)]


def test_rows_go_by_scale_then_gpus() -> None:
    assert [row[:3] for row in rows(CELLS)] == [["1x", "1", "1"], ["1x", "2", "2"], ["2x", "1", "1"]]
    assert rows([cell(goodput_per_s=None, attainment=None)])[0][5:7] == ["-", "-"]


def test_words_say_how_many_gpus_or_that_none_will_do() -> None:
    one, two = words(needed(CELLS, 0.95), 0.95)

    assert one == "1x needs 2 GPUs, with 1,000 tokens of KV each replica."
    assert two == "2x: nothing in this grid meets the SLO for 0.95 of the requests."


def test_the_chart_stands_in_the_page_and_as_an_image(tmp_path: Path) -> None:
    write_grid(tmp_path, CELLS, ["a <line>"], "trace")

    assert (tmp_path / "frontier.svg").read_text().startswith("<svg")
    text = (tmp_path / "grid.html").read_text()
    assert "chart-frontier" in text and "a &lt;line&gt;" in text


def test_numbers_are_whole_in_a_narrow_terminal() -> None:
    console = Console(width=80, record=True, file=StringIO())

    print_grid([cell(kv_tokens=120_000, ttft_p99_ms=15_631.0)], ["said"], console)

    text = console.export_text()
    assert "120,000" in text and "15,631" in text and "said" in text


def test_where_gpus_are_the_same_memory_goes_across() -> None:
    title, _ = charts([cell(), cell(kv_tokens=5000)])["frontier"]

    assert title == "What more KV memory gives"
    assert "no server was asked" in page([cell(goodput_per_s=None)], [], "x")
