"""One point of a sweep: its load sent to a server, or through the simulated engine in virtual time, until it is steady."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from replay.book import point_facts, server_facts
from replay.edge.probe import Target
from replay.foretelling import SAMPLE_S, write_played
from replay.judge.steady import Steady, little_of, steadiness
from replay.judge.summary import LoadBy
from replay.outcome import Sample
from replay.plan.plan import Plan
from replay.plan.predict import predict_routed
from replay.plan.route import Router, routed
from replay.plan.scale import rows_of
from replay.progress import Progress
from replay.results import log_path, read_lines, read_outcomes
from replay.run import Connected, ReplayConfig, connected, each_kv_tokens, interruptible, send_point, together
from replay.sharing import Job, Stop
from replay.sim.engine import Engine
from replay.sim.engines import engine_named
from replay.sim.presets import Preset, changed
from replay.sim.virtual import play

LOOK_EVERY = 1.1  # a point is looked at again when it has lasted so many times as long
FIRST_LOOK_S = 5.0
STEADY, GROWING, TIME_UP, ENOUGH = "steady", "growing", "time is up", "enough requests"
SAMPLE_WARM_UP, LONGEST_WARM_UP = 0.25, 500  # of a sample's requests, and requests: before its window
PAST_CAPACITY_REQUESTS = 2  # times the least number, before growth ends a point


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all points of a sweep have in common."""

    trace: Path
    run_dir: Path
    target: str | None
    other_targets: tuple[str, ...]
    router: Router
    engine: str | None
    cache: str
    max_s: float
    min_requests: int
    is_sample: bool
    seed: int
    kv_tokens: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    prompt_mode: str
    tokenizer: str
    api_key_env: str | None
    api_key_file: Path | None
    metrics_urls: tuple[str, ...]
    metrics_hz: float
    gpu: str | None
    serve_metrics: int | None
    timeout_s: float
    drain_s: float
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    index: int
    value: float
    by: LoadBy
    seed: int
    salt: int
    plan: Plan
    primer: int  # leading requests that only fill the cache
    at_once: int | None  # closed loop
    trace_input_tokens: float | None  # mean prompt of the whole trace; None: a sample, of which there are others


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """`facts` go into run.json; `point` runs a load into the run folder and returns what run.json says of it."""

    facts: dict[str, Any]
    point: Callable[[Load], Awaitable[dict[str, Any]]]


@contextlib.asynccontextmanager
async def opened(setting: Setting) -> AsyncIterator[Runner]:
    if setting.engine is not None:
        yield _virtual(setting)
        return
    config = _replay_config(setting)
    async with connected(config) as link:
        yield _live(setting, config, link)


@dataclass(slots=True)
class Watcher:
    """Decides from samples when a point may end."""

    setting: Setting
    load: Load
    t_s: list[float] = field(default_factory=list)
    in_flight: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    reason: str | None = None
    _next_look_s: float = FIRST_LOOK_S
    primed_s: float | None = None  # since when requests count

    def see(self, t_s: float, in_flight: float, ended: float) -> str | None:
        """Why the point is over now; None: it is not."""
        if self.reason is not None:
            return self.reason
        if self.primed_s is None and ended + in_flight >= self.load.primer:
            self.primed_s = t_s
        if self.primed_s is None:
            return None
        self.t_s.append(t_s)
        self.in_flight.append(in_flight)
        self.ended.append(ended)
        lasted_s = t_s - self.primed_s
        if lasted_s >= self.setting.max_s:
            self.reason = TIME_UP
        elif self.setting.is_sample:  # a point that may end when it looks well would look better than it is
            self.reason = ENOUGH if ended - self.ended[0] >= self._skipped + self.setting.min_requests else None
        elif lasted_s >= self._next_look_s:
            self._next_look_s = lasted_s * LOOK_EVERY
            self.reason = self._verdict()
        return self.reason

    def _verdict(self) -> str | None:
        seen = self.steadiness()
        enough = self.setting.min_requests
        if seen.verdict == "steady" and seen.ended >= enough:
            return STEADY
        if seen.verdict == "growing" and seen.ended >= PAST_CAPACITY_REQUESTS * enough:
            return GROWING
        return None

    def steadiness(self) -> Steady:
        return self._steadiness(len(self.t_s))

    def sample_begins_s(self) -> float:
        """When so many requests have ended as a sample leaves out."""
        if not self.t_s:
            return 0.0
        return self.t_s[min(int(np.searchsorted(self.ended, self.ended[0] + self._skipped)), len(self.t_s) - 1)]

    @property
    def _skipped(self) -> float:
        return min(SAMPLE_WARM_UP * self.setting.min_requests, LONGEST_WARM_UP)

    def until(self, end_s: float) -> Steady:
        """Without what came after the last request: the drain."""
        return self._steadiness(int(np.searchsorted(self.t_s, end_s, side="right")))

    def _steadiness(self, count: int) -> Steady:
        t, flying, ended = (np.array(one[:count]) for one in (self.t_s, self.in_flight, self.ended))
        return steadiness(t, flying, ended, is_closed=self.load.at_once is not None)


