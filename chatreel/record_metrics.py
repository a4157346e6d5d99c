"""The figures of a running recording on a metrics page, loopback only."""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tracer.errors import TraceError
from tracer.record.figures import Sketch, quantile
from tracer.record.session import RecordStats

QUANTILES = (0.5, 0.99)
_PREFIX = "chatreel_record"


class StatsPage(Collector):
    """Shows the `stats` that it was given last."""

    def __init__(self) -> None:
        self.stats = RecordStats()

    def collect(self) -> Iterator[Metric]:
        stats, figures = self.stats, self.stats.figures
        yield _counter("requests", "Requests of the recorded endpoints", stats.seen)
        yield _counter("passed_through_requests", "Requests of other endpoints", stats.passed_through)
        yield _counter("rows_written", "Rows on disk", stats.recorded)
        yield _counter("rows_lost", "Rows that will never be written", stats.lost)
        yield _counter("prompts_shed", "Rows without their prompt, because the worker lagged", stats.prompts_shed)
        yield _counter("token_drift_requests", "Requests whose prompt the server counted otherwise", stats.token_drift)
        yield _counter("prompt_blocks", "Prompt blocks of 16 tokens", figures.prompt_blocks)
        yield _counter("reused_prompt_blocks", "Prompt blocks seen earlier in this recording, at least", figures.reused_blocks)
        yield _gauge("requests_in_flight", "Requests under way", stats.in_flight)
        yield _gauge("queued_bytes", "Waiting for the worker", stats.queued_bytes)
        yield _gauge("disk_failing", "1 while nothing can be written", int(stats.disk_error is not None))
        yield _quantiles("recent_ttft_seconds", "First token, last 30 to 60 s", figures.ttft_us, 1e-6)
        yield _quantiles("recent_input_tokens", "Prompt tokens, last 30 to 60 s", figures.input_tokens)
        yield _quantiles("recent_output_tokens", "Answer tokens, last 30 to 60 s", figures.output_tokens)


def _counter(name: str, help_: str, value: int) -> Metric:
    return CounterMetricFamily(f"{_PREFIX}_{name}", help_, value=value)


def _gauge(name: str, help_: str, value: int) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", help_, value=value)


def _quantiles(name: str, help_: str, sketch: Sketch, unit: float = 1.0) -> Metric:
    family = GaugeMetricFamily(f"{_PREFIX}_{name}", help_, labels=["quantile"])
    for share in QUANTILES:
        value = quantile(sketch, share)
        if value is not None:
            family.add_metric([str(share)], value * unit)
    return family


@contextmanager
def metrics_page(page: StatsPage, port: int) -> Iterator[str]:
    """Serves it; gives the URL. Port 0 takes any free one."""
    registry = CollectorRegistry()
    registry.register(page)
    try:
        server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    except (OSError, OverflowError) as error:
        raise TraceError(
            "cannot serve metrics here", seen=f"127.0.0.1:{port}", next_step="Choose another --prometheus port"
        ) from error
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
