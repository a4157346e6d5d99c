"""Warnings as values: what was seen, why it matters, what to do. Pure; all of them are here."""

from collections import Counter
from collections.abc import Sequence

from replay.judge.metrics import Facts, last_value
from replay.judge.summary import Cache, Latency, Note, Percentiles, Point
from replay.outcome import Outcome, Sample

HIT_RATE_GAP = 0.02
LATE_MS = 10.0
LATE_SHARE_OF_TTFT = 0.1
LOOP_LAG_MS = 50.0
CPU_SHARE = 0.95
SMALL_SAMPLE = 100
EXACT_SHARE = 0.999
OTHER_TRAFFIC_SHARE = 0.05
LOAD_SHARE = 0.9
ERROR_TEXTS = 2
MISSED_SCRAPES = 0.02
LATE_SCRAPES = 0.05
UNEVEN_KV = 0.3  # of the cache, between the fullest server and the emptiest


def client_limits(
    late: Percentiles | None, latency: Latency, loop_lag: Percentiles | None, cpu_share: float | None
) -> list[Note]:
    """Signs that the client, not the server, set the figures. Any of them makes a point invalid.

    Late: p99 of sent - planned (p90 below 100 requests, where p99 is a single one) above 10 ms and above a tenth of the
    median service TTFT: the same lateness is a fault against a server that answers in 10 ms, and noise against one that
    takes a second. What lateness there is stands in the schedule latencies in any case. Stalls of the event loop are
    judged by the same tail, over quarter seconds.
    """
    notes = []
    ttft = latency.ttft_service_ms
    allowed_ms = max(LATE_MS, LATE_SHARE_OF_TTFT * ttft.p50 if ttft else 0.0)
    less_load = "give the client its own cores or another machine, or lower --scale"
    if late is not None and tail(late) > allowed_ms:
        name = _tail_name(late)
        notes.append(
            Note(
                kind="client_late",
                seen=f"requests went out late: {name} {tail(late):.1f} ms (limit {allowed_ms:.1f} ms), worst {late.max:.1f} ms",
                why="the offered load was not the planned one, and waiting in the client looks like a slow server",
                action=less_load,
            )
        )
    if loop_lag is not None and tail(loop_lag) > max(LOOP_LAG_MS, allowed_ms):
        notes.append(
            Note(
                kind="client_stalled",
                seen=f"the client's event loop stalled: {_tail_name(loop_lag)} of its delays {tail(loop_lag):.0f} ms",
                why="tokens are stamped late, so TTFT and ITL include the client's own delay",
                action=less_load,
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


def _attempts(outcomes: Sequence[Outcome]) -> list[Note]:
    notes = []
    left = [one for one in outcomes if one.error_kind == "client_abort"]
    if left:
        waiting = sum(one.first_token_ns is None for one in left)
        notes.append(
            Note(
                kind="hung_up",
                seen=f"{len(left)} requests were hung up on as recorded, {waiting} before their first token",
                why="latency figures cover answered requests only, and those who gave up had waited longest",
                action="--no-hang-up shows what they would have waited",
            )
        )
    kinds = Counter(kind for one in outcomes for kind in (one.retried or "").split())
    if kinds:
        notes.append(
            Note(
                kind="retried",
                seen=f"{sum(bool(one.retried) for one in outcomes)} requests were sent again after "
                + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())),
                why="their latencies count from the first attempt, and the server saw more requests than planned",
                action="--retries 0 shows each failure as one",
            )
        )
    return notes


def tail(figures: Percentiles) -> float:
    """p99, or p90 below 100 values, where p99 is a single one."""
    return figures.p99 if figures.count >= SMALL_SAMPLE else figures.p90


