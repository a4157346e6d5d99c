"""Metric names of inference servers, brought to one set of names. Pure: exposition text in, numbers out."""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

# Our name -> their names, best first. Counters may or may not carry `_total`.
_GAUGES = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
}
_COUNTERS = {
    "prefix_queries_tokens": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries", "sglang:prompt_tokens"),
    "prefix_hits_tokens": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits", "sglang:cached_tokens"),
    "host_hits_tokens": ("vllm:external_prefix_cache_hits",),
    "preemptions": ("vllm:num_preemptions", "sglang:num_retracted_requests"),
    "prompt_tokens": ("vllm:prompt_tokens", "sglang:prompt_tokens"),
    "generation_tokens": ("vllm:generation_tokens", "sglang:generation_tokens"),
}
COUNTERS = tuple(_COUNTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """One scrape. `values` by our names, absent ones left out; counters are as the server counts them."""

    values: dict[str, float]
    block_tokens: int | None
    kv_capacity_tokens: int | None


def read_metrics(text: str) -> ServerState:
    """Normalise one exposition; several engines or models in it are added up, their KV usage averaged.

    Raises ValueError for text that is no exposition.
    """
    totals: dict[str, list[float]] = {}
    config: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "vllm:cache_config_info":
                config = sample.labels
            else:
                totals.setdefault(sample.name.removesuffix("_total"), []).append(sample.value)
    values = {}
    for ours, names in {**_GAUGES, **_COUNTERS}.items():
        found = next((totals[name] for name in names if name in totals), None)
        if found is not None:
            values[ours] = sum(found) / len(found) if ours == "kv_usage" else sum(found)
    block, count = _number(config.get("block_size")), _number(config.get("num_gpu_blocks"))
    return ServerState(values=values, block_tokens=block, kv_capacity_tokens=block * count if block and count else None)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


class CounterBase:
    """Counters since a start, across resets of the server: a counter that falls has begun again from 0."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._since: dict[str, float] = {}

    def since_start(self, values: dict[str, float]) -> dict[str, float]:
        """The first call sets the start."""
        for name in COUNTERS:
            if name not in values:
                continue
            now = values[name]
            before = self._last.get(name, now)
            self._since[name] = self._since.get(name, 0.0) + (now - before if now >= before else now)
            self._last[name] = now
        return {name: self._since[name] for name in self._since if name in values}
