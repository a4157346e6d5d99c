"""One page that opens offline, draws every chart in a real browser, and shows foreign words as words."""

import re
import shutil
import subprocess

import pytest

from replay.judge.summary import Slo
from replay.report import html
from replay.report.charts import by_scale, over_time
from replay.report.reading import judge_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --virtual-time-budget=20000""".split()
    + ["--host-resolver-rules=MAP * ~NOTFOUND"]
)
EVIL = "</script><script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">"


@pytest.fixture
def evil_story(kv_fills_at_5x, outcome):
    """Foreign words wherever a trace or a server may put them."""
    rows = kv_fills_at_5x.scales[1].outcomes
    rows[9] = outcome(9, planned_ms=450.0, error="http_status", error_text=EVIL)
    kv_fills_at_5x.notes.append(EVIL)
    return kv_fills_at_5x


def without_scripts(page):
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def test_the_page_is_self_contained_and_small(kv_fills_at_5x, tmp_path):
    html.write_html(judge_run(kv_fills_at_5x.write()), tmp_path / "report.html")

    page = (tmp_path / "report.html").read_text()
    assert len(page) < 2_000_000
    assert not re.search(r"<(?:link|img|iframe|object|script)\b[^>]*\b(?:src|href)=", without_scripts(page))
    assert "http" not in without_scripts(page).replace("http-equiv", "").replace("http://127.0.0.1:8000", "")
    assert "http" not in page[page.rindex("<script>") :]  # the chart specs
    assert "default-src 'none'" in page


def test_the_page_holds_headline_figures_notes_and_formulas(kv_fills_at_5x):
    summary = judge_run(kv_fills_at_5x.write(), [Slo(metric="ttft", limit_ms=500)])

    text = without_scripts(html.page(summary))

    assert all(line in text for line in summary.headline)
    assert '<td class="flat">flat</td>' in text and '<td class="wall">wall</td>' in text
    assert "arrival stamps spread uniformly" in text
    assert "How it was measured" in text and "first token - start" in text


def test_invalid_points_are_marked_and_dimmed(story):
    story.at(1).requests(200, every_ms=100, ttft_ms=20.0).server(kv=0.3)
    story.at(2).requests(400, every_ms=50, ttft_ms=20.0, late_ms=60.0).server(kv=0.3)
    summary = judge_run(story.write())

    text = html.page(summary)

    assert '<td class="invalid">INVALID</td>' in text
    assert text.count('class="doubt"') == text.count("<tr><td>") - 1  # every row but the verdict
    assert "2x: INVALID, the client was the limit" in text and "2x INVALID" in text


def test_foreign_words_are_escaped(evil_story):
    page = html.page(judge_run(evil_story.write()))

    assert page.count("</script>") == 2  # the bundle and ours
    assert "&lt;img src=x onerror=" in without_scripts(page)
    assert "<img" not in without_scripts(page)


def test_charts_without_figures_are_left_out_and_a_run_of_nothing_is_a_page(story):
    story.at(1).requests(60, every_ms=100, cached=None)
    some = judge_run(story.write())
    story.scales.clear()
    none = judge_run(story.write())

    assert set(over_time(some)) == {"load", "ttft", "tpot"}
    assert set(by_scale(some)) == {"hit-scale", "ttft-scale", "tpot-scale"}  # what was predicted is known
    assert "Nothing was sent." in html.page(none) and "No point was run." in html.page(none)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: charts are not drawn in a real browser")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_is_drawn_by_a_browser_without_a_network(evil_story, tmp_path, scheme):
    summary = judge_run(evil_story.write(), [Slo(metric="ttft", limit_ms=500)])
    html.write_html(summary, tmp_path / "report.html")
    wanted = len(over_time(summary)) + len(by_scale(summary))

    dom = browse(tmp_path, f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}")

    assert wanted == 13
    assert re.search(r'<body[^>]* data-drawn="13"', dom) and re.search(r'<body[^>]* data-failed="0"', dom)
    assert without_scripts(dom).count("<svg") == wanted
    assert "could not be drawn" not in without_scripts(dom)
    assert "<title>chatreel: chat.parquet</title>" in dom  # nothing foreign ran
    assert dom.count('class="mark-line') >= 20 and 'class="mark-rect' in dom


def browse(folder, *flags):
    """The page's DOM after its scripts have run."""
    command = [
        CHROMIUM,
        *FLAGS,
        *flags,
        f"--user-data-dir={folder / 'profile'}",
        "--dump-dom",
        f"file://{folder / 'report.html'}",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_images_are_made_without_a_browser(kv_fills_at_5x, tmp_path):
    summary = judge_run(kv_fills_at_5x.write())

    svg = html.write_images(summary, tmp_path, "svg")
    (png,) = [path for path in html.write_images(summary, tmp_path / "png", "png") if path.stem == "kv"]

    assert {path.stem for path in svg} == {*over_time(summary), *by_scale(summary)}
    assert all("<svg" in path.read_text() and "</svg>" in path.read_text() for path in svg)
    assert png.read_bytes().startswith(b"\x89PNG")