def run_notes(facts: Facts, outcomes: Sequence[Outcome]) -> list[Note]:
    """What went another way than planned."""
    notes = []
    missing = facts.planned - len(outcomes)
    if facts.stopped is not None or missing > 0:
        reason = facts.stopped or "the run ended before it was done"
        notes.append(
            Note(
                kind="stopped_early",
                seen=f"cut short, {reason}: {missing} of {facts.planned} requests have no outcome",
                why="the figures cover only what had ended by then, and the slowest had not",
                action="look at the server's log, then replay this scale again",
            )
        )
    notes += _attempts(outcomes)
    failed = [one for one in outcomes if one.error_kind not in (None, "client_abort")]
    if failed:
        kinds = Counter(str(one.error_kind) for one in failed)
        texts = Counter(one.error_text for one in failed if one.error_text).most_common(ERROR_TEXTS)
        said = "; ".join(f"{count}x {' '.join(text.split())}" for text, count in texts)
        notes.append(
            Note(
                kind="errors",
                seen=f"requests failed: {', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))}"
                + (f" ({said})" if said else ""),
                why="latency figures cover only the requests that were answered; each failure is a missed SLO",
                action="see error_text in the outcomes file",
            )
        )
    later = [one for one in outcomes if one.answer_spliced is not None]
    made_up = sum(one.answer_spliced is False for one in later)
    if facts.answers_reused is False and facts.later_turns:
        notes.append(
            Note(
                kind="answers_not_reused",
                seen="later turns carry made-up answers: the server does not return token ids",
                why="a real conversation finds its last answer in the cache, this one does not; the prediction accounts for it",
                action="use a server that honours return_token_ids (vLLM)",
            )
        )
    elif made_up:
        notes.append(
            Note(
                kind="answers_not_spliced",
                seen=f"{made_up} of {len(later)} later turns carry a made-up answer: the real one failed or was not whole",
                why="these turns miss their last answer in the cache, which the prediction does not know",
                action="see the failed requests",
            )
        )
    return notes


def load_notes(point: Point, later_turns: int) -> list[Note]:
    """Closed loops hide load: a slow server is asked less."""
    if not later_turns or point.sent_per_s is None or point.sent_per_s >= LOAD_SHARE * point.offered_per_s:
        return []
    return [
        Note(
            kind="load_not_reached",
            seen=f"{point.sent_per_s:.2f} requests/s went out where the plan has {point.offered_per_s:.2f}; "
            f"{point.late_turns} of {later_turns} later turns waited for a slower answer than recorded",
            why="users who wait send less: latency at the planned load would be higher",
            action="compare throughput with the offered load before comparing latencies",
        )
    ]


