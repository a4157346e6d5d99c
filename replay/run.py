"""A trace replayed at several scales into a run folder (see outcome.py): what is sent, watched and written, and in what order.

The sending itself is in sharing.py, by one process here or by several (workers.py).
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import numpy as np
import uvloop

from replay.book import Book, point_facts, server_facts
from replay.edge.client import Client, TransportName, client_for
from replay.edge.fleet import probe_all
from replay.edge.nvml import Nvml
from replay.edge.page import served
from replay.edge.probe import Target
from replay.edge.scrape import Reading as ServerReading
from replay.edge.scrape import Scraper
from replay.errors import PlanError
from replay.live import CONTENT_TYPE
from replay.outcome import Sample
from replay.plan.plan import Plan
from replay.plan.predict import Prediction, predict_routed
from replay.plan.route import Router, routed
from replay.plan.scale import By, scale_plan
from replay.plan.share import WHOLE, Shard, share_rows
from replay.progress import OnProgress, Progress
from replay.reading import Reading
from replay.results import log_path
from replay.sharing import Counts, Job, Share, Stop, Until, background
from replay.starting import check_start, shard_facts, shard_notes, wait_for_start, wait_until_near
from replay.workers import Workers
from tracer.limits import lift_file_limit

METRICS_HZ, FASTEST_HZ = 4.0, 10.0
PATIENCE = 0.8  # of the time between two samples: a page that takes longer is in one of the next


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    trace: Path
    target: str  # root URL, without /v1
    other_targets: tuple[str, ...] = ()  # more servers of the same model
    router: Router = "prefix"  # which of them a request goes to
    run_dir: Path
    scales: tuple[float, ...] = (1.0, 2.0, 5.0)
    by: By = "users"
    limit: int | None = None
    seed: int = 0
    prompt_mode: str = "auto"  # auto | ids | text | chat | responses | messages
    tokenizer: str = "cl100k"
    api_key_env: str | None = None
    api_key_file: Path | None = None
    metrics_urls: tuple[str, ...] = ()  # none: the target's own
    metrics_hz: float = METRICS_HZ
    serve_metrics: int | None = None  # port of a page of the client's own series, on loopback
    gpu: str | None = None  # nvml, or nvml:0,1: GPUs of this machine
    kv_tokens: int | None = None  # of each target
    timeout_s: float = 600.0
    drain_s: float = 600.0
    dequantise: bool = True
    transport: TransportName = "own"
    workers: int = 1  # sending processes
    long_references: int = 4_000_000  # a point of more block references is read and predicted while it runs, not before
    hang_up: bool = True  # where the recorded clients did
    retries: int = 0  # of a request that failed before its first token
    shard: Shard = WHOLE  # of several hosts, which part of the plan this one sends
    start_at_ns: int | None = None  # wall clock, since 1970: when the first point starts; None: as soon as it can
    # Asked when this point is ready: its start on this host's wall clock, as other hosts agree.
    agree: Callable[[int], Awaitable[int]] | None = None
    open_loop: bool = False  # later turns at their recorded times too, whether or not the answer before has come


def run_replay(config: ReplayConfig, on_progress: OnProgress = lambda _: None) -> Path:
    """Replay every scale in turn and return the run folder. Raises TraceError or PlanError before anything is sent."""
    return uvloop.run(replay(config, on_progress))


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    client: Client
    target: Target
    workers: Workers | None
    headers: dict[str, str]
    gpus: Nvml | None
    live: list[Progress]  # the point that runs now, last


@contextlib.asynccontextmanager
async def connected(config: ReplayConfig) -> AsyncIterator[Connected]:
    """The target found out and ready to be sent to. Raises PlanError if it is not usable."""
    if not 0 < config.metrics_hz <= FASTEST_HZ:
        raise PlanError(
            "cannot read metrics so often", seen=f"--metrics-hz {config.metrics_hz:g}", wanted=f"above 0, at most {FASTEST_HZ:g}"
        )
    headers = _headers(config)
    lift_file_limit()
    async with contextlib.AsyncExitStack() as stack:
        live: list[Progress] = []
        if config.serve_metrics is not None:
            page = served(config.serve_metrics, CONTENT_TYPE, lambda: live[-1].openmetrics() if live else "# EOF\n")
            await stack.enter_async_context(page)
        gpus = stack.enter_context(contextlib.closing(Nvml(config.gpu))) if config.gpu is not None else None
        workers = stack.enter_context(Workers(config.workers)) if config.workers > 1 else None  # they start while we look
        client = await stack.enter_async_context(client_for(config.timeout_s, headers, config.transport))
        target = await probe_all(
            client,
            [url.rstrip("/") for url in (config.target, *config.other_targets)],
            prompt_mode=config.prompt_mode,
            tokenizer=config.tokenizer,
            metrics_urls=config.metrics_urls,
        )
        yield Connected(client=client, target=target, workers=workers, headers=headers, gpus=gpus, live=live)


async def replay(config: ReplayConfig, on_progress: OnProgress = lambda _: None, stop: Stop | None = None) -> Path:
    if config.agree is None:
        check_start(config.shard, config.start_at_ns, len(config.scales))
    options = plan_options(config.limit, config.dequantise, config.open_loop)
    reading = Reading(config.trace, config.seed, **options)
    async with connected(config) as link:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        stop = stop or Stop()
        with reading, interruptible(stop):
            book = Book(
                config.run_dir,
                _manifest(config, link.target),
                lambda: [*reading.notes, *link.target.notes, *shard_notes(config.shard)],
            )
            target, kv_tokens = link.target, each_kv_tokens(config, link.target)
            for index, scale in enumerate(config.scales):
                if stop.reason is not None:
                    break
                point_seed, salt = point_seeds(config.seed, index)
                is_long = reading.references * scale > config.long_references
                begins_at_once = is_long and link.workers is None and _needs_no_blocks(config, scale)
                plan = reading.plan if begins_at_once else await reading.finished()
                scaled = scale_plan(plan, scale, config.by, np.random.default_rng(point_seed))
                scaled = routed(scaled, config.router, kv_tokens, answers_reused=target.answers_reused)
                facts = point_facts(index, scale, config.by, point_seed, scaled, None)
                facts["servers"] = server_facts(target, kv_tokens, scaled)
                if config.shard.count > 1 or config.agree is not None:
                    facts |= shard_facts(scaled, config.shard, facts, config.start_at_ns)
                progress = Progress(scale=scale, planned=facts["planned"], predicted_hit_rate=None)
                log = log_path(config.run_dir, index, 0)
                job = Job(
                    target=target,
                    salt=salt,
                    drain_s=config.drain_s,
                    point=index,
                    log=log,
                    hang_up=config.hang_up,
                    retries=config.retries,
                )
                until = reading.until if begins_at_once else None
                foretell = partial(foretold, replace(config, agree=None), scale, point_seed, kv_tokens, target.answers_reused)
                prediction = None if is_long else predict_routed(scaled, kv_tokens, answers_reused=target.answers_reused)
                async with book.point(facts, prediction or foretell, progress.foretold):
                    await send_point(config, link, scaled, job, stop, progress, on_progress, until)
                    progress.stop_reason = facts["stopped"] = stop.reason
                    on_progress(progress)
    return config.run_dir


def foretold(
    config: ReplayConfig, scale: float, point_seed: int, kv_tokens: tuple[int | None, ...], answers_reused: bool
) -> Prediction:
    """From the trace file: nothing but a few numbers goes from process to process."""
    plan = planned(config.trace, config.seed, **plan_options(config.limit, config.dequantise, config.open_loop))
    scaled = scale_plan(plan, scale, config.by, np.random.default_rng(point_seed))
    ready = routed(scaled, config.router, kv_tokens, answers_reused=answers_reused)
    return predict_routed(ready, kv_tokens, answers_reused=answers_reused)


async def send_point(
    config: ReplayConfig,
    link: Connected,
    plan: Plan,
    job: Job,
    stop: Stop,
    progress: Progress,
    on_progress: OnProgress,
    until: Until | None = None,
) -> None:
    """Send a plan and watch the server meanwhile; outcomes and samples are in the run folder then.

    `until`: waits until the plan has the blocks of a request; None: it has them all.
    """
    if link.workers is None:
        sender: _Sender = Share(plan, share_rows(plan, 0, 1, config.shard), job, link.client, stop, until)
    else:
        sender = link.workers.share_out(plan, config.shard, job, config.timeout_s, link.headers, config.transport, stop)
    link.live[:] = [progress]
    scraper = Scraper(link.client.http, link.target.metrics_urls, link.gpus)
    watch = _Watch(scraper, 1 / config.metrics_hz, sender, progress, on_progress)
    with open(config.run_dir / f"point-{job.point}.samples.jsonl", "wb") as samples:
        await watch.run(samples, *_starting(config, job.point, stop))


def _starting(config: ReplayConfig, point: int, stop: Stop) -> tuple[Callable[[], Awaitable[None]], Callable[[], Awaitable[int]]]:
    """(waits until the start is near, waits for it and returns it on the monotonic clock)."""
    start_at_ns = config.start_at_ns if point == 0 else None

    async def near() -> None:
        nonlocal start_at_ns
        if config.agree is not None:
            start_at_ns = await config.agree(point)
        await wait_until_near(start_at_ns, stop)

    async def start() -> int:
        return await wait_for_start(start_at_ns, stop)

    return near, start


def _needs_no_blocks(config: ReplayConfig, scale: float) -> bool:
    """Its plan can be made before they are read. A shard's can wait for them: it is to start later, and has a digest."""
    is_routed_by_them = bool(config.other_targets) and config.router == "prefix"
    return (scale == 1 or config.by == "time") and not is_routed_by_them and config.shard.count == 1 and config.agree is None


