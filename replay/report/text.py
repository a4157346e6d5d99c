"""The summary in a terminal: what was found, a table of points, notes."""

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from replay.judge.summary import Percentiles, Point, Summary
from replay.judge.verdict import reported_hit_rate


def print_summary(summary: Summary, console: Console) -> None:
    console.print()
    for line in summary.headline:
        console.print(f"[bold]{escape(line)}[/bold]")
    console.print()
    console.print(_table(summary))
    for note in _notes(summary):
        console.print(note)


def _table(summary: Summary) -> Table:
    """Points side by side: figures down, scales across."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"by {summary.points[0].by}" if summary.points else "")
    for one in summary.points:
        table.add_column(f"{one.scale:g}x", justify="right")
    for label, cells in figure_rows(summary.points):
        table.add_row(label, *cells)
    return table


def figure_rows(points: list[Point]) -> list[tuple[str, list[str]]]:
    """(label, one cell per point): the table of every report."""

    def each(value: Callable[[Point], str]) -> list[str]:
        return [value(one) for one in points]

    return [
        ("offered, requests/s", each(lambda p: f"{p.offered_per_s:.2f}")),
        ("completed, requests/s", each(lambda p: f"{p.requests_per_s:.2f}")),
        ("sent / failed / not sent", each(lambda p: f"{p.sent} / {sum(p.errors.values())} / {p.not_sent}")),
        ("TTFT p50 / p99, ms", each(lambda p: _pair(p.latency.ttft_schedule_ms))),
        ("TPOT p50 / p99, ms", each(lambda p: _pair(p.latency.tpot_ms))),
        ("ITL p50 / p99, ms", each(lambda p: _pair(p.latency.itl_ms))),
        ("E2E p50 / p99, ms", each(lambda p: _pair(p.latency.e2e_schedule_ms))),
        ("output tokens/s", each(lambda p: f"{p.output_tokens_per_s:.0f}")),
        ("prefix hit rate, predicted", each(lambda p: _share(p.cache.hit_rate_predicted))),
        ("prefix hit rate, reported", each(lambda p: _share(reported_hit_rate(p)))),
        ("KV usage p50 / max", each(lambda p: f"{_share(p.cache.kv_usage_p50)} / {_share(p.cache.kv_usage_max)}")),
        ("preemptions", each(lambda p: _number(p.cache.preemptions))),
        ("waiting max / running max", each(lambda p: f"{_number(p.cache.waiting_max)} / {_number(p.cache.running_max)}")),
        ("goodput, requests/s (attained)", each(_goodput)),
        ("lateness p50 / p99, ms", each(lambda p: _pair(p.lateness_ms))),
        ("verdict", each(lambda p: p.regime if p.valid else "INVALID")),
    ]


def _pair(value: Percentiles | None) -> str:
    return "-" if value is None else f"{_digits(value.p50)} / {_digits(value.p99)}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 1 else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _goodput(point: Point) -> str:
    if point.goodput_per_s is None or point.attainment is None:
        return "-"
    return f"{point.goodput_per_s:.2f} ({point.attainment:.1%})"


def _notes(summary: Summary) -> list[str]:
    """Each kind of note once, with the scales that it concerns."""
    lines: dict[tuple[str, str], list[str]] = {}
    for one in summary.points:
        if one.cause:
            lines.setdefault((f"{one.regime}: {one.cause}", ""), []).append(f"{one.scale:g}x")
        for note in one.notes:
            lines.setdefault((note.seen, note.action), []).append(f"{one.scale:g}x")
    texts = [f"[dim]note[/dim] {', '.join(scales)}: {escape(_sentence(*key))}" for key, scales in lines.items()]
    return ["", *(f"[dim]note[/dim] {escape(note.seen)}" for note in summary.notes), *texts]


def _sentence(seen: str, action: str) -> str:
    return f"{seen}. To do: {action}" if action else seen
