"""Sessions and their turns in arrival order, in memory that grows with the sessions alive, not with the trace. Pure.

A later turn arrives at the previous turn's estimated end + think time. Sessions are drawn some thousand at a time, as
columns; turns leave once no session that is still to be drawn can come before them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from synth.arrivals import NS, diurnal, gamma_starts, recorded_starts
from synth.lengths import counts, mean_count, mean_seconds, seconds, tied_scores
from synth.model import Distribution, Workload
from synth.prefixes import Pools

Ints = NDArray[np.int64]


class Streams:
    """One independent random stream per concern, so that changing one dial leaves the draws of the others alone.

    Append new concerns at the end: the n-th stream of a seed never changes.
    """

    def __init__(self, seed: int) -> None:
        children = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(9)]
        self.arrivals, self.pools, self.choices, self.turns, self.think, self.inputs, self.outputs, self.grid = children[:8]
        self.packs = children[8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Requests without block ids, as columns. Shapes: [requests]; choice [requests, levels]."""

    arrival_ns: Ints
    session: Ints  # counted in order of session starts
    turn: Ints
    is_last: NDArray[np.bool_]
    think_ns: Ints  # -1 for first turns
    service_ns: Ints
    history: Ints  # tokens of earlier turns and their answers
    new_tokens: Ints
    output_tokens: Ints
    choice: Ints  # system prompt, then documents

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def take(self, chosen: NDArray[np.generic] | slice) -> "Turns":
        return Turns(**{one.name: getattr(self, one.name)[chosen] for one in fields(self)})

    @classmethod
    def joined(cls, parts: list["Turns"]) -> "Turns":
        return cls(**{one.name: np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(cls)})


def turns_in_order(workload: Workload, pools: Pools, streams: Streams, recorded_starts_ns: Ints | None = None) -> Iterator[Turns]:
    """Requests by arrival, some at a time, until the workload's number of requests or its duration is reached."""
    left = workload.requests
    found = _arriving(workload, pools, streams, recorded_starts_ns)
    if workload.messages_per_request != Distribution(constant=1):
        found = _packed(found, workload, streams.packs)
    for turns in found:
        if left is not None:
            turns = turns.take(slice(left))
            left -= len(turns)
        if len(turns):
            yield turns
        if left == 0:
            return


def _arriving(workload: Workload, pools: Pools, streams: Streams, recorded_starts_ns: Ints | None) -> Iterator[Turns]:
    """New sessions and later turns of live ones, merged by arrival, up to the duration if there is one."""
    end_ns = np.inf if workload.duration_s is None else round(workload.duration_s * NS)
    waiting: list[Turns] = []
    for chunk in _sessions(workload, pools, streams, recorded_starts_ns):
        limit_ns = int(chunk.arrival_ns[0])  # nothing that is still to be drawn arrives before this
        if waiting:
            safe = int(np.searchsorted(waiting[0].arrival_ns, min(limit_ns, end_ns - 1), side="right"))
            yield waiting[0].take(slice(safe))
            waiting = [waiting[0].take(slice(safe, None))]
        if limit_ns >= end_ns:
            return
        both = Turns.joined([*waiting, chunk])
        waiting = [both.take(np.lexsort((both.turn, both.session, both.arrival_ns)))]


def _packed(found: Iterator[Turns], workload: Workload, rng: np.random.Generator) -> Iterator[Turns]:
    """Several messages in one request, in order of arrival: each with its own conversation, below the system prompt.

    A request leaves when its last message has come. Its conversations are nobody's prefix: other messages, or the same
    ones at another place, come before them the next time.
    """
    waiting: list[Turns] = []
    sizes = np.empty(0, dtype=np.int64)
    packs = 0
    for turns in found:
        rows = Turns.joined([*waiting, turns])
        sizes = np.concatenate([sizes, counts(workload.messages_per_request, rng.standard_normal(len(rows)))])
        whole = int(np.searchsorted(np.cumsum(sizes), len(rows), side="right"))
        yield _pack(rows, sizes[:whole], packs, workload)
        packs += whole
        waiting = [rows.take(slice(int(sizes[:whole].sum()), None))]
        sizes = sizes[whole : whole + 1]
    if waiting and len(waiting[0]):
        yield _pack(waiting[0], np.array([len(waiting[0])]), packs, workload)


