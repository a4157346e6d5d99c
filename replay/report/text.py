"""The summary in a terminal: what was found, tables of points, notes. Readable at 100 columns and without colour."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from replay.judge.summary import Gpu, Note, Percentiles, Point, Server, Summary

LABEL_WIDTH, CELL_WIDTH = 34, 18  # columns: how many scales fit side by side
VERDICT_STYLES = {
    "flat": "green",
    "knee": "yellow",
    "wall": "red",
    "INVALID": "bold red",
    "suspect": "yellow",
    "invalid": "bold red",
}

type Cells = list[str]
type Section = list[tuple[str, Cells]]


def print_summary(summary: Summary, console: Console) -> None:
    console.print()
    for line in summary.headline:
        console.print(f"[bold]{escape(printable(line))}[/bold]", highlight=False)
    fit = max(1, (console.width - LABEL_WIDTH) // CELL_WIDTH)
    for start in range(0, len(summary.points), fit):
        console.print()
        console.print(_table(summary.points[start : start + fit], labels(summary.points)[start : start + fit]))
    urls = next((tuple(server.url for server in one.servers) for one in summary.points if one.servers), ())
    if urls:
        console.print()
    for number, url in enumerate(urls):
        console.print(f"target {number}: {escape(printable(url))}", highlight=False)
    notes = grouped_notes(summary)
    if notes:
        console.print()
    for where, note in notes:
        text = f"[yellow]note[/yellow] {escape(where)}: {escape(printable(note.seen))}."
        console.print(text, highlight=False)
        console.print(
            Padding(f"[dim]{escape(note.action[:1].upper() + note.action[1:])}.[/dim]", (0, 0, 0, 5), expand=False),
            highlight=False,
        )


def labels(points: Sequence[Point]) -> list[str]:
    """`5x`; a scale that was run twice also says which run it is."""
    scales = [one.scale for one in points]
    return [one.label + (f" #{one.index + 1}" if scales.count(one.scale) > 1 else "") for one in points]


def _table(points: Sequence[Point], names: list[str]) -> Table:
    """Points side by side: figures down, scales across."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"by {points[0].by}")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for number, section in enumerate(figures(points)):
        if number:
            table.add_section()
            table.add_row()
        for label, cells in section:
            table.add_row(label, *(_styled(cell) for cell in cells))
    return table


def _styled(cell: str) -> str:
    style = VERDICT_STYLES.get(cell)
    return f"[{style}]{cell}[/{style}]" if style else cell


def figures(points: Sequence[Point]) -> list[Section]:
    """(label, one cell per point) in sections: load, latency, cache, client. The table of every report."""

    def row(label: str, value: Callable[[Point], str]) -> tuple[str, Cells]:
        return label, [value(one) for one in points]

    load = [
        row("verdict", lambda p: p.regime if p.valid else "INVALID"),
        row("figures", lambda p: p.standing),
        row("offered / sent, requests/s", lambda p: f"{p.offered_per_s:.2f} / {_rate(p.sent_per_s)}"),
        row("answered, requests/s", lambda p: f"{p.requests_per_s:.2f}"),
        row("input / output, tokens/s", lambda p: f"{p.input_tokens_per_s:.0f} / {p.output_tokens_per_s:.0f}"),
        row("planned / answered", lambda p: f"{p.planned} / {p.completed}"),
        row("failed / not sent", lambda p: f"{sum(p.errors.values())} / {p.not_sent}"),
    ]
    if any(p.hung_up or p.retried for p in points):
        load.append(row("hung up / sent again", lambda p: f"{p.hung_up} / {p.retried}"))
    latency = [
        row("TTFT p50 / p99, ms", lambda p: _pair(p.latency.ttft_schedule_ms)),
        row("TTFT from sending, p50 / p99, ms", lambda p: _pair(p.latency.ttft_service_ms)),
        row("TPOT p50 / p99, ms", lambda p: _pair(p.latency.tpot_ms)),
        row("ITL p50 / p99, ms", lambda p: _pair(p.latency.itl_ms))
        if any(p.latency.itl_ms for p in points)
        else row("chunk gap p50 / p99, ms", lambda p: _pair(p.latency.chunk_gap_ms)),
        row("E2E p50 / p99, ms", lambda p: _pair(p.latency.e2e_schedule_ms)),
    ]
    if any(p.goodput_per_s is not None for p in points):
        latency.append(row("goodput, requests/s (SLO met)", _goodput))
    caches = [one.cache for one in points]
    cache = [
        row("prefix hit rate, predicted", lambda p: _share(p.cache.hit_rate_predicted)),
        row("prefix hit rate, usage", lambda p: _share(p.cache.hit_rate_usage)),
        row("prefix hit rate, server counters", lambda p: _share(p.cache.hit_rate_metrics)),
        *([row("found in host memory", lambda p: _share(p.cache.hit_rate_host))] if any(c.hit_rate_host for c in caches) else []),
        row("KV usage p50 / max", lambda p: f"{_share(p.cache.kv_usage_p50)} / {_share(p.cache.kv_usage_max)}"),
        row("preemptions (first after)", _preemptions),
        row("waiting max / running max", lambda p: f"{_number(p.cache.waiting_max)} / {_number(p.cache.running_max)}"),
    ]
    client = [
        row("lateness p50 / p99, ms", lambda p: _pair(p.lateness_ms)),
        row(
            "CPU busy / loop lag p99, ms", lambda p: f"{_per_cent(p.client_cpu_share_busy)} / {_digits(p.client_loop_lag_p99_ms)}"
        ),
        row("later turns sent late", lambda p: str(p.late_turns)),
    ]
    return [load, latency, cache, client, *_gpus(points), *_servers(points)]


