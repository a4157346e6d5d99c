"""An analysis as Vega-Lite charts: some hundred rows of values each, however long the trace is. Pure."""

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from tracer.analysis.kv import Budget
from tracer.analysis.memory import Causes, Demand, FootprintPoint, MarginalPoint, ReuseTime
from tracer.analysis.profile import LengthBin, Profile
from tracer.analysis.routing import Routing
from tracer.analysis.summary import Analysis, EngineSharing
from tracer.report.page import Chart

WIDTH, HALF_WIDTH, HEIGHT = 1040, 470, 210
BLUE, ORANGE, GREEN, GREY, RED = "#3f7fd0", "#e0811c", "#3a9d6a", "#8b95a1", "#d3455b"  # readable on white and near-black
SOLID, DASHED = [1, 0], [5, 3]
HEADROOM = 1.15  # names of upright lines stand there
SHARE_AXIS = alt.Axis(format="~%", tickCount=5)

type Row = dict[str, Any]
type Found = dict[str, tuple[str, Chart]]


def memory_charts(found: Analysis) -> Found:
    """Name -> (title, chart). Nothing known: no chart."""
    charts: Found = {}
    budget = found.kv.budget if found.kv else None
    if found.engine_sharing and found.engine_sharing.curve:
        charts["hit"] = ("Hit rate by KV memory: LRU, answers cached too", _hit(found.engine_sharing, found, budget))
    memory = found.memory
    if memory is None:
        return charts
    if memory.causes.cold:
        charts["causes"] = ("Whose prefixes are hit", _causes(memory.causes, budget))
        charts["marginal"] = ("What half as much memory again would buy", _marginal(memory.marginal, budget))
    if memory.reuse_time:
        charts["reuse"] = ("Time since the same tokens were last used", _reuse(memory.reuse_time))
    if len(memory.footprint) > 1:
        charts["footprint"] = ("Distinct tokens after so many requests", _footprint(memory.footprint))
    if found.routing:
        charts["routing"] = (f"Hit rate of {found.routing[0].replicas} replicas by routing rule", _routing(found.routing, budget))
    return charts


def time_charts(found: Analysis) -> Found:
    charts: Found = {}
    if found.profile and len(found.profile.requests_per_s) > 1:
        charts["rate"] = ("Arrivals", _rate(found.profile))
    if found.memory and found.memory.demand.at_s[-1] > 0:
        charts["demand"] = (
            "KV tokens: held by running requests, and touched lately",
            _demand(found.memory.demand, found.kv.budget if found.kv else None),
        )
    return charts


def length_charts(found: Analysis) -> Found:
    profile = found.profile
    if profile is None or not (profile.input_tokens or profile.output_tokens):
        return {}
    return {"lengths": ("Tokens of prompts and answers", _lengths(profile))}


def overlay(lines: dict[str, list[tuple[float, float]]], x_title: str, y_title: str, *, log_x: bool = True) -> Chart:
    """Shares (0 to 1) of several traces over one axis: points (x, y) by name, at most four names."""
    legend = dict(zip(lines, (BLUE, ORANGE, GREEN, GREY), strict=False))
    rows: list[Row] = [{"what": name, "x": x, "y": y} for name, points in lines.items() for x, y in points if x > 0 or not log_x]
    x = _log_x([row["x"] for row in rows], x_title) if log_x else alt.X("x:Q", title=x_title)
    y = _share_y(y_title, max(row["y"] for row in rows))
    return _lines(rows, legend, x, y, _tips(x_title, y_title, ".1%"), dashed=set(list(lines)[1:]), width=WIDTH)


def _log_x(values: Sequence[float], title: str = "KV memory, tokens (log)") -> alt.X:
    """The usual ticks of a log axis are a dark carpet: decades, with 2 and 5 between them where there are few."""
    low, high = min(values), max(values)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1,) if len(decades) > 5 else (1, 2, 5)
    ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
    scale = alt.Scale(type="log", nice=False, domain=[low, high if high > low else 2 * low])
    return alt.X("x:Q", title=title, scale=scale, axis=alt.Axis(format="~s", values=ticks))


def _sizes_x(rows: Sequence[Row], budget: Budget | None, title: str = "KV memory, tokens (log)") -> alt.X:
    """Wide enough for the budget's line."""
    own = [budget.kv_tokens] if budget and budget.kv_tokens else []
    return _log_x([row["x"] for row in rows] + own, title)


