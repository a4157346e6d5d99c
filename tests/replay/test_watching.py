"""A slow metrics page neither delays the first request nor piles up samples while requests go out."""

import asyncio
import io
import time
from functools import partial

import msgspec

from replay.edge.scrape import Reading
from replay.outcome import Sample
from replay.progress import Progress
from replay.run import _Watch
from replay.sharing import LOOK_AHEAD_NS, Counts, Stop
from replay.starting import wait_for_start, wait_until_near


class SlowScraper:
    """Takes longer than the look-ahead at first; then it is late."""

    async def read(self, patience_s: float | None = None) -> Reading:
        await asyncio.sleep(1.5 * LOOK_AHEAD_NS / 1e9 if patience_s is None else patience_s)
        return Reading(late=["slow"])

    async def read_afresh(self) -> Reading:
        return Reading(values={"running": 1.0})

    def close(self) -> None: ...


class Sender:
    def __init__(self) -> None:
        self.early_ns = 0

    async def ready(self) -> None: ...

    async def run(self, start_ns: int) -> None:
        self.early_ns = start_ns - time.monotonic_ns()
        await asyncio.sleep(0.5)

    def counts(self) -> list[Counts]:
        return [Counts(sent=3)]


def test_the_first_request_has_its_whole_look_ahead_however_slow_the_page() -> None:
    sender, samples = Sender(), io.BytesIO()
    progress = Progress(scale=1.0, planned=3, predicted_hit_rate=None)

    watch = _Watch(SlowScraper(), 0.1, sender, progress, lambda _: None)  # type: ignore[arg-type]
    asyncio.run(watch.run(samples, partial(wait_until_near, None, Stop()), partial(wait_for_start, None, Stop())))

    seen = [msgspec.json.decode(line, type=Sample) for line in samples.getvalue().splitlines()]
    assert sender.early_ns > 0.5 * LOOK_AHEAD_NS
    assert [one.metrics_late for one in seen[:-1]] == [["slow"]] * (len(seen) - 1) and seen[-1].running == 1
    assert 3 <= len(seen) <= 8 and all(one.client_in_flight == 3 for one in seen)
