"""Sessions and their turns in arrival order, in memory that grows with the sessions alive, not with the trace. Pure.

A later turn arrives at the previous turn's estimated end + think time.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from synth.arrivals import NS, gamma_starts, recorded_starts
from synth.lengths import counts, mean_count, seconds, tied_scores
from synth.model import Workload
from synth.prefixes import Pools

Ints = NDArray[np.int64]


class Streams:
    """One independent random stream per concern, so that changing one dial leaves the draws of the others alone.

    Append new concerns at the end: the n-th stream of a seed never changes.
    """

    def __init__(self, seed: int) -> None:
        children = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(8)]
        self.arrivals, self.pools, self.choices, self.turns, self.think, self.inputs, self.outputs, self.grid = children


class Turn(NamedTuple):
    """One request without block ids."""

    arrival_ns: int
    session: int  # counted in order of session starts
    turn: int
    is_last: bool
    think_ns: int | None
    service_ns: int
    new_tokens: int
    output_tokens: int
    choice: tuple[int, ...]  # system prompt, then documents


@dataclass(slots=True)
class _Session:
    """Draws of one session; entry t is turn t's."""

    new_tokens: list[int]
    output_tokens: list[int]
    think_ns: list[int]
    choice: tuple[int, ...]


def turns_in_order(workload: Workload, pools: Pools, streams: Streams, recorded_starts_ns: Ints | None = None) -> Iterator[Turn]:
    """Requests by arrival, until the workload's number of requests or its duration is reached."""
    end_ns = None if workload.duration_s is None else round(workload.duration_s * NS)
    left = workload.requests if workload.requests is not None else -1
    for turn in _merged(workload, pools, streams, recorded_starts_ns):
        if left == 0 or (end_ns is not None and turn.arrival_ns >= end_ns):
            return
        left -= 1
        yield turn


def _merged(workload: Workload, pools: Pools, streams: Streams, recorded_starts_ns: Ints | None) -> Iterator[Turn]:
    """New sessions and later turns of live ones, merged by arrival; endless."""
    later: list[tuple[int, int, int, _Session]] = []  # heap of (arrival_ns, session, turn, ...); the first two are unique
    ttft_ns, tpot_ns = round(workload.service.ttft_s * NS), workload.service.tpot_s * NS
    for number, (start_ns, session) in enumerate(_sessions(workload, pools, streams, recorded_starts_ns)):
        heapq.heappush(later, (start_ns, number, 0, session))
        while later[0][1] != number or later[0][2] != 0:  # everything before this start can no longer be overtaken
            yield _advance(later, ttft_ns, tpot_ns)
        yield _advance(later, ttft_ns, tpot_ns)


def _advance(later: list[tuple[int, int, int, _Session]], ttft_ns: int, tpot_ns: float) -> Turn:
    """Take the earliest turn and put its successor, if there is one, in its place."""
    arrival_ns, number, turn, session = later[0]
    output = session.output_tokens[turn]
    service_ns = ttft_ns + int(tpot_ns * output)
    is_last = turn + 1 == len(session.new_tokens)
    if is_last:
        heapq.heappop(later)
    else:
        due_ns = arrival_ns + service_ns + session.think_ns[turn + 1]
        heapq.heapreplace(later, (due_ns, number, turn + 1, session))
    think_ns = session.think_ns[turn] if turn else None
    return Turn(arrival_ns, number, turn, is_last, think_ns, service_ns, session.new_tokens[turn], output, session.choice)


def _sessions(
    workload: Workload, pools: Pools, streams: Streams, recorded_starts_ns: Ints | None
) -> Iterator[tuple[int, _Session]]:
    """Start time and draws of each session, in order; endless."""
    for starts in _starts(workload, streams, recorded_starts_ns):
        turns = counts(workload.turns, streams.turns.standard_normal(len(starts)))
        bounds = np.concatenate([[0], np.cumsum(turns)])
        total = int(bounds[-1])
        scores = streams.inputs.standard_normal(total)
        tied = tied_scores(scores, streams.outputs.standard_normal(total), workload.input_output_correlation)
        new, output = counts(workload.input_tokens, scores), counts(workload.output_tokens, tied)
        think = (seconds(workload.think_s, streams.think.standard_normal(total)) * NS).astype(np.int64)
        keep = _turns_that_fit(new + output, bounds, workload.max_conversation_tokens).tolist()
        choices = pools.draw(len(starts), streams.choices).tolist()
        for i, (start_ns, begin) in enumerate(zip(starts.tolist(), bounds[:-1].tolist(), strict=True)):
            end = begin + keep[i]
            yield (
                start_ns,
                _Session(
                    new_tokens=new[begin:end].tolist(),
                    output_tokens=output[begin:end].tolist(),
                    think_ns=think[begin:end].tolist(),
                    choice=tuple(choices[i]),
                ),
            )


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
    if arrivals.process == "recorded":
        assert recorded_starts_ns is not None, "the caller reads the trace of recorded arrivals"
        return recorded_starts(recorded_starts_ns, rate, streams.arrivals)
    assert rate is not None  # checked by the model
    return gamma_starts(rate, arrivals.cv or 1.0, streams.arrivals)