def each_kv_tokens(config: ReplayConfig, target: Target) -> tuple[int | None, ...]:
    return tuple(config.kv_tokens or tokens for tokens in target.each_kv_tokens)


def together(kv_tokens: Sequence[int | None]) -> int | None:
    known = [tokens for tokens in kv_tokens if tokens is not None]
    return sum(known) if len(known) == len(kv_tokens) else None


def _headers(config: ReplayConfig) -> dict[str, str]:
    """With the key where both kinds of API look for it."""
    headers = {"anthropic-version": "2023-06-01"} if config.prompt_mode == "messages" else {}
    key = api_key(config)
    if key is None:
        return headers
    return headers | {"Authorization": f"Bearer {key}"} | ({"x-api-key": key} if headers else {})


def api_key(config: ReplayConfig) -> str | None:
    if config.api_key_file is not None:
        try:
            key = config.api_key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError("the API key cannot be read", path=str(config.api_key_file), seen=str(error)) from error
        if len(key.split()) != 1 or not key.isascii():  # what is seen stays unsaid: it may be most of a key
            raise PlanError("no API key", path=str(config.api_key_file), wanted="a file that holds the key and nothing else")
        return key
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env, "")
    if not key:
        raise PlanError(f"environment variable {config.api_key_env} is not set", next_step="Export the API key in it")
    return key


