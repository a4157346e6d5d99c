"""The queue to the worker: bounded, gathers what is small, and sheds bodies before rows."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from tracer.record.channel import GATHER_S, Channel, Frames, take_normal_time
from tracer.record.messages import Finished, Piece, Started, ToWorker, WorkerConfig
from tracer.wire import CHAT

CONFIG = WorkerConfig(folder="x", key_path="x", tokenizer="cl100k", chunk_times=False, epoch_ns=0, producer="test")


class Pipe:
    """A socket that takes `room` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.frames = Frames()
        self.sends: list[list[ToWorker]] = []

    def sendmsg(self, buffers: list[memoryview]) -> int:
        data = b"".join(buffers)[: self.room]
        if not data:
            raise BlockingIOError
        self.room -= len(data)
        self.sends += [msgspec.msgpack.decode(one, type=list[ToWorker]) for one in self.frames.feed(data)]
        return len(data)

    def fileno(self) -> int:
        return 0

    def close(self) -> None:
        pass


@contextmanager
def channel(pipe: Pipe, limit: int) -> Iterator[Channel]:
    one = Channel(CONFIG, lambda _: None, limit)
    one._socket = pipe  # type: ignore[assignment]
    one._watch_writable = lambda on: setattr(one, "_is_writing", on)  # type: ignore[method-assign]
    yield one


def finished(flow: int) -> Finished:
    return Finished(
        flow=flow,
        arrival_ns=0,
        endpoint=CHAT,
        upstream="u",
        dispatch_ns=1,
        bytes_in=1,
        status=200,
        bytes_out=1,
        at_ns=2,
        broken=None,
    )


def test_what_is_small_waits_a_moment_for_more_and_keeps_its_order() -> None:
    async def play() -> list[list[ToWorker]]:
        pipe = Pipe(1 << 20)
        with channel(pipe, 1 << 20) as one:
            begun = Started(flow=1, arrival_ns=0, endpoint=CHAT, body=b"{}")
            messages = [
                begun,
                Piece(1, 5, b"x"),
                Piece(1, 6, b"y"),
                finished(1),
            ]
            one.started(begun)
            one.received(messages[1])
            one.received(messages[2])
            one.finished(messages[3])
            assert pipe.sends == []
            await asyncio.sleep(3 * GATHER_S)
            assert pipe.sends == [messages]
            assert one.queued_bytes == 0
            one.received(Piece(2, 7, bytes(100_000)))
            assert len(pipe.sends) == 2  # at once
        return pipe.sends

    asyncio.run(play())


def test_a_worker_that_takes_nothing_costs_bodies_first_and_rows_last() -> None:
    async def play() -> None:
        pipe = Pipe(0)
        with channel(pipe, 100_000) as one:
            for flow in range(100):
                one.started(Started(flow=flow, arrival_ns=0, endpoint=CHAT, body=bytes(2000)))
                one.received(Piece(flow, 1, bytes(2000)))
                one.finished(finished(flow))
            assert one.queued_bytes <= 100_000
            assert one.prompts_shed > 50
            assert one.rows_lost == 0
            for flow in range(5000):
                one.finished(finished(flow))
            assert one.queued_bytes <= 100_000
            assert 0 < one.rows_lost < 5000
            lost, pipe.room = one.rows_lost, 1 << 20
            one._pass_on()
            one._send()
            rows = sum(isinstance(message, Finished) for frame in pipe.sends for message in frame)
            assert rows + lost == 5100
            assert one.queued_bytes == 0

    asyncio.run(play())


def test_rows_that_a_dead_worker_has_not_taken_are_counted(tmp_path: Path) -> None:
    async def play() -> None:
        with channel(Pipe(0), 1 << 20) as one:
            one._is_stopping = True  # no new worker
            one.finished(finished(1))
            one._pass_on()
            one.finished(finished(2))
            asyncio.get_running_loop().remove_reader = lambda _: True  # type: ignore[method-assign, assignment]
            one._worker_gone()
            one.finished(finished(3))
            assert (one.rows_lost, one.queued_bytes) == (3, 0)

    asyncio.run(play())


def test_a_worker_that_is_waited_for_leaves_idle_time() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))

        take_normal_time(process.pid)

        found = os.sched_getscheduler(process.pid)
        process.kill()
    take_normal_time(process.pid)  # it is gone: nothing to do
    if os.geteuid() != 0:
        pytest.skip("only the privileged may leave idle scheduling")
    assert found == os.SCHED_OTHER
