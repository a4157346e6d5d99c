"""Judged figures of a run: what summary.json holds and every report shows. Values only; metrics.py computes them.

Absent is null: a figure that could not be measured is never 0.
"""

from typing import Literal

import msgspec

LoadBy = Literal["users", "time", "concurrency", "rate"]  # the last two: sessions at once, requests per second
Steadiness = Literal["steady", "growing", "unsettled"]  # growing: the figures depend on how long the point lasts


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Nearest-rank percentiles over requests (or gaps); the mean is there but never stands alone."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float
    mean: float


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    metric: Literal["ttft", "tpot", "e2e"]
    limit_ms: float


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """A warning as a value: what was seen, why it matters, what to do."""

    kind: str
    seen: str
    why: str
    action: str


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds. `schedule` counts from when a request should have gone out, `service` from when it did."""

    ttft_schedule_ms: Percentiles | None
    ttft_service_ms: Percentiles | None
    e2e_schedule_ms: Percentiles | None
    e2e_service_ms: Percentiles | None
    tpot_ms: Percentiles | None  # (last - first) / (n - 1), n >= 2, each request weighs the same
    itl_ms: Percentiles | None  # only where each chunk's token count is known
    chunk_gap_ms: Percentiles | None


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """Token-weighted prefix hit rates and KV pressure."""

    hit_rate_predicted: float | None  # LRU at the server's KV size, from the plan alone
    hit_rate_predicted_infinite: float | None
    hit_rate_usage: float | None  # sum of cached_tokens / sum of prompt tokens over answered requests
    hit_rate_metrics: float | None  # server's counters over the point
    hit_rate_host: float | None = None  # found beyond the GPU's memory; usage counts it, the counters above do not
    kv_capacity_tokens: int | None
    kv_usage_p50: float | None  # over the samples inside the steady window, like waiting_p50; maxima: whole point
    kv_usage_max: float | None
    kv_full_share: float | None  # share of those samples with at least 95 % of the KV cache in use
    preemptions: int | None
    first_preemption_s: float | None
    running_max: float | None
    waiting_p50: float | None
    waiting_max: float | None

    @property
    def hit_rate_reported(self) -> float | None:
        """What the server says: per answer if it does, else its counters."""
        return self.hit_rate_usage if self.hit_rate_usage is not None else self.hit_rate_metrics


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs that were read, in the steady window; shares are means over GPUs, and percentiles over samples."""

    count: int
    busy: Percentiles | None  # share of time in which a kernel ran, however small
    sm_active: Percentiles | None
    tensor_active: Percentiles | None
    memory_active: Percentiles | None  # share of cycles in which memory moved data: use of its bandwidth
    memory_busy: Percentiles | None  # share of time in which memory was used at all
    memory_used_share_max: float | None
    clock_mhz: Percentiles | None
    temperature_max_c: float | None
    power_w: float | None  # of all of them, mean
    power_max_w: float | None
    energy_per_output_token_j: float | None


class Little(msgspec.Struct, frozen=True, kw_only=True):
    """Little's law (1961) over the steady window, where it must hold: mean in flight = rate * mean time in the system."""

    in_flight: float  # mean over the samples
    rate_per_s: float  # arrivals in the window
    time_s: float  # mean of sent to end over these arrivals

    @property
    def expected(self) -> float:
        return self.rate_per_s * self.time_s


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """One of several servers that a plan was routed to."""

    url: str
    planned: int
    completed: int
    failed: int
    ttft_ms: Percentiles | None  # schedule latency, of requests in the steady window
    hit_rate_predicted: float | None  # of a cache of its size that sees its requests only
    hit_rate_usage: float | None
    hit_rate_metrics: float | None = None


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One value per time bin for charts; null where nothing was seen in a bin. At most 100 bins."""

    t_s: list[float]  # middle of the bin, since the start of the point
    offered_per_s: list[float | None]  # these two null for a killed run, whose last requests left no trace
    sent_per_s: list[float | None]
    completed_per_s: list[float]
    failed_per_s: list[float]
    in_flight: list[float | None]
    ttft_p50_ms: list[float | None]  # by planned time, schedule latency; below 100 requests in a bin p99 is the slowest
    ttft_p99_ms: list[float | None]
    tpot_p50_ms: list[float | None]
    tpot_p99_ms: list[float | None]
    hit_rate: list[float | None]
    kv_usage: list[float | None]  # gauges: the highest in the bin
    running: list[float | None]
    waiting: list[float | None]
    preemptions: list[float | None]  # new ones in the bin
    gpu_busy: list[float | None] = []
    gpu_tensor_active: list[float | None] = []
    gpu_memory_active: list[float | None] = []
    gpu_power_w: list[float | None] = []


SUSPECT = (
    "stopped_early",
    "few_requests",
    "never_steady",
    "cache_warm",
    "other_traffic",
    "prompt_tokens_differ",
    "output_tokens_differ",
    "hit_rates_differ",
    "metrics_missed",
    "part_differs",
)  # kinds of notes


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One scale of a run."""

    index: int
    scale: float  # or what `by` says
    by: LoadBy
    seed: int | None
    planned: int
    sent: int
    completed: int
    errors: dict[str, int]  # by error kind
    hung_up: int = 0  # on by their clients, as recorded; none of the errors
    retried: int = 0  # requests that were sent more than once
    not_sent: int
    duration_s: float  # first planned to last end
    window_s: tuple[float, float]  # steady window; warm-up and drain lie outside
    offered_per_s: float  # planned / span of the plan
    sent_per_s: float | None  # in the steady window, as the three below; null: a killed run, its last requests left no trace
    requests_per_s: float  # answered
    input_tokens_per_s: float
    output_tokens_per_s: float
    input_tokens_exact_share: float | None  # server counted as many prompt tokens as planned
    output_tokens_exact_share: float | None
    latency: Latency
    lateness_ms: Percentiles | None  # sent - planned: the client's own fault
    late_turns: int  # later turns that went out after their recorded time
    goodput_per_s: float | None
    attainment: float | None  # met / sent in window; errors are misses
    cache: Cache
    client_cpu_share_busy: float | None  # of one core: median over the busiest tenth of the samples
    client_loop_lag_p99_ms: float | None
    valid: bool  # False: the client was the limit, do not trust this point
    regime: Literal["flat", "knee", "wall", "invalid", "unknown"]
    cause: str | None  # named when not flat: "KV full", "preemptions", "queue growth", "hit-rate collapse", ... see knee.py
    notes: list[Note]
    series: Series
    steady: Steadiness | None = None  # of a sweep's points, as the next one
    little: Little | None = None
    gpu: Gpu | None = None
    servers: list[Server] = []  # where there are several

    @property
    def label(self) -> str:
        return load_label(self.scale, self.by)

    @property
    def standing(self) -> Literal["valid", "suspect", "invalid"]:
        """Invalid: the client was the limit. Suspect: it was not, but something else makes the figures another load's."""
        return "invalid" if not self.valid else "suspect" if any(one.kind in SUSPECT for one in self.notes) else "valid"


def load_label(value: float, by: LoadBy) -> str:
    """`5x`, `64 at once` or `12/s`."""
    return f"{value:g} at once" if by == "concurrency" else f"{value:.4g}/s" if by == "rate" else f"{value:g}x"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. `headline` is plain words first, most important finding first."""

    schema_version: int = 1
    trace: str
    target: str
    server: str  # what answered: engine and model as far as known
    prompt_mode: str
    seed: int | None
    started_utc: str
    slos: list[Slo]
    headline: list[str]
    points: list[Point]
    notes: list[Note]