def _gpus(points: Sequence[Point]) -> list[Section]:
    """Rows of what is known of any point."""
    if not any(one.gpu for one in points):
        return []

    def shares(label: str, of: Callable[[Gpu], Percentiles | None]) -> tuple[str, Cells] | None:
        seen = [one.gpu and of(one.gpu) for one in points]
        return (label, [f"{_share(x.p50)} / {_share(x.max)}" if x else "-" for x in seen]) if any(seen) else None

    def figure(label: str, of: Callable[[Gpu], float | None], shown: Callable[[float | None], str]) -> tuple[str, Cells] | None:
        seen = [of(one.gpu) if one.gpu else None for one in points]
        return (label, [shown(x) for x in seen]) if any(x is not None for x in seen) else None

    rows = [
        figure("GPUs", lambda g: g.count, _number),
        shares("GPU busy p50 / max", lambda g: g.busy),
        shares("tensor cores active p50 / max", lambda g: g.tensor_active),
        shares("memory bandwidth p50 / max", lambda g: g.memory_active),
        shares("memory busy p50 / max", lambda g: g.memory_busy),
        figure("GPU memory in use, max", lambda g: g.memory_used_share_max, _share),
        figure("power, W", lambda g: g.power_w, _digits),
        figure("energy, J per output token", lambda g: g.energy_per_output_token_j, _digits),
    ]
    return [[one for one in rows if one is not None]]


def _servers(points: Sequence[Point]) -> list[Section]:
    """Where there are several: each one's share of the load, and its own cache."""

    def row(label: str, number: int, value: Callable[[Server], str]) -> tuple[str, Cells]:
        return label, [value(p.servers[number]) if number < len(p.servers) else "-" for p in points]

    def section(number: int) -> Section:
        return [
            row(f"target {number}: planned / answered", number, lambda s: f"{s.planned} / {s.completed}"),
            row("  TTFT p50 / p99, ms", number, lambda s: _pair(s.ttft_ms)),
            row("  hit rate, predicted", number, lambda s: _share(s.hit_rate_predicted)),
            row("  hit rate, usage", number, lambda s: _share(s.hit_rate_usage)),
            row("  hit rate, server counters", number, lambda s: _share(s.hit_rate_metrics)),
        ]

    return [section(number) for number in range(max(len(p.servers) for p in points))]


def _pair(value: Percentiles | None) -> str:
    return "-" if value is None else f"{_digits(value.p50)} / {_digits(value.p99)}"


def _digits(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 0.995 else f"{value:.2f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _per_cent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _preemptions(point: Point) -> str:
    first = point.cache.first_preemption_s
    return _number(point.cache.preemptions) + (f" ({first:.0f} s)" if first is not None else "")


def _goodput(point: Point) -> str:
    if point.goodput_per_s is None or point.attainment is None:
        return "-"
    return f"{point.goodput_per_s:.2f} ({point.attainment:.1%})"


def grouped_notes(summary: Summary) -> list[tuple[str, Note]]:
    """(where, note): the run's, then each note of the points once, with the scales that it concerns."""
    found = [("run", note) for note in summary.notes]
    scales: dict[Note, list[str]] = {}
    for name, point in zip(labels(summary.points), summary.points, strict=True):
        for note in point.notes:
            scales.setdefault(note, []).append(name)
    return found + [(", ".join(names), note) for note, names in scales.items()]


def printable(text: str) -> str:
    """Servers' words may hold control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in text)
