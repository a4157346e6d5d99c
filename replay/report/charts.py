"""The summary as Vega-Lite charts: one row of values per bin or point, so a long run stays a small page. Pure."""

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Literal

import altair as alt

from replay.judge.summary import Percentiles, Point, Summary
from replay.report.text import labels

PAGE_WIDTH, AXIS_WIDTH, AXIS_EXTENT, SPACING = 1130, 66, 38, 14  # of one extent, so that time axes stand below each other
MAX_COLUMNS = 4
TIME_HEIGHT, SCALE_WIDTH, SCALE_HEIGHT = 130, 270, 170
BLUE, ORANGE, GREY, RED = "#3f7fd0", "#e0811c", "#8b95a1", "#d3455b"  # readable on white and on near-black
SOLID, DASHED = [1, 0], [5, 3]

type Chart = alt.Chart | alt.FacetChart
type Kind = Literal["share", "full", "log", "count", "bars"]
type Values = Sequence[float | None]
type Line = tuple[str, str, list[int], Values]  # name, colour, dash, values
type Row = dict[str, Any]


def over_time(summary: Summary) -> dict[str, tuple[str, Chart]]:
    """Name -> (title, chart): a panel per scale side by side, one y axis for all. Nothing measured: no chart."""
    points = summary.points
    limits = {slo.metric: slo.limit_ms for slo in summary.slos}
    ttft = [_tails(one.series.ttft_p50_ms, one.series.ttft_p99_ms, limits.get("ttft")) for one in points]
    tpot = [_tails(one.series.tpot_p50_ms, one.series.tpot_p99_ms, limits.get("tpot")) for one in points]
    wanted: list[tuple[str, str, str, Kind, list[list[Line]]]] = [
        ("load", "Load", "requests/s", "count", [_load(one) for one in points]),
        ("ttft", "Time to first token, from when the request was due", "TTFT, ms (log)", "log", ttft),
        ("tpot", "Time per output token after the first", "TPOT, ms (log)", "log", tpot),
        ("hit", "Prefix hit rate", "share of prompt tokens", "share", [_hit(one) for one in points]),
        ("kv", "KV cache in use by running requests", "share of KV blocks", "full", [_kv(one) for one in points]),
        ("queue", "Requests in the server", "requests", "count", [_queue(one) for one in points]),
        ("gpu", "GPUs", "share", "full", [_gpu(one) for one in points]),
        ("power", "Power of the GPUs", "W", "count", [_power(one) for one in points]),
        ("preemptions", "Preemptions, new ones per bin", "preemptions", "bars", [_preemptions(one) for one in points]),
    ]
    found = {name: (title, _panels(points, lines, unit, kind)) for name, title, unit, kind, lines in wanted}
    return {name: (title, chart) for name, (title, chart) in found.items() if chart is not None}


def _load(point: Point) -> list[Line]:
    s = point.series
    failed: list[Line] = [("failed", RED, SOLID, s.failed_per_s)] if any(s.failed_per_s) else []
    return [("offered by the plan", GREY, DASHED, s.offered_per_s), ("answered", BLUE, SOLID, s.completed_per_s), *failed]


def _tails(p50: Values, p99: Values, limit_ms: float | None) -> list[Line]:
    limit: list[Line] = [] if limit_ms is None else [("SLO", RED, DASHED, [limit_ms] * len(p50))]
    return [("p50", BLUE, SOLID, p50), ("p99", ORANGE, SOLID, p99), *limit]


def _hit(point: Point) -> list[Line]:
    seen, predicted = point.series.hit_rate, point.cache.hit_rate_predicted
    if not _has_values(seen):
        return []
    whole = "predicted, whole point"
    return [("reported", BLUE, SOLID, seen), (whole, GREY, DASHED, [predicted] * len(seen))]


def _kv(point: Point) -> list[Line]:
    return [("KV in use", BLUE, SOLID, point.series.kv_usage)]


def _queue(point: Point) -> list[Line]:
    return [("running", BLUE, SOLID, point.series.running), ("waiting", ORANGE, SOLID, point.series.waiting)]


def _gpu(point: Point) -> list[Line]:
    s = point.series
    bandwidth, tensor = s.gpu_memory_active, s.gpu_tensor_active
    return [
        ("busy", GREY, DASHED, s.gpu_busy),
        ("memory bandwidth", BLUE, SOLID, bandwidth),
        ("tensor cores", ORANGE, SOLID, tensor),
    ]


def _power(point: Point) -> list[Line]:
    return [("power", RED, SOLID, point.series.gpu_power_w)]


def _preemptions(point: Point) -> list[Line]:
    return [("preemptions", RED, SOLID, point.series.preemptions)]


