"""`chatreel capacity`: find it, say it, and show what was tried."""

from rich.console import Console
from rich.table import Table

from replay.capacity import Capacity, CapacityConfig, run_capacity
from replay.judge.summary import Point, load_label
from replay.judge.verdict import EXIT_INVALID, EXIT_OK, EXIT_SLO_MISSED
from replay.report.html import write_html
from replay.report.json import write_json
from replay.report.reading import judge_run
from replay.sweeping import load_name


def find_and_report(config: CapacityConfig, out: Console, err: Console) -> int:
    """Exit code: 3 if the client was the limit anywhere, 4 if not even the lowest load meets the limits, else 0."""
    err.print(f"seed {config.sweep.seed}", highlight=False)
    found = run_capacity(config, lambda line: err.print(line, highlight=False))
    summary = judge_run(config.sweep.run_dir, [one.slo for one in config.limits])
    run_dir = config.sweep.run_dir
    write_json(summary, run_dir / "summary.json")
    write_html(summary, run_dir / "report.html")
    out.print(f"[bold]{verdict_line(found, config)}[/bold]", highlight=False)
    out.print(_table(found, summary.points, config))
    err.print(f"\nreport: {run_dir / 'report.html'}   figures: {run_dir / 'capacity.json'}", highlight=False, soft_wrap=True)
    if any(not one.valid for one in summary.points):
        return EXIT_INVALID
    return EXIT_OK if found.lowest_meets else EXIT_SLO_MISSED


def verdict_line(found: Capacity, config: CapacityConfig) -> str:
    def name(load: float) -> str:
        return load_name(config.sweep, load)

    low, high, estimate = found.bracket.low, found.bracket.high, found.bracket.estimate
    if not found.lowest_meets:
        least = f" of those tried, {name(found.tried[0].load)}," if found.tried else ""
        return f"Not even the lowest load{least} meets the limits."
    about = f", about {name(estimate)}" if estimate is not None else ""
    if low is not None and high is not None:
        return f"Capacity lies between {name(low)} and {name(high)} (99 % confidence at each end){about}."
    if low is not None:
        return f"Capacity is at least {name(low)}: no load of the range surely misses the limits{about}."
    below = f" and below {name(high)}" if high is not None else ""
    return f"Capacity is not sure{below}: too few requests to say that a load meets the limits{about}."


def _table(found: Capacity, points: list[Point], config: CapacityConfig) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("load")
    for title in ("runs", "requests", "met all, 99 % interval", "verdict", "TTFT p99, ms", "TPOT p99, ms", "in flight / Little"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found.tried:
        share = one.shares[0]
        here = [point for point in points if point.scale == one.load]
        table.add_row(
            load_label(one.load, points[0].by),
            str(one.runs),
            str(one.requests),
            f"{share.seen:.2%} ({share.low:.2%}-{share.high:.2%})",
            "grows" if one.is_growing else one.verdict,
            _worst([point.latency.ttft_schedule_ms.p99 for point in here if point.latency.ttft_schedule_ms]),
            _worst([point.latency.tpot_ms.p99 for point in here if point.latency.tpot_ms]),
            ", ".join(f"{point.little.in_flight:.1f} / {point.little.expected:.1f}" for point in here if point.little),
        )
    return table


def _worst(values: list[float]) -> str:
    return f"{max(values):.1f}" if values else "-"
