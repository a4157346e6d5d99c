"""A shard of a replay on a host that is led from another one: what it can be asked. Calls return soon."""

import asyncio
import hashlib
import os
import tempfile
import time
import traceback
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Literal

import uvloop

from replay.progress import Progress
from replay.run import ReplayConfig, replay
from replay.sharing import Counts, Stop
from tracer.errors import TraceError

Phase = Literal["reading", "ready", "sending", "ended", "failed"]
KEY_ENV = "CHATREEL_TARGET_KEY"
SOON_NS = 1_000_000_000
CLOSING_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    phase: Phase
    point: int
    planned: int  # requests of that point
    counts: Counts | None  # of it; None: it has not begun
    failure: str | None


class Node:
    """The replay runs in a thread of its own, so that calls are answered meanwhile."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="chatreel-node-", ignore_cleanup_errors=True)
        self._place = Path(self._folder.name)
        self._run_dir = self._place / "run"
        self._phase: Phase = "reading"
        self._point = 0
        self._failure: str | None = None
        self._progress: Progress | None = None
        self._stop = Stop()
        self._start: Future[int] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._is_over = False

    def now_ns(self) -> int:
        return time.time_ns()

    def lacks(self, path: str, digest: str) -> bool:
        """Whether this host has no such file, or another one of that name."""
        return not Path(path).is_file() or file_digest(Path(path)) != digest

    def keep(self, name: str, piece: bytes) -> str:
        """A file of the leading host, piece by piece. Returns where it is here; none but this user may read it."""
        path = self._place / name
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
            file.write(piece)
        return str(path)

    def know_key(self, key: str) -> str:
        """The target's API key, kept in memory: no disk of any node has it. Returns the environment variable that holds it."""
        os.environ[KEY_ENV] = key
        return KEY_ENV

    def begin(self, config: ReplayConfig) -> None:
        own = replace(config, run_dir=self._run_dir, agree=self._agree)
        self._thread = Thread(target=self._run, args=(own,), name="chatreel-replay", daemon=True)
        self._thread.start()

    def start(self, at_ns: int) -> None:
        """When the point that it is ready for starts, on this host's wall clock."""
        self._start.set_result(at_ns)

    def stop(self, reason: str) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set, reason)
        if self._phase == "ready" and not self._start.done():  # it ends as one that was stopped, with nothing sent
            self._start.set_result(time.time_ns() + SOON_NS)

    def state(self) -> State:
        seen = self._progress
        planned, counts = (0, None) if seen is None else (seen.planned, seen.counts)
        return State(phase=self._phase, point=self._point, planned=planned, counts=counts, failure=self._failure)

    def files(self) -> dict[str, int]:
        """What there is of the run folder: name and size."""
        found = self._run_dir.iterdir() if self._run_dir.is_dir() else ()
        return {path.name: path.stat().st_size for path in found if path.is_file() and path.suffix != ".partial"}

    def read(self, name: str, offset: int, size: int) -> bytes:
        with open(self._run_dir / name, "rb") as file:
            file.seek(offset)
            return file.read(size)

    def close(self) -> None:
        """Whatever it is at; what it has measured is removed."""
        self._is_over = True
        os.environ.pop(KEY_ENV, None)
        self._start.cancel()
        if self._thread is not None:
            self._thread.join(CLOSING_S)
        self._folder.cleanup()

    async def _agree(self, point: int) -> int:
        self._loop = asyncio.get_running_loop()
        self._start, self._progress, self._point = Future(), None, point
        self._phase = "ready"  # last: now `start` may come
        if self._is_over:
            raise asyncio.CancelledError
        at_ns = await asyncio.wrap_future(self._start)
        self._phase = "sending"
        return at_ns

    def _run(self, config: ReplayConfig) -> None:
        try:
            uvloop.run(replay(config, self._show, self._stop))
        except TraceError as error:
            self._failure = str(error)
        except BaseException:  # whoever leads must hear of a fault of ours too, and has no other way
            self._failure = traceback.format_exc()
        self._phase = "ended" if self._failure is None else "failed"

    def _show(self, progress: Progress) -> None:
        self._progress = progress


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
