"""The engine's counters under vLLM's metric names. Latencies are in virtual seconds.

Own histograms and a custom collector, because `prometheus_client`'s cost a lock and a linear search per observation,
and there is one per output token.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from replay.sim.engine import Engine, Step

# Bucket bounds as in vLLM's v1/metrics/loggers.py, with finer steps below 10 ms between tokens.
_TTFT_S = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640]
_ITL_S = [0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
_REQUEST_S = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]


class Histogram:
    def __init__(self, bounds: list[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulated(self) -> list[tuple[str, float]]:
        rows, total = [], 0
        for bound, count in zip([*self.bounds, float("inf")], self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return rows


class Metrics(Collector):
    """What `/metrics` shows. `add` takes each step as it becomes visible to clients."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.engine = engine
        self.labels = {"model_name": model_name, "engine": "0"}
        self.lag_s = 0.0
        self.lag_max_s = 0.0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter(stop=0, length=0, abort=0)
        self.time_to_first_token = Histogram(_TTFT_S)
        self.inter_token_latency = Histogram(_ITL_S)
        self.e2e = Histogram(_REQUEST_S)
        self.queue_time = Histogram(_REQUEST_S)
        self.prefill_time = Histogram(_REQUEST_S)
        self.decode_time = Histogram(_REQUEST_S)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def add(self, step: Step) -> None:
        self.generation_tokens += len(step.tokens)
        for request, _, gap_s in step.tokens:
            if gap_s is None:
                self.time_to_first_token.observe(step.end_s - request.arrival_s)
                self.prompt_tokens += len(request.prompt)
            else:
                self.inter_token_latency.observe(gap_s)
        for request in step.finished:
            assert request.scheduled_s is not None and request.first_token_s is not None
            self.finished[str(request.finish_reason)] += 1
            self.e2e.observe(step.end_s - request.arrival_s)
            self.queue_time.observe(request.scheduled_s - request.arrival_s)
            self.prefill_time.observe(request.first_token_s - request.scheduled_s)
            self.decode_time.observe(step.end_s - request.first_token_s)

    def add_lag(self, lag_s: float) -> None:
        self.lag_s = lag_s
        self.lag_max_s = max(self.lag_max_s, lag_s)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        engine = self.engine
        gauges = {
            "vllm:num_requests_running": ("Requests in the batch.", len(engine.running)),
            "vllm:num_requests_waiting": ("Requests in the queue.", len(engine.waiting)),
            "vllm:kv_cache_usage_perc": ("Share of KV blocks held by running requests, 0 to 1.", engine.kv_usage),
            "chatreel_sim_lag_seconds": ("Wall seconds by which the last step came late.", self.lag_s),
            "chatreel_sim_lag_max_seconds": ("The largest lag so far.", self.lag_max_s),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=list(self.labels))
            gauge.add_metric(list(self.labels.values()), value)
            yield gauge
        config = {
            "block_size": str(engine.preset.block_tokens),
            "num_gpu_blocks": str(engine.cache.total),
            "kv_cache_size_tokens": str(engine.cache.total * engine.preset.block_tokens),
            "enable_prefix_caching": "True",
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "Size of the KV cache.", labels=[*self.labels, *config])
        info.add_metric([*self.labels.values(), *config.values()], 1)
        yield info

    def _counters(self) -> Iterator[Metric]:
        engine = self.engine
        counters = {
            "vllm:prefix_cache_queries": ("Prompt tokens looked up.", engine.prefix_cache_queries),
            "vllm:prefix_cache_hits": ("Prompt tokens found.", engine.prefix_cache_hits),
            **({} if engine.cache.host is None else {"vllm:external_prefix_cache_hits": ("In host memory.", engine.host_hits)}),
            "vllm:num_preemptions": ("Requests put back for want of blocks.", engine.preemptions),
            "vllm:prompt_tokens": ("Prompt tokens of requests that got a first token.", self.prompt_tokens),
            "vllm:generation_tokens": ("Tokens answered.", self.generation_tokens),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=list(self.labels))
            counter.add_metric(list(self.labels.values()), value)
            yield counter
        success = CounterMetricFamily("vllm:request_success", "Requests that ended.", labels=[*self.labels, "finished_reason"])
        for reason, count in self.finished.items():
            success.add_metric([*self.labels.values(), reason], count)
        yield success

    def _histograms(self) -> Iterator[Metric]:
        histograms = {
            "vllm:time_to_first_token_seconds": ("Arrival to first token.", self.time_to_first_token),
            "vllm:inter_token_latency_seconds": ("Token to token.", self.inter_token_latency),
            "vllm:e2e_request_latency_seconds": ("Arrival to end.", self.e2e),
            "vllm:request_queue_time_seconds": ("Arrival to first scheduling.", self.queue_time),
            "vllm:request_prefill_time_seconds": ("First scheduling to first token.", self.prefill_time),
            "vllm:request_decode_time_seconds": ("First token to end.", self.decode_time),
        }
        for name, (text, histogram) in histograms.items():
            family = HistogramMetricFamily(name, text, labels=list(self.labels))
            family.add_metric(list(self.labels.values()), histogram.cumulated(), histogram.sum)
            yield family
