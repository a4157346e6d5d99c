"""The client's own series while it runs, as OpenMetrics text. Pure; rendered only when somebody asks.

A text of our own: a registry of prometheus_client takes some milliseconds for these lines, during which nothing would be sent.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from replay.outcome import Outcome

# Upper edges in seconds.
EDGES_S = {
    "lateness": (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0),
    "ttft": (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0),
    "tpot": (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0),
    "e2e": (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
}
LATE_S, LATE_SHARE_OF_TTFT = 0.01, 0.1  # as in judge/notes.py
_HELP = {
    "lateness": "Sent - planned: what the client itself did wrong",
    "ttft": "First token - planned, of answered requests",
    "tpot": "(Last token - first token) / (n - 1), of answered requests with n >= 2 tokens",
    "e2e": "Last token - planned, of answered requests",
}
PREFIX = "chatreel_replay"
CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@dataclass(slots=True)
class Tally:
    """How many values lie at or below each edge and above the one before; the last are above all."""

    counts: dict[str, list[int]] = field(
        default_factory=lambda: {name: [0] * (len(edges) + 1) for name, edges in EDGES_S.items()}
    )
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(EDGES_S, 0.0))

    def add(self, one: Outcome) -> None:
        if one.sent_ns is not None:
            self._add("lateness", one.sent_ns - one.planned_ns)
        first, last = one.first_token_ns, one.last_token_ns
        if one.error_kind is None and first is not None and last is not None:
            self._add("ttft", first - one.planned_ns)
            self._add("e2e", last - one.planned_ns)
            if one.output_tokens is not None and one.output_tokens > 1:
                self._add("tpot", (last - first) / (one.output_tokens - 1))

    def _add(self, name: str, value_ns: float) -> None:
        self.counts[name][bisect_left(EDGES_S[name], value_ns / 1e9)] += 1
        self.sums[name] += value_ns / 1e9

    def quantile_s(self, name: str, share: float) -> float | None:
        """The edge at or below which so many lie; None: none do, or too few below the last edge."""
        counts, seen = self.counts[name], 0
        wanted = share * sum(counts)
        for edge, count in zip(EDGES_S[name], counts, strict=False):
            seen += count
            if seen and seen >= wanted:
                return edge
        return None


def joined(tallies: Iterable[Tally]) -> Tally:
    found = Tally()
    for one in tallies:
        for name in EDGES_S:
            found.counts[name] = [a + b for a, b in zip(found.counts[name], one.counts[name], strict=True)]
            found.sums[name] += one.sums[name]
    return found


def is_late(tally: Tally) -> bool:
    """The verdict to be, as far as lateness goes: its p99 is above 10 ms and above a tenth of the median TTFT."""
    if not any(tally.counts["lateness"]):
        return False
    late, ttft = tally.quantile_s("lateness", 0.99), tally.quantile_s("ttft", 0.5)
    return late is None or late > max(LATE_S, LATE_SHARE_OF_TTFT * (ttft or 0.0))


def render(load: str, counters: Mapping[str, float], gauges: Mapping[str, float | None], tally: Tally) -> str:
    """OpenMetrics 1.0. Of gauges those that are known."""
    label = f'load="{load}"'
    lines = []
    for name, value in counters.items():
        lines += [f"# TYPE {PREFIX}_{name} counter", f"{PREFIX}_{name}_total{{{label}}} {value}"]
    for name, known in gauges.items():
        if known is not None:
            lines += [f"# TYPE {PREFIX}_{name} gauge", f"{PREFIX}_{name}{{{label}}} {known}"]
    for name, edges in EDGES_S.items():
        full, below = f"{PREFIX}_{name}_seconds", 0
        lines += [f"# TYPE {full} histogram", f"# UNIT {full} seconds", f"# HELP {full} {_HELP[name]}"]
        for edge, count in zip((*edges, "+Inf"), tally.counts[name], strict=True):
            below += count
            lines.append(f'{full}_bucket{{{label},le="{edge}"}} {below}')
        lines += [f"{full}_count{{{label}}} {below}", f"{full}_sum{{{label}}} {tally.sums[name]}"]
    return "\n".join([*lines, "# EOF", ""])
