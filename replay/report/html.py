"""The summary as one HTML file that opens anywhere, without a network: words first, then the table, then charts."""

import html
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import altair as alt
import vl_convert

from replay.judge.summary import Note, Point, Summary
from replay.report.charts import Chart, by_scale, over_time
from replay.report.text import figures, grouped_notes, labels, printable

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.split(".")[:2])
IMAGE_SCALE = 2  # pixels of a PNG per unit of a chart
FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', sans-serif"

# The policy keeps the page honest about being offline: a browser refuses whatever it would load from elsewhere.
_POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"

_STYLE = """
:root { color-scheme: light dark; --ink: #1b2430; --soft: #5a6673; --line: #dde2e8; --page: #fff; --box: #f6f8fa;
  --flat: #1f7a45; --knee: #9a5b00; --wall: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #9ba7b4; --line: #333c46; --page: #14181d;
  --box: #1c2229; --flat: #58c184; --knee: #f0ad4e; --wall: #ff8a80; } }
body { font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', 'Noto Sans', sans-serif; color: var(--ink);
  background: var(--page); max-width: 1150px; margin: 2rem auto 4rem; padding: 0 1.5rem; }
h1 { font-size: 1.55rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.4rem 0 .7rem; }
h3 { font-size: .95rem; margin: 0 0 .2rem; }
.soft { color: var(--soft); } .origin { font-size: .88rem; overflow-wrap: anywhere; }
.lead { padding: .9rem 1.2rem .9rem 2.2rem; margin: 1.2rem 0; background: var(--box); border-left: 4px solid var(--soft); }
.lead li { font-size: 1.1rem; margin: .2rem 0; }
.flat, .knee, .wall, .invalid { font-weight: 650; } .flat { color: var(--flat); } .knee { color: var(--knee); }
.wall, .invalid { color: var(--wall); } .invalid { text-transform: uppercase; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem 1.1rem .22rem 0; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-right: 2rem; } thead th { border-bottom: 2px solid var(--line); }
tbody + tbody tr:first-child td { border-top: 1px solid var(--line); padding-top: .5rem; }
tbody tr:last-child td { padding-bottom: .5rem; } .doubt { opacity: .55; }
.grid { display: grid; grid-template-columns: repeat(3, 1fr); gap: 1.6rem 1rem; }
@media (max-width: 1050px) { .grid { grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)); } }
.wide { margin: 0 0 1.8rem; overflow-x: auto; } .notes li { margin: .5rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .45rem 1.4rem; } dt { font-weight: 600; } dd { margin: 0; }
@media (max-width: 700px) { dl { display: block; } dt { margin-top: .6rem; } }
"""

_SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
const ink = dark ? "#c3cbd4" : "#3b4653", line = dark ? "#333c46" : "#e3e7ec", text = {labelColor: ink, titleColor: ink};
const config = {background: null, font: FONT, view: {stroke: line}, legend: {...text, labelFontSize: 12},
  axis: {...text, gridColor: line, domainColor: line, tickColor: line, titleFontWeight: "normal", titleFontSize: 12,
    labelFontSize: 11},
  header: {...text}};
let drawn = 0, failed = 0;
const report = () => { document.body.dataset.drawn = drawn; document.body.dataset.failed = failed; };
window.addEventListener("error", () => { failed += 1; report(); });
for (const [name, spec] of Object.entries(SPECS)) {
  const place = document.getElementById("chart-" + name);
  vegaEmbed(place, spec, {mode: "vega-lite", renderer: "svg", actions: false, config})
    .then(() => { drawn += 1; report(); })
    .catch(error => { failed += 1; place.textContent = "This chart could not be drawn: " + error; report(); });
}
"""

_FORMULAS = {
    "TTFT": "first token - start. A token is reasoning, answer or tool call; role-only and empty chunks are not.",
    "Start": "when the request should have gone out (schedule latency) or when it did (service latency). Latencies here count "
    "from the schedule unless they say otherwise, so that waiting in a slow client cannot hide.",
    "TPOT": "(last token - first token) / (n - 1), n >= 2 output tokens as the server counted them; requests weigh the same.",
    "ITL": "gaps between tokens, only where the server says how many tokens each chunk holds; else it is called chunk gap.",
    "E2E": "last token - start.",
    "Percentiles": "nearest rank. Inside a time bin of fewer than 100 requests p99 is the slowest one.",
    "Steady window": "the planned span without its first tenth (at most 30 s) and without the drain; the grey parts of charts "
    "are shown, not counted. Points of fewer than 50 requests count whole.",
    "Goodput": "requests per second that meet every SLO; failed requests are misses.",
    "Hit rate, predicted": "token-weighted hits of an LRU cache of the server's KV size over the plan's block ids (Mattson and "
    "others, 1970): only full 16-token blocks, at least the last prompt token is computed, answers fill the cache.",
    "Hit rate, reported": "usage: sum of cached_tokens / sum of prompt tokens. Server counters: hits / queries over the point.",
    "Regime": "against the lowest valid scale. Wall: more than a tenth of what was sent piled up, or over 5 % failed. Knee: TTFT "
    "p99 or median TPOT more than doubled, requests were preempted, or a queue stood half of the time. Else flat.",
    "Invalid": "the client was the limit: it sent late, its event loop stalled, or its core was full. Do not trust such a point.",
}


def write_html(summary: Summary, path: Path) -> None:
    path.write_text(page(summary), encoding="utf-8")


def page(summary: Summary) -> str:
    scales, times = by_scale(summary), over_time(summary)
    formulas = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in _FORMULAS.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>chatreel: {_text(Path(summary.trace).name)}</title><style>{_STYLE}</style></head><body>
<h1>{_title(summary)}</h1>
<p class="soft origin">{_origin(summary)}</p>
<ul class="lead">{"".join(f"<li>{_text(line)}</li>" for line in summary.headline)}</ul>
<h2>Figures</h2>{_table(summary.points)}
{_charts("By scale", "grid", "", scales)}
{_charts("Over time", "", "wide", times)}
<h2>Notes</h2>{_notes(summary)}
<h2>How it was measured</h2><dl>{formulas}</dl>
<noscript><p>The charts need JavaScript; all figures are in the table and in summary.json.</p></noscript>
<script>{_bundle()}</script>
<script>const FONT = {_json(FONT)}, SPECS = {_json({name: _spec(chart) for name, (_, chart) in (scales | times).items()})};
{_SCRIPT}</script></body></html>
"""


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script: seconds to make, the same for every page."""
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE))


def _text(text: str) -> str:
    """Traces' and servers' words end here: no markup, no control characters."""
    return html.escape(printable(text))


def _json(value: object) -> str:
    """JSON that cannot end the script element which holds it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _spec(chart: Chart) -> dict[str, object]:
    """Without the schema's address, so that the page names no other site."""
    spec: dict[str, object] = chart.to_dict()
    return {name: value for name, value in spec.items() if name not in ("$schema", "config")}


