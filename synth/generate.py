"""Turns become trace rows: block ids, chained and dense in first-seen order. Pure.

A prompt is the session's shared beginning, all earlier turns and answers, then the turn's new tokens. Full blocks of the
conversation so far are named already; the rest of a prompt and its answer get new ids.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from synth.model import Workload
from synth.prefixes import Pools, PrefixTree
from synth.sessions import Turn
from tracer.errors import TraceError
from tracer.schema import BASE_BLOCK_TOKENS, Request

Ids = NDArray[np.int32]
MAX_ID = 2**31 - 1


@dataclass(slots=True)
class Totals:
    """What a generator has yielded so far; the caller passes it in and reads it afterwards."""

    requests: int = 0
    sessions: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    served_tokens: int = 0  # prompt tokens that an endless prefix cache would serve
    last_arrival_ns: int = 0
    block_ids: int = 0

    @property
    def prefix_share(self) -> float:
        return self.served_tokens / self.input_tokens if self.input_tokens else 0.0


@dataclass(slots=True)
class _Conversation:
    ids: Ids  # full blocks of everything said so far
    tokens: int
    last_request_id: int


def rows(turns: Iterable[Turn], workload: Workload, pools: Pools, totals: Totals) -> Iterator[Request]:
    """Trace rows of turns, in the same order. Lists of ids are numpy arrays: as a million rows pass, nobody unpacks them."""
    tree = PrefixTree()
    alive: dict[int, _Conversation] = {}
    kind = "chat" if "chat" in workload.endpoint else "completion"
    for turn in turns:
        before = alive.pop(turn.session, None)
        ends: list[int] = []
        if before is None:
            ends = cast(list[int], pools.level_ends(np.array([turn.choice]))[0].tolist())
            known, history = tree.known(turn.choice), ends[-1]
        else:
            known, history = before.ids, before.tokens
        input_tokens = history + turn.new_tokens
        blocks = _named(known, input_tokens, turn.output_tokens, totals.block_ids)
        if before is None:
            tree.add(turn.choice, ends, blocks.input, BASE_BLOCK_TOKENS)
        row = _row(turn, workload, kind, totals.requests, before, input_tokens, blocks)
        if not turn.is_last:
            everything = np.concatenate([blocks.input, blocks.output])
            alive[turn.session] = _Conversation(everything, input_tokens + turn.output_tokens, totals.requests)
        _count(totals, row, blocks.next_id, served=len(known) * BASE_BLOCK_TOKENS)
        yield row


@dataclass(frozen=True, slots=True)
class _Named:
    input: Ids
    tail: int | None
    output: Ids
    next_id: int


def _named(known: Ids, input_tokens: int, output_tokens: int, next_id: int) -> _Named:
    """Block ids of a prompt that starts with known ones, and of its answer: full blocks, then tail, then answer.

    The block that the prompt's tail shares with the answer is the first answer block, under an id of its own.
    """
    full = input_tokens // BASE_BLOCK_TOKENS
    after_input = next_id + full - len(known)
    has_tail = input_tokens % BASE_BLOCK_TOKENS > 0
    after_tail = after_input + has_tail
    end = after_tail + (input_tokens + output_tokens) // BASE_BLOCK_TOKENS - full
    if end > MAX_ID:
        raise TraceError("more block ids than an int32 can count", seen=f"{end}", next_step="Ask for fewer requests")
    return _Named(
        input=np.concatenate([known, np.arange(next_id, after_input, dtype=np.int32)]),
        tail=after_input if has_tail else None,
        output=np.arange(after_tail, end, dtype=np.int32),
        next_id=end,
    )


def _row(
    turn: Turn,
    workload: Workload,
    kind: str,
    request_id: int,
    before: _Conversation | None,
    input_tokens: int,
    blocks: _Named,
) -> Request:
    return {
        "request_id": request_id,
        "session_id": turn.session,
        "parent_request_id": None if before is None else before.last_request_id,
        "turn": turn.turn,
        "kind": kind,
        "arrival_ns": turn.arrival_ns,
        "end_ns": turn.service_ns,
        "think_ns": turn.think_ns,
        "model": workload.model,
        "endpoint": workload.endpoint,
        "stream": workload.stream,
        "max_tokens": turn.output_tokens,
        "input_tokens": input_tokens,
        "input_tokens_count_source": "generated",
        "output_tokens": turn.output_tokens,
        "output_tokens_count_source": "generated",
        "input_blocks": cast(list[int], blocks.input),
        "input_tail_id": blocks.tail,
        "output_blocks": cast(list[int], blocks.output),
    }


def _count(totals: Totals, row: Request, next_id: int, served: int) -> None:
    totals.requests += 1
    totals.sessions += row["turn"] == 0
    totals.input_tokens += row["input_tokens"] or 0
    totals.output_tokens += row["output_tokens"] or 0
    totals.served_tokens += served
    totals.last_arrival_ns = row["arrival_ns"]
    totals.block_ids = next_id
