"""The frame of every HTML report: one file, no network, light and dark, charts drawn by a script inside it."""

import html
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import altair as alt
import vl_convert

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.split(".")[:2])
IMAGE_SCALE = 2  # pixels of a PNG per unit of a chart
FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', sans-serif"

type Chart = alt.Chart | alt.LayerChart | alt.FacetChart
type Charts = Mapping[str, tuple[str, Chart]]  # name -> (title, chart)

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
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(540px, 100%), 1fr)); gap: 1.6rem 1rem; }
.pair > div { overflow-x: auto; } .wide { margin: 0 0 1.8rem; overflow-x: auto; } .notes li { margin: .5rem 0; }
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


def render(title: str, body: str, charts: Charts) -> str:
    """A whole page. `title` and `body` are HTML already; `chart_boxes` says where in it each chart goes."""
    specs = script_json({name: _spec(chart) for name, (_, chart) in charts.items()})
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>chatreel: {title}</title><style>{_STYLE}</style></head><body>
{body}
<script>{_bundle()}</script>
<script>const FONT = {script_json(FONT)}, SPECS = {specs};
{_SCRIPT}</script></body></html>
"""


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script: seconds to make, the same for every page."""
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE))


def escaped(text: str) -> str:
    """Traces' and servers' words end here: no markup, no control characters."""
    return html.escape("".join(c if c.isprintable() else " " for c in text))


def script_json(value: object) -> str:
    """JSON that cannot end the script element which holds it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _spec(chart: Chart) -> dict[str, object]:
    """Without the schema's address, so that the page names no other site."""
    spec: dict[str, object] = chart.to_dict()
    return {name: value for name, value in spec.items() if name not in ("$schema", "config")}


def chart_boxes(heading: str, outer: str, inner: str, charts: Charts) -> str:
    boxes = "".join(
        f'<div class="{inner}"><h3>{html.escape(title)}</h3><div id="chart-{name}"></div></div>'
        for name, (title, _) in charts.items()
    )
    title = f"<h2>{heading}</h2>" if heading else ""
    return f'{title}<div class="{outer}">{boxes}</div>' if boxes else ""


def definitions(entries: Iterable[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>' for name, text in entries)}</dl>"


def write_chart_images(charts: Charts, folder: Path, kind: str = "svg") -> list[Path]:
    """Each chart as its own SVG or PNG file, made without a browser."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, (title, chart) in charts.items():
        path = folder / f"{name}.{kind}"
        path.write_bytes(_image(chart.properties(title=title, background="white"), kind))
        paths.append(path)
    return paths


def _image(chart: Chart, kind: str) -> bytes:
    spec = chart.to_dict()
    if kind == "svg":
        return str(vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)).encode()
    return bytes(vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=IMAGE_SCALE))
