"""What happened to each planned request. A run folder holds what a report needs; the report is a second pass over it.

    RUN/run.json                 how the run was made: trace, target, seed, points, prediction, checks
    RUN/point-<n>.outcomes-<share>.jsonl   while it runs, one line per request, appended as it ends: a killed run keeps all
                                 but the last quarter of a second
    RUN/point-<n>.outcomes-<share>.parquet the same when the point has ended, one file per sending process
    RUN/point-<n>.samples.jsonl  one line per scrape of the server's /metrics and of the client's own state
    RUN/summary.json             judged figures (replay/judge/summary.py)
    RUN/report.html

All `*_ns` times of outcomes and samples count from the start of the point on the monotonic clock. Absent is null.
"""

from typing import Literal

import msgspec

# Who is to blame when no token came: the target or the way to it. `None` in an outcome means that all went well.
ErrorKind = Literal[
    "connect",
    "connection_lost",
    "timeout",
    "http_status",
    "stream_error",
    "no_tokens",
    "bad_response",
    "client_abort",  # hung up where the recorded client did
    "cancelled",  # the run ended first
]
NO_FAULT = ("client_abort", "cancelled")  # nobody failed
HUNG_UP = "hung up, as the recorded client did"  # error_text of a client_abort


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request, sent or not. schedule latency = x - planned_ns; service latency = x - sent_ns."""

    request_id: int  # in the plan
    source_request_id: int  # row of the trace it came from
    session_id: int
    turn: int
    server: int | None = None  # which of several targets it went to, from 0
    planned_ns: int  # when it should go out: open loop from the trace; later turns: previous end + think time
    recorded_ns: int | None = None  # when the scaled trace had it: differs for later turns, which wait for answers
    ready_ns: int | None = None  # prompt built and request encoded
    sent_ns: int | None = None  # bytes handed to the socket
    first_byte_ns: int | None = None
    first_reasoning_ns: int | None = None
    first_answer_ns: int | None = None
    last_token_ns: int | None = None
    end_ns: int | None = None
    planned_input_tokens: int
    planned_output_tokens: int
    input_tokens: int | None = None  # as the server counted them
    output_tokens: int | None = None
    cached_tokens: int | None = None
    token_count_source: Literal["usage", "chunks"] | None = None
    chunk_gaps_us: list[int] = []  # between token-bearing chunks
    chunk_tokens: list[int] | None = None  # tokens in each chunk, where the server says (continuous usage or token ids)
    finish_reason: str | None = None
    http_status: int | None = None
    error_kind: ErrorKind | None = None
    error_text: str | None = None  # server's words, cut to 300 characters
    retried: str | None = None  # error kinds of the attempts before the last; sent_ns is of the first, the rest of the last
    answer_spliced: bool | None = None  # later turns: did the prompt carry the server's real previous answer?

    @property
    def first_token_ns(self) -> int | None:
        seen = [t for t in (self.first_reasoning_ns, self.first_answer_ns) if t is not None]
        return min(seen) if seen else None


class Sample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Server and client state at one instant; counters count from the start of the point, resets handled."""

    t_ns: int
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None  # 0..1
    prefix_queries_tokens: float | None = None
    prefix_hits_tokens: float | None = None
    host_hits_tokens: float | None = None  # loaded from beyond the GPU's memory; not in the line above
    preemptions: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    gpu_count: float | None = None  # of the machine that the metrics pages or NVML tell of; see edge/gpus.py
    gpu_busy: float | None = None  # 0..1, like the next five; means over GPUs
    gpu_engine_active: float | None = None
    gpu_sm_active: float | None = None
    gpu_tensor_active: float | None = None
    gpu_memory_active: float | None = None
    gpu_memory_busy: float | None = None
    gpu_memory_used_bytes: float | None = None
    gpu_memory_free_bytes: float | None = None
    gpu_power_w: float | None = None
    gpu_energy_j: float | None = None
    gpu_clock_mhz: float | None = None
    gpu_temperature_c: float | None = None
    servers: dict[str, dict[str, float]] = {}  # several: of each metrics URL; above: sums, KV usage their mean
    metrics_missing: list[str] = []  # metrics URLs that gave nothing at this moment
    metrics_late: list[str] = []  # those that had not answered yet: their gauges are not in the figures above
    client_in_flight: int | None = None
    client_cpu_share: float | None = None  # of one core, since the previous sample
    client_loop_lag_ns: int | None = None  # worst delay of the event loop since the previous sample
