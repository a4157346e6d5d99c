"""The servers' /metrics, read on the replay's own clock while it runs."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx

from replay.edge.engines import GAUGES, HITS, CounterBase, ServerState, joint, state_of, wanted_lines
from replay.edge.nvml import NAME as NVML
from replay.edge.nvml import Nvml

type Source = Callable[[], Coroutine[Any, Any, ServerState | None]]

TIMEOUT_S = 2.0
AT_ONCE = 1 << 16  # characters that are looked through in one go, some 0.1 ms: what is due goes out between them


async def scrape(client: httpx.AsyncClient, url: str) -> ServerState | None:
    """One reading; None where there is none to be had (no such page, no answer, not an exposition, no name that we know)."""
    try:
        async with asyncio.timeout(TIMEOUT_S):  # httpx counts from byte to byte: a page that trickles would never end
            response = await client.get(url, timeout=TIMEOUT_S)
            state = state_of(await _lines(response.text)) if response.status_code == 200 else None
    except (httpx.HTTPError, ValueError, TimeoutError):
        return None
    return state if state is not None and state.values else None


async def _lines(text: str) -> list[str]:
    lines, start = [], 0
    while len(text) - start > AT_ONCE and (end := text.rfind("\n", start, start + AT_ONCE) + 1) > start:
        lines += wanted_lines(text[start:end])
        await asyncio.sleep(0)
        start = end
    return lines + wanted_lines(text[start:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All servers at one moment. `values` by our names, counters since the start."""

    values: dict[str, float] = field(default_factory=dict)
    servers: dict[str, dict[str, float]] = field(default_factory=dict)  # gauges and HITS by URL, if there are several
    missing: list[str] = field(default_factory=list)  # URLs that gave nothing
    late: list[str] = field(default_factory=list)  # URLs that have not answered yet


class Scraper:
    """Reads the same pages again and again, counters across restarts of each server. A page is never asked twice at a time."""

    def __init__(self, client: httpx.AsyncClient, urls: Sequence[str], gpus: Nvml | None = None) -> None:
        self._sources: dict[str, Source] = {url: partial(scrape, client, url) for url in urls}
        if gpus is not None:
            self._sources[NVML] = gpus.read
        self._counters = {url: CounterBase() for url in self._sources}
        self._seen: dict[str, ServerState] = {}
        self._under_way: dict[str, asyncio.Task[ServerState | None]] = {}

    async def read(self, patience_s: float | None = None) -> Reading:
        """What has come within so long, or as long as it takes. What is late counts in the reading that finds it there."""
        for url in self._sources:
            if url not in self._under_way:
                self._under_way[url] = asyncio.get_running_loop().create_task(self._sources[url]())
        if self._under_way:
            await asyncio.wait(self._under_way.values(), timeout=patience_s)
        return self._reading({url: task.result() for url, task in list(self._under_way.items()) if task.done()})

    async def read_afresh(self) -> Reading:
        """Asked only now, so that nothing in it is older than this call."""
        await self.read()
        return await self.read()

    def close(self) -> None:
        for task in self._under_way.values():
            task.cancel()
        self._under_way.clear()

    def _reading(self, states: dict[str, ServerState | None]) -> Reading:
        known: list[ServerState] = []
        for url, counters in self._counters.items():
            state = states.get(url)
            if url in states:
                del self._under_way[url]
            if state is not None:
                self._seen[url] = state
                known.append(replace(state, values=state.values | counters.since_start(state.values)))
            elif url in self._seen:  # what it had counted stays in the sum
                known.append(replace(self._seen[url], values=counters.last))
        several = {
            url: {name: state.values[name] for name in GAUGES if name in state.values}
            | {name: self._counters[url].last[name] for name in HITS if name in state.values}
            for url, state in states.items()
            if state is not None and len(self._counters) > 1
        }
        is_told = any(state is not None for state in states.values())
        return Reading(
            values=joint(known) if is_told else {},
            servers=several,
            missing=[url for url, state in states.items() if state is None],
            late=list(self._under_way),
        )
