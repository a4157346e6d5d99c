"""The recorder as a whole: `record` blocks until stopped; `start_recorder` runs it in a process of its own.

A recording `x.parquet` has beside it `x.key` (0600) and, until it is compacted, `x.segments/` (0700).
"""

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import msgspec

from tracer.errors import TraceError
from tracer.record.addon import Proxy, RecorderAddon, parse_upstream
from tracer.record.channel import QUEUE_BYTES, Channel
from tracer.record.compactor import compact, segments_folder
from tracer.record.messages import Counted, WorkerConfig
from tracer.record.privacy import create_key, load_key

STATS_S = 1.0
WARN_AGAIN_S = 60.0
WORKER_FINISH_S = 120.0


class RecordConfig(msgspec.Struct, frozen=True, kw_only=True):
    upstream: str
    out: str  # trace file to write, .parquet
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    tokenizer: str = "cl100k"
    chunk_times: bool = False
    key_path: str | None = None  # an existing key, to make traces that can be compared; else a new one beside `out`
    drain_s: float = 30.0  # how long requests under way may take to end after the stop signal
    queue_bytes: int = QUEUE_BYTES


class RecordStats(msgspec.Struct, frozen=True, kw_only=True):
    seen: int  # requests of the recorded endpoints
    in_flight: int  # requests of all endpoints
    recorded: int  # rows on disk
    lost: int  # rows that will never be
    prompts_shed: int  # rows without their prompt's blocks, because the worker lagged
    token_drift: int  # rows whose prompt the server counted otherwise than our tokenizer
    passed_through: int  # requests of other endpoints
    queued_bytes: int
    disk_error: str | None


