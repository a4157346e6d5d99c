"""Warnings as values: what was seen, why it matters, what to do. Pure."""

from replay.judge.metrics import Facts
from replay.judge.summary import Cache, Latency, Note, Percentiles

HIT_RATE_GAP = 0.02
LATE_MS = 10.0
LATE_SHARE_OF_TTFT = 0.1
LOOP_LAG_P99_MS = 50.0
CPU_SHARE = 0.95
SMALL_SAMPLE = 100


def client_limits(
    late: Percentiles | None, latency: Latency, loop_lag_p99_ms: float | None, cpu_share: float | None
) -> list[Note]:
    """Signs that the client, not the server, set the figures. Any of them makes a point invalid.

    Late: p99 of sent - planned (p90 below 100 requests, where p99 is a single one) above 10 ms and above a tenth of the
    median service TTFT: the same lateness is a fault against a server that answers in 10 ms, and noise against one that
    takes a second. What lateness there is stands in the schedule latencies in any case.
    """
    notes = []
    ttft = latency.ttft_service_ms
    allowed_ms = max(LATE_MS, LATE_SHARE_OF_TTFT * ttft.p50 if ttft else 0.0)
    if late is not None and (late.p99 if late.count >= SMALL_SAMPLE else late.p90) > allowed_ms:
        notes.append(
            Note(
                kind="client_late",
                seen=f"requests went out late: p99 {late.p99:.1f} ms (limit {allowed_ms:.1f} ms), worst {late.max:.1f} ms",
                why="the offered load was not the planned one, and waiting in the client looks like a slow server",
                action="give the client its own cores or another machine, or lower --scale",
            )
        )
    if loop_lag_p99_ms is not None and loop_lag_p99_ms > max(LOOP_LAG_P99_MS, allowed_ms):
        notes.append(
            Note(
                kind="client_stalled",
                seen=f"the client's event loop stalled: worst delay per quarter second, p99 {loop_lag_p99_ms:.0f} ms",
                why="tokens are stamped late, so TTFT and ITL include the client's own delay",
                action="give the client its own cores or another machine, or lower --scale",
            )
        )
    if cpu_share is not None and cpu_share > CPU_SHARE:
        notes.append(
            Note(
                kind="client_cpu",
                seen=f"the client used {cpu_share:.0%} of a core",
                why="one process has one core for its event loop; beyond that it is the limit",
                action="lower --scale, or split the trace over several clients",
            )
        )
    return notes


def cache_notes(cache: Cache, facts: Facts, prompt_exact: float | None, has_metrics: bool) -> list[Note]:
    notes = []
    reported = cache.hit_rate_usage if cache.hit_rate_usage is not None else cache.hit_rate_metrics
    predicted = cache.hit_rate_predicted
    if reported is not None and predicted is not None and abs(reported - predicted) > HIT_RATE_GAP:
        notes.append(
            Note(
                kind="hit_rate_gap",
                seen=f"the server reports a prefix hit rate of {reported:.1%}, an LRU of its size gives {predicted:.1%}",
                why="another eviction rule, a router in front, blocks pinned by running requests, or a broken shared prefix",
                action="check the server's cache settings, and that nothing on the way changes prompts (template, BOS, router)",
            )
        )
    if reported is None:
        notes.append(
            Note(
                kind="hit_rate_unknown",
                seen="the server reports no cached tokens, neither in usage nor in /metrics",
                why="predicted and measured cache use cannot be compared",
                action="vLLM: --enable-prompt-tokens-details; SGLang: --enable-cache-report",
            )
        )
    if predicted is None:
        notes.append(
            Note(
                kind="kv_size_unknown",
                seen="the server does not tell the size of its KV cache",
                why="the hit rate can be predicted only for endless memory",
                action="give --kv-tokens",
            )
        )
    if not has_metrics:
        notes.append(
            Note(
                kind="no_metrics",
                seen="no server metrics were read",
                why="KV usage, queue and preemptions are unknown, so no cause can be named",
                action="give --metrics-url",
            )
        )
    if prompt_exact is not None and prompt_exact < 0.999:
        notes.append(
            Note(
                kind="prompt_tokens_differ",
                seen=f"the server counted the planned prompt tokens in only {prompt_exact:.1%} of requests",
                why="prompts change on the way or tokenizers differ: lengths and sharing are not those of the trace",
                action="use --prompt-mode ids, or give the server's tokenizer with --tokenizer",
            )
        )
    if facts.later_turns and not facts.answers_reused:
        notes.append(
            Note(
                kind="answers_not_reused",
                seen="later turns carry made-up answers: the server does not return token ids",
                why="a real conversation finds its last answer in the cache, this one does not; the prediction accounts for it",
                action="use a server that honours return_token_ids (vLLM)",
            )
        )
    return notes


def sample_notes(completed: int) -> list[Note]:
    if completed >= SMALL_SAMPLE:
        return []
    return [
        Note(
            kind="few_requests",
            seen=f"{completed} requests in the steady window",
            why="below 100 the p99 is simply the slowest one",
            action="replay more of the trace",
        )
    ]