def _manifest(config: ReplayConfig, target: Target) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "trace": str(config.trace),
        "target": ", ".join(target.all_urls),
        "router": config.router if config.other_targets else None,
        "model": target.model,
        "prompt_mode": target.prompt_mode,
        "returns_token_ids": target.returns_token_ids,
        "has_metrics": target.has_metrics,
        "metrics_urls": target.metrics_urls,
        "metrics_hz": config.metrics_hz,
        "gpu": config.gpu,
        "kv_capacity_tokens": together(each_kv_tokens(config, target)),
        "block_tokens": target.block_tokens,
        "seed": config.seed,
        "by": config.by,
        **plan_options(config.limit, config.dequantise, config.open_loop),
        "hang_up": config.hang_up,
        "retries": config.retries,
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "notes": [],
        "points": [],
    }


def planned(trace: Path, seed: int, *, limit: int | None, dequantise: bool, open_loop: bool) -> Plan:
    """A trace file as the plan of a run with this seed."""
    return Reading(trace, seed, limit=limit, dequantise=dequantise, open_loop=open_loop).whole()


def plan_options(limit: int | None, dequantise: bool, open_loop: bool) -> dict[str, Any]:
    """What run.json says so that a run's plan can be made again."""
    return {"limit": limit, "dequantise": dequantise, "open_loop": open_loop}


def point_seeds(seed: int, index: int) -> tuple[int, int]:
    """(seed of the scaling, salt of the prompts) of a point."""
    scaling, salt = np.random.SeedSequence([seed, index]).generate_state(2).tolist()
    return scaling, salt


@contextlib.contextmanager
def interruptible(stop: Stop) -> Iterator[None]:
    """First Ctrl-C: stop sending and drain. The second one ends the program as usual."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        stop.set("interrupted")
        loop.remove_signal_handler(signal.SIGINT)

    try:
        loop.add_signal_handler(signal.SIGINT, first)
    except (ValueError, RuntimeError):  # not the main thread: the caller handles signals
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Sender(Protocol):
    """What sends a point: a share here, or workers."""

    async def ready(self) -> None: ...
    async def run(self, start_ns: int) -> None: ...
    def counts(self) -> list[Counts]: ...


class _Watch:
    """Server and client, looked at every `period_s` while a point runs, however long the server's pages take."""

    def __init__(self, scraper: Scraper, period_s: float, sender: _Sender, progress: Progress, on_progress: OnProgress) -> None:
        self.scraper, self.period_s = scraper, period_s
        self.sender = sender
        self.progress = progress
        self.on_progress = on_progress

    async def run(self, samples: BinaryIO, near: Callable[[], Awaitable[None]], start: Callable[[], Awaitable[int]]) -> None:
        await self.sender.ready()
        await near()
        try:
            before = await self.scraper.read()  # where the counters start; a slow page must not eat up the time until the first
            self.start_ns = await start()
            self._take_sample(samples, before)
            async with background(self._sample(samples)):
                await self.sender.run(self.start_ns)
            self._take_sample(samples, await self.scraper.read_afresh())  # counters as they are when all have ended
        finally:
            self.scraper.close()

    async def _sample(self, samples: BinaryIO) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            self._take_sample(samples, await self.scraper.read(PATIENCE * self.period_s))
            next_s = max(next_s + self.period_s, loop.time())
            await asyncio.sleep(next_s - loop.time())

    def _take_sample(self, samples: BinaryIO, server: ServerReading) -> None:
        shares = self.sender.counts()
        self.progress.update(shares)
        sample = Sample(
            t_ns=time.monotonic_ns() - self.start_ns,
            client_in_flight=self.progress.in_flight,
            client_cpu_share=max((one.cpu_share for one in shares), default=0.0),  # each process has one core for its loop
            client_loop_lag_ns=max((one.loop_lag_ns for one in shares), default=0),
            servers=server.servers,
            metrics_missing=server.missing,
            metrics_late=server.late,
            **server.values,
        )
        samples.write(msgspec.json.encode(sample) + b"\n")
        samples.flush()
        self.progress.last_sample = sample
        self.on_progress(self.progress)
