"""One page that opens offline, draws every chart in a real browser, stays small, and shows foreign words as words."""

import html
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from tracer.analysis import kv, memory, profile, routing
from tracer.analysis.reuse import hit_curve, touches_as_engine
from tracer.analysis.summary import Analysis, analyze
from tracer.analysis.text import in_words
from tracer.report import analysis as report
from tracer.report.charts import length_charts, memory_charts, time_charts
from tracer.report.page import script_json
from tracer.schema import SCHEMA, Footer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --virtual-time-budget=20000""".split()
    + ["--host-resolver-rules=MAP * ~NOTFOUND"]
)
EVIL = "</script><script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">"
NAMES = {"hit", "causes", "marginal", "reuse", "footprint", "routing", "rate", "demand", "lengths"}


def table_of(requests: int) -> pa.Table:
    """Conversations below one system prompt, each turn a block longer, in turn."""
    rows = [
        {
            "request_id": k,
            "arrival_ns": k * 500_000_000,
            "session_id": k % 20,
            "turn": k // 20,
            "input_tokens": 16 * (k // 20 + 2) + 3,
            "output_tokens": 20,
            "end_ns": 2_000_000_000,
            "input_blocks": [0, *(1 + k % 20 + 20 * depth for depth in range(k // 20 + 1))],
        }
        for k in range(requests)
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


@pytest.fixture(scope="module")
def found() -> Analysis:
    return described(table_of(200), f"/traces/{EVIL}/chat.parquet")


def described(table: pa.Table, name: str) -> Analysis:
    footer = Footer(block_tokens=16, source_format=EVIL)
    curve = hit_curve(touches_as_engine(table, footer))
    one = kv.budget_without_model(kv.gpu_named("a10"), 1, 1e8)
    return msgspec.structs.replace(
        analyze(table, footer, name),
        profile=profile.describe(table, footer),
        memory=memory.describe(table, footer, 1e8),
        kv=kv.fit(curve, one),
        routing=routing.describe(table, footer, 2, [one.kv_tokens]),
    )


def without_scripts(page: str) -> str:
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def all_charts(found: Analysis) -> dict:
    return memory_charts(found) | time_charts(found) | length_charts(found)


def test_the_page_is_self_contained_and_small(found: Analysis, tmp_path: Path) -> None:
    report.write_html(found, tmp_path / "report.html")

    page = (tmp_path / "report.html").read_text()
    assert len(page) < 2_000_000
    assert not re.search(r"<(?:link|img|iframe|object|script)\b[^>]*\b(?:src|href)=", without_scripts(page))
    assert "http" not in without_scripts(page).replace("http-equiv", "")
    assert "http" not in page[page.rindex("<script>") :]  # the chart specs
    assert "default-src 'none'" in page


def test_words_first_then_tables_and_formulas(found: Analysis) -> None:
    text = without_scripts(report.page(found))

    for line in in_words(found):
        assert html.escape(line) in text
    assert text.index("One a10") < text.index("What each size of memory gives") < text.index("How it was computed")
    assert "<td>input tokens</td>" in text


def test_foreign_words_are_escaped(found: Analysis) -> None:
    page = report.page(found)

    assert page.count("</script>") == 2  # the bundle and ours
    assert "&lt;img src=x onerror=" in without_scripts(page) and "<img" not in without_scripts(page)
    assert "<" not in script_json({"</script>": "<!--"})


def test_the_specs_do_not_grow_with_the_trace(found: Analysis) -> None:
    small = len(report.page(found))

    longer = len(report.page(described(table_of(2000), "longer.parquet")))

    assert longer < small + 20_000


def test_a_trace_without_blocks_or_with_one_request_is_a_page_too() -> None:
    rows = [{"request_id": 0, "arrival_ns": 0, "input_tokens": 5, "output_tokens": 1}]
    footer, table = Footer(), pa.Table.from_pylist(rows, schema=SCHEMA)
    bare = msgspec.structs.replace(analyze(table, footer, "one.parquet"), profile=profile.describe(table, footer))

    assert set(all_charts(bare)) == {"lengths"}
    assert "nothing can be said about the prefix cache" in report.page(bare)
    assert "<h1>Traffic of one</h1>" in report.page(analyze(table, footer, "one.parquet"))
    whole = described(table_of(1), "one.parquet")
    assert {"hit", "causes", "lengths"} <= set(all_charts(whole))
    assert "<h1>Traffic of one</h1>" in report.page(whole)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: charts are not drawn in a real browser")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_is_drawn_by_a_browser_without_a_network(found: Analysis, tmp_path: Path, scheme: str) -> None:
    report.write_html(found, tmp_path / "report.html")

    dom = browse(tmp_path, f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}")

    assert set(all_charts(found)) == NAMES
    assert re.search(rf'<body[^>]* data-drawn="{len(NAMES)}"', dom) and re.search(r'<body[^>]* data-failed="0"', dom)
    assert without_scripts(dom).count("<svg") == len(NAMES)
    assert "could not be drawn" not in without_scripts(dom)
    assert "<title>chatreel: chat.parquet</title>" in dom  # nothing foreign ran
    assert dom.count('class="mark-line') >= 9 and 'class="mark-area' in dom and dom.count('class="mark-rect') >= 2


def browse(folder: Path, *flags: str) -> str:
    """The page's DOM after its scripts have run."""
    profile_flag = f"--user-data-dir={folder / 'profile'}"
    command = [str(CHROMIUM), *FLAGS, *flags, profile_flag, "--dump-dom", f"file://{folder / 'report.html'}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_images_are_made_without_a_browser(found: Analysis, tmp_path: Path) -> None:
    svg = report.write_images(found, tmp_path, "svg")
    (png,) = [path for path in report.write_images(found, tmp_path / "png", "png") if path.stem == "hit"]

    assert {path.stem for path in svg} == NAMES
    assert all("<svg" in path.read_text() and "</svg>" in path.read_text() for path in svg)
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_budget_line_stands_where_the_gpu_ends(found: Analysis) -> None:
    spec = memory_charts(found)["hit"][1].to_dict()

    assert [{"at": 216, "label": "a10"}] in spec["datasets"].values()
    assert found.kv is not None and found.kv.budget.kv_tokens == 24e9 * 0.9 / 1e8
