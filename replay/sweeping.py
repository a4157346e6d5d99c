"""`chatreel sweep`: one load after the other into a run folder like that of a replay, each until it is steady.

The loads are drawn here; running.py sends one of them, to a server or through the simulated engine.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import uvloop

from replay.book import write_json
from replay.errors import PlanError
from replay.judge.summary import LoadBy, load_label
from replay.plan.load import Arrivals, as_long_as, at_rate, closed, stretch, twice
from replay.plan.plan import Plan
from replay.plan.route import Router
from replay.plan.scale import By, scale_plan
from replay.run import METRICS_HZ, planned, point_seeds
from replay.running import Load, Setting, opened

Kind = Literal["concurrency", "rate", "scale"]
Cache = Literal["cold", "primed", "carry"]
CLOSED_SESSIONS = 40  # a closed loop's plan holds so many sessions for each that is open, and never fewer than
CLOSED_REQUESTS = 5_000  # requests
LONGEST_STRETCH, LONGEST_LEAD = 4, 2  # times the least number of requests
LEAD_SHARE = 0.9  # of the sessions that are under way where a stretch begins
GOLDEN = 0.6180339887498949  # its multiples modulo 1 are spread evenly, however many there are


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    trace: Path
    run_dir: Path
    kind: Kind
    values: tuple[float, ...]
    target: str | None = None  # root URL; or else `engine`
    other_targets: tuple[str, ...] = ()  # more servers of the same model
    router: Router = "prefix"  # which of them a request goes to
    engine: str | None = None  # a preset, in virtual time
    by: By = "users"  # scale
    arrivals: Arrivals = "poisson"  # rate
    waits: bool = False  # rate: later turns follow the answer before them
    keep_think: bool = False  # concurrency
    cache: Cache = "cold"
    max_s: float = 120.0
    min_requests: int = 200
    begin: float = 0.0  # where in the trace a point begins, as a share of its requests
    is_sample: bool = False  # a point begins anywhere in the trace instead and has `min_requests`, not until steady
    limit: int | None = None
    seed: int = 0
    resume: bool = False
    kv_tokens: int | None = None  # the preset's, or what the server does not say
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prompt_mode: str = "auto"
    tokenizer: str = "cl100k"
    api_key_env: str | None = None
    api_key_file: Path | None = None
    metrics_urls: tuple[str, ...] = ()
    metrics_hz: float = METRICS_HZ
    gpu: str | None = None
    serve_metrics: int | None = None
    timeout_s: float = 600.0
    drain_s: float = 60.0
    workers: int = 1

    @property
    def starts_again(self) -> bool:
        """A server keeps its cache between two runs of the command; a simulated engine's is gone, and is quick to fill again."""
        return self.resume and self.cache == "carry" and self.engine is not None

    @property
    def setting(self) -> Setting:
        names = {field.name for field in dataclasses.fields(Setting)}
        return Setting(**{name: getattr(self, name) for name in names})


type Say = Callable[[str], None]


def run_sweep(config: SweepConfig, say: Say = lambda _: None) -> Path:
    """Every value in turn. Raises TraceError or PlanError before anything is sent."""
    return asyncio.run(sweep(config, say)) if config.engine else uvloop.run(sweep(config, say))


async def sweep(config: SweepConfig, say: Say = lambda _: None) -> Path:
    book = Book(config)
    async with opened(config.setting) as run:
        book.begin(run.facts)
        if config.starts_again:
            say("the simulated cache that points carry over is not kept in the run folder: all points run again")
        for index, value in enumerate(config.values):
            if book.facts_of(index) is not None:
                say(f"{load_name(config, value)}: done before")
                continue
            load = book.load(index, value)
            facts = await run.point(load)
            book.close(facts)
            say(f"{load_name(config, value)}: {facts['planned']} requests in {facts['planned_span_s']:.0f} s, {facts['steady']}")
            if facts["stopped"] is not None:
                break
    return config.run_dir


