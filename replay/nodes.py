"""A replay led from here and sent by several nodes, a shard each: clocks compared, one start, results fetched and joined."""

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from replay.book import write_json
from replay.errors import PlanError
from replay.gathering import gather
from replay.node import State, file_digest
from replay.plan.clocks import Offset, RoundTrip, clock_notes, offset_of, offset_words
from replay.plan.share import WHOLE, Shard
from replay.progress import OnProgress, Progress
from replay.run import ReplayConfig, api_key
from replay.starting import NEAR_NS

ROUND_TRIPS = 30
START_IN_NS = NEAR_NS + 1_000_000_000
LOOK_S = 0.5
PIECE_BYTES = 8_000_000  # of a file on its way
PATIENCE_S = 60.0  # for an answer: no call takes long


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """`call(number, method, *arguments)` asks the Node of that number; its future raises if the node is gone."""

    names: Sequence[str]
    call: Callable[..., Future[Any]]
    shared: Callable[[bytes], Any] = lambda piece: piece  # makes an argument that several nodes get


@dataclass(slots=True)
class _Lead:
    crew: Crew
    say: Callable[[str], None]
    lost: dict[int, str] = field(default_factory=dict)  # nodes that do not answer, and why
    starts: list[int] = field(default_factory=list)  # of each point, on our wall clock
    clocks: list[dict[int, Offset]] = field(default_factory=list)  # before each point, and after the last
    stopping: str | None = None

    @property
    def alive(self) -> list[int]:
        return [number for number in range(len(self.crew.names)) if number not in self.lost]

    def ask(self, method: str, arguments: Mapping[int, Sequence[Any]] | None = None) -> dict[int, Any]:
        """All nodes, or those that have arguments, at once. Who does not answer is lost."""
        given = arguments or dict.fromkeys(self.alive, ())
        asked = {number: self.crew.call(number, method, *given[number]) for number in given if number not in self.lost}
        answers = {}
        for number, future in asked.items():
            try:
                answers[number] = future.result(PATIENCE_S)
            except Exception as error:  # whatever the calls go through, it is the node that cannot be reached
                self.lost[number] = f"{self.crew.names[number]} was lost: {_first_line(error)}"
        return answers

    def compare_clocks(self) -> None:
        found = {}
        for number in self.alive:  # one at a time: the driver is a part of what is timed
            trips = []
            for _ in range(ROUND_TRIPS):
                asked_ns = time.time_ns()
                there = self.ask("now_ns", {number: ()})
                if number not in there:
                    break
                trips.append(RoundTrip(asked_ns=asked_ns, there_ns=there[number], answered_ns=time.time_ns()))
            else:
                found[number] = offset_of(trips)
        self.clocks.append(found)

    def stop(self, reason: str) -> None:
        if self.stopping is None:
            self.stopping = reason
            self.ask("stop", dict.fromkeys(self.alive, (reason,)))


def check_led(config: ReplayConfig) -> None:
    """Raises PlanError for options that nodes cannot follow."""
    asked = {
        "--shard": config.shard != WHOLE,
        "--start-at": config.start_at_ns is not None,
        "--serve-metrics": config.serve_metrics is not None,
        "--gpu": config.gpu is not None,
    }
    if any(asked.values()):
        raise PlanError(
            "nodes that are led from here are told their shard and start, and have GPUs and ports of their own",
            seen=f"--ray with {', '.join(name for name, is_asked in asked.items() if is_asked)}",
            next_step="Leave these out; GPUs of the server by its DCGM exporter as another --metrics-url",
        )


def replay_on(crew: Crew, config: ReplayConfig, say: Callable[[str], None], on_progress: OnProgress) -> Path:
    """Returns the run folder, of what the others measured if a node was lost. Raises PlanError if nothing was sent."""
    lead = _Lead(crew, say)
    with _first_interrupt(lead):
        try:
            _hand_out(lead, config)
            _conduct(lead, config, on_progress)
            lead.compare_clocks()
            return _fetch(lead, config)
        finally:
            lead.ask("close")


def _hand_out(lead: _Lead, config: ReplayConfig) -> None:
    count = len(lead.crew.names)
    configs = {
        number: replace(config, shard=Shard(index=number, count=count), api_key_env=None, api_key_file=None)
        for number in lead.alive
    }
    for number, where in _kept(lead, config.trace).items():
        configs[number] = replace(configs[number], trace=Path(where))
    if Path(config.tokenizer).is_file():
        for number, where in _kept(lead, Path(config.tokenizer)).items():
            configs[number] = replace(configs[number], tokenizer=where)
    key = api_key(config)
    if key is not None:
        for number, name in lead.ask("know_key", dict.fromkeys(lead.alive, (key,))).items():
            configs[number] = replace(configs[number], api_key_env=name)
    lead.ask("begin", {number: (one,) for number, one in configs.items()})


def _kept(lead: _Lead, path: Path) -> dict[int, str]:
    """Where each node has the file now: where we have it, or in a folder of its own."""
    path = path.resolve()
    try:
        lacking = [
            number
            for number, lacks in lead.ask("lacks", dict.fromkeys(lead.alive, (str(path), file_digest(path)))).items()
            if lacks
        ]
        places = dict.fromkeys(lead.alive, str(path))
        with open(path, "rb") as file:
            while lacking and (piece := file.read(PIECE_BYTES)):
                shared = lead.crew.shared(piece)
                places |= lead.ask("keep", dict.fromkeys(lacking, (path.name, shared)))
    except OSError as error:
        raise PlanError("cannot be read", path=str(path), seen=str(error)) from error
    return places


