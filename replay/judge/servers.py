"""Figures of each of several servers. Pure."""

from collections.abc import Sequence

from replay.judge import metrics
from replay.judge.metrics import Facts
from replay.judge.summary import Server
from replay.outcome import Outcome, Sample


def servers(facts: Facts, outcomes: Sequence[Outcome], samples: Sequence[Sample], window_s: tuple[float, float]) -> list[Server]:
    """Hit rates over the whole point, as of all servers together; TTFT in the window."""
    found = []
    for number, one in enumerate(facts.servers):
        own = [seen for seen in outcomes if seen.server == number]
        failed = sum(seen.error_kind is not None for seen in own)
        found.append(
            Server(
                url=one.url,
                planned=one.planned,
                completed=len(own) - failed,
                failed=failed,
                ttft_ms=metrics.latency(metrics.in_window(own, window_s), ()).ttft_schedule_ms,
                hit_rate_predicted=one.hit_rate_predicted,
                hit_rate_usage=metrics.hit_rate_usage(own),
                hit_rate_metrics=_hit_rate(samples, one.metrics_urls),
            )
        )
    return found


def _hit_rate(samples: Sequence[Sample], pages: Sequence[str]) -> float | None:
    """Of what these pages had counted when they were last read."""
    last = [next((one.servers[url] for one in reversed(samples) if url in one.servers), {}) for url in pages]
    telling = [one for one in last if "prefix_hits_tokens" in one and one.get("prefix_queries_tokens")]
    queries = sum(one["prefix_queries_tokens"] for one in telling)
    return sum(one["prefix_hits_tokens"] for one in telling) / queries if queries else None
