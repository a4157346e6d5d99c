"""The one loop that sleeps: sends a plan on time, and streams what happens into the run folder (see outcome.py)."""

import asyncio
import contextlib
import dataclasses
import gc
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.edge.alarm import Alarm
from replay.edge.client import Exchange, exchange, http_client
from replay.edge.engines import CounterBase
from replay.edge.probe import Target, probe
from replay.edge.scrape import scrape
from replay.errors import PlanError
from replay.outcome import Outcome, Sample
from replay.plan.build import COLUMNS, build_plan
from replay.plan.pacer import Pacer
from replay.plan.plan import Plan, Planned
from replay.plan.predict import Prediction, predict
from replay.plan.prompts import as_text, prompt_places, spliced
from replay.plan.scale import By, scale_plan
from tracer.limits import lift_file_limit
from tracer.tracefile import read_footer, read_table

LOOK_AHEAD_NS = 200_000_000  # prompts are built this long before they are due: 12k tokens take some 2 ms
SAMPLE_S = 0.25
LAG_PROBE_S = 0.02
DEAD_AFTER = 25  # so many requests in a row that did not even reach the target: it is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    trace: Path
    target: str  # root URL, without /v1
    run_dir: Path
    scales: tuple[float, ...] = (1.0, 2.0, 5.0)
    by: By = "users"
    limit: int | None = None
    seed: int = 0
    prompt_mode: str = "auto"  # auto | ids | text
    tokenizer: str = "cl100k"
    api_key_env: str | None = None
    metrics_url: str | None = None
    kv_tokens: int | None = None
    timeout_s: float = 600.0
    drain_s: float = 600.0
    dequantise: bool = True
    open_loop: bool = False  # later turns at their recorded times too, whether or not the answer before has come


@dataclass(slots=True)
class Progress:
    """Counters of the point that runs now, for a live line."""

    scale: float
    planned: int
    predicted_hit_rate: float | None
    sent: int = 0
    ended: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    late_ns_max: int = 0
    last_sample: Sample | None = None
    stop_reason: str | None = None

    @property
    def in_flight(self) -> int:
        return self.sent - self.ended


@dataclass(slots=True)
class Stop:
    """Set by Ctrl-C or by a dead target: send nothing more, drain what is in flight."""

    reason: str | None = None
    event: asyncio.Event = field(default_factory=asyncio.Event)

    def set(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
        self.event.set()


OnProgress = Callable[[Progress], None]


def run_replay(config: ReplayConfig, on_progress: OnProgress = lambda _: None) -> Path:
    """Replay every scale in turn and return the run folder. Raises TraceError or PlanError before anything is sent."""
    return asyncio.run(replay(config, on_progress))


async def replay(config: ReplayConfig, on_progress: OnProgress = lambda _: None) -> Path:
    seeds = np.random.SeedSequence(config.seed)
    footer = read_footer(config.trace)
    plan = build_plan(
        read_table(config.trace, COLUMNS),
        footer,
        np.random.default_rng(seeds.spawn(1)[0]),
        limit=config.limit,
        dequantise=config.dequantise,
    )
    if config.open_loop:
        plan = dataclasses.replace(plan, think_ns=np.full(len(plan), -1))
    headers = _headers(config)
    lift_file_limit()
    async with http_client(config.timeout_s, headers) as client:
        target = await probe(
            client,
            config.target.rstrip("/"),
            prompt_mode=config.prompt_mode,
            tokenizer=config.tokenizer,
            metrics_url=config.metrics_url,
        )
        config.run_dir.mkdir(parents=True, exist_ok=True)
        manifest = _manifest(config, target, plan)
        stop = Stop()
        with _interruptible(stop):
            for index, scale in enumerate(config.scales):
                if stop.reason is not None:
                    break
                point_seed, salt = (int(word) for word in np.random.SeedSequence([config.seed, index]).generate_state(2))
                scaled = scale_plan(plan, scale, config.by, np.random.default_rng(point_seed))
                prediction = _predict(scaled, config, target)
                facts = _point_facts(index, scale, config, point_seed, scaled, prediction)
                progress = Progress(scale=scale, planned=len(scaled), predicted_hit_rate=prediction.at_capacity)
                manifest["points"].append(facts)
                _write_json(config.run_dir / "run.json", manifest)
                point = _Point(scaled, target, salt, client, stop, progress, on_progress)
                await point.run(config.run_dir, index, config.drain_s)
                facts["stopped"] = stop.reason
                _write_json(config.run_dir / "run.json", manifest)
    return config.run_dir


def _headers(config: ReplayConfig) -> dict[str, str]:
    if config.api_key_env is None:
        return {}
    key = os.environ.get(config.api_key_env)
    if not key:
        raise PlanError(f"environment variable {config.api_key_env} is not set", next_step="Export the API key in it")
    return {"Authorization": f"Bearer {key}"}


def _predict(plan: Plan, config: ReplayConfig, target: Target) -> Prediction:
    capacity = config.kv_tokens or target.kv_capacity_tokens
    return predict(plan, capacity, answers_reused=target.returns_token_ids and target.prompt_mode == "ids")


def _manifest(config: ReplayConfig, target: Target, plan: Plan) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "trace": str(config.trace),
        "target": target.url,
        "model": target.model,
        "prompt_mode": target.prompt_mode,
        "returns_token_ids": target.returns_token_ids,
        "has_metrics": target.has_metrics,
        "kv_capacity_tokens": config.kv_tokens or target.kv_capacity_tokens,
        "seed": config.seed,
        "by": config.by,
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "notes": [*plan.notes, *target.notes],
        "points": [],
    }


