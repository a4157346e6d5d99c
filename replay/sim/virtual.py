"""A plan through simulated engines in virtual time: no network and no waiting. Pure.

First turns arrive as planned, later ones after the answer before them and their think time, as in a real replay. Requests
carry names of blocks instead of tokens: a trace's block ids commit to all that is before them, so they name KV blocks too.
"""

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.errors import PlanError
from replay.outcome import HUNG_UP, Outcome, Sample
from replay.plan.plan import Ints, Plan
from replay.plan.route import Router, longest_prefix, round_robin, sticky
from replay.sim.coasting import Coaster, Stretch
from replay.sim.dense import DenseCache
from replay.sim.engine import Engine, Request
from replay.sim.eviction import is_plain
from replay.sim.presets import Preset

NS = 1_000_000_000
_NONE = np.empty(0)


@dataclass(slots=True, kw_only=True)
class InFlight:
    row: int
    planned_ns: int
    request: Request
    engine: int
    leaves_ns: int | None = None  # its client hangs up then, if it is not done


def play(
    plan: Plan,
    preset: Preset,
    *,
    replicas: int,
    router: Router,
    sample_s: float,
    stepwise: bool = False,
    engines: list[Engine] | None = None,
    at_once: int | None = None,
    is_over: Callable[[], bool] | None = None,
    fleet: "Fleet | None" = None,
    hang_up: bool = False,
) -> Iterator[Outcome | Sample]:
    """Outcomes as they end and a sample of the engines' state every `sample_s` of virtual time, in order of time.

    The engine that is furthest behind steps first, so no answer comes before what led to it. `stepwise`: one step after
    the other and one block after the other, as the server does; the result is the same to the last bit. `engines`: used,
    step by step, instead of new ones. `at_once`: so many sessions are open, and the next one starts when one has ended.
    Once `is_over`, nothing more arrives. `fleet`: instead of one of like replicas; see split.py. `hang_up`: clients go where the
    recorded ones did.
    """
    fleet = fleet or Fleet(plan, preset, replicas, router, stepwise, engines, at_once, hang_up=hang_up)
    fleet.sample_s = sample_s
    # Where the caller may end the load after any sample, no run of steps goes beyond one; nor where engines meet in it.
    fleet.goes_beyond_samples = is_over is None and replicas == 1 and engines is None
    while fleet.is_busy:
        if is_over is not None and is_over():
            fleet.end_arrivals()
            if not fleet.is_busy:
                break
        now_s = fleet.now_s
        while fleet.next_sample_s <= now_s:
            yield fleet.sample(fleet.next_sample_s)
            fleet.next_sample_s += sample_s
        yield from fleet.advance(fleet.next_sample_s)
    yield fleet.sample(fleet.end_s)


