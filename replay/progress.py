"""How far the point is that runs now: for a line in a terminal, and for a metrics page."""

from collections.abc import Callable
from dataclasses import dataclass, field

from replay.live import Tally, is_late, joined, render
from replay.outcome import Sample
from replay.plan.predict import Prediction
from replay.sharing import Counts

SUMMED = ("sent", "ended", "errors", "prompt_tokens", "cached_tokens", "output_tokens")


@dataclass(slots=True)
class Progress:
    """Counters of the point that runs now, for a live line."""

    scale: float
    planned: int
    predicted_hit_rate: float | None
    counts: Counts = field(default_factory=Counts)  # of all shares, but their tallies
    tallies: list[Tally] = field(default_factory=list)  # of each share
    last_sample: Sample | None = None
    stop_reason: str | None = None

    @property
    def in_flight(self) -> int:
        return self.counts.sent - self.counts.ended

    def foretold(self, prediction: Prediction) -> None:
        self.predicted_hit_rate = prediction.at_capacity

    def update(self, shares: list[Counts]) -> None:
        self.counts = Counts(**{name: sum(getattr(one, name) for one in shares) for name in SUMMED})
        self.tallies = [one.tally for one in shares]

    def openmetrics(self) -> str:
        sample, counts = self.last_sample, self.counts
        gauges = {
            "planned_requests": self.planned,
            "requests_in_flight": self.in_flight,
            "predicted_hit_rate": self.predicted_hit_rate,
            "client_cpu_share": sample.client_cpu_share if sample else None,
            "client_loop_lag_seconds": (sample.client_loop_lag_ns or 0) / 1e9 if sample else None,
        }
        counters = {
            "requests_sent": counts.sent,
            "requests_ended": counts.ended,
            "requests_failed": counts.errors,
            "prompt_tokens": counts.prompt_tokens,
            "cached_tokens": counts.cached_tokens,
            "output_tokens": counts.output_tokens,
        }
        tally = joined(self.tallies)
        return render(f"{self.scale:g}", counters, gauges | {"client_is_late": int(is_late(tally))}, tally)


OnProgress = Callable[[Progress], None]