def _point_facts(index: int, scale: float, config: ReplayConfig, seed: int, plan: Plan, prediction: Prediction) -> dict[str, Any]:
    return {
        "index": index,
        "scale": scale,
        "by": config.by,
        "seed": seed,
        "planned": len(plan),
        "planned_span_s": float(plan.planned_ns[-1]) / 1e9,
        "later_turns": int(((plan.parent >= 0) & (plan.think_ns >= 0)).sum()),
        "hit_rate_predicted": prediction.at_capacity,
        "hit_rate_predicted_infinite": prediction.infinite,
        "kv_capacity_tokens": prediction.kv_capacity_tokens,
        "answers_reused": prediction.answers_reused,
        "stopped": None,
    }


def _write_json(path: Path, value: object) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2))
    partial.replace(path)


@contextlib.contextmanager
def _interruptible(stop: Stop) -> Any:
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


class _Point:
    """One scale: its clock, its requests in flight, its files."""

    def __init__(
        self,
        plan: Plan,
        target: Target,
        salt: int,
        client: httpx.AsyncClient,
        stop: Stop,
        progress: Progress,
        on_progress: OnProgress,
    ) -> None:
        self.plan = plan
        self.target = target
        self.salt = salt
        self.client = client
        self.stop = stop
        self.progress = progress
        self.on_progress = on_progress
        self.pacer = Pacer(plan)
        self.parents = set(plan.parent[plan.parent >= 0].tolist())
        self.spoken: dict[int, NDArray[np.int64]] = {}  # prompt + answer of turns that a later turn continues
        self.changed = asyncio.Event()
        self.unreached = 0
        self.loop_lag_ns = 0
        self.counters = CounterBase()
        self.cpu_ns, self.wall_ns = time.process_time_ns(), time.monotonic_ns()
        self.start_ns = 0

    @property
    def now_ns(self) -> int:
        return time.monotonic_ns() - self.start_ns

    async def run(self, run_dir: Path, index: int, drain_s: float) -> None:
        alarm = Alarm()
        gc.collect()
        gc.freeze()  # a collection over a long plan would stall every stream
        stem = run_dir / f"point-{index}"
        try:
            with open(f"{stem}.outcomes.jsonl", "wb") as outcomes, open(f"{stem}.samples.jsonl", "wb") as samples:
                self.start_ns = time.monotonic_ns() + LOOK_AHEAD_NS
                await self._take_sample(samples)  # where the counters start
                async with _background(self._sample(samples), self._probe_lag()):
                    await self._send_all(alarm, outcomes, drain_s)
                await self._take_sample(samples)  # counters as they are when all have ended
        finally:
            alarm.close()
            gc.unfreeze()
        self.progress.stop_reason = self.stop.reason
        self.on_progress(self.progress)

    async def _send_all(self, alarm: Alarm, outcomes: BinaryIO, drain_s: float) -> None:
        tasks: set[asyncio.Task[None]] = set()
        try:
            while not self.pacer.is_finished and self.stop.reason is None:
                self.changed.clear()
                for due_ns, request_id in self.pacer.take_due(self.now_ns + LOOK_AHEAD_NS):
                    task = asyncio.get_running_loop().create_task(self._one(alarm, due_ns, request_id, outcomes))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                await self._wait_for_work()
            if tasks:
                await asyncio.wait(tasks, timeout=drain_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_for_work(self) -> None:
        """Until something else is due within the look-ahead, or an answer made a next turn due, or we are to stop."""
        next_ns = self.pacer.next_due_ns()
        wait_s = None if next_ns is None else (next_ns - LOOK_AHEAD_NS - self.now_ns) / 1e9
        if wait_s is not None and wait_s <= 0:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.changed.wait()

    async def _one(self, alarm: Alarm, due_ns: int, request_id: int, outcomes: BinaryIO) -> None:
        planned = self.plan[request_id]
        prompt, answer_spliced = self._prompt(planned)
        body = self._body(planned, prompt)
        ready_ns = self.now_ns
        await alarm.wait_until(self.start_ns + due_ns)
        if self.stop.reason is not None:
            return
        self.progress.sent += 1
        seen: Exchange | None = None
        try:
            seen = await exchange(self.client, self.target.url + "/v1/completions", body)
        finally:
            if seen is None:  # drained too long, or the second Ctrl-C
                seen = Exchange(sent_ns=self.start_ns + due_ns, end_ns=time.monotonic_ns())
                seen.fail("cancelled", "the run ended before the answer did")
            outcome = _outcome(planned, due_ns, ready_ns, seen, self.start_ns, answer_spliced)
            outcomes.write(msgspec.json.encode(outcome) + b"\n")
            outcomes.flush()
            self._ended(planned, prompt, seen, outcome)

    def _prompt(self, planned: Planned) -> tuple[NDArray[np.int64], bool | None]:
        """The prompt as token ids (mode ids) or places in the vocabulary (mode text)."""
        vocabulary = self.target.vocabulary
        places = prompt_places(planned, self.plan.block_tokens, self.salt, len(vocabulary.ids))
        if self.target.prompt_mode == "text":
            keep = max(1, planned.input_tokens - self.target.overhead_tokens)
            return places[:keep], None if planned.parent is None else False
        tokens = vocabulary.ids[places]
        if planned.parent is None:
            return tokens, None
        return spliced(tokens, self.spoken.pop(planned.parent, None), planned.parent_tokens)

    def _body(self, planned: Planned, prompt: NDArray[np.int64]) -> bytes:
        is_text = self.target.prompt_mode == "text"
        body = {
            "model": self.target.model,
            "prompt": as_text(prompt, self.target.vocabulary) if is_text else prompt.tolist(),
            "max_tokens": planned.output_tokens,
            "min_tokens": planned.output_tokens,  # ignore_eos alone does not fix the length on every server
            "ignore_eos": True,
            "temperature": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if self.target.returns_token_ids:
            body["return_token_ids"] = True
        return msgspec.json.encode(body)

    def _ended(self, planned: Planned, prompt: NDArray[np.int64], seen: Exchange, outcome: Outcome) -> None:
        progress = self.progress
        progress.ended += 1
        progress.errors += seen.error_kind is not None
        progress.prompt_tokens += outcome.input_tokens or 0
        progress.cached_tokens += outcome.cached_tokens or 0
        progress.late_ns_max = max(progress.late_ns_max, (outcome.sent_ns or 0) - outcome.planned_ns)
        if planned.request_id in self.parents and seen.facts.token_ids and seen.facts.has_all_token_ids:
            self.spoken[planned.request_id] = np.concatenate([prompt, np.array(seen.facts.token_ids, dtype=np.int64)])
        self.unreached = self.unreached + 1 if seen.error_kind in ("connect", "connection_lost") else 0
        if self.unreached >= DEAD_AFTER:
            self.stop.set(f"the target is gone: {self.unreached} requests in a row did not get through")
        self.pacer.ended(planned.request_id, outcome.end_ns or self.now_ns)
        self.changed.set()

    async def _sample(self, samples: BinaryIO) -> None:
        while True:
            await self._take_sample(samples)
            await asyncio.sleep(SAMPLE_S)

    async def _take_sample(self, samples: BinaryIO) -> None:
        state = await scrape(self.client, self.target.metrics_url) if self.target.has_metrics else None
        values = dict(state.values) if state else {}
        values.update(self.counters.since_start(values))
        cpu_ns, wall_ns = time.process_time_ns(), time.monotonic_ns()
        cpu_share = (cpu_ns - self.cpu_ns) / max(1, wall_ns - self.wall_ns)
        self.cpu_ns, self.wall_ns = cpu_ns, wall_ns
        lag_ns, self.loop_lag_ns = self.loop_lag_ns, 0
        sample = Sample(
            t_ns=self.now_ns,
            client_in_flight=self.progress.in_flight,
            client_cpu_share=cpu_share,
            client_loop_lag_ns=lag_ns,
            **values,
        )
        samples.write(msgspec.json.encode(sample) + b"\n")
        samples.flush()
        self.progress.last_sample = sample
        self.on_progress(self.progress)

    async def _probe_lag(self) -> None:
        """How late the event loop is: a stalled loop stamps every token late."""
        while True:
            before = time.monotonic_ns()
            await asyncio.sleep(LAG_PROBE_S)
            late_ns = time.monotonic_ns() - before - int(LAG_PROBE_S * 1e9)
            self.loop_lag_ns = max(self.loop_lag_ns, late_ns)


@contextlib.asynccontextmanager
async def _background(*coroutines: Any) -> AsyncIterator[None]:
    tasks = [asyncio.get_running_loop().create_task(one) for one in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


def _outcome(planned: Planned, due_ns: int, ready_ns: int, seen: Exchange, start_ns: int, answer_spliced: bool | None) -> Outcome:
    def since(absolute_ns: int | None) -> int | None:
        return None if absolute_ns is None else absolute_ns - start_ns

    usage = seen.facts.usage
    counted = usage is not None and usage.completion_tokens is not None
    has_all_counts = len(seen.chunk_tokens) == seen.chunks
    return Outcome(
        request_id=planned.request_id,
        source_request_id=planned.source_request_id,
        session_id=planned.session_id,
        turn=planned.turn,
        planned_ns=due_ns,
        recorded_ns=planned.planned_ns,
        ready_ns=ready_ns,
        sent_ns=since(seen.sent_ns),
        first_byte_ns=since(seen.first_byte_ns),
        first_reasoning_ns=since(seen.first_reasoning_ns),
        first_answer_ns=since(seen.first_answer_ns),
        last_token_ns=since(seen.last_token_ns),
        end_ns=since(seen.end_ns),
        planned_input_tokens=planned.input_tokens,
        planned_output_tokens=planned.output_tokens,
        input_tokens=usage.prompt_tokens if usage else None,
        output_tokens=usage.completion_tokens if usage and counted else (seen.chunks or None),
        cached_tokens=usage.cached_tokens if usage else None,
        token_count_source="usage" if counted else ("chunks" if seen.chunks else None),
        chunk_gaps_us=seen.chunk_gaps_us,
        chunk_tokens=seen.chunk_tokens if has_all_counts and seen.chunks else None,
        finish_reason=seen.facts.finish_reason,
        http_status=seen.http_status,
        error_kind=seen.error_kind,
        error_text=seen.error_text,
        answer_spliced=answer_spliced,
    )