class Fleet:
    def __init__(
        self,
        plan: Plan,
        preset: Preset,
        replicas: int,
        router: Router,
        stepwise: bool = False,
        engines: list[Engine] | None = None,
        at_once: int | None = None,
        *,
        hang_up: bool = False,
    ) -> None:
        self.plan = plan
        self.asked_tokens = plan.answer_tokens(hang_up=hang_up)
        self.patience_ns = plan.abort_ns if hang_up else np.full(len(plan), -1, dtype=np.int64)
        self.stepwise = stepwise or engines is not None
        self.names = _Names(plan, preset.block_tokens, self.asked_tokens)
        if engines is None:
            is_dense = is_plain(preset) and not stepwise
            caches = [DenseCache(preset.kv_blocks, self.names.total) if is_dense else None for _ in range(replicas)]
            engines = [Engine(preset, cache) for cache in caches]
        self.engines = engines
        self.coasters = [] if self.stepwise else [Coaster(engine) for engine in engines]
        self.has_host = preset.offload_blocks > 0
        self.ends_s = [array("d") for _ in engines]  # of every step of every engine
        self.shortest_step_s = preset.step_s(1, 1, 1)
        self.choose = ROUTERS[router]
        self.before_ns = round(preset.request_overhead_s * NS)  # an engine hears of a request so long after it was sent
        waits = (plan.parent >= 0) & (plan.think_ns >= 0)
        firsts = np.flatnonzero(~waits).tolist()
        self.queue = deque(firsts[at_once:] if at_once else [])  # sessions that start when another one has ended
        self.due = [(int(plan.planned_ns[row]) + self.before_ns, row) for row in firsts[:at_once]]
        heapq.heapify(self.due)
        self.after: dict[int, list[int]] = {}  # row -> turns that wait for its end
        for row in np.flatnonzero(waits).tolist():
            self.after.setdefault(int(plan.parent[row]), []).append(row)
        self.in_flight: dict[int, InFlight] = {}  # by id of the engine's request
        self.may_leave: dict[int, InFlight] = {}  # by row: whose clients would not wait for ever
        self.leaving: list[tuple[int, int]] = []  # (when, row) of those, a heap; its first one is in flight
        self.generated = 0
        self.arrived = 0
        self.end_s = 0.0
        self.sample_s = inf
        self.next_sample_s = 0.0
        self.goes_beyond_samples = False

    @property
    def is_busy(self) -> bool:
        return bool(self.due or self.leaving) or any(not engine.idle for engine in self.engines)

    @property
    def now_s(self) -> float:
        """When the next thing happens: an arrival, or the step of the engine that is furthest behind."""
        times = [engine.next_step_s for engine in self.engines if not engine.idle]
        if self.due:
            times.append(self.due[0][0] / NS)
        if self.leaving:
            times.append(self.leaving[0][0] / NS)
        return min(times)

    def advance(self, until_s: float = 0.0) -> Iterator[Outcome | Sample]:
        """One arrival, one client that hangs up, one step, or a run of like steps that start before `until_s`."""
        busy = [number for number, engine in enumerate(self.engines) if not engine.idle]
        behind = min(busy, key=lambda number: self.engines[number].next_step_s) if busy else None
        next_step_s = inf if behind is None else self.engines[behind].next_step_s
        leaving = self.leaving
        if leaving and (not self.due or leaving[0] <= self.due[0]) and leaving[0][0] / NS <= next_step_s:
            yield self._leave(self.may_leave[leaving[0][1]])
        elif self.due and self.due[0][0] / NS <= next_step_s:
            arrival_ns, row = heapq.heappop(self.due)
            yield from self._arrive(arrival_ns - self.before_ns, row)
        elif behind is not None:
            yield from self._step(behind, until_s)

    def _step(self, number: int, until_s: float) -> Iterator[Outcome | Sample]:
        engine = self.engines[number]
        if self.goes_beyond_samples:
            until_s = inf
        look = (self.next_sample_s, self.sample_s) if self.goes_beyond_samples else (inf, inf)
        if not self.stepwise:
            stretch = self.coasters[number].run(self._horizon_s(number, until_s), *look)
            yield from self._samples_within(stretch, engine)
            ends_s, finished, tokens = stretch.ends_s, stretch.finished, stretch.tokens
        else:
            step = engine.step()
            ends_s, finished, tokens = [step.end_s], step.finished, len(step.tokens)
        self.ends_s[number].extend(ends_s)
        self.generated += tokens
        self.end_s = max(self.end_s, engine.now_s)
        for request in finished:
            one = self.in_flight[id(request)]
            if one.leaves_ns is None or _ns(request.last_token_s) <= one.leaves_ns:
                del self.in_flight[id(request)]
                yield from self._finished(one)

    def _samples_within(self, stretch: Stretch, engine: Engine) -> Iterator[Sample]:
        """Of one engine alone: only its blocks in use and the tokens given change from step to step."""
        if not stretch.seen:
            return
        width = stretch.tokens // len(stretch.ends_s)
        now = self.sample(0.0)
        for steps, free in stretch.seen:
            yield msgspec.structs.replace(
                now,
                t_ns=round(self.next_sample_s * NS),
                running=float(width),  # those that end in the last step are still there
                kv_usage=1 - free / engine.cache.total,
                generation_tokens=float(self.generated + steps * width),
            )
            self.next_sample_s += self.sample_s

    def _horizon_s(self, number: int, until_s: float) -> float:
        """Up to here nothing that happens elsewhere concerns this engine: no arrival, and no end on another engine.

        Another engine ends a request with its shortest answer at the soonest, in steps that last as long as the shortest.
        """
        if self.due:
            until_s = min(until_s, self.due[0][0] / NS)
        if self.leaving:
            until_s = min(until_s, self.leaving[0][0] / NS)
        for other, engine in enumerate(self.engines):
            if other != number and not engine.idle:
                left = min((len(one.answer) - one.answered for one in engine.waiting), default=inf)
                left = min(left, self.coasters[other].steps_to_next_end)
                until_s = min(until_s, engine.next_step_s + (left - 1) * self.shortest_step_s)
        return until_s

    def _arrive(self, planned_ns: int, row: int) -> Iterator[Outcome]:
        names = self.names.of(row)
        if (outcome := self._unheard(self.engines[0], row, planned_ns)) is not None:
            yield outcome
            return
        read: Sequence[int] = array("q", names.tobytes()) if isinstance(self.engines[0].cache, DenseCache) else names.tolist()
        self._submit(self.engines, row, planned_ns, range(int(self.asked_tokens[row])), read)

    def _unheard(self, engine: Engine, row: int, planned_ns: int) -> Outcome | None:
        """Of a request that does not come to an engine: its client has gone before that, or the server refuses it."""
        patience_ns = int(self.patience_ns[row])
        if 0 <= patience_ns < self.before_ns:
            end_ns = planned_ns + patience_ns
            self._then(row, end_ns)
            return self._outcome(row, planned_ns, error_kind="client_abort", error_text=HUNG_UP, end_ns=end_ns)
        refusal = engine.refusal(int(self.plan.input_tokens[row]), int(self.asked_tokens[row]))
        if refusal is None:
            return None
        self._then(row, planned_ns)
        return self._outcome(row, planned_ns, http_status=400, error_kind="http_status", error_text=refusal, end_ns=planned_ns)

    def _submit(self, engines: list[Engine], row: int, planned_ns: int, answer: range, names: Sequence[int]) -> None:
        request = Request(
            prompt=range(int(self.plan.input_tokens[row])),
            answer=answer,
            arrival_s=(planned_ns + self.before_ns) / NS,
            names=names,
        )
        chosen = self.choose(engines, request, int(self.plan.session_id[row]), self.arrived)
        one = self.in_flight[id(request)] = InFlight(row=row, planned_ns=planned_ns, request=request, engine=chosen)
        self.engines[chosen].submit(request)
        self.arrived += 1
        patience_ns = int(self.patience_ns[row])
        if patience_ns >= 0:
            one.leaves_ns = planned_ns + patience_ns
            self.may_leave[row] = one
            heapq.heappush(self.leaving, (one.leaves_ns, row))

    def _leave(self, one: InFlight) -> Outcome:
        """Its client hangs up: the engine drops it between two steps, as the server does. What came later was not seen."""
        request, end_ns = one.request, one.leaves_ns
        assert end_ns is not None
        if self.coasters:
            self.coasters[one.engine].abort(request)
        else:
            self.engines[one.engine].abort(request)
        self.in_flight.pop(id(request), None)
        self.end_s = max(self.end_s, end_ns / NS)
        times_s = self._times_s(one)
        times_s = times_s[np.rint(times_s * NS) <= end_ns]
        self._then(one.row, end_ns)
        self._forget(one)
        return self._outcome(
            one.row,
            one.planned_ns,
            end_ns=end_ns,
            http_status=200,
            error_kind="client_abort",
            error_text=HUNG_UP,
            answer_spliced=self._is_spliced(one.row),
            **(self._seen(one, times_s) if len(times_s) else {}),
        )

    def _forget(self, one: InFlight) -> None:
        """It is not in flight any more, so nobody can leave it."""
        if self.may_leave.pop(one.row, None) is not None:
            while self.leaving and self.leaving[0][1] not in self.may_leave:
                heapq.heappop(self.leaving)

    def _finished(self, one: InFlight) -> Iterator[Outcome]:
        yield self._ended(one)

    def _ended(self, one: InFlight) -> Outcome:
        end_ns = _ns(one.request.last_token_s)
        self._then(one.row, end_ns)
        self._forget(one)
        return self._outcome(
            one.row,
            one.planned_ns,
            end_ns=end_ns,
            cached_tokens=one.request.cached_tokens,
            finish_reason=one.request.finish_reason,
            http_status=200,
            answer_spliced=self._is_spliced(one.row),
            **self._seen(one, self._times_s(one)),
        )

    def _is_spliced(self, row: int) -> bool | None:
        return True if self.plan.parent[row] >= 0 else None

    def _seen(self, one: InFlight, times_s: NDArray[np.float64]) -> dict[str, object]:
        """Of an outcome, what the tokens that came say."""
        first_ns = _ns(times_s[0])
        return {
            "first_byte_ns": first_ns,
            "first_answer_ns": first_ns,
            "last_token_ns": _ns(times_s[-1]),
            "input_tokens": len(one.request.prompt),
            "output_tokens": len(times_s),
            "token_count_source": "usage",
            "chunk_gaps_us": _gaps_us(times_s),
            "chunk_tokens": [1] * len(times_s),
        }

    def _times_s(self, one: InFlight) -> NDArray[np.float64]:
        return token_times_s(one.request, self.ends_s[one.engine])

    def _then(self, row: int, end_ns: int) -> None:
        """The turns that waited for this one are due after their think time."""
        turns = self.after.pop(row, ())
        for turn in turns:
            heapq.heappush(self.due, (end_ns + int(self.plan.think_ns[turn]) + self.before_ns, turn))
        if not turns and self.queue:
            heapq.heappush(self.due, (end_ns + self.before_ns, self.queue.popleft()))

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
            host_hits_tokens=float(sum(engine.host_hits for engine in engines)) if self.has_host else None,
            preemptions=float(sum(engine.preemptions for engine in engines)),
            prompt_tokens=float(sum(engine.prefix_cache_queries for engine in engines)),
            generation_tokens=float(self.generated),
            client_in_flight=len(self.in_flight),
        )


