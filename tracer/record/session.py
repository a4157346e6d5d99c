"""One proxy and its worker, from start to the worker's farewell. Blocks nothing but its own event loop."""

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from tracer.errors import TraceError
from tracer.record.addon import Proxy, RecorderAddon, load_mitmproxy
from tracer.record.channel import QUEUE_BYTES, Channel
from tracer.record.figures import together
from tracer.record.messages import SERVER_TOKENIZER, Counted, Figures, WorkerConfig
from tracer.record.routes import AllowList, Routes, parse_allow_list, parse_routes

STATS_S = 1.0
GC_THRESHOLDS = (700, 20, 50)  # rarer rounds of the old: Python's own are 700, 10, 10; of the young, 10,000 take 4 ms
WARN_AGAIN_S = 60.0
WORKER_FINISH_S = 120.0


class RecordConfig(msgspec.Struct, frozen=True, kw_only=True):
    upstream: str = ""  # of a reverse proxy
    more_upstreams: list[str] = []  # `/path=URL` or `host=URL`; one of all must be without a condition
    forward: bool = False  # a forward proxy instead, to `allow_hosts` only, TLS decrypted
    allow_hosts: list[str] = []
    upstream_ca: str | None = None  # PEM file of the authorities that upstreams are checked by, beside the usual ones
    ca_folder: str | None = None  # certificate authority of the proxy, kept; None: one of this recording alone
    out: str  # trace file to write, .parquet
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    tokenizer: str = "cl100k"
    model_tokenizers: dict[str, str] = {}  # of models that have one of their own
    chunk_times: bool = False
    force_usage: bool = False  # ask the server for usage where the client does not, and keep it from the client
    key_path: str | None = None  # an existing key, to make traces that can be compared; else a new one beside `out`
    keep_text: bool = False  # prompts and answers in clear, in a file of their own
    drain_s: float = 30.0  # how long requests under way may take to end after the stop signal
    queue_bytes: int = QUEUE_BYTES  # per proxy
    workers: int = 1  # proxies with a writer each, all on one port


def routes(config: RecordConfig) -> Routes | AllowList:
    """Raises TraceError for what is none."""
    given = [one for one in (config.upstream, *config.more_upstreams) if one]
    if config.forward and given:
        raise TraceError("a forward proxy has no upstream", seen=given[0], next_step="Name what it may reach with --allow-host")
    if config.forward:
        return parse_allow_list(config.allow_hosts)
    return parse_routes(given)


def tokenize_urls(config: RecordConfig) -> dict[str, str]:
    """Where to ask for token ids, by name of the upstream. Raises TraceError for routes that are none."""
    found = routes(config)
    if isinstance(found, Routes):
        upstreams = [found.default, *(route.upstream for route in found.others)]
        return {one.name: one.origin + one.path_prefix for one in reversed(upstreams)}
    if SERVER_TOKENIZER in (config.tokenizer, *config.model_tokenizers.values()):
        raise TraceError(
            "a forward proxy does not ask other hosts of its own accord",
            seen=f"tokenizer {SERVER_TOKENIZER}",
            wanted="a tokenizer that stands here, e.g. o200k or a model's folder",
        )
    return {}


