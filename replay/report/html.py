"""The summary as one HTML file that opens anywhere, without a network: words first, then the table, then charts."""

import html
from collections.abc import Sequence
from pathlib import Path

from replay.judge.summary import Note, Point, Summary
from replay.report.charts import by_scale, over_time
from replay.report.text import figures, grouped_notes, labels
from tracer.report.page import chart_boxes, definitions, escaped, render, write_chart_images

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
    body = f"""<h1>{_title(summary)}</h1>
<p class="soft origin">{_origin(summary)}</p>
<ul class="lead">{"".join(f"<li>{escaped(line)}</li>" for line in summary.headline)}</ul>
<h2>Figures</h2>{_table(summary.points)}
{chart_boxes("By scale", "grid", "", scales)}
{chart_boxes("Over time", "", "wide", times)}
<h2>Notes</h2>{_notes(summary)}
<h2>How it was measured</h2>{definitions(_FORMULAS.items())}
<noscript><p>The charts need JavaScript; all figures are in the table and in summary.json.</p></noscript>"""
    return render(escaped(Path(summary.trace).name), body, scales | times)


def _title(summary: Summary) -> str:
    name, scales = escaped(Path(summary.trace).stem), [one.label for one in summary.points]
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
    return " · ".join(f"{name} <code>{escaped(value)}</code>" for name, value in facts)


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
        marked = "".join(f'<td class="{one.regime}">{escaped(cell)}</td>' for cell, one in zip(cells, points, strict=True))
    else:
        marked = "".join(
            f"<td{'' if one.valid else ' class="doubt"'}>{escaped(cell)}</td>" for cell, one in zip(cells, points, strict=True)
        )
    return f"<tr><td>{html.escape(label)}</td>{marked}</tr>"


def _notes(summary: Summary) -> str:
    items = "".join(_note(where, note) for where, note in grouped_notes(summary))
    return f'<ul class="notes">{items}</ul>' if items else "<p>None.</p>"


def _note(where: str, note: Note) -> str:
    rest = f'<span class="soft">Why it matters: {escaped(note.why)}. What to do: {escaped(note.action)}.</span>'
    return f"<li><b>{html.escape(where)}</b>: {escaped(note.seen)}.<br>{rest}</li>"


def write_images(summary: Summary, folder: Path, kind: str = "svg") -> list[Path]:
    """Each chart as its own SVG or PNG file, made without a browser."""
    return write_chart_images(by_scale(summary) | over_time(summary), folder, kind)