def _has_values(values: Sequence[float | None]) -> bool:
    return any(value is not None for value in values)


def _panels(points: Sequence[Point], lines: list[list[Line]], unit: str, kind: Kind) -> Chart | None:
    rows = [row for one, name, own in zip(points, panel_names(points), lines, strict=True) for row in _time_rows(one, name, own)]
    legend = {name: (colour, dash) for own in lines for name, colour, dash, values in own if _has_values(values)}
    if not legend:
        return None
    columns = min(len(points), MAX_COLUMNS)
    width = (PAGE_WIDTH - AXIS_WIDTH - SPACING * (columns - 1)) // columns - 4
    x = alt.X("t:Q", title="seconds since the start", scale=alt.Scale(nice=False), axis=alt.Axis(tickCount=6, grid=False))
    base = alt.Chart(width=width, height=TIME_HEIGHT)
    drawn = base.transform_filter("datum.what !== 'outside'")
    marked = (
        drawn.mark_bar(width=3)
        if kind == "bars"
        else drawn.mark_line(strokeWidth=1.5, point=alt.OverlayMarkDef(size=5, filled=True))
    ).encode(
        x=x,
        y=_y(unit, kind, chain.from_iterable(lines)),
        color=_colour(legend),
        **({} if kind == "bars" else {"strokeDash": _dash(legend)}),
        tooltip=_TIME_TIPS,
    )
    shade = base.transform_filter("datum.what === 'outside'").mark_rect(opacity=0.13, color=GREY).encode(x=x, x2="t2:Q")
    facet = alt.Facet(
        "panel:N", title=None, sort=panel_names(points), header=alt.Header(labelFontWeight="bold", labelFontSize=12)
    )
    chart: Chart = (
        alt.layer(shade, marked, data=alt.InlineData(values=rows))
        .facet(facet=facet, columns=columns, spacing=SPACING)
        .resolve_scale(x="independent")
    )
    return chart


def panel_names(points: Sequence[Point]) -> list[str]:
    names = zip(points, labels(points), strict=True)
    return [f"{name}: {one.regime}" if one.valid else f"{name}: INVALID, the client was the limit" for one, name in names]


def _time_rows(point: Point, panel: str, lines: Sequence[Line]) -> list[Row]:
    """The last rows say what lies outside the steady window: shown, not counted."""
    s = point.series
    rows: list[Row] = []
    for what, _, _, values in lines:
        if _has_values(values):
            rows += [{"panel": panel, "what": what, "t": t, "value": _short(v)} for t, v in zip(s.t_s, values, strict=True)]
    if rows:
        end = s.t_s[-1] + s.t_s[0]  # the first middle is half a bin
        outside = [(0.0, point.window_s[0]), (point.window_s[1], end)]
        rows += [{"panel": panel, "what": "outside", "t": a, "t2": b} for a, b in outside if b > a]
    return rows


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


_TIME_TIPS = [
    alt.Tooltip("panel:N", title="scale"),
    alt.Tooltip("what:N", title="line"),
    alt.Tooltip("t:Q", title="seconds"),
    alt.Tooltip("value:Q", format=".4~g"),
]


def by_scale(summary: Summary) -> dict[str, tuple[str, Chart]]:
    """Name -> (title, chart): the points side by side, from the lowest scale to the highest."""
    points = sorted(summary.points, key=lambda one: one.scale)
    limits = {slo.metric: slo.limit_ms for slo in summary.slos}
    caches = [one.cache for one in points]
    ttft, tpot = [one.latency.ttft_schedule_ms for one in points], [one.latency.tpot_ms for one in points]
    wanted: list[tuple[str, str, str, Kind, list[Line]]] = [
        (
            "hit-scale",
            "Prefix hit rate",
            "share of prompt tokens",
            "share",
            [
                ("server counters", ORANGE, DASHED, [one.hit_rate_metrics for one in caches]),
                ("usage", BLUE, SOLID, [one.hit_rate_usage for one in caches]),
                ("predicted", GREY, DASHED, [one.hit_rate_predicted for one in caches]),
            ],
        ),
        ("ttft-scale", "Time to first token", "TTFT, ms (log)", "log", _tails(*_pairs(ttft), limits.get("ttft"))),
        ("tpot-scale", "Time per output token", "TPOT, ms (log)", "log", _tails(*_pairs(tpot), limits.get("tpot"))),
        (
            "kv-scale",
            "KV cache in use",
            "share of KV blocks",
            "full",
            [
                ("median", BLUE, SOLID, [one.kv_usage_p50 for one in caches]),
                ("highest", ORANGE, SOLID, [one.kv_usage_max for one in caches]),
            ],
        ),
        (
            "queue-scale",
            "Requests in the server, highest",
            "requests",
            "count",
            [
                ("running", BLUE, SOLID, [one.running_max for one in caches]),
                ("waiting", ORANGE, SOLID, [one.waiting_max for one in caches]),
            ],
        ),
        (
            "preemptions-scale",
            "Preemptions",
            "preemptions",
            "count",
            [("preemptions", RED, SOLID, [c.preemptions for c in caches])],
        ),
    ]
    found = {name: (title, _scale_chart(points, lines, unit, kind)) for name, title, unit, kind, lines in wanted}
    return {name: (title, chart) for name, (title, chart) in found.items() if chart is not None}