def _share_y(title: str, highest: float) -> alt.Y:
    return alt.Y("y:Q", title=title, scale=alt.Scale(domain=[0, (highest or 1.0) * HEADROOM]), axis=SHARE_AXIS)


def _chart(rows: Sequence[Row], width: int = HALF_WIDTH) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=[_rounded(row) for row in rows]), width=width, height=HEIGHT)


def _rounded(row: Row) -> Row:
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in row.items()}


def _colour(legend: dict[str, str]) -> alt.Color:
    """One line needs no legend: the title names it."""
    scale = alt.Scale(domain=list(legend), range=list(legend.values()))
    shown = alt.Legend(orient="top", symbolType="stroke", labelLimit=320) if len(legend) > 1 else None
    return alt.Color("what:N", title=None, scale=scale, legend=shown)


def _squares(legend: dict[str, str]) -> alt.Color:
    return _colour(legend).legend(alt.Legend(orient="top", symbolType="square", symbolStrokeWidth=0) if len(legend) > 1 else None)


def _dash(legend: dict[str, str], dashed: set[str]) -> alt.StrokeDash:
    ranges = [DASHED if name in dashed else SOLID for name in legend]
    return alt.StrokeDash("what:N", scale=alt.Scale(domain=list(legend), range=ranges), legend=None)


def _tips(x: str, y: str, y_format: str) -> list[alt.Tooltip]:
    return [
        alt.Tooltip("what:N", title="line"),
        alt.Tooltip("x:Q", title=x, format=".3~s"),
        alt.Tooltip("y:Q", title=y, format=y_format),
    ]


def _lines(rows: Sequence[Row], legend: dict[str, str], x: alt.X, y: alt.Y, tips: list[alt.Tooltip], **more: Any) -> alt.Chart:
    dashed, width = more.get("dashed", set()), more.get("width", HALF_WIDTH)
    chart: alt.Chart = (
        _chart(rows, width)
        .mark_line(strokeWidth=2, interpolate=more.get("interpolate", "linear"))
        .encode(x=x, y=y, color=_colour(legend), strokeDash=_dash(legend, dashed), tooltip=tips)
    )
    return chart


def _with_budget(chart: alt.Chart, budget: Budget | None, rows: Sequence[Row], *, across: bool = False) -> Chart:
    """A line at what one replica's GPUs hold."""
    if budget is None or budget.kv_tokens < 1:
        return chart
    gpus = budget.gpu if budget.tensor_parallel == 1 else f"{budget.tensor_parallel} x {budget.gpu}"
    mark = alt.Chart(alt.InlineData(values=[{"at": budget.kv_tokens, "label": gpus}]))
    if across:
        line = mark.mark_rule(color=RED, strokeDash=DASHED, strokeWidth=1.5).encode(y=alt.Y("at:Q"))
        text = mark.mark_text(color=RED, align="right", dx=-4, dy=-6).encode(y="at:Q", x=alt.value("width"), text="label:N")
    else:
        line = mark.mark_rule(color=RED, strokeDash=DASHED, strokeWidth=1.5).encode(x=alt.X("at:Q"))
        at_end = budget.kv_tokens > 0.3 * max(row["x"] for row in rows)  # there the name stands before its line
        named = mark.mark_text(color=RED, dy=8, align="right" if at_end else "left", dx=-4 if at_end else 4)
        text = named.encode(x="at:Q", y=alt.value(0), text="label:N")
    layered: Chart = alt.layer(chart, line, text)
    return layered


def _hit(engine: EngineSharing, found: Analysis, budget: Budget | None) -> Chart:
    legend = {"all requests": BLUE}
    rows: list[Row] = [{"what": "all requests", "x": one.cache_tokens, "y": one.hit_rate} for one in engine.curve]
    if found.memory and found.memory.causes.warm:
        warm = f"without the first {found.memory.causes.warm_up_share:.0%}, which fill the cache"
        legend[warm] = ORANGE
        rows += [{"what": warm, "x": one.cache_tokens, "y": one.hit_rate} for one in found.memory.causes.warm]
    if found.memory and found.memory.eviction:
        legend |= {"with the best eviction there can be": GREEN, "with FIFO": GREY}
        for one in found.memory.eviction:
            rows.append({"what": "with the best eviction there can be", "x": one.cache_tokens, "y": one.optimal})
            rows.append({"what": "with FIFO", "x": one.cache_tokens, "y": one.fifo})
    x, y = _sizes_x(rows, budget), _share_y("share of prompt tokens", max(row["y"] for row in rows))
    dashed, tips = {*legend} - {"all requests"}, _tips("KV tokens", "hit rate", ".1%")
    return _with_budget(_lines(rows, legend, x, y, tips, dashed=dashed, width=WIDTH), budget, rows)


