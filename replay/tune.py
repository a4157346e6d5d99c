"""`chatreel tune`: a server launched in each configuration of a grid, all under the same load, and which one to take.

The run folder has tune.json, written anew after each configuration, and for each a folder config-N with the server's log and
a run folder's files. What a configuration is comes from configurations.py, its process from edge/launch.py, what it is worth
from judge/choice.py.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import uvloop

from replay import capacity
from replay.book import write_json
from replay.capacity import CapacityConfig, run_capacity
from replay.configurations import Grid, Value, Values, arguments, filled, named
from replay.edge.launch import Launch, LaunchError, free_port, launched, tail
from replay.errors import PlanError
from replay.judge.search import Limit
from replay.running import opened
from replay.sim.engines import engine_named
from replay.sim.presets import changed
from replay.sweeping import Book, Say, SweepConfig, load_name
from replay.tuned import Row, Tuned, at_loads, chosen

POINT_S = 60.0  # beside the load itself: to look at the server, and to write
ANYWHERE = "http://127.0.0.1:1"  # stands for a target that is not launched yet


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """`sweep` says what is loaded and how; its run_dir is that of the whole, its target is not used.

    `requests`: of a run; None: once through the trace. `search`: the capacity of each is looked for instead; its sweep and its
    limits are not used. `box_s`: what a configuration may take once it is ready; None: as long as its loads may.
    """

    grid: Grid
    sweep: SweepConfig
    limits: Sequence[Limit]
    attain: float = 0.99
    repeats: int = 1
    requests: int | None = None
    search: CapacityConfig | None = None
    box_s: float | None = None
    retry_failed: bool = False


def run_tune(config: TuneConfig, say: Say = lambda _: None) -> Tuned:
    """Every configuration in turn. Raises TraceError or PlanError before anything is launched."""
    config = _checked(config)
    found = _begun(config)
    done = {row.number for row in found.rows}
    with _ended_by_signals():
        for number, values in enumerate(config.grid.configurations()):
            name = f"{number + 1} of {found.configurations}: {named(values)}"
            if number in done:
                say(f"{name}: done before")
                continue
            say(name)
            try:
                row = _row(config, number, values, say)
            except KeyboardInterrupt:
                found = msgspec.structs.replace(found, stopped="interrupted")
                break
            say(f"  failed: {row.failed}" if row.failed else f"  {took(row)}")
            found = msgspec.structs.replace(found, rows=sorted([*found.rows, row], key=lambda one: one.number))
            write_json(config.sweep.run_dir / "tune.json", found)
    found = chosen(found, config.sweep, config.grid, config.search.tolerance if config.search else None)
    write_json(config.sweep.run_dir / "tune.json", found)
    return found


def took(row: Row) -> str:
    ready = f"ready after {row.ready_s:.1f} s, " if row.ready_s is not None else ""
    return f"{ready}measured in {row.took_s:.0f} s"


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and a lost terminal are as a Ctrl-C: no server stays behind."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, end)
    except ValueError:  # not the main thread: the caller handles signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _checked(config: TuneConfig) -> TuneConfig:
    """What cannot run is said before anything is launched."""
    if not config.limits:
        raise PlanError("the best under which limit?", wanted="--slo METRIC:pNN:MS, e.g. ttft:p99:500ms")
    if not 0 < config.attain < 1:
        raise PlanError("no such share", seen=f"--attain {config.attain:g}", wanted="more than 0 and less than 1, e.g. 0.99")
    if config.repeats < 1 or (config.requests is not None and config.requests < 1):
        raise PlanError("no such number of runs or requests", seen=f"{config.repeats} and {config.requests}", wanted="1 or more")
    if config.box_s is not None and config.box_s <= 0:
        raise PlanError("no such time", seen=f"--box-s {config.box_s:g}", wanted="seconds above 0")
    folder = config.sweep.run_dir
    for name in ("run.json", "tune.json"):
        if (folder / name).exists() and not (config.sweep.resume and name == "tune.json"):
            step = "Choose another --out" + (", or go on with it by --resume" if name == "tune.json" else "")
            raise PlanError("there is a run here already", path=str(folder), next_step=step)
    if config.sweep.engine is not None:
        for values in config.grid.configurations():
            changed(engine_named(config.sweep.engine), **values)
    first = dataclasses.replace(config.sweep, run_dir=folder / "config-0", resume=True)
    book = Book(first if first.engine else dataclasses.replace(first, target=ANYWHERE))
    if config.search is not None:
        capacity.check(dataclasses.replace(config.search, sweep=book.config, limits=config.limits))
    requests = config.requests or capacity.requests_of(book)
    box_s = config.box_s
    if box_s is None and config.search is None:
        runs = len(config.sweep.values) * config.repeats
        box_s = runs * (config.sweep.max_s + config.sweep.drain_s + POINT_S)
    return dataclasses.replace(config, requests=requests, box_s=box_s)


def _begun(config: TuneConfig) -> Tuned:
    """A new tune.json, or what was done before a crash. Raises PlanError if something else was."""
    path = config.sweep.run_dir / "tune.json"
    asked = _asked(config)
    if not path.exists():
        fresh = Tuned(
            trace=str(config.sweep.trace),
            grid=config.grid.path,
            by=config.sweep.by if config.sweep.kind == "scale" else "rate",
            simulated=config.sweep.engine is not None,
            limits=list(config.limits),
            attain=config.attain,
            seed=config.sweep.seed,
            configurations=len(config.grid.configurations()),
            rows=[],
            asked=asked,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, fresh)
        return fresh
    try:
        known = msgspec.json.decode(path.read_bytes(), type=Tuned)
    except msgspec.DecodeError as error:
        raise PlanError("cannot be read", path=str(path), seen=str(error), next_step="Choose another --out") from error
    other = sorted(key for key in asked.keys() | known.asked.keys() if asked.get(key) != known.asked.get(key))
    if other:
        raise PlanError(
            f"not what was begun here: other {', '.join(other)}",
            path=str(path.parent),
            seen=f"{other[0]} = {_brief(asked.get(other[0]))}",
            wanted=_brief(known.asked.get(other[0])),
            next_step="Go on with the same trace, grid and options, or choose another --out",
        )
    rows = [row for row in known.rows if row.failed is None or not config.retry_failed]
    return msgspec.structs.replace(known, rows=rows, choice=None, load=None, stopped=None)


def _brief(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 100 else f"{text[:100]}..."


def _asked(config: TuneConfig) -> dict[str, Any]:
    """What must be the same for configurations to be comparable; the trace by its bytes."""
    left_out = {"run_dir", "resume", "api_key_env", "target", "trace", "kv_tokens", "max_num_seqs", "max_num_batched_tokens"}
    sweep = {one.name: getattr(config.sweep, one.name) for one in dataclasses.fields(config.sweep) if one.name not in left_out}
    grid = {one.name: getattr(config.grid, one.name) for one in dataclasses.fields(Grid) if one.name not in ("path", "cheapest")}
    search = config.search and (config.search.lowest, config.search.highest, config.search.tolerance, config.search.repeats)
    with open(config.sweep.trace, "rb") as file:
        trace = hashlib.file_digest(file, "sha256").hexdigest()
    own = {"limits": config.limits, "attain": config.attain, "repeats": config.repeats, "requests": config.requests}
    asked = {"trace": f"sha256 {trace}", **grid, **sweep, **own, "search": search, "box_s": config.box_s}
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(asked))
    return plain


def _row(config: TuneConfig, number: int, values: Values, say: Say) -> Row:
    """One configuration, whatever becomes of it."""
    folder = config.sweep.run_dir / f"config-{number}"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off: its server and its port are gone
    folder.mkdir()
    start_s = time.monotonic()
    row = Row(
        number=number,
        values={key: list(value) if isinstance(value, tuple) else value for key, value in values.items()},
        run=folder.name,
        command=[],
        took_s=0.0,
    )
    try:
        if config.sweep.engine is not None:
            sweep = dataclasses.replace(config.sweep, run_dir=folder, target=None, **values)  # type: ignore[arg-type]
            return _measured(config, sweep, row, lambda: None, say)
        return _launched(config, folder, row, values, say)
    except (LaunchError, PlanError) as error:
        failed = str(error)
    except TimeoutError:
        failed = f"the {config.box_s or 0:g} s that a configuration may take (--box-s) were over long ago"
    return msgspec.structs.replace(row, failed=failed, took_s=time.monotonic() - start_s, log_tail=tail(folder / "server.log"))


def _launched(config: TuneConfig, folder: Path, row: Row, values: Values, say: Say) -> Row:
    grid = config.grid
    filling: dict[str, Value] = {**values, "port": grid.port or free_port()}
    command = arguments(grid.command, filling)
    launch = Launch(
        command=command,
        env={key: filled(text, filling) for key, text in grid.env.items()},
        cwd=filled(grid.cwd, filling) if grid.cwd else None,
        ready=filled(grid.ready, filling),
        ready_timeout_s=grid.ready_timeout_s,
        grace_s=grid.grace_s,
        log=folder / "server.log",
    )
    sweep = dataclasses.replace(
        config.sweep,
        run_dir=folder,
        target=filled(grid.target, filling),
        metrics_urls=tuple(filled(url, filling) for url in grid.metrics) or config.sweep.metrics_urls,
    )
    with launched(launch) as server:
        row = msgspec.structs.replace(row, command=command, ready_s=server.ready_s)
        return _measured(config, sweep, row, server.end, say)


def _measured(config: TuneConfig, sweep: SweepConfig, row: Row, end: Callable[[], str | None], say: Say) -> Row:
    """Raises KeyboardInterrupt where the user stopped it, LaunchError where the server ended under the load."""
    start_s = time.monotonic()
    bracket, stopped = None, None
    try:
        if config.search is not None:
            search = dataclasses.replace(
                config.search,
                sweep=sweep,
                limits=config.limits,
                attain=config.attain,
                requests=config.requests,
                box_s=config.box_s,
            )
            found = run_capacity(search, lambda line: say(f"  {line}"))
            bracket, stopped = found.bracket, found.stopped
        else:
            run = asyncio.run if sweep.engine else uvloop.run
            stopped = run(_points(config, sweep, say))
    except PlanError:
        _refuse_ended(end())  # why nothing was answered
        raise
    if stopped == "interrupted":
        raise KeyboardInterrupt
    _refuse_ended(end())
    loads = at_loads(sweep, config.limits, config.attain)
    if not loads:
        raise LaunchError(stopped or "nothing was measured")
    return msgspec.structs.replace(row, loads=loads, bracket=bracket, took_s=time.monotonic() - start_s)


def _refuse_ended(how: str | None) -> None:
    if how is not None:
        raise LaunchError(f"the server {how} under the load")


async def _points(config: TuneConfig, sweep: SweepConfig, say: Say) -> str | None:
    """Every load so many times, each elsewhere in the trace, the same for all configurations. Why it was stopped early."""
    sweep = dataclasses.replace(sweep, is_sample=True, min_requests=config.requests or 1)
    async with asyncio.timeout(config.box_s):
        book = Book(sweep)
        async with opened(sweep.setting) as runner:
            book.begin(runner.facts)
            for index, (nth, value) in enumerate(product(range(config.repeats), sweep.values)):
                facts = await runner.point(book.load(index, value, nth))
                book.close(facts)
                if facts["stopped"] is not None:
                    return str(facts["stopped"])
                lasted = f"{facts['planned']} requests in {facts['planned_span_s']:.0f} s"
                say(f"  {load_name(sweep, value)}: {lasted}, {facts['steady']}")
    return None


def launch_line(grid: Grid, values: Values) -> str | None:
    """What to launch with these values, for a shell; None: an engine is simulated."""
    if not grid.command:
        return None
    port: Value = grid.port if grid.port is not None else "PORT"
    env = [f"{key}={shlex.quote(filled(text, {**values, 'port': port}))}" for key, text in grid.env.items()]
    return " ".join([*env, shlex.join(arguments(grid.command, {**values, "port": port}))])