def _pairs(figures: Sequence[Percentiles | None]) -> tuple[Values, Values]:
    return [one.p50 if one else None for one in figures], [one.p99 if one else None for one in figures]


def _scale_chart(points: Sequence[Point], lines: list[Line], unit: str, kind: Kind) -> Chart | None:
    lines = [line for line in lines if _has_values(line[3])]
    if not lines:
        return None
    names = [name if one.valid else f"{name} INVALID" for one, name in zip(points, labels(points), strict=True)]
    rows = [
        {"scale": name, "what": what, "value": _short(value)}
        for what, _, _, values in lines
        for name, value in zip(names, values, strict=True)
    ]
    legend = {name: (colour, dash) for name, colour, dash, _ in lines}
    chart: alt.Chart = (
        alt.Chart(alt.InlineData(values=rows), width=SCALE_WIDTH, height=SCALE_HEIGHT)
        .mark_line(strokeWidth=2, point=alt.OverlayMarkDef(size=45, filled=True))
        .encode(
            x=alt.X("scale:O", title=f"scale (by {points[0].by})", sort=names, axis=alt.Axis(labelAngle=0)),
            y=_y(unit, kind, lines),
            color=_colour(legend),
            strokeDash=_dash(legend),
            tooltip=[alt.Tooltip("scale:O"), alt.Tooltip("what:N", title="line"), alt.Tooltip("value:Q", format=".4~g")],
        )
    )
    return chart


def _y(unit: str, kind: Kind, lines: Iterable[Line]) -> alt.Y:
    seen = [value for _, _, _, values in lines for value in values if value is not None]
    highest = max(seen, default=0.0) or 1  # all zero: an axis from 0 to 1, not a line in mid-air
    axis: dict[str, Any]
    match kind:
        case "full":
            scale, axis = alt.Scale(domain=[0, 1]), {"format": "%", "tickCount": 5}
        case "log":
            low, high = _decades(seen)
            # the usual ticks of a log axis are a dark carpet: decades, with 2 and 5 between them where there are few
            steps = (1,) if high - low > 2 else (1, 2, 5)
            ticks = [step * 10.0**decade for decade in range(low, high + 1) for step in steps]
            scale, axis = alt.Scale(type="log", domain=[10.0**low, 10.0**high]), {"format": "~s", "values": ticks}
        case "share":
            scale, axis = alt.Scale(domainMin=0, domainMax=highest, nice=True), {"format": "~%", "tickCount": 5}
        case "count" | "bars":
            scale, axis = alt.Scale(domainMin=0, domainMax=highest, nice=True), {"format": "~s", "tickCount": 5}
    return alt.Y("value:Q", title=unit, scale=scale, axis=alt.Axis(**axis, minExtent=AXIS_EXTENT, maxExtent=AXIS_EXTENT))


def _decades(seen: Iterable[float]) -> tuple[int, int]:
    """Whole powers of ten around all values, at least one decade."""
    positive = [value for value in seen if value > 0] or [1.0]
    low = math.floor(math.log10(min(positive)))
    return low, max(low + 1, math.ceil(math.log10(max(positive))))


def _colour(legend: dict[str, tuple[str, list[int]]]) -> alt.Color:
    scale = alt.Scale(domain=list(legend), range=[colour for colour, _ in legend.values()])
    return alt.Color("what:N", title=None, scale=scale, legend=_legend(legend))


def _dash(legend: dict[str, tuple[str, list[int]]]) -> alt.StrokeDash:
    scale = alt.Scale(domain=list(legend), range=[dash for _, dash in legend.values()])
    return alt.StrokeDash("what:N", title=None, scale=scale, legend=_legend(legend))


def _legend(lines: dict[str, tuple[str, list[int]]]) -> alt.Legend | None:
    """One line needs no legend: the title names it."""
    return alt.Legend(orient="top", symbolType="stroke") if len(lines) > 1 else None