def _causes(causes: Causes, budget: Budget | None) -> Chart:
    names = {"global_prefix": "global prefix", "own_session": "own session", "sharing_group": "sharing group"}
    if not causes.sessions_known:
        names = {"global_prefix": "global prefix", "sharing_group": "shared by a few requests"}
    legend = dict(zip(names.values(), (GREY, BLUE, GREEN) if len(names) == 3 else (GREY, GREEN), strict=True))
    rows: list[Row] = [
        {"what": name, "x": one.cache_tokens, "y": max(float(getattr(one, field)), 0.0), "order": k}
        for k, (field, name) in enumerate(names.items())
        for one in causes.cold
    ]
    y = _share_y("share of prompt tokens", max(one.hit_rate for one in causes.cold))
    area: alt.Chart = (
        _chart(rows)
        .mark_area(opacity=0.8)
        .encode(
            x=_sizes_x(rows, budget),
            y=y.stack("zero"),
            color=_squares(legend),
            order="order:Q",
            tooltip=_tips("KV tokens", "share", ".1%"),
        )
    )
    return _with_budget(area, budget, rows)


def _marginal(points: Sequence[MarginalPoint], budget: Budget | None) -> Chart:
    legend = {"with half more": BLUE}
    rows: list[Row] = [{"what": "with half more", "x": one.cache_tokens, "y": one.gain_of_half_more} for one in points]
    y = _share_y("hit rate gained", max(row["y"] for row in rows))
    return _with_budget(_lines(rows, legend, _sizes_x(rows, budget), y, _tips("KV tokens", "gained", ".1%")), budget, rows)


def _reuse(found: ReuseTime) -> Chart:
    step = 10 ** (1 / 4)
    rows: list[Row] = [{"x": one.up_to / step, "x2": one.up_to, "y": one.share, "base": 0} for one in found.histogram]
    first = next(k for k, row in enumerate(rows) if row["y"] > 0)
    ends = [row[end] for row in rows[first:] for end in ("x", "x2")]
    bars = (
        _chart(rows[first:])
        .mark_bar(color=BLUE, opacity=0.85)
        .encode(
            x=_log_x(ends, "seconds (log)"),
            x2="x2:Q",
            y2="base:Q",
            y=_share_y("share of possible hits", max(row["y"] for row in rows)),
            tooltip=[
                alt.Tooltip("x2:Q", title="up to, s", format=".3~s"),
                alt.Tooltip("y:Q", title="share", format=".1%"),
            ],
        )
    )
    marks: list[Row] = [{"at": found.p50_s, "label": "50 %"}, {"at": found.p90_s, "label": "90 %"}]
    quantiles = alt.Chart(alt.InlineData(values=[mark for mark in marks if mark["at"] > rows[first]["x"]]))
    line = quantiles.mark_rule(color=ORANGE, strokeWidth=1.5).encode(x=alt.X("at:Q"))
    text = quantiles.mark_text(color=ORANGE, align="left", dx=4, dy=8).encode(x="at:Q", y=alt.value(0), text="label:N")
    layered: Chart = alt.layer(bars, line, text)
    return layered


def _footprint(points: Sequence[FootprintPoint]) -> Chart:
    rows = [{"what": "distinct tokens", "x": one.requests, "y": one.tokens} for one in points]
    x = alt.X("x:Q", title="requests", scale=alt.Scale(nice=False), axis=alt.Axis(format="~s", tickCount=6))
    y = alt.Y("y:Q", title="tokens", axis=alt.Axis(format="~s", tickCount=5))
    return _lines(rows, {"distinct tokens": BLUE}, x, y, _tips("requests", "tokens", ".3~s"))