class _Names:
    """Names of the KV blocks of requests, 0 .. `total` - 1: a trace block's id and the part of it; then those of its own."""

    def __init__(self, plan: Plan, block_tokens: int, answer_tokens: Ints) -> None:
        trace, engine = plan.block_tokens, block_tokens
        if trace % engine and engine % trace:
            raise PlanError(
                "blocks of this trace do not fit those of the engine", seen=f"{trace} and {engine} tokens", wanted="a multiple"
            )
        self.plan = plan
        self.block_tokens = engine
        self._to_come = np.bincount(plan.parent[plan.parent >= 0], minlength=len(plan))  # turns that go on from a request
        self._paths: dict[int, NDArray[np.int64]] = {}  # of requests that a later turn goes on from
        self._tokens = plan.input_tokens + answer_tokens
        blocks = self._tokens // engine
        of_trace = (plan.blocks.lengths + plan.answer_blocks.lengths) * trace // engine
        highest = max(int(plan.blocks.ids.max(initial=-1)), int(plan.answer_blocks.ids.max(initial=-1)))
        own = np.cumsum(np.concatenate([[0], np.maximum(blocks - of_trace, 0)]))
        self._first_own = own[:-1] + (highest + 1) * max(1, trace // engine)
        self.total = int(own[-1]) + (highest + 1) * max(1, trace // engine)

    def of(self, row: int) -> NDArray[np.int64]:
        """All full blocks of prompt and answer."""
        plan, size = self.plan, self.block_tokens
        count = int(self._tokens[row]) // size
        named = self._of_trace(np.concatenate([plan.blocks[row], plan.answer_blocks[row]]))[:count]
        first = self._first_own[row]
        names = np.concatenate([named, np.arange(first, first + count - len(named))])
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

    def _of_trace(self, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        trace, engine = self.plan.block_tokens, self.block_tokens
        if engine >= trace:
            return ids[engine // trace - 1 :: engine // trace].astype(np.int64)
        parts = trace // engine
        return (ids.astype(np.int64)[:, None] * parts + np.arange(parts)).ravel()


def token_times_s(request: Request, ends_s: "array[float]") -> NDArray[np.float64]:
    """Tokens came at the ends of these steps."""
    return np.concatenate([_NONE, *(np.frombuffer(ends_s[first : last + 1]) for first, last in request.token_steps)])


def _ns(at_s: float | None) -> int:
    assert at_s is not None
    return round(at_s * NS)


def _gaps_us(times_s: NDArray[np.float64]) -> list[int]:
    gaps: list[int] = np.rint(np.diff(times_s) * 1e6).astype(np.int64).tolist()
    return gaps


def _prefix(engines: list[Engine], request: Request, _session: int, _number: int) -> int:
    load = [len(engine.running) + len(engine.waiting) for engine in engines]
    limit = (len(request.prompt) - 1) // engines[0].preset.block_tokens
    given = [engine.prefix_cache_queries for engine in engines]
    return longest_prefix(lambda number: len(engines[number].cache.leading_run(request.names, limit)), load, given)


def _sticky(engines: list[Engine], _request: Request, session: int, _number: int) -> int:
    return sticky(session, len(engines))


def _round_robin(engines: list[Engine], _request: Request, _session: int, number: int) -> int:
    return round_robin(number, len(engines))


ROUTERS: dict[Router, Callable[[list[Engine], Request, int, int], int]] = {
    "prefix": _prefix,
    "sticky": _sticky,
    "rr": _round_robin,
}
