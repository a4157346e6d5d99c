"""A plan through simulated engines in virtual time: no network and no waiting. Pure.

First turns arrive as planned, later ones after the answer before them and their think time, as in a real replay. Requests
carry names of blocks instead of tokens: a trace's block ids commit to all that is before them, so they name KV blocks too.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from replay.errors import PlanError
from replay.outcome import Outcome, Sample
from replay.plan.plan import Plan
from replay.sim.engine import Engine, Request, Step
from replay.sim.presets import Preset

type Router = Literal["prefix", "sticky", "rr"]
NS = 1_000_000_000
MAX_LEAD = 8  # prefix: requests that a replica may have more than the least busy one and still be chosen
_OWN_BITS = 20  # blocks that one request can have of its own: 2 ** 20 of 16 tokens


@dataclass(slots=True, kw_only=True)
class _InFlight:
    row: int
    planned_ns: int
    request: Request
    gaps_us: list[int]


def play(
    plan: Plan,
    preset: Preset,
    *,
    replicas: int,
    router: Router,
    sample_s: float,
    engines: list[Engine] | None = None,
    at_once: int | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[Outcome | Sample]:
    """Outcomes as they end and a sample of the engines' state every `sample_s` of virtual time, in order of time.

    The engine that is furthest behind steps first, so no answer comes before what led to it. `engines`: used instead of new
    ones. `at_once`: so many sessions are open, and the next one starts when one has ended. Once `is_over`, nothing more arrives.
    """
    fleet = _Fleet(plan, preset, replicas, router, engines, at_once)
    next_sample_s = 0.0
    while fleet.is_busy:
        if is_over():
            fleet.end_arrivals()
            if not fleet.is_busy:
                break
        now_s = fleet.now_s
        while next_sample_s <= now_s:
            yield fleet.sample(next_sample_s)
            next_sample_s += sample_s
        yield from fleet.advance()
    yield fleet.sample(fleet.end_s)


class _Fleet:
    def __init__(
        self,
        plan: Plan,
        preset: Preset,
        replicas: int,
        router: Router,
        engines: list[Engine] | None = None,
        at_once: int | None = None,
    ) -> None:
        self.plan = plan
        self.names = _Names(plan, preset.block_tokens)
        self.engines = engines or [Engine(preset) for _ in range(replicas)]
        self.choose = ROUTERS[router]
        waits = (plan.parent >= 0) & (plan.think_ns >= 0)
        firsts = np.flatnonzero(~waits).tolist()
        self.queue = deque(firsts[at_once:] if at_once else [])  # sessions that start when another one has ended
        self.due = [(int(plan.planned_ns[row]), row) for row in firsts[:at_once]]
        heapq.heapify(self.due)
        self.after: dict[int, list[int]] = {}  # row -> turns that wait for its end
        for row in np.flatnonzero(waits).tolist():
            self.after.setdefault(int(plan.parent[row]), []).append(row)
        self.in_flight: dict[int, _InFlight] = {}  # by id of the engine's request
        self.generated = 0
        self.arrived = 0
        self.end_s = 0.0

    @property
    def is_busy(self) -> bool:
        return bool(self.due) or any(not engine.idle for engine in self.engines)

    @property
    def now_s(self) -> float:
        """When the next thing happens: an arrival, or the step of the engine that is furthest behind."""
        times = [_next_step_s(engine) for engine in self.engines if not engine.idle]
        if self.due:
            times.append(self.due[0][0] / NS)
        return min(times)

    def advance(self) -> Iterator[Outcome]:
        busy = [engine for engine in self.engines if not engine.idle]
        behind = min(busy, key=_next_step_s) if busy else None
        if self.due and (behind is None or self.due[0][0] / NS <= _next_step_s(behind)):
            planned_ns, row = heapq.heappop(self.due)
            yield from self._arrive(planned_ns, row)
        elif behind is not None:
            yield from self._stepped(behind.step())

    def _arrive(self, planned_ns: int, row: int) -> Iterator[Outcome]:
        input_tokens, output_tokens = int(self.plan.input_tokens[row]), int(self.plan.output_tokens[row])
        refusal = self.engines[0].refusal(input_tokens, output_tokens)
        names = self.names.of(row)
        if refusal is not None:
            self._then(row, planned_ns)
            yield self._outcome(row, planned_ns, http_status=400, error_kind="http_status", error_text=refusal, end_ns=planned_ns)
            return
        request = Request(prompt=range(input_tokens), answer=range(output_tokens), arrival_s=planned_ns / NS, names=names)
        self.in_flight[id(request)] = _InFlight(row=row, planned_ns=planned_ns, request=request, gaps_us=[])
        self.engines[self.choose(self.engines, request, int(self.plan.session_id[row]), self.arrived)].submit(request)
        self.arrived += 1

    def _stepped(self, step: Step) -> Iterator[Outcome]:
        self.generated += len(step.tokens)
        self.end_s = max(self.end_s, step.end_s)
        for token in step.tokens:
            if token.gap_s is not None:
                self.in_flight[id(token.request)].gaps_us.append(round(token.gap_s * 1e6))
        for request in step.finished:
            yield self._ended(self.in_flight.pop(id(request)))

    def _ended(self, one: _InFlight) -> Outcome:
        request = one.request
        assert request.first_token_s is not None and request.last_token_s is not None
        end_ns = round(request.last_token_s * NS)
        self._then(one.row, end_ns)
        return self._outcome(
            one.row,
            one.planned_ns,
            first_byte_ns=round(request.first_token_s * NS),
            first_answer_ns=round(request.first_token_s * NS),
            last_token_ns=end_ns,
            end_ns=end_ns,
            input_tokens=len(request.prompt),
            output_tokens=request.answered,
            cached_tokens=request.cached_tokens,
            token_count_source="usage",
            chunk_gaps_us=one.gaps_us,
            chunk_tokens=[1] * request.answered,
            finish_reason=request.finish_reason,
            http_status=200,
            answer_spliced=True if self.plan.parent[one.row] >= 0 else None,
        )

    def _then(self, row: int, end_ns: int) -> None:
        """The turns that waited for this one are due after their think time."""
        turns = self.after.pop(row, ())
        for turn in turns:
            heapq.heappush(self.due, (end_ns + int(self.plan.think_ns[turn]), turn))
        if not turns and self.queue:
            heapq.heappush(self.due, (end_ns, self.queue.popleft()))

    def end_arrivals(self) -> None:
        self.due.clear()
        self.after.clear()
        self.queue.clear()

    def _outcome(self, row: int, planned_ns: int, **values: object) -> Outcome:
        plan = self.plan
        return Outcome(
            request_id=row,
            source_request_id=int(plan.source_request_id[row]),
            session_id=int(plan.session_id[row]),
            turn=int(plan.turn[row]),
            planned_ns=planned_ns,
            recorded_ns=int(plan.planned_ns[row]),
            ready_ns=planned_ns,
            sent_ns=planned_ns,
            planned_input_tokens=int(plan.input_tokens[row]),
            planned_output_tokens=int(plan.output_tokens[row]),
            **values,  # type: ignore[arg-type]
        )

    def sample(self, at_s: float) -> Sample:
        engines = self.engines
        return Sample(
            t_ns=round(at_s * NS),
            running=float(sum(len(engine.running) for engine in engines)),
            waiting=float(sum(len(engine.waiting) for engine in engines)),
            kv_usage=sum(engine.kv_usage for engine in engines) / len(engines),
            prefix_queries_tokens=float(sum(engine.prefix_cache_queries for engine in engines)),
            prefix_hits_tokens=float(sum(engine.prefix_cache_hits for engine in engines)),
            preemptions=float(sum(engine.preemptions for engine in engines)),
            prompt_tokens=float(sum(engine.prefix_cache_queries for engine in engines)),
            generation_tokens=float(self.generated),
            client_in_flight=len(self.in_flight),
        )


class _Names:
    """Names of the KV blocks of requests: a trace block's id and the part of it, a request's own number beyond."""

    def __init__(self, plan: Plan, block_tokens: int) -> None:
        trace, engine = plan.block_tokens, block_tokens
        if trace % engine and engine % trace:
            raise PlanError(
                "blocks of this trace do not fit those of the engine", seen=f"{trace} and {engine} tokens", wanted="a multiple"
            )
        self.plan = plan
        self.block_tokens = engine
        self._to_come = np.bincount(plan.parent[plan.parent >= 0], minlength=len(plan))  # turns that go on from a request
        self._paths: dict[int, list[int]] = {}  # of requests that a later turn goes on from

    def of(self, row: int) -> list[int]:
        """All full blocks of prompt and answer."""
        plan, size = self.plan, self.block_tokens
        count = (int(plan.input_tokens[row]) + int(plan.output_tokens[row])) // size
        named = self._of_trace(np.concatenate([plan.blocks[row], plan.answer_blocks[row]]))[:count]
        own = [-1 - ((row << _OWN_BITS) + place) for place in range(len(named), count)]
        names = named + own
        parent = int(plan.parent[row])
        if parent >= 0 and parent in self._paths:  # the conversation as it went: what both have in common is the parent's
            common = int(plan.parent_tokens[row]) // size
            names[:common] = self._paths[parent][:common]
            self._to_come[parent] -= 1
            if not self._to_come[parent]:
                del self._paths[parent]
        if self._to_come[row]:
            self._paths[row] = names
        return names

    def _of_trace(self, ids: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> list[int]:
        trace, engine = self.plan.block_tokens, self.block_tokens
        if engine >= trace:
            names: list[int] = ids[engine // trace - 1 :: engine // trace].tolist()
            return names
        parts = trace // engine
        whole = np.repeat(ids.astype(np.int64) * parts, parts) + np.tile(np.arange(parts), len(ids))
        spelled: list[int] = whole.tolist()
        return spelled


def _next_step_s(engine: Engine) -> float:
    return engine.now_s if engine.running else max(engine.now_s, engine.waiting[0].arrival_s)


def _prefix(engines: list[Engine], request: Request, _session: int, _number: int) -> int:
    """The longest cached prefix among the replicas that are not far busier than the least busy one."""
    load = [len(engine.running) + len(engine.waiting) for engine in engines]
    limit = (len(request.prompt) - 1) // engines[0].preset.block_tokens
    able = [number for number in range(len(engines)) if load[number] <= min(load) + MAX_LEAD]
    return max(able, key=lambda number: (len(engines[number].cache.leading_run(request.names, limit)), -load[number]))


def _sticky(engines: list[Engine], _request: Request, session: int, _number: int) -> int:
    return session % len(engines)


def _round_robin(engines: list[Engine], _request: Request, _session: int, number: int) -> int:
    return number % len(engines)


ROUTERS: dict[Router, Callable[[list[Engine], Request, int, int], int]] = {
    "prefix": _prefix,
    "sticky": _sticky,
    "rr": _round_robin,
}