class Book:
    """The run folder's run.json, and the loads of its points."""

    def __init__(self, config: SweepConfig) -> None:
        _check(config)
        self.config = config
        self.plan = planned(config.trace, config.seed, limit=config.limit, dequantise=True, open_loop=False)
        self.manifest: dict[str, Any] = {}

    @property
    def own_rate(self) -> float:
        """Requests per second of the trace as it was recorded."""
        return _own_rate(self.plan)

    def begin(self, facts: dict[str, Any]) -> None:
        config = self.config
        path = config.run_dir / "run.json"
        asked = _asked(config)
        if path.exists():
            known = msgspec.json.decode(path.read_bytes())
            if known.get("sweep") != asked:
                raise PlanError("another run is in this folder", path=str(config.run_dir), next_step="Choose another --out")
            known["points"] = [] if config.starts_again else [one for one in known["points"] if one["stopped"] is None]
            self.manifest = known
            return
        config.run_dir.mkdir(parents=True, exist_ok=True)
        self.manifest = {
            "schema_version": 1,
            "trace": str(config.trace),
            "seed": config.seed,
            "by": _load_by(config),
            "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            **facts,
            "notes": [*facts["notes"], *self.plan.notes],
            "sweep": asked,
            "points": [],
        }

    def facts_of(self, index: int) -> dict[str, Any] | None:
        """Of a point that has run, maybe before a crash."""
        return next((point for point in self.manifest["points"] if point["index"] == index), None)

    def load(self, index: int, value: float, nth: int = 0) -> Load:
        """The load of a point that is to be sent now. `nth`: sample at this value."""
        for torn in self.config.run_dir.glob(f"point-{index}.*"):  # of a run that was killed
            torn.unlink()
        return self.drawn(index, value, nth)

    def drawn(self, index: int, value: float, nth: int = 0) -> Load:
        """The load of a point; its seed and salt follow from the run's seed and its number."""
        config = self.config
        seed, salt = point_seeds(config.seed, index)
        rng = np.random.default_rng(seed)
        plan = _LOADED[config.kind](self._stretch(nth, value) if config.is_sample else self._turned(), value, config, rng)
        primer = len(plan) if config.cache == "primed" else self._lead(plan) if config.is_sample or config.begin else 0
        return Load(
            index=index,
            value=value,
            by=_load_by(config),
            seed=seed,
            salt=salt if config.cache != "carry" else point_seeds(config.seed, 0)[1],
            plan=twice(plan) if config.cache == "primed" else plan,
            primer=primer,
            at_once=round(value) if config.kind == "concurrency" else None,
            trace_input_tokens=None if config.is_sample else float(self.plan.input_tokens.mean()),
        )

    def _turned(self) -> Plan:
        """From `begin` on to the end of the trace, then its first part."""
        return stretch(self.plan, int(self.config.begin * len(self.plan)), len(self.plan)) if self.config.begin else self.plan

    def _stretch(self, nth: int, value: float) -> Plan:
        """The samples of a value begin all over the trace, however many there are."""
        config = self.config
        per_s = value if config.kind == "rate" else self.own_rate * (value if config.by == "time" else 1.0)
        requests = min(max(1, round(per_s * config.max_s)), LONGEST_STRETCH * config.min_requests)
        place = (np.random.default_rng(config.seed).random() + nth * GOLDEN) % 1
        return stretch(self.plan, int(place * len(self.plan)), requests + LONGEST_LEAD * config.min_requests)

    def _lead(self, plan: Plan) -> int:
        """Requests until the cache holds what it would hold in the middle of the trace: its own size, or the history of nearly
        all sessions that are under way where the stretch begins.
        """
        under_way = np.flatnonzero((plan.parent < 0) & (plan.turn > 0))
        touched = int(np.quantile(under_way, LEAD_SHARE)) + 1 if len(under_way) else 0
        tokens = self.manifest.get("kv_capacity_tokens")
        new = np.cumsum(plan.input_tokens + plan.output_tokens - np.where(plan.parent >= 0, plan.parent_tokens, 0))
        filled = int(np.searchsorted(new, tokens)) + 1 if tokens else len(plan)
        return min(touched, filled, LONGEST_LEAD * self.config.min_requests)

    def close(self, facts: dict[str, Any]) -> None:
        others = [one for one in self.manifest["points"] if one["index"] != facts["index"]]
        self.manifest["points"] = sorted([*others, facts], key=lambda one: int(one["index"]))
        write_json(self.config.run_dir / "run.json", self.manifest)


def _closed(plan: Plan, value: float, config: SweepConfig, _rng: np.random.Generator) -> Plan:
    per_session = len(plan) / (int(plan.session_id.max()) + 1)
    return closed(
        as_long_as(plan, max(CLOSED_REQUESTS, round(value * CLOSED_SESSIONS * per_session))), keep_think=config.keep_think
    )


def _rate(plan: Plan, value: float, config: SweepConfig, rng: np.random.Generator) -> Plan:
    lead = LONGEST_LEAD * config.min_requests if config.begin else 0
    longer = plan if config.is_sample else as_long_as(plan, max(1, round(value * config.max_s)) + lead)
    return at_rate(longer, value, config.arrivals, rng, waits=config.waits)


def _scaled(plan: Plan, value: float, config: SweepConfig, rng: np.random.Generator) -> Plan:
    return scale_plan(plan, value, config.by, rng)


def _own_rate(plan: Plan) -> float:
    return max(1, len(plan) - 1) / max(1e-9, float(plan.planned_ns[-1]) / 1e9)


_LOADED: dict[Kind, Callable[[Plan, float, SweepConfig, np.random.Generator], Plan]] = {
    "concurrency": _closed,
    "rate": _rate,
    "scale": _scaled,
}


def _load_by(config: SweepConfig) -> LoadBy:
    return config.by if config.kind == "scale" else config.kind


def load_name(config: SweepConfig, value: float) -> str:
    return load_label(value, _load_by(config))


def _asked(config: SweepConfig) -> dict[str, Any]:
    """What must be the same for a run to be gone on with."""
    left_out = {"run_dir", "resume", "api_key_env", "api_key_file", "metrics_hz", "gpu", "serve_metrics", "workers"}
    asked = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in left_out}
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode({**asked, "trace": str(config.trace)}))
    return plain


def _check(config: SweepConfig) -> None:
    if (config.target is None) == (config.engine is None):
        raise PlanError("what is to be loaded?", wanted="either --target URL or --engine PRESET")
    if not config.values or min(config.values) <= 0:
        raise PlanError("no such loads", seen=str(list(config.values)), wanted="numbers above 0")
    if config.kind == "concurrency" and any(value != round(value) for value in config.values):
        raise PlanError("no such numbers of sessions", seen=str(list(config.values)), wanted="whole numbers")
    if not 0 <= config.begin < 1:
        raise PlanError("no such place in a trace", seen=f"--begin {config.begin:g}", wanted="0 or more and below 1, e.g. 0.5")
    if config.max_s <= 0 or config.min_requests < 1:
        raise PlanError(
            "a point cannot last so", seen=f"--max-s {config.max_s:g}", wanted="more than 0, and requests to wait for"
        )
    if (config.run_dir / "run.json").exists() and not config.resume:
        raise PlanError(
            "there is a run here already",
            path=str(config.run_dir),
            next_step="Choose another --out, or go on with it by --resume",
        )
