"""A grid as a table, words and one chart: what more GPUs and more KV memory give. Pure but for `write_grid`."""

from collections.abc import Sequence
from pathlib import Path

import altair as alt
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from replay.grid import Cell, Needed, Setting
from tracer.report.page import Charts, chart_boxes, escaped, render, write_chart_images

WIDTH, HEIGHT = 300, 220
_HEAD = (
    "scale", "GPUs", "replicas", "KV tokens each", "answered /s", "goodput /s", "SLO met", "hit rate",
    "TTFT p99, ms", "TPOT p50, ms", "preemp- tions",
)  # fmt: skip
_DROPPED = ("answered /s", "preemp- tions", "hit rate", "TPOT p50, ms")  # in this order, where a terminal is narrow


def heads(cells: Sequence[Cell]) -> list[str]:
    """What is varied beside GPUs and KV has its columns after them."""
    return [*_HEAD[:4], *(key.replace("_", " ") for key in cells[0].settings), *_HEAD[4:]]


def shown(value: Setting) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def rows(cells: Sequence[Cell]) -> list[list[str]]:
    ordered = sorted(cells, key=lambda one: (one.scale, one.gpus, one.kv_tokens))  # what is varied stays in its order
    return [
        [
            f"{one.scale:g}x",
            str(one.gpus),
            one.split or str(one.replicas),
            f"{one.kv_tokens:,}",
            *map(shown, one.settings.values()),
            _number(one.requests_per_s, ".2f"),
            _number(one.goodput_per_s, ".2f"),
            _number(one.attainment, ".1%"),
            _number(one.hit_rate, ".1%"),
            _number(one.ttft_p99_ms, ",.0f"),
            _number(one.tpot_p50_ms, ".1f"),
            _number(one.preemptions, ",d"),
        ]
        for one in ordered
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def words(found: Sequence[Needed], attain: float) -> list[str]:
    lines = []
    for one in found:
        if one.cell is None:
            lines.append(f"{one.scale:g}x: nothing in this grid meets the SLO for {attain:.4g} of the requests.")
            continue
        count = f"{one.cell.gpus} GPU{'s' if one.cell.gpus > 1 else ''}"
        split = f", prefill and decode split {one.cell.split}" if one.cell.split else ""
        also = "".join(f", {key} = {shown(value)}" for key, value in one.cell.settings.items())
        lines.append(f"{one.scale:g}x needs {count}{split}, with {one.cell.kv_tokens:,} tokens of KV each replica{also}.")
    return lines


def charts(cells: Sequence[Cell]) -> Charts:
    """One panel per scale: the rate that meets the SLO (without one: answered) against GPUs, or KV where GPUs are the same."""
    has_slo = any(one.goodput_per_s is not None for one in cells)
    unit = "requests/s within the SLO" if has_slo else "requests/s answered"
    values = [
        {
            "scale": f"{one.scale:g}x",
            "GPUs": one.gpus,
            "KV tokens": one.kv_tokens,
            "rate": one.goodput_per_s if has_slo else one.requests_per_s,
            "met": one.attainment,
            "settings": ", ".join(f"{key} {shown(value)}" for key, value in one.settings.items()),
        }
        for one in cells
    ]
    several = len({one.gpus for one in cells}) > 1
    across, colour = ("GPUs", "KV tokens") if several else ("KV tokens", "GPUs")
    base = alt.Chart(width=WIDTH, height=HEIGHT).mark_line(strokeWidth=2, point=alt.OverlayMarkDef(size=45, filled=True))
    drawn = base.encode(
        x=alt.X(f"{across}:Q", axis=alt.Axis(format="~s", values=sorted({int(one[across] or 0) for one in values}))),
        y=alt.Y("rate:Q", title=unit, scale=alt.Scale(zero=True)),
        color=alt.Color(f"{colour}:O", title=colour + (" each replica" if several else "")),
        tooltip=[alt.Tooltip(f"{name}") for name in ("scale:N", "GPUs:Q", "KV tokens:Q", "settings:N", "rate:Q", "met:Q")],
    )
    if any(one.settings for one in cells):
        drawn = drawn.encode(
            strokeDash=alt.StrokeDash("settings:N", legend=None),
            shape=alt.Shape("settings:N", title=None, legend=alt.Legend(labelLimit=360)),
        )
    order = [f"{scale:g}x" for scale in sorted({one.scale for one in cells})]
    panels = alt.layer(drawn, data=alt.InlineData(values=values)).facet(
        facet=alt.Facet("scale:N", title=None, sort=order), columns=3
    )
    return {"frontier": ("What more GPUs and KV memory give" if several else "What more KV memory gives", panels)}


def page(cells: Sequence[Cell], lines: Sequence[str], origin: str) -> str:
    drawn = charts(cells)
    head = "".join(f"<th>{escaped(name)}</th>" for name in heads(cells))
    body = "".join(f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows(cells))
    said = f'<ul class="lead">{"".join(f"<li>{escaped(line)}</li>" for line in lines)}</ul>' if lines else ""
    return render(
        "grid",
        f"""<h1>Grid of predictions</h1><p class="soft origin">{escaped(origin)}</p>{said}
{chart_boxes("Frontier", "", "wide", drawn)}
<h2>Figures</h2><div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
<p class="soft">Simulated in virtual time: no server was asked. Each row has a whole report in its own folder.</p>""",
        drawn,
    )


def _width(name: str, column: Sequence[str]) -> int:
    return max(map(len, (*column, *name.split())))


def print_grid(cells: Sequence[Cell], lines: Sequence[str], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    # Heads may wrap, numbers not; what is nowhere known, and replicas that are the GPUs, would not fit into 80 columns.
    wanted = [
        (name, column)
        for name, column in zip(heads(cells), zip(*rows(cells), strict=True), strict=True)
        if set(column) != {"-"} and (name != "replicas" or any(one.replicas != one.gpus or one.split for one in cells))
    ]
    for least in _DROPPED:
        if sum(_width(*one) + 1 for one in wanted) > console.width:
            wanted = [one for one in wanted if one[0] != least]
    for name, column in wanted:
        table.add_column(name, justify="right", min_width=_width(name, column))
    for row in zip(*(column for _, column in wanted), strict=True):
        table.add_row(*row)
    console.print(table)
    for line in lines:
        console.print(f"[bold]{escape(line)}[/bold]", highlight=False)


def write_grid(folder: Path, cells: Sequence[Cell], lines: Sequence[str], origin: str) -> None:
    """grid.html, frontier.svg."""
    (folder / "grid.html").write_text(page(cells, lines, origin), encoding="utf-8")
    write_chart_images(charts(cells), folder)
