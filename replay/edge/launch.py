"""A server launched in its own process group: waited for until it is ready, and stopped with all of its group."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

LOOK_S = 0.1
ASK_S = 5.0  # until an answer about being ready
TAIL_LINES, TAIL_BYTES = 12, 16_384
KILLED_S = 10.0  # until the last of a killed group is gone: memory of a GPU takes a while


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    command: Sequence[str]
    env: Mapping[str, str]  # beside ours
    cwd: str | None
    ready: str  # URL
    ready_timeout_s: float
    grace_s: float  # from SIGTERM to SIGKILL
    log: Path


class LaunchError(Exception):
    """This server could not be brought up or did not stay so; another configuration may."""


@dataclass(frozen=True, slots=True)
class Server:
    process: subprocess.Popen[bytes]
    ready_s: float

    def end(self) -> str | None:
        """How it ended; None: it runs."""
        code = self.process.poll()
        return None if code is None else how_it_ended(code)


@contextlib.contextmanager
def launched(launch: Launch) -> Iterator[Server]:
    """Raises LaunchError. Not async: nothing else is to go on, and a Ctrl-C anywhere in here must still stop the server."""
    if _status(launch.ready) is not None:  # it would be measured in place of ours
        raise LaunchError(f"something answers at {launch.ready} before the launch: end it, or take {{port}} for a free port")
    process = _started(launch)
    try:
        yield Server(process, _wait(process, launch))
    finally:
        stop(process, launch.grace_s)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _started(launch: Launch) -> subprocess.Popen[bytes]:
    with open(launch.log, "wb") as log:
        try:
            return subprocess.Popen(
                launch.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **launch.env},
                cwd=launch.cwd,
                start_new_session=True,  # Ctrl-C in a terminal is for us, and one signal reaches all of its processes
            )
        except OSError as error:
            where = f" in {launch.cwd}" if launch.cwd else ""
            raise LaunchError(f"{launch.command[0]} cannot be started{where}: {error.strerror}") from error


def _wait(process: subprocess.Popen[bytes], launch: Launch) -> float:
    """Seconds until it was ready."""
    start = time.monotonic()
    while True:
        status = _status(launch.ready)
        lasted_s = time.monotonic() - start
        code = process.poll()
        if code is not None:
            raise LaunchError(f"the server {how_it_ended(code)} after {lasted_s:.1f} s, before it was ready")
        if status == 200:
            return lasted_s
        seen = f"HTTP {status}" if status is not None else "nothing"
        if lasted_s >= launch.ready_timeout_s:
            raise LaunchError(f"not ready after {lasted_s:.0f} s: {seen} at {launch.ready}")
        time.sleep(LOOK_S)


def _status(url: str) -> int | None:
    try:
        return httpx.get(url, timeout=ASK_S, trust_env=False).status_code
    except (httpx.HTTPError, httpx.InvalidURL):
        return None


def stop(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM to the group; SIGKILL to what is left of it after the grace time, or at once if we are told to end meanwhile."""
    try:
        _signal(process, signal.SIGTERM)
        _await_end(process, grace_s)
    finally:
        _signal(process, signal.SIGKILL)
        _await_end(process, KILLED_S)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if _living(process):  # of a group without processes the number may be another's by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _await_end(process: subprocess.Popen[bytes], seconds: float) -> None:
    end = time.monotonic() + seconds
    while _living(process) and time.monotonic() < end:
        time.sleep(LOOK_S)


def _living(process: subprocess.Popen[bytes]) -> bool:
    """Whether any process of the group is alive: a dead one that nobody waits for is not."""
    if process.poll() is None:
        return True
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = path.read_text(errors="replace").rpartition(")")[2].split()[:3]  # after the name: state, ppid, pgrp
            if int(group) == process.pid and state != "Z":
                return True
    return False


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def tail(log: Path) -> list[str]:
    """The last lines of a server's log that hold anything."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = ("".join(c if c.isprintable() else " " for c in line).rstrip() for line in text.splitlines())
    return [line for line in lines if line][-TAIL_LINES:]