def _conduct(lead: _Lead, config: ReplayConfig, on_progress: OnProgress) -> None:
    """Gives each start when all are ready for it, until all have ended."""
    total: Progress | None = None
    known: dict[int, State] = {}  # of the nodes at this point; one that is at the next already has no more counts of it
    while True:
        states: dict[int, State] = lead.ask("state")
        _complain(lead, states)
        at = len(lead.starts) - 1
        known |= {number: one for number, one in states.items() if one.point == at and one.counts is not None}
        if total is not None and len(known) == len(lead.crew.names):
            total.planned = sum(one.planned for one in known.values())
            total.update([one.counts for one in known.values() if one.counts is not None])
            on_progress(total)
        phases = {one.phase for one in states.values()}
        if phases <= {"ended", "failed"}:
            return
        if phases == {"ready"} and lead.stopping is None:
            total, known = Progress(scale=config.scales[at + 1], planned=0, predicted_hit_rate=None), {}
            _start(lead)
        time.sleep(LOOK_S)


def _complain(lead: _Lead, states: Mapping[int, State]) -> None:
    """A node that cannot go on stops all: what is sent from then on is not the load that was asked for."""
    names = lead.crew.names
    broken = [why for _, why in sorted(lead.lost.items())]
    broken += [f"{names[number]} failed: {one.failure}" for number, one in states.items() if one.phase == "failed"]
    if not broken:
        return
    if not lead.starts or not lead.alive:
        raise PlanError(
            "a node cannot replay" if not lead.starts else "no node is left",
            seen="; ".join(broken),
            wanted="every node able to reach the target",
            next_step="Nothing was sent" if not lead.starts else "What the nodes had measured is lost with them",
        )
    if lead.stopping is None:
        lead.say(f"{'; '.join(broken)}. The others stop and drain; what they measured is kept")
        lead.stop(broken[0])


def _start(lead: _Lead) -> None:
    lead.compare_clocks()
    clocks = lead.clocks[-1]
    for number, offset in clocks.items():
        lead.say(f"{lead.crew.names[number]}: clock {offset_words(offset)}")
    at_ns = time.time_ns() + START_IN_NS
    lead.starts.append(at_ns)
    lead.say(f"{len(clocks)} nodes start at {datetime.fromtimestamp(at_ns / 1e9, UTC):%H:%M:%S.%f} UTC")
    lead.ask("start", {number: (at_ns + round(offset.ms * 1e6),) for number, offset in clocks.items()})


def _fetch(lead: _Lead, config: ReplayConfig) -> Path:
    failures = {number: one.failure for number, one in lead.ask("state").items() if one.failure is not None}
    parts = config.run_dir / "shards"
    folders = []
    for number in lead.alive:
        folder = parts / str(number)
        if _fetch_one(lead, number, folder):
            _amend(lead, number, folder, config, failures.get(number))
            folders.append(folder)
    if not folders:
        raise PlanError("no node is left", seen="; ".join(lead.lost.values()))
    for line in gather(folders, config.run_dir, lead.lost):
        lead.say(line)
    _note(lead, config.run_dir)
    shutil.rmtree(parts)
    return config.run_dir


def _fetch_one(lead: _Lead, number: int, folder: Path) -> bool:
    """Whether it came over whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in lead.ask("files", {number: ()}).get(number, {}).items():
        with open(folder / name, "wb") as file:
            for offset in range(0, size, PIECE_BYTES):
                file.write(lead.ask("read", {number: (name, offset, PIECE_BYTES)}).get(number, b""))
    return number not in lead.lost and (folder / "run.json").exists()


def _amend(lead: _Lead, number: int, folder: Path, config: ReplayConfig, failure: str | None) -> None:
    """What only we know of its run.json."""
    manifest = msgspec.json.decode((folder / "run.json").read_bytes())
    manifest["trace"] = str(config.trace)
    for index, (point, at_ns) in enumerate(zip(manifest["points"], lead.starts, strict=False)):
        before, after = (lead.clocks[at].get(number) for at in (index, index + 1))
        point["shard"] |= {"start_unix_ns": at_ns, "node": lead.crew.names[number]}
        point["shard"] |= {"clock_offset": before, "clock_offset_after": after}
        point["stopped"] = point["stopped"] or (failure if index == len(lead.starts) - 1 else None)
    write_json(folder / "run.json", manifest)


def _note(lead: _Lead, run_dir: Path) -> None:
    manifest = msgspec.json.decode((run_dir / "run.json").read_bytes())
    names = lead.crew.names
    manifest["notes"] += clock_notes([{names[number]: one for number, one in each.items()} for each in lead.clocks])
    write_json(run_dir / "run.json", manifest)


@contextlib.contextmanager
def _first_interrupt(lead: _Lead) -> Iterator[None]:
    """Stops sending and drains; the second one ends the program as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.getsignal(signal.SIGINT)

    def first(*_: object) -> None:
        signal.signal(signal.SIGINT, usual)
        if not lead.starts:
            raise KeyboardInterrupt
        lead.say("stops sending and drains; Ctrl-C again ends it at once")
        threading.Thread(target=lead.stop, args=("interrupted",)).start()  # calls may be under way right here

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no answer'}"