def _title(summary: Summary) -> str:
    name, scales = _text(Path(summary.trace).stem), [f"{one.scale:g}x" for one in summary.points]
    if not scales:
        return name
    listed = scales[0] if len(scales) == 1 else f"{', '.join(scales[:-1])} and {scales[-1]}"
    return f"{name} at {listed} by {summary.points[0].by}"


def _origin(summary: Summary) -> str:
    facts = [
        ("trace", summary.trace),
        ("target", summary.target),
        ("model", summary.server),
        ("prompts as", {"ids": "token ids", "text": "text"}.get(summary.prompt_mode, summary.prompt_mode)),
        ("seed", str(summary.seed)),
        ("started", summary.started_utc),
        *(("SLO", f"{slo.metric.upper()} <= {slo.limit_ms:g} ms") for slo in summary.slos),
    ]
    return " · ".join(f"{name} <code>{_text(value)}</code>" for name, value in facts)


def _table(points: Sequence[Point]) -> str:
    if not points:
        return "<p>No point was run.</p>"
    head = "".join(f"<th>{name}</th>" for name in labels(points))
    bodies = "".join(
        f"<tbody>{''.join(_row(label, cells, points) for label, cells in section)}</tbody>" for section in figures(points)
    )
    return f'<div class="scroll"><table><thead><tr><th>scaled by {points[0].by}</th>{head}</tr></thead>{bodies}</table></div>'


def _row(label: str, cells: Sequence[str], points: Sequence[Point]) -> str:
    if label == "verdict":
        marked = "".join(f'<td class="{one.regime}">{_text(cell)}</td>' for cell, one in zip(cells, points, strict=True))
    else:
        marked = "".join(
            f"<td{'' if one.valid else ' class="doubt"'}>{_text(cell)}</td>" for cell, one in zip(cells, points, strict=True)
        )
    return f"<tr><td>{html.escape(label)}</td>{marked}</tr>"


def _charts(heading: str, outer: str, inner: str, drawn: dict[str, tuple[str, Chart]]) -> str:
    boxes = "".join(
        f'<div class="{inner}"><h3>{html.escape(title)}</h3><div id="chart-{name}"></div></div>'
        for name, (title, _) in drawn.items()
    )
    return f'<h2>{heading}</h2><div class="{outer}">{boxes}</div>' if boxes else ""


def _notes(summary: Summary) -> str:
    items = "".join(_note(where, note) for where, note in grouped_notes(summary))
    return f'<ul class="notes">{items}</ul>' if items else "<p>None.</p>"


def _note(where: str, note: Note) -> str:
    rest = f'<span class="soft">Why it matters: {_text(note.why)}. What to do: {_text(note.action)}.</span>'
    return f"<li><b>{html.escape(where)}</b>: {_text(note.seen)}.<br>{rest}</li>"


def write_images(summary: Summary, folder: Path, kind: str = "svg") -> list[Path]:
    """Each chart as its own SVG or PNG file, made without a browser."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, (title, chart) in (by_scale(summary) | over_time(summary)).items():
        path = folder / f"{name}.{kind}"
        path.write_bytes(_image(chart.properties(title=title, background="white"), kind))
        paths.append(path)
    return paths


def _image(chart: Chart, kind: str) -> bytes:
    spec = chart.to_dict()
    if kind == "svg":
        return str(vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)).encode()
    return bytes(vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=IMAGE_SCALE))
