"""One process's share of a point: sends its requests on time and writes down what happens to each."""

import asyncio
import contextlib
import gc
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from replay.edge.alarm import Alarm
from replay.edge.bodies import PATHS, api_of
from replay.edge.client import Client, Exchange
from replay.edge.probe import Target
from replay.live import Tally
from replay.outcome import HUNG_UP, Outcome
from replay.plan.pacer import Pacer
from replay.plan.plan import Ints, Plan
from replay.prompting import Bodies, Body
from replay.results import compact

LOOK_AHEAD_NS = 200_000_000  # prompts are built this long before they are due: 12k tokens take some 2 ms
GATHER_NS = 20_000_000  # so long they are gathered before: ten small prompts at once cost little more than one
BUILD_TOKENS = 8_192  # prompts built in one go, before the event loop gets its turn again
BUILD_REQUESTS = 64  # some 2 ms for short prompts
LAG_PROBE_S = 0.02
RETRY_S = 0.5  # before the first one, doubled for each
RETRIED_STATUS = (408, 429, 500, 502, 503, 504)
DEAD_AFTER = 25  # so many requests in a row that did not even reach the target: it is gone

type Until = Callable[[int], Awaitable[None]]


@dataclass(slots=True)
class Stop:
    """Set by Ctrl-C or by a dead target: send nothing more, drain what is in flight."""

    reason: str | None = None
    event: asyncio.Event = field(default_factory=asyncio.Event)

    def set(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
        self.event.set()


@dataclass(slots=True)
class Counts:
    """How far a share is; the last two since they were last asked for."""

    sent: int = 0
    ended: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    tally: Tally = field(default_factory=Tally)
    stop_reason: str | None = None
    loop_lag_ns: int = 0  # worst delay of the event loop: a stalled loop stamps every token late
    cpu_share: float = 0.0  # of one core, by the event loop and all that runs in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that a share needs beside its rows of the plan."""

    target: Target
    salt: int
    drain_s: float
    point: int
    log: Path
    at_once: int | None = None  # closed loop: sessions that are open at a time
    hang_up: bool = False  # where the recorded client did
    retries: int = 0  # of a request that failed before its first token


@dataclass(slots=True)
class _Ready:
    """A request that only waits for its time."""

    row: int
    due_ns: int
    ready_ns: int
    body: Body
    sent_ns: int | None = None  # of the first attempt
    failed: list[str] = field(default_factory=list)  # what ended each attempt before the last
    leaves: asyncio.TimerHandle | None = None  # when its client hangs up


class Share:
    """`until`: waits until the plan has the blocks of a request; None: it has them all."""

    def __init__(self, plan: Plan, rows: Ints, job: Job, client: Client, stop: Stop, until: Until | None = None) -> None:
        self.until = until
        self.plan, self.rows, self.job, self.client, self.stop = plan, rows, job, client, stop
        self.target = job.target
        self.endpoints = [client.endpoint(url + PATHS[self.target.prompt_mode]) for url in self.target.all_urls]
        self.api = api_of(self.target.prompt_mode)
        self.pacer = Pacer(plan, rows, job.at_once)
        soon_ns = LOOK_AHEAD_NS if until is None else 0
        self.bodies = Bodies(plan, self.pacer, self.target, job.salt, job.hang_up, soon_ns)
        self.start_ns = 0
        self.prepared = 0
        self.prepared_for = [0] * len(self.endpoints)
        self.open: dict[int, Exchange] = {}  # by row
        self.unnoted: deque[tuple[_Ready, Exchange]] = deque()  # ended, not read to the end and written yet
        self.has_next = False  # an end made another request due, now or later
        self.left_over: list[tuple[int, int]] = []  # due, but too many for the moment at which others ended
        self.waiting: dict[int, Callable[[], None]] = {}  # rows between two attempts: call to give them up
        self.unreached = [0] * len(self.endpoints)
        self.log: BinaryIO | None = None
        self._counts = Counts()
        self._cpu_ns, self._wall_ns = time.thread_time_ns(), time.monotonic_ns()
        gc.collect()

    @property
    def now_ns(self) -> int:
        return time.monotonic_ns() - self.start_ns

    def counts(self) -> list[Counts]:
        counts = self._counts
        cpu_ns, wall_ns = time.thread_time_ns(), time.monotonic_ns()
        counts.cpu_share = (cpu_ns - self._cpu_ns) / max(1, wall_ns - self._wall_ns)
        counts.stop_reason = self.stop.reason
        self._cpu_ns, self._wall_ns = cpu_ns, wall_ns
        taken = replace(counts)
        counts.loop_lag_ns = 0
        if self.log is not None and not self.log.closed:
            self.log.flush()
        return [taken]

    async def ready(self) -> None:
        """At once: see workers.py for those that are not."""

    async def run(self, start_ns: int) -> None:
        """Until all has ended or was given up; the log is Parquet then.

        `start_ns`: CLOCK_MONOTONIC, one clock for all processes of a machine.
        """
        self.start_ns = start_ns
        self.changed = asyncio.Event()
        self.alarm = Alarm()
        self.client.on_read(self.alarm.look)
        gc.freeze()  # a collection over a long plan would stall every stream
        try:
            with open(self.job.log, "wb", buffering=1 << 16) as self.log:
                async with background(self._probe_lag(), self._hear_stop()):
                    try:
                        await self._send_all()
                        await self._drain()
                    finally:
                        self._give_up()
                        self._note_all()
        finally:
            self.alarm.close()
            gc.unfreeze()
        compact(self.job.log)

    async def _send_all(self) -> None:
        while (self.left_over or not self.pacer.is_finished) and self.stop.reason is None:
            self.changed.clear()
            due_first, self.left_over = self.left_over, []
            for due in self._in_batches(due_first + self.pacer.take_due(self.now_ns + LOOK_AHEAD_NS)):
                if self.until is not None:
                    await self.until(max(row for _, row in due))
                self._prepare(due)
                await asyncio.sleep(0)
            await self._wait_for_work()

    def _in_batches(self, due: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        batch, tokens = [], 0
        for one in due:
            batch.append(one)
            tokens += int(self.plan.input_tokens[one[1]])
            if tokens >= BUILD_TOKENS or len(batch) >= BUILD_REQUESTS:
                yield batch
                batch, tokens = [], 0
        if batch:
            yield batch

    async def _wait_for_work(self) -> None:
        """Until something else is due within the look-ahead, or an answer made a next turn due, or we are to stop."""
        next_ns = self.pacer.next_due_ns()
        if next_ns is None:
            await self.changed.wait()
            return
        wait_s = (next_ns - LOOK_AHEAD_NS + GATHER_NS - self.now_ns) / 1e9
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.changed.wait()

    async def _drain(self) -> None:
        if self.stop.reason is not None:
            self.alarm.close()
            self.prepared = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.job.drain_s):
                while self.prepared or self.open:
                    self.changed.clear()
                    await self.changed.wait()

    def _give_up(self) -> None:
        """Drained too long, or the second Ctrl-C."""
        for never in list(self.waiting.values()):
            never()
        for seen in list(self.open.values()):
            seen.give_up("cancelled", "the run ended before the answer did")

    def _prepare(self, due: list[tuple[int, int]]) -> None:
        bodies = self.bodies.take([row for _, row in due])
        for (due_ns, row), body in zip(due, bodies, strict=True):
            ready = _Ready(row, due_ns, self.now_ns, body)
            self.prepared += 1
            self.prepared_for[self._server(row)] += 1
            self.alarm.call_at(self.start_ns + due_ns, partial(self._send, ready))
        for endpoint, prepared in zip(self.endpoints, self.prepared_for, strict=True):
            self.client.reserve(endpoint, prepared)

    def _server(self, row: int) -> int:
        return 0 if self.plan.server is None else int(self.plan.server[row])

    def _send(self, ready: _Ready) -> None:
        server = self._server(ready.row)
        self.prepared -= 1
        self.prepared_for[server] -= 1
        self._counts.sent += 1
        self._attempt(ready)

    def _attempt(self, ready: _Ready) -> None:
        row = ready.row
        # whether to ask again, and what a later turn holds, hang on what the answer says
        is_read_later = self.job.retries == 0 and ready.body.prompt is None
        seen = Exchange(api=self.api, done=partial(self._attempted, ready), is_read_later=is_read_later)
        self.open[row] = seen
        patience_ns = int(self.plan.abort_ns[row]) if self.job.hang_up else -1
        if patience_ns >= 0 and ready.leaves is None:
            ready.leaves = asyncio.get_running_loop().call_later(patience_ns / 1e9, self._hang_up, row)
        self.client.post(self.endpoints[self._server(row)], ready.body.text, seen)

    def _hang_up(self, row: int) -> None:
        """As the recorded client did. One that waits for its next attempt ends with the fault of its last one."""
        if row in self.waiting:
            self.waiting[row]()
        else:
            self.open[row].give_up("client_abort", HUNG_UP)

    def _attempted(self, ready: _Ready, seen: Exchange) -> None:
        ready.sent_ns = ready.sent_ns or seen.sent_ns
        tried = len(ready.failed)
        if tried >= self.job.retries or self.stop.reason is not None or not _is_worth_retrying(seen):
            self._ended(ready, seen)
            return

        def again() -> None:
            del self.waiting[ready.row]
            ready.failed.append(seen.error_kind or "")
            self._attempt(ready)

        def never() -> None:
            del self.waiting[ready.row]
            timer.cancel()
            self._ended(ready, seen)

        timer = asyncio.get_running_loop().call_later(RETRY_S * 2**tried, again)
        self.waiting[ready.row] = never

    def _ended(self, ready: _Ready, seen: Exchange) -> None:
        row = ready.row
        self.open.pop(row, None)
        if ready.leaves is not None:
            ready.leaves.cancel()
        if ready.body.prompt is not None and seen.facts.token_ids and seen.facts.has_all_token_ids:
            self.bodies.answered(row, ready.body.prompt, seen.facts.token_ids)
        self.has_next |= self.pacer.ended(row, seen.end_ns - self.start_ns)
        self.unnoted.append((ready, seen))
        if len(self.unnoted) == 1:  # not now: the answer's last bytes may be among those of others that have ended
            asyncio.get_running_loop().call_soon(self._work_off)

    def _work_off(self) -> None:
        """Requests have ended: what is due now goes out first, then it is written down how they ended."""
        if self.stop.reason is None and self.until is None:
            batches = list(self._in_batches(self.pacer.take_due(self.now_ns)))
            if batches:
                self._prepare(batches[0])
            self.left_over += [one for due in batches[1:] for one in due]
        has_more = self.left_over or (self.has_next and self.pacer.next_due_ns() is not None)
        self.has_next = False
        if has_more or self.pacer.is_finished or self.stop.reason is not None:
            self.changed.set()
        self._note_all()

    def _note_all(self) -> None:
        while self.unnoted:
            self._note(*self.unnoted.popleft())

    def _note(self, ready: _Ready, seen: Exchange) -> None:
        seen.settle()
        self._see_whether_gone(self._server(ready.row), seen)
        counts = self._counts
        outcome = _outcome(self.plan, ready, seen, self.start_ns)
        assert self.log is not None
        self.log.write(msgspec.json.encode(outcome) + b"\n")
        counts.ended += 1
        counts.errors += seen.error_kind not in (None, "client_abort")
        counts.prompt_tokens += outcome.input_tokens or 0
        counts.cached_tokens += outcome.cached_tokens or 0
        counts.output_tokens += outcome.output_tokens or 0
        counts.tally.add(outcome)

    def _see_whether_gone(self, server: int, seen: Exchange) -> None:
        unreached = self.unreached[server] + 1 if seen.error_kind in ("connect", "connection_lost") else 0
        self.unreached[server] = unreached
        if unreached >= DEAD_AFTER:
            name = "the target" if len(self.endpoints) == 1 else f"target {self.target.all_urls[server]}"
            self.stop.set(f"{name} is gone: {unreached} requests in a row did not get through")

    async def _hear_stop(self) -> None:
        await self.stop.event.wait()
        for never in list(self.waiting.values()):
            never()
        self.changed.set()

    async def _probe_lag(self) -> None:
        while True:
            before = time.monotonic_ns()
            await asyncio.sleep(LAG_PROBE_S)
            late_ns = time.monotonic_ns() - before - int(LAG_PROBE_S * 1e9)
            self._counts.loop_lag_ns = max(self._counts.loop_lag_ns, late_ns)


@contextlib.asynccontextmanager
async def background(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.get_running_loop().create_task(one) for one in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


def _is_worth_retrying(seen: Exchange) -> bool:
    """What may go better a moment later and gave no token yet: the same set as OpenAI's own client."""
    if seen.error_kind == "http_status":
        return seen.http_status in RETRIED_STATUS
    return seen.error_kind in ("connect", "connection_lost", "timeout") and seen.chunks == 0


def _outcome(plan: Plan, ready: _Ready, seen: Exchange, start_ns: int) -> Outcome:
    def since(absolute_ns: int | None) -> int | None:
        return None if absolute_ns is None else absolute_ns - start_ns

    row = ready.row
    usage = seen.facts.usage
    counted = usage is not None and usage.completion_tokens is not None
    has_all_counts = len(seen.chunk_tokens) == seen.chunks
    return Outcome(
        request_id=row,
        source_request_id=int(plan.source_request_id[row]),
        session_id=int(plan.session_id[row]),
        turn=int(plan.turn[row]),
        server=None if plan.server is None else int(plan.server[row]),
        planned_ns=ready.due_ns,
        recorded_ns=int(plan.planned_ns[row]),
        ready_ns=ready.ready_ns,
        sent_ns=since(ready.sent_ns),
        first_byte_ns=since(seen.first_byte_ns),
        first_reasoning_ns=since(seen.first_reasoning_ns),
        first_answer_ns=since(seen.first_answer_ns),
        last_token_ns=since(seen.last_token_ns),
        end_ns=since(seen.end_ns),
        planned_input_tokens=int(plan.input_tokens[row]),
        planned_output_tokens=int(plan.output_tokens[row]),
        input_tokens=usage.prompt_tokens if usage else None,
        output_tokens=usage.completion_tokens if usage and counted else (seen.chunks or None),
        cached_tokens=usage.cached_tokens if usage else None,
        token_count_source="usage" if counted else ("chunks" if seen.chunks else None),
        chunk_gaps_us=seen.chunk_gaps_us,
        chunk_tokens=seen.chunk_tokens if has_all_counts and seen.chunks else None,
        finish_reason=seen.facts.finish_reason,
        http_status=seen.http_status,
        error_kind=seen.error_kind,
        error_text=seen.error_text,
        answer_spliced=ready.body.answer_spliced,
        retried=" ".join(ready.failed) or None,
    )