def _facts(
    watcher: Watcher, target: Target | None, kv_tokens: Sequence[int | None], *, answers_reused: bool, stopped: str | None
) -> dict[str, Any]:
    """What run.json says of a point that has run. The window: from the end of the warm-up to the last request."""
    load, setting = watcher.load, watcher.setting
    outcomes, _ = read_outcomes(setting.run_dir, load.index)
    samples, _ = read_lines(setting.run_dir / f"point-{load.index}.samples.jsonl", Sample)
    sent = np.array([one.sent_ns for one in outcomes if one.sent_ns is not None and one.end_ns is not None], dtype=np.float64)
    ends = np.array([one.end_ns for one in outcomes if one.sent_ns is not None and one.end_ns is not None], dtype=np.float64)
    end_s = float(sent.max() / 1e9) if len(sent) else 0.0
    seen = watcher.until(end_s)
    warm_up_s = watcher.sample_begins_s() if setting.is_sample else seen.warm_up_s
    start_s = warm_up_s if warm_up_s < end_s else 0.0
    rows = np.sort(np.array([one.request_id for one in outcomes], dtype=np.int64))
    was_sent = rows_of(load.plan, rows) if len(rows) else load.plan
    prediction = predict_routed(was_sent, kv_tokens, answers_reused=answers_reused)
    servers = server_facts(target, kv_tokens, was_sent) if target is not None else []
    for server, one in zip(servers, prediction.by_server, strict=True):
        server["hit_rate_predicted"] = one and one.at_capacity
    t_s = np.array([one.t_ns / 1e9 for one in samples])
    flying = np.array([float(one.client_in_flight or 0) for one in samples])
    return point_facts(load.index, load.value, load.by, load.seed, load.plan, prediction) | {
        "servers": servers,
        "trace_input_tokens": load.trace_input_tokens,
        "planned": len(outcomes),
        "planned_span_s": end_s,
        "later_turns": 0,  # none of them has a recorded time to be late against
        "window_s": (start_s, end_s),
        "steady": seen.verdict,
        "warm_up_s": warm_up_s,
        "drift": seen.drift,
        "half_width": seen.half_width,
        "ended_because": watcher.reason or "the trace is over",
        "little": msgspec.to_builtins(little_of(sent, ends, t_s, flying, (start_s, end_s))),
        "stopped": stopped,
    }


