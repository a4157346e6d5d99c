"""The server's /metrics, read on the replay's own clock while it runs."""

import httpx

from replay.edge.engines import ServerState, read_metrics


async def scrape(client: httpx.AsyncClient, url: str) -> ServerState | None:
    """One reading; None where there is none to be had (no such page, no answer, not an exposition)."""
    try:
        response = await client.get(url, timeout=2.0)
        return read_metrics(response.text) if response.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