class RecordResult(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    rows: int
    losses: dict[str, int]


def record(
    config: RecordConfig,
    on_ready: Callable[[str], None] | None = None,
    on_stats: Callable[[RecordStats], None] | None = None,
    on_warning: Callable[[str], None] | None = None,
) -> RecordResult:
    """Record until SIGINT or SIGTERM (a second one cuts the requests under way), then write the trace.

    `on_ready` gets the URL for clients. Warnings go to stderr by default. Must run in the main thread to get signals.
    """
    warn = on_warning or _to_stderr
    out = Path(config.out)
    upstream = parse_upstream(config.upstream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold prompts
    folder, key_path = _lay_out(out, config.key_path)
    started_ns = time.monotonic_ns()
    worker = WorkerConfig(
        folder=str(folder),
        key_path=str(key_path),
        tokenizer=config.tokenizer,
        chunk_times=config.chunk_times,
        epoch_ns=time.time_ns(),
        upstream=upstream.name,
        producer=f"chatreel {metadata.version('chatreel')}",
    )
    session = _Session(config, worker, warn, on_stats or (lambda _: None), started_ns)
    try:
        asyncio.run(session.run(on_ready or (lambda _: None)))
    except TraceError:
        _take_back(folder, key_path if config.key_path is None else None)
        raise
    session.warn_of_losses()
    result = compact(folder, out, counts=session.counts())
    return RecordResult(path=str(result.path), rows=result.rows, losses=result.losses)


class _Session:
    """One run of proxy and worker, from start to the worker's farewell."""

    def __init__(
        self,
        config: RecordConfig,
        worker: WorkerConfig,
        warn: Callable[[str], None],
        on_stats: Callable[[RecordStats], None],
        started_ns: int,
    ) -> None:
        self._config = config
        self._worker = worker
        self._warn = warn
        self._on_stats = on_stats
        self._now_ns = lambda: time.monotonic_ns() - started_ns
        self._channel: Channel | None = None
        self._addon: RecorderAddon | None = None
        self._warned: tuple[str | None, int] = (None, 0)
        self._warn_at = 0.0

    async def run(self, on_ready: Callable[[str], None]) -> None:
        stop, cut = asyncio.Event(), asyncio.Event()
        self._watch_signals(stop, cut)
        channel = self._channel = Channel(self._worker, self._warn, self._config.queue_bytes)
        failed = await channel.start()
        if failed is not None:
            raise TraceError(f"cannot record: {failed}")
        upstream = parse_upstream(self._config.upstream)
        self._addon = RecorderAddon(channel, self._now_ns, upstream.path_prefix)
        proxy = Proxy(upstream, self._config.host, self._config.port, self._addon, Path(self._worker.folder, "ca"))
        try:
            on_ready(await proxy.start())
            while not await _is_set(stop, STATS_S):
                self._tick()
            await self._stop(proxy, cut)
        finally:
            channel.tell(Counted(counts=self._own_counts()))
            await channel.finish(WORKER_FINISH_S)
            self._tick()

    async def _stop(self, proxy: Proxy, cut: asyncio.Event) -> None:
        stopping = asyncio.ensure_future(proxy.stop(self._config.drain_s))
        while not stopping.done():
            self._tick()
            if await _is_set(cut, 0.2) and self._addon is not None:
                self._addon.under_way.clear()
                await asyncio.sleep(0.05)
        await stopping

    def _watch_signals(self, stop: asyncio.Event, cut: asyncio.Event) -> None:
        def on_signal() -> None:
            (cut if stop.is_set() else stop).set()

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, on_signal)

    def _tick(self) -> None:
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

    def warn_of_losses(self) -> None:
        stats = self.stats()
        if stats.lost:
            self._warn(f"the trace lacks {stats.lost} of {stats.seen} requests")

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


async def _is_set(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _to_stderr(text: str) -> None:
    print(f"chatreel: {text}", file=sys.stderr, flush=True)


def _lay_out(out: Path, key_path: str | None) -> tuple[Path, Path]:
    """(segments folder, key file), new unless a key is given. Never overwrites an earlier recording."""
    folder = segments_folder(out)
    if out.suffix != ".parquet":
        raise TraceError("a trace is a Parquet file", seen=str(out), wanted="a path that ends in .parquet")
    if out.exists():
        raise TraceError("this trace exists already", path=str(out), next_step="Choose another -o path")
    if folder.exists():
        raise TraceError(
            "an unfinished recording stands here",
            path=str(folder),
            next_step=f"Run `chatreel compact {folder}` to turn it into a trace, or choose another -o path",
        )
    if key_path is not None:
        load_key(Path(key_path))
        key = Path(key_path)
    else:
        key = out.with_suffix(".key")
        create_key(key)
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise TraceError(f"cannot write here: {error.strerror}", path=str(folder)) from error
    return folder, key


def _take_back(folder: Path, key: Path | None) -> None:
    """A recording that never began leaves nothing behind."""
    shutil.rmtree(folder)
    if key is not None:
        key.unlink(missing_ok=True)


class RecorderProcess:
    """A recorder in its own process, for tests, demos and scripts."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str) -> None:
        self.process = process
        self.url = url

    def stop(self, timeout_s: float = 60.0) -> RecordResult:
        """Drain, compact, and return the result; kills the recorder when that takes longer than `timeout_s`."""
        self.process.send_signal(signal.SIGTERM)
        try:
            out, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TraceError(f"the recorder did not stop within {timeout_s:.0f} s") from None
        last = out.splitlines()[-1] if out else b"{}"
        if self.process.returncode != 0:
            error = msgspec.json.decode(last).get("error", f"exit code {self.process.returncode}")
            raise TraceError(f"the recorder failed: {error}")
        return msgspec.json.decode(last, type=RecordResult)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> "RecorderProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()


def start_recorder(config: RecordConfig) -> RecorderProcess:
    """Start and wait until it listens. Its warnings go to our stderr. Raises TraceError if it cannot start."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tracer.record", msgspec.json.encode(config).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    answer = msgspec.json.decode(line) if line else {"error": "it ended at once"}
    if "url" not in answer:
        process.communicate()
        raise TraceError(f"the recorder cannot start: {answer['error']}")
    return RecorderProcess(process, answer["url"])
