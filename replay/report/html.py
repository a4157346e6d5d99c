"""The summary as one HTML file that opens anywhere, without a network: words first, then the table, then charts."""

import html
import json
from collections.abc import Sequence
from pathlib import Path

import altair as alt
import vl_convert

from replay.judge.summary import Note, Point, Summary
from replay.report.charts import Chart, charts
from replay.report.text import figure_rows

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.split(".")[:2])

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5b6875; --line: #d8dee4; --page: #fff; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #9aa7b3; --line: #39434d; --page: #14181c; --bad: #ff8a80; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1180px; margin: 2rem auto;
  padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: .9rem; margin: 0 0 .3rem; }
.soft { color: var(--soft); } .lead li { font-size: 1.12rem; margin: .25rem 0; } .bad { color: var(--bad); font-weight: 600; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } th, td { padding: .3rem .9rem .3rem 0; text-align: right;
  border-bottom: 1px solid var(--line); } th:first-child, td:first-child { text-align: left; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(540px, 1fr)); gap: 1.4rem; }
.chart { background: #fff; color: #1c2733; border: 1px solid var(--line); border-radius: 6px; padding: .7rem; overflow-x: auto; }
dt { font-weight: 600; margin-top: .5rem; } dd { margin: 0; } code { font-size: .92em; }
"""

_FORMULAS = {
    "TTFT": "first token - start. A token is reasoning, answer or tool call; role-only and empty chunks are not.",
    "Schedule and service": "start is when the request should have gone out (schedule) or when it did (service). Latencies "
    "here are schedule latencies: waiting in a slow client cannot hide.",
    "TPOT": "(last token - first token) / (n - 1), n >= 2 output tokens as the server counted them; requests weigh the same.",
    "ITL": "gaps between tokens, only where the server says how many tokens each chunk holds.",
    "Percentiles": "nearest rank. Steady window: the planned span without its first tenth (at most 30 s) and without the drain.",
    "Hit rate, predicted": "token-weighted hits of an LRU cache of the server's KV size over the plan's block ids (Mattson "
    "1970): only full 16-token blocks, at least the last prompt token is computed, answers fill the cache.",
    "Hit rate, reported": "sum of cached_tokens / sum of prompt tokens, as the server's usage says; else from its counters.",
    "Valid": "a point is invalid when the client was the limit: it sent late, its event loop stalled, or its core was full.",
}


def write_html(summary: Summary, path: Path) -> None:
    path.write_text(page(summary))


def page(summary: Summary) -> str:
    drawn = charts(summary)
    specs = {name: chart.to_dict() for name, (_, chart) in drawn.items()}
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)
    boxes = "".join(
        f'<div class="chart"><h3>{html.escape(title)}</h3><div id="chart-{name}"></div></div>'
        for name, (title, _) in drawn.items()
    )
    formulas = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in _FORMULAS.items())
    data = json.dumps(specs).replace("</", "<\\/")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>chatreel: {html.escape(Path(summary.trace).name)}</title><style>{_STYLE}</style></head><body>
<h1>What this traffic does to the server</h1>
<p class="soft">{_origin(summary)}</p>
<ul class="lead">{"".join(f"<li>{html.escape(line)}</li>" for line in summary.headline)}</ul>
<h2>Figures</h2>{_table(summary.points)}
<h2>Charts</h2><div class="charts">{boxes}</div>
<h2>Notes</h2>{_notes(summary)}
<h2>How it was measured</h2><dl>{formulas}</dl>
<script>{script}</script>
<script>const specs = {data};
for (const [name, spec] of Object.entries(specs))
  vegaEmbed("#chart-" + name, spec, {{renderer: "svg", actions: false}});
</script></body></html>
"""


def _origin(summary: Summary) -> str:
    facts = [
        ("trace", summary.trace),
        ("target", summary.target),
        ("model", summary.server),
        ("prompts", {"ids": "token ids", "text": "text"}.get(summary.prompt_mode, summary.prompt_mode)),
        ("seed", str(summary.seed)),
        ("started", summary.started_utc),
    ]
    return " · ".join(f"{name} <code>{html.escape(value)}</code>" for name, value in facts)


def _table(points: Sequence[Point]) -> str:
    if not points:
        return "<p>No point was run.</p>"
    head = "".join(f"<th>{one.scale:g}x</th>" for one in points)
    rows = "".join(
        f"<tr><td>{html.escape(label)}</td>{''.join(_cell(cell) for cell in cells)}</tr>"
        for label, cells in figure_rows(list(points))
    )
    return f"<table><thead><tr><th>scaled by {points[0].by}</th>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(text: str) -> str:
    mark = ' class="bad"' if text == "INVALID" else ""
    return f"<td{mark}>{html.escape(text)}</td>"


def _notes(summary: Summary) -> str:
    items = [_note("run", note) for note in summary.notes]
    for point in summary.points:
        if point.cause:
            items.append(f"<li><b>{point.scale:g}x</b>: {point.regime}, cause: {html.escape(point.cause)}</li>")
        items += [_note(f"{point.scale:g}x", note) for note in point.notes]
    return f"<ul>{''.join(items)}</ul>" if items else "<p>None.</p>"


def _note(where: str, note: Note) -> str:
    seen, why, action = html.escape(note.seen), html.escape(note.why), html.escape(note.action)
    rest = f'<span class="soft">Why it matters: {why}. What to do: {action}.</span>'
    return f"<li><b>{where}</b>: {seen}. {rest}</li>"


def write_images(summary: Summary, folder: Path, kind: str = "svg") -> list[Path]:
    """Each chart as its own SVG or PNG file, made without a browser."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, (title, chart) in charts(summary).items():
        path = folder / f"{name}.{kind}"
        path.write_bytes(_image(chart.properties(title=title), kind))
        paths.append(path)
    return paths


def _image(chart: Chart, kind: str) -> bytes:
    spec = chart.to_dict()
    if kind == "svg":
        return str(vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)).encode()
    return bytes(vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=2))
