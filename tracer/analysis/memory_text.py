"""What was found about KV memory, replicas and GPUs, in a terminal: words first, then the figures."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tracer.analysis.kv import Budget, KvFit
from tracer.analysis.memory import CausePoint, Demand, Memory, ReuseTime
from tracer.analysis.policies import EvictionPoint
from tracer.analysis.routing import Routing


def memory_in_words(memory: Memory | None, kv: KvFit | None, routing: Sequence[Routing] | None) -> list[str]:
    """Most important first."""
    lines = fit_in_words(kv) if kv else []
    if memory is None:
        return lines
    if memory.reuse_time is not None:
        lines.append(f"Kept for {duration(memory.reuse_time.p90_s)} after each use, blocks give 90 % of the possible hits.")
    lines.append(_demand_in_words(memory.demand, kv))
    if memory.eviction:
        lines.append(_eviction_in_words(memory.eviction))
    if memory.causes.cold:
        lines.append(_causes_in_words(memory.causes.cold[-1], memory.causes.sessions_known))
    return lines + (_routing_in_words(routing, kv) if routing else [])


def fit_in_words(found: KvFit) -> list[str]:
    one = found.budget
    name = gpus_in_words(one)
    whose = "with this model" if one.weight_bytes is not None else "without any weights"
    verb = "holds" if one.tensor_parallel == 1 else "hold"
    holds = f"{name} {whose} {verb} {tokens(one.kv_tokens)} tokens of KV: a hit rate of {found.hit_rate:.1%}"
    lines = [f"{holds}, {found.share_of_possible_hits:.0%} of the possible hits."]
    if found.tokens_for_90_percent > one.kv_tokens:
        lines.append(
            f"90 % of the possible hits take {found.replicas_for_90_percent:,} such replicas, or as much memory beside the "
            f"GPU; 10 GB more on one raise the hit rate by {100 * found.gain_of_ten_gb:.2f} points."
        )
    if one.kv_tokens_beyond_window > one.kv_tokens:
        lines.append(
            f"Layers with a sliding window need no old tokens: a server that makes use of it holds up to "
            f"{tokens(one.kv_tokens_beyond_window)}."
        )
    return lines


def gpus_in_words(one: Budget) -> str:
    return f"One {one.gpu}" if one.tensor_parallel == 1 else f"{one.tensor_parallel} x {one.gpu}"


def _demand_in_words(demand: Demand, kv: KvFit | None) -> str:
    mean, peak = tokens(demand.running_mean_tokens), tokens(demand.running_peak_tokens)
    guessed = " (ends are assumed)" if demand.assumed_ends else ""
    line = f"Running requests hold {mean} tokens on average, {peak} at most{guessed}"
    if kv is not None and demand.running_mean_tokens > kv.budget.kv_tokens:
        return f"{line}: more than one replica has, before anything is cached."
    return f"{line}; only what they leave is cache."


def _eviction_in_words(points: Sequence[EvictionPoint]) -> str:
    """Where better eviction would win most."""
    one = max(points, key=lambda point: point.optimal - point.lru)
    return (
        f"With {tokens(one.cache_tokens)} tokens LRU serves {one.lru:.1%}, the best eviction there can be {one.optimal:.1%}, "
        f"FIFO {one.fifo:.1%}."
    )


def _causes_in_words(last: CausePoint, sessions_known: bool) -> str:
    total = last.hit_rate or 1.0
    common = f"Of the possible hits {last.global_prefix / total:.0%} are in prefixes that everybody shares"
    if not sessions_known:
        return f"{common}, {last.sharing_group / total:.0%} in those of a few requests; the trace names no conversations."
    own, group = last.own_session / total, last.sharing_group / total
    return f"{common}, {own:.0%} in the conversation's own earlier turns, {group:.0%} in what other conversations brought."


def _routing_in_words(routing: Sequence[Routing], kv: KvFit | None) -> list[str]:
    size = kv.budget.kv_tokens if kv else None
    parts = []
    for one in routing:
        at = [point for point in one.curve if size is None or point.cache_tokens_per_replica <= size]
        if at:
            parts.append(f"{one.rule.replace('_', ' ')} {at[-1].hit_rate:.1%}")
    each = "endless memory" if size is None else f"{tokens(size)} tokens"
    return [f"{routing[0].replicas} replicas of {each} each: {', '.join(parts)}."] if parts else []


def print_memory(memory: Memory | None, console: Console) -> None:
    if memory is None:
        return
    if memory.reuse_time is not None and memory.reuse_distance is not None:
        far = memory.reuse_distance
        sizes = " / ".join(tokens(one) for one in (far.p50_tokens, far.p90_tokens, far.p99_tokens))
        console.print(f"\nreuse, p50 / p90 / p99: {_times(memory.reuse_time)} since the last use; {sizes} tokens between")
    demand = memory.demand
    recent = max(demand.working_set_60s_tokens), max(demand.working_set_600s_tokens)
    console.print(f"working set, highest: {tokens(recent[0])} tokens of the last minute, {tokens(recent[1])} of the last ten")
    if memory.causes.cold:
        console.print(_cause_table(memory))


def _times(one: ReuseTime) -> str:
    return " / ".join(duration(seconds) for seconds in (one.p50_s, one.p90_s, one.p99_s))


def _cause_table(memory: Memory) -> Table:
    causes = memory.causes
    title = f"\nhit rate by cause, and without the first {causes.warm_up_share:.0%} of the requests"
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for name in ("KV tokens", "global prefix", "own session", "sharing group", "hit rate", "KV tokens", "warm", "+50 % memory"):
        table.add_column(name, justify="right")
    rows = list(zip(causes.cold, causes.warm, memory.marginal, strict=False))
    for cold, warm, more in rows[:-1][::3] + rows[-1:]:
        table.add_row(
            tokens(cold.cache_tokens),
            f"{cold.global_prefix:.1%}",
            f"{cold.own_session:.1%}" if causes.sessions_known else "-",
            f"{cold.sharing_group:.1%}",
            f"{cold.hit_rate:.1%}",
            tokens(warm.cache_tokens),
            f"{warm.hit_rate:.1%}",
            f"{100 * more.gain_of_half_more:+.1f}",
        )
    return table


def tokens(count: float) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.1f} k" if count >= 1e3 else f"{count:.0f}"


def duration(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.1f} s"