def _routing(found: Sequence[Routing], budget: Budget | None) -> Chart:
    colours = {"round_robin": GREY, "session_sticky": BLUE, "prefix_aware": GREEN}
    legend = {one.rule.replace("_", " "): colours[one.rule] for one in found}
    rows: list[Row] = [
        {"what": one.rule.replace("_", " "), "x": point.cache_tokens_per_replica, "y": point.hit_rate}
        for one in found
        for point in one.curve
        if point.cache_tokens_per_replica > 0
    ]
    y = _share_y("share of prompt tokens", max(row["y"] for row in rows))
    x = _sizes_x(rows, budget, "KV memory of each replica, tokens (log)")
    return _with_budget(_lines(rows, legend, x, y, _tips("KV tokens each", "hit rate", ".1%")), budget, rows)


def _time_unit(span_s: float) -> tuple[float, str]:
    if span_s >= 3 * 86400:
        return 86400.0, "days"
    return (3600.0, "hours") if span_s >= 3 * 3600 else (60.0, "minutes") if span_s >= 300 else (1.0, "seconds")


def _time_x(unit: str) -> alt.X:
    return alt.X("x:Q", title=f"{unit} since the start", scale=alt.Scale(nice=False), axis=alt.Axis(tickCount=10, grid=False))


def _rate(profile: Profile) -> Chart:
    bin_s, rates = profile.rate_bin_s, profile.requests_per_s
    scale, unit = _time_unit(bin_s * len(rates))
    rows = [{"what": "arrivals", "x": (k + 0.5) * bin_s / scale, "y": rate} for k, rate in enumerate(rates)]
    y = alt.Y("y:Q", title="requests/s", scale=alt.Scale(domainMin=0), axis=alt.Axis(format="~s", tickCount=5))
    tips = _tips(unit, "requests/s", ".3~s")
    return _lines(rows, {"arrivals": BLUE}, _time_x(unit), y, tips, width=WIDTH, interpolate="step")


def _demand(found: Demand, budget: Budget | None) -> Chart:
    scale, unit = _time_unit(found.at_s[-1])
    series = {
        "running requests": (BLUE, found.running_tokens),
        "touched in the last 60 s": (ORANGE, found.working_set_60s_tokens),
        "touched in the last 600 s": (GREEN, found.working_set_600s_tokens),
    }
    rows: list[Row] = [
        {"what": name, "x": at / scale, "y": value or None}  # a log axis has no zero
        for name, (_, values) in series.items()
        for at, value in zip(found.at_s, values, strict=True)
    ]
    seen = [row["y"] for row in rows if row["y"]] + ([budget.kv_tokens] if budget and budget.kv_tokens else [])
    seen = seen or [1]
    domain = [10.0 ** math.floor(math.log10(min(seen))), 10.0 ** max(math.ceil(math.log10(max(seen) + 1)), 1)]
    ticks = [10.0**k for k in range(round(math.log10(domain[0])), round(math.log10(domain[1])) + 1)]
    y = alt.Y("y:Q", title="tokens (log)", scale=alt.Scale(type="log", domain=domain), axis=alt.Axis(format="~s", values=ticks))
    legend = {name: colour for name, (colour, _) in series.items()}
    return _with_budget(
        _lines(rows, legend, _time_x(unit), y, _tips(unit, "tokens", ".3~s"), width=WIDTH), budget, rows, across=True
    )


def _lengths(profile: Profile) -> Chart:
    rows: list[Row] = [*_length_rows("prompts", profile.input_tokens), *_length_rows("answers", profile.output_tokens)]
    legend = {name: colour for name, colour in (("prompts", BLUE), ("answers", ORANGE)) if any(r["what"] == name for r in rows)}
    ends = [row[end] for row in rows for end in ("x", "x2")]
    chart: alt.Chart = (
        _chart(rows, WIDTH)
        .mark_bar(opacity=0.6)
        .encode(
            x=_log_x(ends, "tokens (log)"),
            x2="x2:Q",
            y2="base:Q",
            y=_share_y("share of requests", max(row["y"] for row in rows)).stack(None),
            color=_squares(legend),
            tooltip=[
                alt.Tooltip("what:N"),
                alt.Tooltip("x:Q", title="from", format=".3~s"),
                alt.Tooltip("x2:Q", title="below", format=".3~s"),
                alt.Tooltip("y:Q", title="share", format=".1%"),
            ],
        )
    )
    return chart


def _length_rows(name: str, bins: Sequence[LengthBin]) -> list[Row]:
    total = sum(one.requests for one in bins)
    return [
        {"what": name, "x": max(one.from_tokens, 0.5), "x2": one.below_tokens, "y": one.requests / total, "base": 0}
        for one in bins
    ]
