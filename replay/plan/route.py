"""Which of several servers a request goes to. Pure; the rules are the same for a plan and for simulated engines.

A plan is routed before anything is sent, so that processes and hosts which share it need not talk: what is cached and how many
requests are in flight comes from the schedule then, never from a server's answers.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from replay.plan.plan import Ints, Plan

type Router = Literal["prefix", "sticky", "rr"]
MAX_LEAD = 8  # prefix: requests that a server may have more than the least busy one and still be chosen
ASSUMED_TOKEN_NS = 20_000_000  # by the schedule a request is in flight for so long per token of its answer
KEPT_SHARE = 0.95  # of a full cache, when room is made


def sticky[Number: (int, Ints)](session: Number, count: int) -> Number:
    return session % count


def round_robin[Number: (int, Ints)](number: Number, count: int) -> Number:
    """`number`: of the request, in the order of arrival."""
    return number % count


def longest_prefix(cached: Callable[[int], int], in_flight: Sequence[int], given: Sequence[int]) -> int:
    """The server with the most of a prompt `cached`, of those that are not far busier than the least busy one.

    Among equals the least busy one, then the one that was `given` the fewest prompt tokens so far.
    """
    able = [number for number, load in enumerate(in_flight) if load <= min(in_flight) + MAX_LEAD]
    return max(able, key=lambda number: (cached(number), -in_flight[number], -given[number]))


def routed(plan: Plan, router: Router, kv_tokens: Sequence[int | None], *, answers_reused: bool) -> Plan:
    """The plan with the server of each request. `kv_tokens`: of each server; None, not known, is taken to be endless.

    `rr` and `sticky` need no blocks yet. Only where `answers_reused` can a later turn find the answer before it in a cache.
    """
    if len(kv_tokens) < 2:
        return plan
    if router == "prefix":
        server = _by_prefix(plan, kv_tokens, answers_reused=answers_reused)
    elif router == "sticky":
        server = sticky(plan.session_id, len(kv_tokens))
    else:
        server = round_robin(np.arange(len(plan)), len(kv_tokens))
    return replace(plan, server=server)


def _by_prefix(plan: Plan, kv_tokens: Sequence[int | None], *, answers_reused: bool) -> Ints:
    size = plan.block_tokens
    names = 1 + max(int(plan.blocks.ids.max(initial=-1)), int(plan.answer_blocks.ids.max(initial=-1)))
    caches = [_Cache(names, None if tokens is None else tokens // size) for tokens in kv_tokens]
    ends: list[list[int]] = [[] for _ in kv_tokens]  # heaps, by server
    given = [0] * len(kv_tokens)
    chosen = np.empty(len(plan), dtype=np.int64)
    facts = zip(plan.planned_ns.tolist(), plan.input_tokens.tolist(), plan.output_tokens.tolist(), strict=True)
    for row, (now_ns, input_tokens, output_tokens) in enumerate(facts):
        for heap in ends:
            while heap and heap[0] <= now_ns:
                heapq.heappop(heap)
        prompt = plan.blocks[row]
        usable = prompt[: (input_tokens - 1) // size]  # an engine computes at least the last token
        runs = [cache.leading_run(usable) for cache in caches]
        server = longest_prefix(runs.__getitem__, [len(heap) for heap in ends], given)
        caches[server].touch(np.concatenate([prompt, plan.answer_blocks[row]]) if answers_reused else prompt)
        heapq.heappush(ends[server], now_ns + output_tokens * ASSUMED_TOKEN_NS)
        given[server] += input_tokens
        chosen[row] = server
    return chosen


class _Cache:
    """Least recently used, of names 0 .. `names` - 1; room is made for a twentieth of it at a time."""

    def __init__(self, names: int, blocks: int | None) -> None:
        self._blocks = blocks
        self._touched = np.zeros(names, dtype=np.int64)  # when; 0: not here
        self._clock = 1
        self._held: list[NDArray[np.int32]] = []
        self._count = 0

    def leading_run(self, names: NDArray[np.int32]) -> int:
        missing = self._touched[names] == 0
        first = int(np.argmax(missing)) if len(names) else 0
        return first if len(names) and missing[first] else len(names)

    def touch(self, names: NDArray[np.int32]) -> None:
        """The deepest first, so that a path loses its end before its beginning."""
        new = names[self._touched[names] == 0]
        self._touched[names] = np.arange(self._clock + len(names), self._clock, -1)
        self._clock += len(names)
        self._held.append(new)
        self._count += len(new)
        if self._blocks is not None and self._count > self._blocks:
            held = np.concatenate(self._held)
            kept = int(self._blocks * KEPT_SHARE)
            order = np.argpartition(self._touched[held], len(held) - kept - 1)
            self._touched[held[order[: len(held) - kept]]] = 0
            self._held = [held[order[len(held) - kept :]]]
            self._count = kept
