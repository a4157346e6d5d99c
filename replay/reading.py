"""A trace file read into a plan: at once what a replay needs to begin, block ids in a thread of their own while it runs."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from replay.plan.build import BLOCKS, SCALARS, outline
from replay.plan.plan import Plan
from tracer.tracefile import blocks, iter_tables, list_extent, read_footer, read_table


class Reading:
    """`plan` can be sent from as far as `until` says. Raises TraceError or PlanError for a file that is none to replay.

    Entering begins to read the block ids, leaving ends that; or `whole` reads all of them here and now.
    """

    def __init__(self, trace: Path, seed: int, *, limit: int | None, dequantise: bool, open_loop: bool) -> None:
        rng = np.random.default_rng(np.random.SeedSequence(seed).spawn(1)[0])
        footer, extents = read_footer(trace), [list_extent(trace, name) for name in BLOCKS]
        table = read_table(trace, SCALARS)
        self._filling = outline(table, footer, rng, extents, limit=limit, dequantise=dequantise)
        self._trace, self._is_open_loop = trace, open_loop
        self.plan = self._as_asked(self._filling.plan)
        self.references = sum(one.values for one in extents)  # at most so many block ids
        self._changed = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._is_left = False
        self._error: Exception | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What was changed on the way, as far as known."""
        return self._filling.notes

    def whole(self) -> Plan:
        self._read(lambda: None)
        return self._as_asked(self._filling.finished())

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._read_on, args=(lambda: loop.call_soon_threadsafe(self._changed.set),), name="chatreel-reading"
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_left = True
        if self._thread is not None:
            self._thread.join()

    async def until(self, request: int) -> None:
        """This request and all before it have their blocks. Raises what reading them raised."""
        while self._filling.filled <= request:
            self._changed.clear()
            if self._error is not None:
                raise self._error
            if self._filling.filled <= request:
                await self._changed.wait()

    async def finished(self) -> Plan:
        await self.until(len(self.plan) - 1)
        return self._as_asked(self._filling.finished())

    def _read_on(self, tell: Callable[[], object]) -> None:
        try:
            self._read(tell)
        except Exception as error:  # told to whoever waits
            self._error = error
            tell()

    def _read(self, tell: Callable[[], object]) -> None:
        for table in iter_tables(self._trace, BLOCKS):
            self._filling.add(*(blocks(table, name) for name in BLOCKS))
            tell()
            if self._filling.is_done or self._is_left:
                return

    def _as_asked(self, plan: Plan) -> Plan:
        return replace(plan, think_ns=np.full(len(plan), -1)) if self._is_open_loop else plan
