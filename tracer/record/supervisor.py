"""Several proxies on one port, each in a process with a writer of its own; the kernel spreads connections over them.

Same key, same zero of time, one folder of segments each. A proxy that dies costs its open requests; another takes over.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tracer.errors import TraceError
from tracer.record.figures import without_recent
from tracer.record.lane import MESSAGE_BYTES, Failed, FromLane, LaneConfig, Ready, Told, Warned
from tracer.record.messages import WorkerConfig
from tracer.record.session import STATS_S, WORKER_FINISH_S, RecordConfig, RecordStats, is_set, summed, watch_signals
from tracer.record.writer import lane_folder, lock_folder

RESTART_S = 1.0
MAX_RESTART_S = 60.0
_RUN_LANE = "from tracer.record.lane import main; main()"

_decode: "msgspec.msgpack.Decoder[FromLane]" = msgspec.msgpack.Decoder(FromLane)


@dataclass(slots=True)
class _Lane:
    process: "subprocess.Popen[bytes]"
    link: socket.socket
    stats: RecordStats = field(default_factory=RecordStats)
    counts: dict[str, int] = field(default_factory=dict)
    failed: str | None = None


class Supervisor:
    """Looks like a Session to its caller. Numbers are sums over all lanes, those that died included."""

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
        self._started_ns = started_ns
        self._lanes: dict[int, _Lane] = {}  # by place
        self._spawned = 0
        self._deaths = 0
        self._past = RecordStats()
        self._past_counts: Counter[str] = Counter()
        self._stopping = asyncio.Event()

    async def run(self, on_ready: Callable[[str], None]) -> None:
        stop, cut = asyncio.Event(), asyncio.Event()
        watch_signals(stop, cut)
        lock = lock_folder(Path(self._worker.folder), wait_s=0)
        tending: list[asyncio.Task[None]] = []
        try:
            with _held_port(self._config.host, self._config.port) as port:
                ca_folder = self._config.ca_folder or str(Path(self._worker.folder, "ca"))  # one for all
                self._config = msgspec.structs.replace(self._config, port=port, ca_folder=ca_folder)
                ready = [asyncio.get_running_loop().create_future() for _ in range(self._config.workers)]
                for place, one in enumerate(ready):
                    tending.append(asyncio.create_task(self._tend(place, one)))
                    if place == 0:
                        await one  # it makes the certificate authority that the others find
                on_ready((await asyncio.gather(*ready))[0])
                while not await is_set(stop, STATS_S):
                    self._tick()
        finally:
            self._stopping.set()
            self._signal()
            await self._drain(tending, cut)
            os.close(lock)

    def stats(self) -> RecordStats:
        return summed([self._past, *(lane.stats for lane in self._lanes.values())])

    def counts(self) -> dict[str, int]:
        counts = self._past_counts.copy()
        for lane in self._lanes.values():
            counts.update(lane.counts)
        counts["proxy_deaths"] = self._deaths
        return {name: count for name, count in counts.items() if count}

    async def _tend(self, place: int, ready: "asyncio.Future[str]") -> None:
        """Keep one place filled until the end."""
        pause_s = RESTART_S
        while True:
            began = time.monotonic()
            why = await self._live(place, ready)
            if not ready.done():
                ready.set_exception(TraceError(why))
                return
            self._bury(place)
            if self._stopping.is_set():
                return
            self._deaths += 1
            self._warn(
                f"PROXY {place + 1} OF {self._config.workers} DIED ({why}): the requests it had open are broken. "
                f"The others go on; a new one starts in {pause_s:.0f} s"
            )
            if await is_set(self._stopping, pause_s):
                return
            lived_long = time.monotonic() - began > MAX_RESTART_S
            pause_s = RESTART_S if lived_long else min(2 * pause_s, MAX_RESTART_S)

    async def _live(self, place: int, ready: "asyncio.Future[str]") -> str:
        """One lane from its start to its end; returns why it ended."""
        try:
            lane = self._lanes[place] = self._spawn()
        except OSError as error:
            return f"cannot start: {error.strerror}"
        with lane.link:
            while data := await _received(lane.link):
                match _decode.decode(data):
                    case Ready(url) if not ready.done():
                        ready.set_result(url)
                    case Told(stats, counts):
                        lane.stats, lane.counts = stats, counts
                    case Warned(text):
                        self._warn(f"proxy {place + 1} of {self._config.workers}: {text}")
                    case Failed(text):
                        lane.failed = text
        code = await asyncio.to_thread(lane.process.wait)
        if code and self._stopping.is_set():
            self._warn(f"proxy {place + 1} of {self._config.workers} was cut off; its last rows may be missing")
        return lane.failed or f"exit code {code}"

    def _spawn(self) -> _Lane:
        """Its own session: Ctrl-C in a terminal comes to us alone, and we pass it on once."""
        folder = lane_folder(Path(self._worker.folder), self._spawned)
        self._spawned += 1
        folder.mkdir(mode=0o700)
        worker = msgspec.structs.replace(self._worker, folder=str(folder))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setblocking(False)
            ours.send(msgspec.msgpack.encode(LaneConfig(config=self._config, worker=worker, started_ns=self._started_ns)))
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", _RUN_LANE, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                raise
        return _Lane(process, ours)

    def _bury(self, place: int) -> None:
        lane = self._lanes.pop(place, None)
        if lane is not None:
            figures = without_recent(lane.stats.figures)
            ended = msgspec.structs.replace(lane.stats, in_flight=0, queued_bytes=0, disk_error=None, figures=figures)
            self._past = summed([self._past, ended])
            self._past_counts.update(lane.counts)

    def _signal(self, number: int = signal.SIGTERM) -> None:
        for lane in self._lanes.values():
            lane.process.send_signal(number)

    async def _drain(self, tending: "Sequence[asyncio.Task[None]]", cut: asyncio.Event) -> None:
        """A second signal goes on to the lanes; one that hangs is killed long after it should have ended."""
        kill_at = time.monotonic() + self._config.drain_s + WORKER_FINISH_S + 10
        is_cut = False
        while not all(task.done() for task in tending):
            self._tick()
            await asyncio.wait(tending, timeout=0.2)
            if cut.is_set() and not is_cut:
                is_cut = True
                self._signal()
            if time.monotonic() > kill_at:
                self._signal(signal.SIGKILL)
        self._tick()

    def _tick(self) -> None:
        try:
            self._on_stats(self.stats())
        except Exception:  # a live line that cannot be drawn must not stop the recording
            pass


async def _received(link: socket.socket) -> bytes:
    try:
        return await asyncio.get_running_loop().sock_recv(link, MESSAGE_BYTES)
    except OSError:
        return b""


@contextmanager
def _held_port(host: str, port: int) -> Iterator[int]:
    """The port number, ours until the end even if all lanes are down.

    Refuses a port that is in use: with SO_REUSEPORT alone, two recorders of one user would share the traffic unawares.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            address = (address[0], probe.getsockname()[1], *address[2:])
        holder = socket.socket(family, kind)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except (OSError, OverflowError) as error:
        raise TraceError("cannot listen here", seen=f"{host}:{port}", next_step="Choose another --port or --host") from error
    with holder:  # bound, but not listening: it gets no connections
        holder.bind(address)
        yield int(address[1])
