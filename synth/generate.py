"""Turns become trace columns: block ids, chained and dense in first-seen order. Pure.

A prompt is the session's shared beginning, all earlier turns and answers, then the turn's new tokens. Full blocks of the
conversation so far are named already; the rest of a prompt and its answer get new ids, one after the other. So a prompt
is a few *runs* of consecutive ids, and only runs are remembered.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from synth.model import Workload
from synth.prefixes import Pools, PrefixTree
from synth.sessions import Turns
from tracer.errors import TraceError
from tracer.schema import BASE_BLOCK_TOKENS

Ids = NDArray[np.int32]
Ints = NDArray[np.int64]
MAX_ID = 2**31 - 1
SLICE_IDS = 4_000_000  # ids laid out at a time: some 50 MB


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """What each request named, in order of session and turn; all [requests].

    Ids from `first` on: blocks of the prompt, one for its tail if it has one, blocks of the answer. The block that the
    prompt's tail shares with the answer is the first answer block, under an id of its own.
    """

    session: Ints
    turn: Ints
    request_id: Ints
    first: Ints
    prompt_blocks: Ints
    has_tail: Ints  # 0 or 1
    answer_blocks: Ints
    node: Ints  # of the prefix tree: what the session's first request found named; -1 is nothing
    is_last: NDArray[np.bool_]

    def take(self, chosen: NDArray[np.generic]) -> "_Runs":
        return _Runs(**{one.name: getattr(self, one.name)[chosen] for one in fields(self)})

    @classmethod
    def joined(cls, parts: list["_Runs"]) -> "_Runs":
        return cls(**{one.name: np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(cls)})


def tables(found: Iterable[Turns], workload: Workload, pools: Pools, totals: Totals) -> Iterator[pa.Table]:
    """Trace columns of turns, in the same order. Raises TraceError where ids run out."""
    tree = PrefixTree(1 + pools.documents_per_session)
    alive: list[_Runs] = []
    for turns in found:
        for part in _slices(turns, pools):
            table, runs = _table(part, workload, pools, tree, alive, totals)
            yield table
            going_on = np.isin(runs.session, runs.session[runs.is_last], invert=True)
            alive = [runs.take(going_on)]


def _slices(turns: Turns, pools: Pools) -> Iterator[Turns]:
    blocks = (_prefix_tokens(turns, pools) + turns.history + turns.new_tokens) // BASE_BLOCK_TOKENS
    part = np.cumsum(blocks) // SLICE_IDS
    edges = np.flatnonzero(np.diff(part)) + 1
    for begin, end in zip([0, *edges.tolist()], [*edges.tolist(), len(turns)], strict=True):
        if end > begin:
            yield turns.take(slice(begin, end))


def _prefix_tokens(turns: Turns, pools: Pools) -> Ints:
    return np.asarray(pools.level_ends(turns.choice)[:, -1])


def _table(
    turns: Turns, workload: Workload, pools: Pools, tree: PrefixTree, alive: list[_Runs], totals: Totals
) -> tuple[pa.Table, _Runs]:
    history = _prefix_tokens(turns, pools) + turns.history
    input_tokens = history + turns.new_tokens
    prompt = input_tokens // BASE_BLOCK_TOKENS
    answer = (input_tokens + turns.output_tokens) // BASE_BLOCK_TOKENS - prompt
    has_tail = (input_tokens % BASE_BLOCK_TOKENS > 0).astype(np.int64)
    known = history // BASE_BLOCK_TOKENS
    firsts = np.flatnonzero(turns.turn == 0)
    node = np.full(len(turns), -1, dtype=np.int64)
    node[firsts], known[firsts], new_nodes = tree.walk(turns.choice[firsts], pools.level_ends(turns.choice[firsts]))
    fresh = prompt - known + has_tail + answer
    first = totals.block_ids + np.cumsum(fresh) - fresh
    end = int(first[-1] + fresh[-1])
    if end > MAX_ID:
        raise TraceError("more block ids than an int32 can count", seen=f"{end}", next_step="Ask for fewer requests")
    tree.name(new_nodes, first[firsts])
    own = _Runs(
        session=turns.session,
        turn=turns.turn,
        request_id=np.arange(len(turns)) + totals.requests,
        first=first,
        prompt_blocks=prompt - known,
        has_tail=has_tail,
        answer_blocks=answer,
        node=node,
        is_last=turns.is_last,
    )
    both = _Runs.joined([*alive, own])
    order = np.lexsort((both.turn, both.session))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    runs = both.take(order)
    at = place[len(order) - len(turns) :]  # of each turn in runs
    parent = np.where(turns.turn > 0, runs.request_id[at - 1], -1)
    blocks = {
        "input_blocks": _lists(prompt, _prompt_ids(runs, at, turns.turn, tree)),
        "input_tail_id": _known(np.where(has_tail > 0, first + prompt - known, -1)),
        "output_blocks": _lists(answer, _spans(first + prompt - known + has_tail, answer)),
    }
    table = _columns(turns, workload, input_tokens, parent, blocks, totals.requests)
    _count(totals, turns, input_tokens, known, end)
    return table, runs


def _prompt_ids(runs: _Runs, at: Ints, turn: Ints, tree: PrefixTree) -> Ids:
    """Prompt blocks, request after request: levels of the shared beginning, earlier turns and answers, the new tokens."""
    levels = tree.levels
    each = levels + 2 * turn + 1
    begin = np.cumsum(each) - each
    firsts, lengths = np.zeros(int(each.sum()), dtype=np.int64), np.zeros(int(each.sum()), dtype=np.int64)
    places = begin[:, None] + np.arange(levels)
    firsts[places], lengths[places] = tree.runs(runs.node[at - turn])
    turns_of = _spans(at - turn, turn + 1).astype(np.int64)
    places_of = np.repeat(begin + levels, turn + 1) + 2 * _spans(np.zeros_like(turn), turn + 1)
    firsts[places_of], lengths[places_of] = runs.first[turns_of], runs.prompt_blocks[turns_of]
    earlier = turns_of != np.repeat(at, turn + 1)
    turns_of, places_of = turns_of[earlier], places_of[earlier] + 1
    firsts[places_of] = runs.first[turns_of] + runs.prompt_blocks[turns_of] + runs.has_tail[turns_of]
    lengths[places_of] = runs.answer_blocks[turns_of]
    return _spans(firsts, lengths)


def _spans(firsts: Ints, lengths: Ints) -> Ids:
    """firsts[0], firsts[0] + 1, ... `lengths[0]` of them, then the same for the next."""
    before = np.cumsum(lengths) - lengths
    ids = np.repeat((firsts - before).astype(np.int32), lengths)
    ids += np.arange(len(ids), dtype=np.int32)
    return ids


def _lists(lengths: Ints, ids: Ids) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))


def _known(values: Ints) -> pa.Array:
    return pa.array(values, mask=values < 0)


def _columns(
    turns: Turns, workload: Workload, input_tokens: Ints, parent: Ints, blocks: dict[str, pa.Array], first_request_id: int
) -> pa.Table:
    def same(value: str | bool) -> pa.Array:
        return pa.repeat(value, len(turns))

    columns = {
        "request_id": pa.array(np.arange(len(turns)) + first_request_id),
        "session_id": pa.array(turns.session),
        "parent_request_id": _known(parent),
        "turn": pa.array(turns.turn),
        "kind": same("chat" if "chat" in workload.endpoint else "completion"),
        "arrival_ns": pa.array(turns.arrival_ns),
        "end_ns": pa.array(turns.service_ns),
        "think_ns": _known(turns.think_ns),
        "model": same(workload.model),
        "endpoint": same(workload.endpoint),
        "stream": same(workload.stream),
        "max_tokens": pa.array(turns.output_tokens),
        "input_tokens": pa.array(input_tokens),
        "input_tokens_count_source": same("generated"),
        "output_tokens": pa.array(turns.output_tokens),
        "output_tokens_count_source": same("generated"),
    }
    return pa.table({**columns, **blocks})


def _count(totals: Totals, turns: Turns, input_tokens: Ints, known: Ints, next_id: int) -> None:
    totals.requests += len(turns)
    totals.sessions += int((turns.turn == 0).sum())
    totals.input_tokens += int(input_tokens.sum())
    totals.output_tokens += int(turns.output_tokens.sum())
    totals.served_tokens += int(known.sum()) * BASE_BLOCK_TOKENS
    totals.last_arrival_ns = int(turns.arrival_ns[-1])
    totals.block_ids = next_id
