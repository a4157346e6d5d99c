"""Progress bars on stderr, only where a person watches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from replay.progress import Progress as PointProgress


@contextmanager
def byte_progress(console: Console, title: str) -> Iterator[Callable[[int, int], None] | None]:
    if not console.is_terminal:
        yield None
        return
    with Progress(TextColumn(title), BarColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(title)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def replay_progress(console: Console) -> Iterator[Callable[[PointProgress], None]]:
    """One bar per point; without a terminal, one line when a point begins and one when it ends."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=console, disable=not console.is_terminal, refresh_per_second=4) as progress:
        tasks: dict[int, object] = {}

        def show(point: PointProgress) -> None:
            if id(point) not in tasks:
                tasks[id(point)] = progress.add_task(f"{point.scale:g}x", total=point.planned, state="")
                if not console.is_terminal:
                    console.print(f"{point.scale:g}x: {point.planned} requests", highlight=False)
            progress.update(tasks[id(point)], completed=point.counts.ended, state=_state(point))  # type: ignore[arg-type]

        yield show


def _state(point: PointProgress) -> str:
    counts = point.counts
    parts = [f"{counts.ended}/{point.planned} done, {point.in_flight} in flight"]
    if counts.errors:
        parts.append(f"{counts.errors} failed")
    if counts.prompt_tokens:
        parts.append(f"hits {counts.cached_tokens / counts.prompt_tokens:.0%}")
    sample = point.last_sample
    if sample is not None and sample.kv_usage is not None:
        parts.append(f"KV {sample.kv_usage:.0%}")
    if sample is not None and sample.preemptions:
        parts.append(f"{sample.preemptions:.0f} preemptions")
    return ", ".join(parts)
