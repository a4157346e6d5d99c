"""One of several proxies on a port: a session in a process of its own, which tells its supervisor how it goes.

It drains and ends on SIGTERM, and when the supervisor is gone.
"""

import asyncio
import os
import resource
import signal
import socket
import sys

import msgspec
import uvloop

from tracer.errors import TraceError
from tracer.record.messages import WorkerConfig
from tracer.record.session import RecordConfig, RecordStats, Session

MESSAGE_BYTES = 1 << 16


class LaneConfig(msgspec.Struct, frozen=True, kw_only=True):
    """First and only message to the lane."""

    config: RecordConfig
    worker: WorkerConfig
    started_ns: int  # monotonic clock at arrival_ns == 0, the same for all lanes


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    url: str


class Told(msgspec.Struct, frozen=True, tag="told"):
    stats: RecordStats
    counts: dict[str, int]


class Warned(msgspec.Struct, frozen=True, tag="warned"):
    text: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    text: str


FromLane = Ready | Told | Warned | Failed


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold prompts
    with socket.socket(fileno=int(sys.argv[1])) as link:
        config = msgspec.msgpack.decode(link.recv(MESSAGE_BYTES), type=LaneConfig)
        try:
            uvloop.run(_run(config, link))
        except TraceError as error:
            _say(link, Failed(str(error)))


async def _run(lane: LaneConfig, link: socket.socket) -> None:
    asyncio.get_running_loop().add_reader(link, _supervisor_gone, link)
    session = Session(
        lane.config,
        lane.worker,
        lambda text: _say(link, Warned(text)),
        lambda stats: _say(link, Told(stats, session.counts())),
        lane.started_ns,
        share_port=True,
    )
    await session.run(lambda url: _say(link, Ready(url)))


def _supervisor_gone(link: socket.socket) -> None:
    asyncio.get_running_loop().remove_reader(link)
    os.kill(os.getpid(), signal.SIGTERM)


def _say(link: socket.socket, news: FromLane) -> None:
    """Never waits: a supervisor that does not listen must not stop traffic. The next stats say it again."""
    try:
        link.send(msgspec.msgpack.encode(news), socket.MSG_DONTWAIT)
    except OSError:
        pass