def _spare_collections() -> None:
    """What is loaded by now stays until the end: a full collection that walks it stalls every stream for some 50 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


class RecordStats(msgspec.Struct, frozen=True, kw_only=True):
    seen: int = 0  # requests of the recorded endpoints
    in_flight: int = 0  # requests of all endpoints
    recorded: int = 0  # rows on disk
    lost: int = 0  # rows that will never be
    prompts_shed: int = 0  # rows without their prompt's blocks, because the worker lagged
    token_drift: int = 0  # rows whose prompt the server counted otherwise than our tokenizer
    passed_through: int = 0  # requests of other endpoints
    queued_bytes: int = 0
    disk_error: str | None = None
    figures: Figures = Figures()


class Session:
    """One run of proxy and worker, from start to the worker's farewell."""

    def __init__(
        self,
        config: RecordConfig,
        worker: WorkerConfig,
        warn: Callable[[str], None],
        on_stats: Callable[[RecordStats], None],
        started_ns: int,
        *,
        share_port: bool = False,
    ) -> None:
        self._config = config
        self._worker = worker
        self._warn = warn
        self._on_stats = on_stats
        self._share_port = share_port
        self._now_ns = lambda: time.monotonic_ns() - started_ns
        self._channel: Channel | None = None
        self._addon: RecorderAddon | None = None
        self._warned: tuple[str | None, int] = (None, 0)
        self._warn_at = 0.0

    async def run(self, on_ready: Callable[[str], None]) -> None:
        stop, cut = asyncio.Event(), asyncio.Event()
        watch_signals(stop, cut)
        opening = asyncio.create_task(self.open(routes(self._config)))
        await asyncio.sleep(0)
        load_mitmproxy()  # takes as long as the start of the worker, which goes on meanwhile
        addon = await opening
        ca_folder = Path(self._config.ca_folder or Path(self._worker.folder, "ca"))
        proxy = Proxy(self._config.host, self._config.port, addon, ca_folder, self._config.upstream_ca)
        try:
            url = await proxy.start(share_port=self._share_port)
            _spare_collections()
            on_ready(url)
            while not await is_set(stop, STATS_S):
                self.tick()
            await self._stop(proxy, cut)
        finally:
            await self.close()

    async def open(self, where: Routes | AllowList | None) -> RecorderAddon:
        """The add-on records from now on. `where` None: where requests go is none of its business."""
        channel = self._channel = Channel(self._worker, self._warn, self._config.queue_bytes)
        failed = await channel.start()
        if failed is not None:
            raise TraceError(f"cannot record: {failed}")
        self._addon = RecorderAddon(channel, self._now_ns, where, forces_usage=self._config.force_usage)
        return self._addon

    async def close(self) -> None:
        assert self._channel is not None
        self._channel.tell(Counted(counts=self._own_counts()))
        await self._channel.finish(WORKER_FINISH_S)
        self.tick()

    async def _stop(self, proxy: Proxy, cut: asyncio.Event) -> None:
        stopping = asyncio.ensure_future(proxy.stop(self._config.drain_s))
        while not stopping.done():
            self.tick()
            await asyncio.wait([stopping], timeout=0.2)
            if cut.is_set() and self._addon is not None:
                self._addon.under_way.clear()
                await asyncio.sleep(0.05)
        await stopping

    def tick(self) -> None:
        """To be called each second."""
        assert self._channel is not None
        self._channel.tell(Counted(counts=self._own_counts()))
        stats = self.stats()
        try:
            self._on_stats(stats)
        except Exception:  # a live line that cannot be drawn must not stop traffic
            pass
        self._warn_of_trouble(stats)

    def _warn_of_trouble(self, stats: RecordStats) -> None:
        """At once when it begins or changes, then once a minute."""
        trouble = (stats.disk_error, stats.lost)
        now = time.monotonic()
        if trouble == (None, 0) or (trouble[0] == self._warned[0] and now < self._warn_at):
            return
        if trouble == self._warned and stats.disk_error is None:
            return
        self._warned, self._warn_at = trouble, now + WARN_AGAIN_S
        if stats.disk_error is not None:
            self._warn(
                f"RECORDING HAS STOPPED: {stats.disk_error}. Traffic flows on; {stats.lost} rows lost so far. "
                f"Free space under {self._worker.folder}; the next try is within ten seconds"
            )
        else:
            self._warn(f"{stats.lost} rows lost so far")

    def stats(self) -> RecordStats:
        assert self._channel is not None
        addon, channel, counts = self._addon, self._channel, self.counts()
        return RecordStats(
            seen=addon.seen if addon else 0,
            in_flight=len(addon.under_way) if addon else 0,
            recorded=channel.recorded,
            lost=counts.get("rows_lost_in_queue", 0) + counts.get("rows_lost_on_disk", 0),
            prompts_shed=channel.prompts_shed,
            token_drift=counts.get("token_drift", 0),
            passed_through=counts.get("passed_through", 0),
            queued_bytes=channel.queued_bytes,
            disk_error=channel.report.disk_error,
            figures=channel.figures,
        )

    def counts(self) -> dict[str, int]:
        assert self._channel is not None
        return {**self._channel.report.counts, **self._own_counts()}

    def _own_counts(self) -> dict[str, int]:
        channel, addon = self._channel, self._addon
        assert channel is not None
        counts = dict(addon.counts) if addon else {}
        counts |= {"rows_lost_in_queue": channel.rows_lost, "prompts_shed": channel.prompts_shed}
        counts["worker_deaths"] = channel.worker_deaths
        return {name: count for name, count in counts.items() if count}


async def is_set(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def watch_signals(stop: asyncio.Event, cut: asyncio.Event) -> None:
    """The first signal sets `stop`, the second one `cut`. Only the main thread gets signals."""

    def on_signal() -> None:
        (cut if stop.is_set() else stop).set()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)


def summed(parts: Iterable[RecordStats]) -> RecordStats:
    """Of several proxies; the first disk error stands for all."""
    parts = list(parts)
    return RecordStats(
        seen=sum(part.seen for part in parts),
        in_flight=sum(part.in_flight for part in parts),
        recorded=sum(part.recorded for part in parts),
        lost=sum(part.lost for part in parts),
        prompts_shed=sum(part.prompts_shed for part in parts),
        token_drift=sum(part.token_drift for part in parts),
        passed_through=sum(part.passed_through for part in parts),
        queued_bytes=sum(part.queued_bytes for part in parts),
        disk_error=next((part.disk_error for part in parts if part.disk_error is not None), None),
        figures=together(part.figures for part in parts),
    )
