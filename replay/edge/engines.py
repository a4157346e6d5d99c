"""Metric names of inference servers, brought to one set of names. Pure: exposition text in, numbers out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from replay.edge.gpus import DCGM_NAMES, GPU_COUNTERS, GPU_GAUGES, joint_gpus, of_dcgm

# Our name -> their names, best first. Several in one entry are added up, one with a minus is taken off; an entry counts only
# if the page has all of them. Counters may or may not carry `_total`. What an engine does not tell stays absent: TGI has neither
# KV use nor hits, llama.cpp no KV use (old versions did), TensorRT-LLM no count of preemptions (its paused requests are a gauge).
_GAUGES = {
    "running": (
        "vllm:num_requests_running",
        "sglang:num_running_reqs",
        "trtllm_num_requests_running",
        "tgi_batch_current_size",
        "llamacpp:requests_processing",
        "dynamo_frontend_inflight_requests -dynamo_frontend_queued_requests",
    ),
    "waiting": (
        "vllm:num_requests_waiting",
        "sglang:num_queue_reqs",
        "trtllm_num_requests_waiting",
        "tgi_queue_size",
        "llamacpp:requests_deferred",
        "dynamo_frontend_queued_requests",  # those that have no first token yet
    ),
    "kv_usage": (
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "sglang:token_usage",
        "trtllm_kv_cache_utilization",
        "llamacpp:kv_cache_usage_ratio",
        "dynamo_component_gpu_cache_usage_percent",  # 0..1 in spite of its name
        "dynamo_component_kvstats_gpu_cache_usage_percent",
    ),
}
_COUNTERS = {
    "prefix_queries_tokens": (
        "vllm:prefix_cache_queries",
        "vllm:gpu_prefix_cache_queries",
        "sglang:prompt_tokens",
        "trtllm_prompt_tokens",
        "llamacpp:prompt_tokens llamacpp:prompt_tokens_cached",  # the first is what was computed
        "dynamo_frontend_input_sequence_tokens_sum",
    ),
    "prefix_hits_tokens": (
        "vllm:prefix_cache_hits",
        "vllm:gpu_prefix_cache_hits",
        "sglang:cached_tokens",
        "trtllm_prompt_cached_tokens",
        "llamacpp:prompt_tokens_cached",
        "dynamo_frontend_cached_tokens_sum",
    ),
    "host_hits_tokens": ("vllm:external_prefix_cache_hits",),
    "preemptions": ("vllm:num_preemptions", "sglang:num_retracted_requests"),
    "prompt_tokens": (
        "vllm:prompt_tokens",
        "sglang:prompt_tokens",
        "trtllm_prompt_tokens",
        "tgi_request_input_length_sum",
        "llamacpp:prompt_tokens llamacpp:prompt_tokens_cached",
        "dynamo_frontend_input_sequence_tokens_sum",
    ),
    "generation_tokens": (
        "vllm:generation_tokens",
        "sglang:generation_tokens",
        "trtllm_generation_tokens",
        "tgi_request_generated_tokens_sum",
        "llamacpp:tokens_predicted",
        "dynamo_frontend_output_tokens",
        "dynamo_frontend_output_sequence_tokens_sum",
    ),
}
COUNTERS, GAUGES = (*_COUNTERS, *GPU_COUNTERS), (*_GAUGES, *GPU_GAUGES)
HITS = ("prefix_queries_tokens", "prefix_hits_tokens")
_FRONT = "dynamo_frontend_"  # a router's own figures: they tell again what the engines behind it tell
_INFO = "vllm:cache_config_info"
_BLOCK, _BLOCKS, _TOKENS = "trtllm_kv_cache_tokens_per_block", "trtllm_kv_cache_max_blocks", "sglang:max_total_num_tokens"
_THEIRS = {name.lstrip("-") for entries in (_GAUGES | _COUNTERS).values() for entry in entries for name in entry.split()}
_WANTED = _THEIRS | DCGM_NAMES | {_INFO, _BLOCK, _BLOCKS, _TOKENS}
_NAMES = frozenset(_WANTED | {f"{name}_total" for name in _WANTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """One scrape. `values` by our names, absent ones left out; counters are as the server counts them."""

    values: dict[str, float]
    block_tokens: int | None
    kv_capacity_tokens: int | None
    front: frozenset[str] = frozenset()  # names whose value is a router's

    @property
    def is_of_gpus(self) -> bool:
        """A page that tells of GPUs and of no server."""
        return all(name.startswith("gpu_") for name in self.values)


def read_metrics(text: str) -> ServerState:
    """Normalise one exposition; several engines or models in it are added up, their KV usage averaged.

    A last line without its end is left out: half a number reads as a smaller one. Raises ValueError for lines that are none.
    """
    return state_of(wanted_lines(text))


def wanted_lines(text: str) -> list[str]:
    """The few lines that are read. A page of vLLM has 600 an engine, nearly all of them buckets: parsed whole it takes 9 ms."""
    return [line for line in text.split("\n")[:-1] if line.partition("{")[0].partition(" ")[0] in _NAMES]


def state_of(lines: Sequence[str]) -> ServerState:
    totals: dict[str, list[float]] = {}
    configs: list[dict[str, str]] = []
    for line in lines:
        name = line.partition("{")[0].partition(" ")[0]
        if name == _INFO:
            configs += [one.labels for family in text_string_to_metric_families(line + "\n") for one in family.samples]
        else:
            totals.setdefault(name.removesuffix("_total"), []).append(_number_of(line))
    values = of_dcgm(totals)
    front = set()
    for ours, entries in (_GAUGES | _COUNTERS).items():
        entry = next((one for one in entries if all(name.lstrip("-") in totals for name in one.split())), None)
        if entry is not None:
            values[ours] = _value(entry, totals) / (len(totals[entry]) if ours == "kv_usage" else 1)
            if entry.startswith(_FRONT):
                front.add(ours)
    block, capacity = _capacity(totals, configs)
    return ServerState(values=values, block_tokens=block, kv_capacity_tokens=capacity, front=frozenset(front))


def _number_of(line: str) -> float:
    """Of `name{labels} value [time stamp]`; OpenMetrics may add ` # {exemplar}`. Raises ValueError."""
    if " # " in line:
        return next(one.value for family in text_string_to_metric_families(line + "\n") for one in family.samples)
    words = line.rpartition("}")[2].split() if "{" in line else line.split()[1:]
    if not words:
        raise ValueError(f"no value in {line!r}")
    return float(words[0])


def _value(entry: str, totals: Mapping[str, list[float]]) -> float:
    return sum(-sum(totals[name[1:]]) if name.startswith("-") else sum(totals[name]) for name in entry.split())


def _capacity(totals: Mapping[str, list[float]], configs: Sequence[dict[str, str]]) -> tuple[int | None, int | None]:
    """(tokens of a block, tokens of all KV caches on the page)."""
    sizes = [(_number(one.get("block_size")), _number(one.get("num_gpu_blocks"))) for one in configs]
    known = [(block, count) for block, count in sizes if block and count]
    if known:
        return known[0][0], sum(block * count for block, count in known)
    if _BLOCK in totals and _BLOCKS in totals:
        block = int(totals[_BLOCK][0])
        return block, int(block * sum(totals[_BLOCKS])) or None
    return None, int(sum(totals.get(_TOKENS, ()))) or None


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def joint(values: Sequence[ServerState]) -> dict[str, float]:
    """Several servers as one: counters and queues added up, KV usage weighed by size where all tell it.

    What engines tell is not added to what the router in front of them tells of the same.
    """
    found = joint_gpus([one.values for one in values])
    for name in (*_GAUGES, *_COUNTERS):
        having = [one for one in values if name in one.values]
        having = [one for one in having if name not in one.front] or having
        if not having:
            continue
        seen = [one.values[name] for one in having]
        sizes = [one.kv_capacity_tokens or 0 for one in having]
        if name != "kv_usage":
            found[name] = sum(seen)
        elif all(sizes):
            found[name] = sum(a * size for a, size in zip(seen, sizes, strict=True)) / sum(sizes)
        else:
            found[name] = sum(seen) / len(seen)
    return found


class CounterBase:
    """Counters of one server since a start, across its resets: a counter that falls has begun again from 0."""

    def __init__(self) -> None:
        self._has_begun = False
        self._last: dict[str, float] = {}
        self._since: dict[str, float] = {}

    def since_start(self, values: dict[str, float]) -> dict[str, float]:
        """The first call sets the start. A counter that comes only later began at 0: some show it from their first request on."""
        for name in COUNTERS:
            if name not in values:
                continue
            now = values[name]
            before = self._last.get(name, 0.0 if self._has_begun else now)
            self._since[name] = self._since.get(name, 0.0) + (now - before if now >= before else now)
            self._last[name] = now
        self._has_begun = True
        return {name: self._since[name] for name in self._since if name in values}

    @property
    def last(self) -> dict[str, float]:
        """As last seen, for when the server does not answer."""
        return dict(self._since)
