"""The servers' /metrics, read on the replay's own clock while it runs."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import httpx

from replay.edge.engines import GAUGES, CounterBase, ServerState, joint, read_metrics

TIMEOUT_S = 2.0


async def scrape(client: httpx.AsyncClient, url: str) -> ServerState | None:
    """One reading; None where there is none to be had (no such page, no answer, not an exposition, no name that we know)."""
    try:
        response = await client.get(url, timeout=TIMEOUT_S)
        state = read_metrics(response.text) if response.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
    return state if state is not None and state.values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All servers at one moment. `values` by our names, counters since the start."""

    values: dict[str, float] = field(default_factory=dict)
    servers: dict[str, dict[str, float]] = field(default_factory=dict)  # gauges by URL, if there are several
    missing: list[str] = field(default_factory=list)  # URLs that gave nothing


class Scraper:
    """Reads the same pages again and again, counters across restarts of each server."""

    def __init__(self, client: httpx.AsyncClient, urls: Sequence[str]) -> None:
        self._client = client
        self._counters = {url: CounterBase() for url in urls}
        self._seen: dict[str, ServerState] = {}

    async def read(self) -> Reading:
        urls = list(self._counters)
        states = await asyncio.gather(*(scrape(self._client, url) for url in urls))
        known: list[ServerState] = []
        for url, state in zip(urls, states, strict=True):
            counters = self._counters[url]
            if state is not None:
                self._seen[url] = state
                known.append(replace(state, values=state.values | counters.since_start(state.values)))
            elif url in self._seen:  # what it had counted stays in the sum
                known.append(replace(self._seen[url], values=counters.last))
        several = {
            url: {name: state.values[name] for name in GAUGES if name in state.values}
            for url, state in zip(urls, states, strict=True)
            if state is not None and len(urls) > 1
        }
        missing = [url for url, state in zip(urls, states, strict=True) if state is None]
        return Reading(values=joint(known) if len(missing) < len(urls) else {}, servers=several, missing=missing)
