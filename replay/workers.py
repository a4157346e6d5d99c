"""Several sending processes for one point: one schedule made here, each sends its share of it on the machine's one clock."""

import asyncio
import multiprocessing
import os
import signal
import tempfile
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np
import uvloop

from replay.edge.client import TransportName, client_for
from replay.plan.plan import Plan
from replay.plan.share import Shard, share_rows
from replay.results import log_path
from replay.sharing import Counts, Job, Share, Stop, background
from tracer.blocks import Blocks
from tracer.limits import lift_file_limit

COUNTS_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    plan_dir: Path = Path()
    index: int
    count: int
    shard: Shard
    job: Job
    timeout_s: float
    headers: dict[str, str]
    transport: TransportName


class Workers:
    """Processes that wait for orders; leaving ends them."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs,), name=f"chatreel-worker-{number}", daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.terminate()

    def share_out(
        self,
        plan: Plan,
        shard: Shard,
        job: Job,
        timeout_s: float,
        headers: dict[str, str],
        transport: TransportName,
        stop: Stop,
    ) -> "SharedOut":
        orders = [
            _Order(
                index=number,
                count=len(self._pipes),
                shard=shard,
                job=replace(
                    job,
                    log=log_path(job.log.parent, job.point, number),
                    at_once=None if job.at_once is None else (job.at_once + number) // len(self._pipes),
                ),
                timeout_s=timeout_s,
                headers=headers,
                transport=transport,
            )
            for number in range(len(self._pipes))
        ]
        return SharedOut(plan, orders, self._pipes, stop)


class SharedOut:
    """One point with the workers."""

    def __init__(self, plan: Plan, orders: list[_Order], pipes: list[Connection], stop: Stop) -> None:
        self._plan, self._orders, self._pipes, self._stop = plan, orders, pipes, stop
        self._counts = [Counts() for _ in pipes]

    def counts(self) -> list[Counts]:
        taken = [replace(one) for one in self._counts]
        for one in self._counts:
            one.loop_lag_ns = 0
        return taken

    async def ready(self) -> None:
        """Every worker has its share of the plan."""
        with tempfile.TemporaryDirectory(prefix="chatreel-plan-") as folder:  # a mapped file may go
            _write_plan(self._plan, Path(folder))
            for pipe, order in zip(self._pipes, self._orders, strict=True):
                _tell(pipe, replace(order, plan_dir=Path(folder)))
            await asyncio.gather(*(self._hear(number) for number in range(len(self._pipes))))

    async def run(self, start_ns: int) -> None:
        for pipe in self._pipes:
            _tell(pipe, start_ns)
        async with background(self._pass_stop()):
            await asyncio.gather(*(self._follow(number) for number in range(len(self._pipes))))

    async def _pass_stop(self) -> None:
        await self._stop.event.wait()
        for pipe in self._pipes:
            _tell(pipe, self._stop.reason)

    async def _follow(self, number: int) -> None:
        while isinstance(counts := await self._hear(number), Counts):
            counts.loop_lag_ns = max(counts.loop_lag_ns, self._counts[number].loop_lag_ns)
            self._counts[number] = counts
            if counts.stop_reason is not None:
                self._stop.set(counts.stop_reason)

    async def _hear(self, number: int) -> Any:
        """None: there is nobody any more, or its share has ended."""
        try:
            return await _receive(self._pipes[number])
        except (EOFError, OSError):
            self._stop.set(f"sending process {number} died; what it had in flight is lost")
            return None


def _tell(pipe: Connection, message: object) -> None:
    with suppress(OSError):  # who is gone is missed when it should answer
        os.set_blocking(pipe.fileno(), True)  # libuv makes what it polls non-blocking, and half a message could get lost
        pipe.send(message)


async def _receive(pipe: Connection) -> Any:
    """Raises EOFError or OSError once the other end is closed."""
    if not pipe.poll():
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(pipe.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(pipe.fileno())
    os.set_blocking(pipe.fileno(), True)
    return pipe.recv()


def work(pipe: Connection) -> None:
    """A worker's life: orders come in over the pipe, counts go out. Ctrl-C goes to the whole group, and the parent decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lift_file_limit()
    with suppress(EOFError, OSError):  # the parent is gone
        uvloop.run(_obey(pipe))


async def _obey(pipe: Connection) -> None:
    while (message := await _receive(pipe)) is not None:
        if isinstance(message, _Order):
            await _do(message, pipe)


async def _do(order: _Order, pipe: Connection) -> None:
    stop = Stop()
    async with client_for(order.timeout_s, order.headers, order.transport) as client:
        plan = _read_plan(order.plan_dir)
        share = Share(plan, share_rows(plan, order.index, order.count, order.shard), order.job, client, stop)
        pipe.send("ready")
        start_ns = await _receive(pipe)

        async def hear() -> None:
            try:
                stop.set(str(await _receive(pipe)))
            except (EOFError, OSError):
                stop.set("the parent process is gone")

        async def tell() -> None:
            while True:
                _tell(pipe, share.counts()[0])
                await asyncio.sleep(COUNTS_S)

        if isinstance(start_ns, int):
            async with background(hear(), tell()):
                await share.run(start_ns)
            _tell(pipe, share.counts()[0])
    _tell(pipe, None)


def _write_plan(plan: Plan, folder: Path) -> None:
    """As plain arrays, which every process maps: no copy of them is made."""
    for field in fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, Blocks):
            np.save(folder / f"{field.name}.offsets.npy", value.offsets)
            np.save(folder / f"{field.name}.ids.npy", value.ids)
        elif field.name != "notes" and value is not None:
            np.save(folder / f"{field.name}.npy", value)


def _read_plan(folder: Path) -> Plan:
    def mapped(name: str) -> Any:
        try:
            return np.load(folder / f"{name}.npy", mmap_mode="r")
        except ValueError:  # an empty array cannot be mapped
            return np.load(folder / f"{name}.npy")

    values: dict[str, Any] = {}
    for field in fields(Plan):
        if field.name in ("blocks", "answer_blocks"):
            values[field.name] = Blocks(offsets=mapped(f"{field.name}.offsets"), ids=mapped(f"{field.name}.ids"))
        elif field.name != "notes" and (folder / f"{field.name}.npy").exists():
            values[field.name] = mapped(field.name)
    return Plan(**values | {"block_tokens": int(values["block_tokens"])})
