"""Figures of each of several servers. Pure."""

from collections.abc import Sequence

from replay.judge import metrics
from replay.judge.metrics import Facts
from replay.judge.summary import Server
from replay.outcome import Outcome


def servers(facts: Facts, outcomes: Sequence[Outcome], window_s: tuple[float, float]) -> list[Server]:
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
            )
        )
    return found