def _virtual(setting: Setting) -> Runner:
    assert setting.engine is not None
    preset = changed(
        engine_named(setting.engine),
        kv_tokens=setting.kv_tokens,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
    )
    tokens = preset.kv_blocks * preset.block_tokens
    carried = [Engine(preset)] if setting.cache == "carry" else None

    async def point(load: Load) -> dict[str, Any]:
        for engine in carried or ():  # what it holds stays, its clock and counters begin again
            engine.now_s, engine.steps = 0.0, 0
            engine.prefix_cache_queries = engine.prefix_cache_hits = engine.preemptions = 0
        watcher = Watcher(setting, load)
        play_into(setting.run_dir, load, preset, carried, watcher)
        return _facts(watcher, None, (tokens,), answers_reused=True, stopped=None)

    facts = {
        "target": f"simulated: {setting.engine}, {tokens:,} tokens of KV, at most {preset.max_num_seqs} requests in a batch",
        "model": setting.engine,
        "prompt_mode": "names",
        "has_metrics": True,
        "kv_capacity_tokens": tokens,
        "simulated": True,
        "notes": ["simulated in virtual time: no server was asked"],
    }
    return Runner(facts=facts, point=point)


def play_into(run_dir: Path, load: Load, preset: Preset, engines: list[Engine] | None, watcher: Watcher) -> None:
    playing = play(
        load.plan,
        preset,
        replicas=1,
        router="rr",
        sample_s=SAMPLE_S,
        engines=engines,
        at_once=load.at_once,
        is_over=lambda: watcher.reason is not None,
    )
    write_played(
        run_dir, load.index, playing, lambda seen, ended: watcher.see(seen.t_ns / 1e9, seen.client_in_flight or 0, ended)
    )


def _live(setting: Setting, config: ReplayConfig, link: Connected) -> Runner:
    target, tokens = link.target, each_kv_tokens(config, link.target)

    async def point(drawn: Load) -> dict[str, Any]:
        plan = routed(drawn.plan, setting.router, tokens, answers_reused=target.answers_reused)
        load = dataclasses.replace(drawn, plan=plan)
        watcher, stop = Watcher(setting, load), Stop()
        progress = Progress(scale=load.value, planned=len(load.plan), predicted_hit_rate=None)

        def look(now: Progress) -> None:
            sample = now.last_sample
            reason = watcher.see(sample.t_ns / 1e9, now.in_flight, now.counts.ended) if sample is not None else None
            if reason is not None:
                stop.set(reason)

        job = Job(
            target=target,
            salt=load.salt,
            drain_s=setting.drain_s,
            point=load.index,
            log=log_path(setting.run_dir, load.index, 0),
            at_once=load.at_once,
        )
        with interruptible(stop):
            await send_point(config, link, load.plan, job, stop, progress, look)
        stopped = None if stop.reason in (None, STEADY, GROWING, TIME_UP, ENOUGH) else stop.reason
        return _facts(watcher, target, tokens, answers_reused=target.answers_reused, stopped=stopped)

    facts = {
        "target": ", ".join(target.all_urls),
        "router": setting.router if setting.other_targets else None,
        "model": target.model,
        "prompt_mode": target.prompt_mode,
        "returns_token_ids": target.returns_token_ids,
        "has_metrics": target.has_metrics,
        "metrics_urls": target.metrics_urls,
        "kv_capacity_tokens": together(tokens),
        "notes": list(target.notes),
    }
    return Runner(facts=facts, point=point)


def _replay_config(setting: Setting) -> ReplayConfig:
    assert setting.target is not None
    return ReplayConfig(
        trace=setting.trace,
        target=setting.target,
        other_targets=setting.other_targets,
        router=setting.router,
        run_dir=setting.run_dir,
        seed=setting.seed,
        prompt_mode=setting.prompt_mode,
        tokenizer=setting.tokenizer,
        api_key_env=setting.api_key_env,
        api_key_file=setting.api_key_file,
        metrics_urls=setting.metrics_urls,
        metrics_hz=setting.metrics_hz,
        gpu=setting.gpu,
        serve_metrics=setting.serve_metrics,
        kv_tokens=setting.kv_tokens,
        timeout_s=setting.timeout_s,
        drain_s=setting.drain_s,
        workers=setting.workers,
    )
