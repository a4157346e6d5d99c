"""How far the point is that runs now: for a line in a terminal, and for a metrics page."""

from collections.abc import Callable
from dataclasses import dataclass, field

from replay.live import Tally, is_late, joined, render
from replay.outcome import Sample
from replay.plan.predict import Prediction
from replay.sharing import Counts


@dataclass(slots=True)
class Progress:
    """Counters of the point that runs now, for a live line."""

    scale: float
    planned: int
    predicted_hit_rate: float | None
    sent: int = 0
    ended: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    late_ns_max: int = 0
    tallies: list[Tally] = field(default_factory=list)  # of each share
    last_sample: Sample | None = None
    stop_reason: str | None = None

    @property
    def in_flight(self) -> int:
        return self.sent - self.ended

    def foretold(self, prediction: Prediction) -> None:
        self.predicted_hit_rate = prediction.at_capacity

    def update(self, shares: list[Counts]) -> None:
        for name in ("sent", "ended", "errors", "prompt_tokens", "cached_tokens", "output_tokens"):
            setattr(self, name, sum(getattr(one, name) for one in shares))
        self.late_ns_max = max((one.late_ns_max for one in shares), default=0)
        self.tallies = [one.tally for one in shares]

    def openmetrics(self) -> str:
        sample = self.last_sample
        gauges = {
            "planned_requests": self.planned,
            "requests_in_flight": self.in_flight,
            "predicted_hit_rate": self.predicted_hit_rate,
            "client_cpu_share": sample.client_cpu_share if sample else None,
            "client_loop_lag_seconds": (sample.client_loop_lag_ns or 0) / 1e9 if sample else None,
        }
        counters = {
            "requests_sent": self.sent,
            "requests_ended": self.ended,
            "requests_failed": self.errors,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
        }
        tally = joined(self.tallies)
        return render(f"{self.scale:g}", counters, gauges | {"client_is_late": int(is_late(tally))}, tally)


OnProgress = Callable[[Progress], None]