def _pack(rows: Turns, sizes: Ints, first_number: int, workload: Workload) -> Turns:
    if not len(sizes):
        return rows.take(slice(0))
    begins = np.cumsum(sizes) - sizes
    rows = rows.take(slice(int(sizes.sum())))
    output = np.add.reduceat(rows.output_tokens, begins)
    none = np.zeros(len(sizes), dtype=np.int64)
    return replace(
        rows.take(begins + sizes - 1),
        session=np.arange(len(sizes)) + first_number,
        turn=none,
        is_last=np.ones(len(sizes), dtype=np.bool_),
        think_ns=none - 1,
        service_ns=_service_ns(workload, output),
        history=none,
        new_tokens=np.add.reduceat(rows.history + rows.new_tokens, begins),
        output_tokens=output,
    )


def _sessions(workload: Workload, pools: Pools, streams: Streams, recorded_starts_ns: Ints | None) -> Iterator[Turns]:
    """All turns of some sessions, session by session in order of their starts; endless."""
    first_number = 0
    for starts in _starts(workload, streams, recorded_starts_ns):
        turns = counts(workload.turns, streams.turns.standard_normal(len(starts)))
        bounds = np.concatenate([[0], np.cumsum(turns)])
        total = int(bounds[-1])
        scores = streams.inputs.standard_normal(total)
        tied = tied_scores(scores, streams.outputs.standard_normal(total), workload.input_output_correlation)
        new, output = counts(workload.input_tokens, scores), counts(workload.output_tokens, tied)
        think = (seconds(workload.think_s, streams.think.standard_normal(total)) * NS).astype(np.int64)
        keep = _turns_that_fit(new + output, bounds, workload.max_conversation_tokens)
        turn = np.arange(total) - np.repeat(bounds[:-1], turns)
        kept = turn < np.repeat(keep, turns)
        session = np.repeat(np.arange(len(starts)), keep)
        turn, new, output, think = turn[kept], new[kept], output[kept], think[kept]
        is_first = turn == 0
        service = _service_ns(workload, output)
        waits = np.where(is_first, 0, think)
        waits[1:] += np.where(is_first[1:], 0, service[:-1])
        yield Turns(
            arrival_ns=starts[session] + _since_first(waits, is_first, session) + waits,
            session=session + first_number,
            turn=turn,
            is_last=turn == keep[session] - 1,
            think_ns=np.where(is_first, -1, think),
            service_ns=service,
            history=_since_first(new + output, is_first, session),
            new_tokens=new,
            output_tokens=output,
            choice=pools.draw(len(starts), streams.choices)[session],
        )
        first_number += len(starts)


def _service_ns(workload: Workload, output_tokens: Ints) -> Ints:
    return round(workload.service.ttft_s * NS) + (workload.service.tpot_s * NS * output_tokens).astype(np.int64)


def _since_first(amounts: Ints, is_first: NDArray[np.bool_], session: Ints) -> Ints:
    """Sum of the amounts of a session's earlier turns."""
    before = np.cumsum(amounts) - amounts
    return np.asarray(before - before[is_first][session])


def _turns_that_fit(tokens: Ints, bounds: Ints, limit: int) -> Ints:
    """How many leading turns of each session stay within `limit` tokens together, at least one."""
    sums = np.concatenate([[0], np.cumsum(tokens)])
    fits = sums[1:] - np.repeat(sums[bounds[:-1]], np.diff(bounds)) <= limit
    return np.maximum(1, np.add.reduceat(fits, bounds[:-1], dtype=np.int64))


def _starts(workload: Workload, streams: Streams, recorded_starts_ns: Ints | None) -> Iterator[Ints]:
    arrivals = workload.arrivals
    rate = arrivals.sessions_per_s
    if arrivals.requests_per_s is not None:
        rate = arrivals.requests_per_s / mean_count(workload.turns)
    elif arrivals.users is not None:
        rate = arrivals.users / mean_session_s(workload)
    if arrivals.process == "recorded":
        assert recorded_starts_ns is not None, "the caller reads the trace of recorded arrivals"
        starts = recorded_starts(recorded_starts_ns, rate, streams.arrivals)
    else:
        assert rate is not None  # checked by the model
        starts = gamma_starts(rate, arrivals.cv or 1.0, streams.arrivals)
    return starts if not arrivals.diurnal_amplitude else diurnal(starts, arrivals.diurnal_amplitude, arrivals.diurnal_period_s)


def mean_session_s(workload: Workload) -> float:
    """First arrival to last answer, on average: turns * service time + (turns - 1) * think time."""
    turns, service = mean_count(workload.turns), workload.service
    service_s = service.ttft_s + service.tpot_s * mean_count(workload.output_tokens)
    return max(turns * service_s + (turns - 1) * mean_seconds(workload.think_s), 1e-9)
