"""The summary as Vega-Lite charts: one row of values per bin or point, so a long run stays a small page. Pure."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from replay.judge.summary import Point, Summary

WIDTH, HEIGHT = 480, 180
SCALE_COLOURS = ["#4c78a8", "#f58518", "#b5179e", "#54a24b", "#72b7b2", "#9d755d"]

type Chart = alt.Chart


def charts(summary: Summary) -> dict[str, tuple[str, Chart]]:
    """Name -> (title, chart); charts for which nothing was measured are left out."""
    over_time = _time_rows(summary.points)
    per_scale = _scale_rows(summary.points)
    wanted: list[tuple[str, str, Chart | None]] = [
        ("hit-rate", "Prefix hit rate by scale", _by_scale(per_scale, "hit", "share", "hit rate")),
        ("preemptions-scale", "Preemptions by scale", _by_scale(per_scale, "preempt", "count", "preemptions")),
        ("ttft-scale", "TTFT by scale (from the planned time)", _by_scale(per_scale, "ttft", "ms", "TTFT, ms (log)")),
        ("tpot-scale", "TPOT by scale", _by_scale(per_scale, "tpot", "ms", "TPOT, ms (log)")),
        ("load", "Offered load (dashed) and completed requests", _lines(over_time, ["completed", "offered"], "requests/s")),
        ("ttft", "TTFT p50 and p99 (dashed) over time", _lines(over_time, ["ttft p50", "ttft p99"], "ms", log=True)),
        ("tpot", "TPOT p50 and p99 (dashed) over time", _lines(over_time, ["tpot p50", "tpot p99"], "ms", log=True)),
        (
            "hit",
            "Prefix hit rate over time, predicted mean (dashed)",
            _lines(over_time, ["hit", "predicted"], "share", share=True),
        ),
        ("kv", "KV blocks held by running requests", _lines(over_time, ["kv"], "share", share=True)),
        ("preemptions", "Preemptions, new ones per bin", _lines(over_time, ["preemptions"], "count")),
        ("queue", "Requests waiting in the server", _lines(over_time, ["waiting"], "requests")),
        ("running", "Requests running in the server", _lines(over_time, ["running"], "requests")),
    ]
    return {name: (title, chart) for name, title, chart in wanted if chart is not None}


def _time_rows(points: list[Point]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for point in points:
        s = point.series
        columns: dict[str, Sequence[float | None]] = {
            "offered": s.offered_per_s,
            "completed": s.completed_per_s,
            "ttft p50": s.ttft_p50_ms,
            "ttft p99": s.ttft_p99_ms,
            "tpot p50": s.tpot_p50_ms,
            "tpot p99": s.tpot_p99_ms,
            "hit": s.hit_rate,
            "predicted": [point.cache.hit_rate_predicted if hit is not None else None for hit in s.hit_rate],
            "kv": s.kv_usage,
            "preemptions": s.preemptions,
            "waiting": s.waiting,
            "running": s.running,
        }
        for what, values in columns.items():
            rows += [
                {"t": t, "value": value, "what": what, "scale": f"{point.scale:g}x"}
                for t, value in zip(s.t_s, values, strict=True)
                if value is not None
            ]
    return rows


def _scale_rows(points: list[Point]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(family: str, what: str, point: Point, value: float | None) -> None:
        if value is not None:
            rows.append({"family": family, "what": what, "scale": point.scale, "value": value})

    for point in points:
        cache, ttft, tpot = point.cache, point.latency.ttft_schedule_ms, point.latency.tpot_ms
        reported = cache.hit_rate_usage if cache.hit_rate_usage is not None else cache.hit_rate_metrics
        add("hit", "predicted", point, cache.hit_rate_predicted)
        add("hit", "reported", point, reported)
        add("preempt", "preemptions", point, cache.preemptions)
        for name, figure in (("ttft", ttft), ("tpot", tpot)):
            add(name, "p50", point, figure.p50 if figure else None)
            add(name, "p99", point, figure.p99 if figure else None)
    return rows


def _lines(rows: list[dict[str, Any]], names: list[str], unit: str, *, log: bool = False, share: bool = False) -> Chart | None:
    """One line per scale; the second name, if any, is dashed."""
    rows = [row for row in rows if row["what"] in names and not (log and row["value"] <= 0)]
    if not rows:
        return None
    scales = sorted({row["scale"] for row in rows}, key=lambda text: float(text[:-1]))
    scale = alt.Scale(type="log") if log else alt.Scale(domain=[0, 1]) if share else alt.Scale(zero=True)
    chart: Chart = (
        alt.Chart(alt.InlineData(values=rows), width=WIDTH, height=HEIGHT)
        .mark_line(interpolate="monotone", strokeWidth=1.6, point=alt.OverlayMarkDef(size=6))
        .encode(
            x=alt.X("t:Q", title="seconds since the start of the point"),
            y=alt.Y("value:Q", title=unit, scale=scale, axis=alt.Axis(format="%" if share else "~s")),
            color=alt.Color("scale:N", title="scale", scale=alt.Scale(domain=scales, range=SCALE_COLOURS[: len(scales)])),
            strokeDash=alt.StrokeDash("what:N", legend=None, scale=alt.Scale(domain=names, range=[[1, 0], [4, 3]])),
            tooltip=["scale:N", "what:N", "t:Q", "value:Q"],
        )
    )
    return chart


def _by_scale(rows: list[dict[str, Any]], family: str, kind: str, title: str) -> Chart | None:
    rows = [row for row in rows if row["family"] == family and not (kind == "ms" and row["value"] <= 0)]
    if not rows:
        return None
    names = sorted({row["what"] for row in rows})
    scales = sorted({row["scale"] for row in rows})
    scale = {"share": alt.Scale(domain=[0, 1]), "ms": alt.Scale(type="log"), "count": alt.Scale(zero=True)}[kind]
    chart: Chart = (
        alt.Chart(alt.InlineData(values=rows), width=WIDTH, height=HEIGHT)
        .mark_line(strokeWidth=2, point=alt.OverlayMarkDef(size=60, filled=True))
        .encode(
            x=alt.X("scale:Q", title="scale", axis=alt.Axis(labelExpr="datum.label + 'x'", values=scales)),
            y=alt.Y("value:Q", title=title, scale=scale, axis=alt.Axis(format="%" if kind == "share" else "~s")),
            color=alt.Color("what:N", title=None, scale=alt.Scale(domain=names, range=["#4c78a8", "#f58518"])),
            strokeDash=alt.StrokeDash("what:N", title=None, scale=alt.Scale(domain=names, range=[[5, 3], [1, 0]])),
            tooltip=["what:N", "scale:Q", "value:Q"],
        )
    )
    return chart