def cache_notes(cache: Cache, has_metrics: bool) -> list[Note]:
    notes = []
    reported, predicted = cache.hit_rate_reported, cache.hit_rate_predicted
    if reported is not None and predicted is not None and abs(reported - predicted) > HIT_RATE_GAP:
        notes.append(
            Note(
                kind="hit_rate_gap",
                seen=f"the server reports a prefix hit rate of {reported:.1%}, an LRU of its size gives {predicted:.1%}",
                why="another eviction rule, a router in front, blocks pinned by running requests, or a broken shared prefix",
                action="check the server's cache settings, and that nothing on the way changes prompts (template, BOS, router)",
            )
        )
    usage, counters = cache.hit_rate_usage, cache.hit_rate_metrics
    if counters is not None:
        counters += cache.hit_rate_host or 0.0
    if usage is not None and counters is not None and abs(usage - counters) > HIT_RATE_GAP:
        notes.append(
            Note(
                kind="hit_rates_differ",
                seen=f"usage says a prefix hit rate of {usage:.1%}, the server's counters say {counters:.1%}",
                why="counters see every client of the server, and on some versions count preempted requests again",
                action="give the server no other traffic; trust usage",
            )
        )
    if reported is None:
        notes.append(
            Note(
                kind="hit_rate_unknown",
                seen="the server reports no cached tokens, neither in usage nor in /metrics",
                why="predicted and measured cache use cannot be compared",
                action="start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report",
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
    return notes


def server_notes(samples: Sequence[Sample]) -> list[Note]:
    """Metrics pages that fell silent, and load that is not spread evenly over several servers."""
    notes = []
    missed = Counter(url for one in samples for url in one.metrics_missing)
    for url, count in sorted(missed.items()):
        if count > MISSED_SCRAPES * len(samples):
            notes.append(
                Note(
                    kind="metrics_missed",
                    seen=f"{url} gave no metrics in {count} of {len(samples)} readings",
                    why="its queue and KV use are missing then, and a restart between two readings cannot be seen",
                    action="look whether that server was up and answers within two seconds",
                )
            )
    late = Counter(url for one in samples for url in one.metrics_late)
    for url, count in sorted(late.items()):
        if count > LATE_SCRAPES * len(samples):
            notes.append(
                Note(
                    kind="metrics_late",
                    seen=f"{url} was too slow for {count} of {len(samples)} readings, which were skipped",
                    why="its gauges are missing in them, so that peaks of its queue and KV use may not have been seen",
                    action="lower --metrics-hz; a page of seconds also takes time from the server itself",
                )
            )
    kv: dict[str, list[float]] = {}
    for one in samples:
        for url, gauges in one.servers.items():
            if "kv_usage" in gauges:
                kv.setdefault(url, []).append(gauges["kv_usage"])
    middles = {url: sorted(seen)[len(seen) // 2] for url, seen in kv.items()}
    if len(middles) > 1 and max(middles.values()) - min(middles.values()) > UNEVEN_KV:
        fullest, emptiest = max(middles, key=lambda url: middles[url]), min(middles, key=lambda url: middles[url])
        notes.append(
            Note(
                kind="servers_uneven",
                seen=f"the KV cache of {fullest} is filled to {middles[fullest]:.0%}, that of {emptiest} to "
                f"{middles[emptiest]:.0%} (medians)",
                why="one server reaches its wall while the mean of all looks easy",
                action="look at the router's rule and at one long sharing group that it keeps on one server",
            )
        )
    return notes


def count_notes(
    facts: Facts,
    outcomes: Sequence[Outcome],
    samples: Sequence[Sample],
    prompt_exact: float | None,
    output_exact: float | None,
) -> list[Note]:
    """Are the tokens those of the trace, and who counted them?"""
    notes = []
    done = [one for one in outcomes if one.error_kind is None]
    if prompt_exact is not None and prompt_exact < EXACT_SHARE:
        notes.append(
            Note(
                kind="prompt_tokens_differ",
                seen=f"the server counted the planned prompt tokens in only {prompt_exact:.1%} of requests",
                why="prompts change on the way or tokenizers differ: lengths and sharing are not those of the trace",
                action="use --prompt-mode ids, or give the server's tokenizer with --tokenizer",
            )
        )
    if output_exact is not None and output_exact < EXACT_SHARE:
        notes.append(
            Note(
                kind="output_tokens_differ",
                seen=f"the server wrote the planned number of tokens in only {output_exact:.1%} of requests",
                why="other answer lengths mean another load and other KV use than the trace has",
                action="check that the server honours min_tokens and ignore_eos, and its context limit",
            )
        )
    by_chunk = sum(one.token_count_source != "usage" for one in done)
    if by_chunk:
        notes.append(
            Note(
                kind="usage_missing",
                seen=f"{by_chunk} of {len(done)} answers carry no usage: their tokens are counted as chunks",
                why="a chunk may hold several tokens, so token rates read too low and TPOT too high",
                action="use a server that honours stream_options.include_usage",
            )
        )
    counted, sent = last_value(samples, "prompt_tokens"), sum(one.input_tokens or 0 for one in done)
    all_answered = len(done) == facts.planned and not by_chunk
    if counted is not None and all_answered and counted > (1 + OTHER_TRAFFIC_SHARE) * sent:
        notes.append(
            Note(
                kind="other_traffic",
                seen=f"the server counted {counted:.0f} prompt tokens, this client sent {sent}",
                why="somebody else used the server: its cache, queue and counters are not this run's alone",
                action="replay against a server of your own",
            )
        )
    return notes


def sample_notes(completed: int) -> list[Note]:
    if completed >= SMALL_SAMPLE:
        return []
    return [
        Note(
            kind="few_requests",
            seen=f"{completed} requests answered in the steady window",
            why="below 100 the p99 is simply the slowest one",
            action="replay more of the trace",
        )
    ]


def plan_note(text: str) -> Note:
    return Note(kind="plan", seen=text, why="the run differs from the trace as recorded", action="see docs/metrics.md")


def torn_note(lines: int) -> Note:
    return Note(
        kind="torn",
        seen=f"{lines} torn lines in the run folder were left out",
        why="the run was killed while writing; what they held is not in the figures",
        action="nothing: the rest is whole",
    )


def _tail_name(figures: Percentiles) -> str:
    return "p99" if figures.count >= SMALL_SAMPLE else "p90"
