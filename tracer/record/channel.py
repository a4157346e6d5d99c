"""From the proxy's event loop to the worker process: a queue bounded in bytes that never makes the proxy wait."""

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from tracer.record.figures import together, without_recent
from tracer.record.messages import Answered, Figures, Finished, Piece, Report, Started, Stop, ToWorker, WorkerConfig

QUEUE_BYTES = 64 << 20
BODY_SHARE = 0.75  # above that no bodies are taken, so that a burst of them cannot cost rows
GATHER_S = 0.05  # waking the worker for each message costs both processes more than its content
GATHER_BYTES = 64 << 10
MESSAGE_BYTES = 64  # beside its body
MAX_FRAMES = 256  # of one send, far below the kernel's limit of 1024
RESTART_S = 1.0  # before the first new worker; doubles while they die young
MAX_RESTART_S = 60.0

_HEAD = struct.Struct("<I")


class Frames:
    """Cuts a byte stream into length-prefixed messages; linear in the bytes, whatever the cuts."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        found, at = [], 0
        while len(self._buffer) - at >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._buffer, at)
            end = at + _HEAD.size + length
            if end > len(self._buffer):
                break
            found.append(bytes(memoryview(self._buffer)[at + _HEAD.size : end]))
            at = end
        del self._buffer[:at]
        return found


def framed(message: object) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return _HEAD.pack(len(payload)) + payload


def take_normal_time(pid: int) -> None:
    """For a worker that runs in idle time only and is waited for: on a machine without any it would not end.

    The kernel lets only the privileged out of idle scheduling (sched(7)); elsewhere it takes the time that it gets.
    """
    with contextlib.suppress(AttributeError, OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_OTHER, os.sched_param(0))


@dataclass(slots=True)
class _Queued:
    data: memoryview
    rows: int


class Channel:
    """Owns the worker process and the socket to it. All methods but `start` and `finish` return at once, never raise."""

    def __init__(self, config: WorkerConfig, on_warning: Callable[[str], None], limit_bytes: int = QUEUE_BYTES) -> None:
        self.report = Report()
        self.queued_bytes = 0
        self.rows_lost = 0
        self.prompts_shed = 0
        self.worker_deaths = 0
        self._config = config
        self._warn = on_warning
        self._limit = limit_bytes
        self._queue: deque[_Queued] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._frames = Frames()
        self._is_writing = False
        self._gathered: list[ToWorker] = []
        self._gathered_bytes = 0  # about
        self._rows_gathered = 0
        self._is_waiting = False
        self._is_stopping = False
        self._spawned_at = 0.0
        self._pause_s = RESTART_S
        self._changed = asyncio.Event()
        self._lost_recorded = 0  # rows on disk by workers that died
        self._lost_figures = Figures()

    @property
    def recorded(self) -> int:
        return self._lost_recorded + self.report.recorded

    @property
    def figures(self) -> Figures:
        return together([self._lost_figures, self.report.figures])

    async def start(self) -> str | None:
        """Returns why the worker cannot work, or None when it is ready."""
        self._is_stopping = True  # no restarts before the first success
        self._spawn()
        if self._socket is not None:
            await self._changed.wait()
            self._changed.clear()
        if self._socket is None or self.report.failed is not None:
            self._close()
            await self._reap()
            return self.report.failed or "the recording worker ended at once"
        self._is_stopping = False
        return None

    def started(self, message: Started) -> None:
        """Queue a prompt; where there is no room for it, only the fact that it came."""
        size = len(message.body or b"")
        if not self._has_room(size):
            self.prompts_shed += 1
            size, message = 0, msgspec.structs.replace(message, body=None, credential=b"", session_header=b"")
        self._gather(message, size)

    def answered(self, message: Answered) -> None:
        self._gather(message, 0)

    def received(self, message: Piece) -> None:
        """Where there is no room it is dropped; the worker finds at the end that bytes are missing."""
        size = len(message.data)
        if self._has_room(size):
            self._gather(message, size)

    def finished(self, message: Finished) -> None:
        if self._gather(message, 0):
            self._rows_gathered += 1
        else:
            self.rows_lost += 1

    def tell(self, message: ToWorker) -> None:
        self._gather(message, 0)

    async def finish(self, deadline_s: float) -> None:
        """Hand over all that is queued, let the worker write it, and see it off."""
        self._is_stopping = True
        self._limit += 1 << 20  # room for the farewell
        self.tell(Stop())
        self._pass_on()
        if self._process is not None:
            take_normal_time(self._process.pid)
        try:
            async with asyncio.timeout(deadline_s):
                while self._socket is not None:
                    await self._changed.wait()
                    self._changed.clear()
        except TimeoutError:
            self._warn(f"the recording worker did not finish within {deadline_s:.0f} s; its last rows may be missing")
        self._close()
        await self._reap()

    def _has_room(self, size: int) -> bool:
        return self.queued_bytes + size <= BODY_SHARE * self._limit

    def _gather(self, message: ToWorker, size: int) -> bool:
        size += MESSAGE_BYTES
        if self._socket is None or self.queued_bytes + size > self._limit:
            return False
        self._gathered.append(message)
        self._gathered_bytes += size
        self.queued_bytes += size
        if self._gathered_bytes >= GATHER_BYTES:
            self._pass_on()
        elif not self._is_waiting:
            self._is_waiting = True
            asyncio.get_running_loop().call_later(GATHER_S, self._waited)
        return True

    def _waited(self) -> None:
        self._is_waiting = False
        self._pass_on()

    def _pass_on(self) -> None:
        """All that was gathered becomes one frame."""
        if not self._gathered:
            return
        frame = framed(self._gathered)
        rows, estimate = self._rows_gathered, self._gathered_bytes
        self._gathered, self._gathered_bytes, self._rows_gathered = [], 0, 0
        self.queued_bytes -= estimate
        self._queue_frame(frame, rows)

    def _queue_frame(self, frame: bytes, rows: int = 0) -> None:
        self._queue.append(_Queued(memoryview(frame), rows))
        self.queued_bytes += len(frame)
        if not self._is_writing:
            self._send()

    def _send(self) -> None:
        while self._queue and self._socket is not None:
            try:
                sent = self._socket.sendmsg([one.data for one in islice(self._queue, MAX_FRAMES)])
            except BlockingIOError:
                self._watch_writable(True)
                return
            except OSError:
                self._worker_gone()
                return
            self._drop_sent(sent)
        self._watch_writable(False)

    def _drop_sent(self, sent: int) -> None:
        self.queued_bytes -= sent
        while sent and sent >= len(self._queue[0].data):
            sent -= len(self._queue.popleft().data)
        if sent:
            self._queue[0].data = self._queue[0].data[sent:]

    def _watch_writable(self, on: bool) -> None:
        if self._socket is None or on == self._is_writing:
            return
        self._is_writing = on
        loop = asyncio.get_running_loop()
        if on:
            loop.add_writer(self._socket, self._send)
        else:
            loop.remove_writer(self._socket)

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._worker_gone()
            return
        for payload in self._frames.feed(data):
            trouble = self.report.trouble
            self.report = msgspec.msgpack.decode(payload, type=Report)
            if self.report.trouble is not None and self.report.trouble != trouble:
                self._warn(self.report.trouble)
            self._changed.set()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        config = msgspec.structs.replace(self._config, counts=self.report.counts)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tracer.record.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        except OSError as error:
            ours.close()
            self._warn(f"cannot start the recording worker: {error.strerror}")
            return
        finally:
            theirs.close()
        self._spawned_at = time.monotonic()
        ours.setblocking(False)
        self._socket, self._frames = ours, Frames()
        self._lost_recorded = self.recorded
        self._lost_figures = without_recent(self.figures)
        self.report = Report(counts=self.report.counts)
        asyncio.get_running_loop().add_reader(ours, self._receive)
        self._queue_frame(framed(config))

    def _worker_gone(self) -> None:
        """Rows that were queued are lost and counted; traffic goes on, and a new worker takes over."""
        self.rows_lost += sum(one.rows for one in self._queue) + self._rows_gathered
        self._close()
        self._changed.set()
        if self._is_stopping:
            return
        self.worker_deaths += 1
        self._warn("the recording worker died; requests pass, but are not recorded until it is back")
        self._restart_later()

    def _restart_later(self) -> None:
        has_lived = time.monotonic() - self._spawned_at > MAX_RESTART_S
        self._pause_s = RESTART_S if has_lived else self._pause_s
        asyncio.get_running_loop().call_later(self._pause_s, self._restart)
        self._pause_s = min(2 * self._pause_s, MAX_RESTART_S)

    def _restart(self) -> None:
        if self._is_stopping or self._socket is not None:
            return
        if self._process is not None:
            self._process.poll()
        self._spawn()
        if self._socket is None:  # no memory or no process to be had; perhaps later
            self._restart_later()

    def _close(self) -> None:
        if self._socket is None:
            return
        self._watch_writable(False)
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._socket = None
        self._queue.clear()
        self._gathered, self._gathered_bytes, self._rows_gathered = [], 0, 0
        self.queued_bytes = 0

    async def _reap(self) -> None:
        if self._process is None:
            return
        for _ in range(100):
            if self._process.poll() is not None:
                return
            await asyncio.sleep(0.05)
        self._process.kill()
        self._process.wait()
