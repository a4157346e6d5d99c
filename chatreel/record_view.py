"""What a recording shows while it runs: a table on a terminal, else a line each ten seconds."""

from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tracer.record.figures import quantile
from tracer.record.session import RecordStats

LINE_S = 10.0
RATE_S = 10.0


class Rate:
    """Requests per second over the last ten seconds."""

    def __init__(self, now_s: float) -> None:
        self._seen = deque([(now_s, 0)])

    def at(self, now_s: float, seen: int) -> float:
        self._seen.append((now_s, seen))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - RATE_S:
            self._seen.popleft()
        since_s, before = self._seen[0]
        return (seen - before) / (now_s - since_s) if now_s > since_s else 0.0


class RecordView:
    """Use as a context; call `show` with each stats."""

    def __init__(self, console: Console, workers: int, now_s: Callable[[], float]) -> None:
        self._console = console
        self._workers = workers
        self._now_s = now_s
        self._live = Live("", console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        began_s = now_s()
        self._rate = Rate(began_s)
        self._line_at_s = began_s + LINE_S

    def __enter__(self) -> "RecordView":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, stats: RecordStats) -> None:
        now_s = self._now_s()
        lines = facts(stats, self._rate.at(now_s, stats.seen), self._workers)
        if self._live is not None:
            self._live.update(_table(lines), refresh=True)
        elif now_s >= self._line_at_s:
            self._line_at_s = now_s + LINE_S
            text = "; ".join(f"{name}: {text}" for name, text in lines)
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def facts(stats: RecordStats, per_s: float, workers: int = 1) -> list[tuple[str, str]]:
    figures = stats.figures
    ttft = [_time(quantile(figures.ttft_us, share)) for share in (0.5, 0.99)]
    given, made = (_count(quantile(sketch, 0.5)) for sketch in (figures.input_tokens, figures.output_tokens))
    lines = [
        ("requests", f"{stats.seen:,} ({per_s:,.1f}/s), {stats.in_flight:,} in flight, {stats.recorded:,} written"),
        ("first token", f"p50 {ttft[0]}, p99 {ttft[1]}"),
        ("tokens", f"p50 in {given}, out {made}"),
        ("prefix reuse", _reuse(stats, workers)),
        ("token drift", f"{stats.token_drift:,} requests"),
        ("drops", f"{stats.lost:,} rows lost, {stats.prompts_shed:,} without prompt"),
    ]
    return lines + ([("disk", stats.disk_error)] if stats.disk_error else [])


def _reuse(stats: RecordStats, workers: int) -> str:
    """Each worker knows its own prompts only, and the oldest blocks are forgotten: then the share is a lower bound."""
    figures = stats.figures
    if not figures.prompt_blocks:
        return "-"
    bounds = [why for why, is_so in (("per worker", workers > 1), ("old blocks forgotten", figures.forgets)) if is_so]
    least = f"at least ({', '.join(bounds)}) " if bounds else ""
    return f"{least}{figures.reused_blocks / figures.prompt_blocks:.1%} of {figures.prompt_blocks:,} prompt blocks"


def _time(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{us / 1e3:.3g} ms" if us < 999_500 else f"{us / 1e6:.3g} s"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _table(lines: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, text in lines:
        is_bad = name == "disk" or (name == "drops" and not text.startswith("0 rows lost"))
        table.add_row(Text(name, style="dim"), Text(text, style="red" if is_bad else ""))
    return table
