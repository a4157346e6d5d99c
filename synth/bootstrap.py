"""More traffic like a recorded trace: its sharing groups, drawn again. Pure: an Arrow table in, trace rows out.

A sharing group is drawn whole, about k times. Global prefixes stay shared by all copies, every other block id is fresh in
each; gaps, lengths, turns and sessions inside a group are kept, because the order of reuse matters as much as the tree.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from synth.arrivals import NS, spread_inside_grid
from synth.fidelity import rows_named
from synth.generate import MAX_ID, Totals
from tracer.analysis.groups import Groups, sharing_groups
from tracer.analysis.reuse import concatenate, one_each, prompt_tokens, require_chained
from tracer.blocks import Blocks, DenseIds
from tracer.errors import TraceError
from tracer.schema import BASE_BLOCK_TOKENS, Footer, Request
from tracer.tracefile import blocks as block_column
from tracer.tracefile import column

Ints = NDArray[np.int64]
MAX_JITTER_NS = 30 * NS  # copies of a group start this much earlier or later at most: the rate profile stays
FEW_JITTER_NS = 10 * NS  # where there are few groups, each one's place weighs on the hit curve
LEAST_STRATA = 16
STRATUM = 4  # groups alike that are drawn together; wider is more like Poisson, narrower more like the source
HEAVY_SHARE = 1 / 200  # of all reuse: a group that holds so much is drawn by itself, for it alone moves the hit curve

# Copied as they are; ids, times and results are not.
CARRIED = (
    "client_id agent_id kind turn end_ns ttft_ns think_ns tool_wait_ns model endpoint adapter stream max_tokens n "
    "temperature top_p top_k presence_penalty frequency_penalty repetition_penalty seed_set tools_count tool_choice "
    "response_format input_tokens output_tokens reasoning_tokens media"
).split()
COLUMNS = [
    *CARRIED,
    *("request_id", "arrival_ns", "session_id", "parent_request_id", "wait_for"),
    *("input_blocks", "input_tail_id", "output_blocks"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is drawn from. Shapes: [requests] unless said otherwise; -1 stands for none."""

    table: pa.Table
    arrival_ns: Ints  # spread inside the recorded grid, from 0
    span_ns: int  # last arrival + one mean gap
    group_of: Ints
    references: Blocks  # input blocks, then tail, then answer blocks
    input_blocks: Ints  # how many references are input blocks
    tail: Ints  # 1 if there is a tail
    is_global: NDArray[np.bool_]  # [references]
    place: Ints  # [references] number of a global id among global ids, else of a private one inside its group
    global_ids: int
    private_ids: Ints  # [groups] distinct private ids
    parent_row: Ints
    block_tokens: int
    prompt_tokens: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Which copies are made. Shapes: [copies]."""

    group: Ints
    shift_ns: Ints  # added to the source's arrivals
    end_ns: int | None  # arrivals from here on are left out


def prepare(table: pa.Table, footer: Footer, duration_ns: int | None, rng: np.random.Generator) -> Source:
    """Group a trace's rows (columns `COLUMNS`); with a duration shorter than the trace, only its beginning."""
    arrival = spread_inside_grid(column(table, "arrival_ns"), footer.time_grid_ns, rng)
    order = np.argsort(arrival, kind="stable")
    arrival = arrival[order] - (int(arrival.min()) if len(arrival) else 0)
    if duration_ns is not None:
        order = order[arrival < duration_ns]
        arrival = arrival[: len(order)]
    if not len(order):
        raise TraceError("the trace has no request to draw from")
    table = table.take(pa.array(order)).combine_chunks()
    blocks, answers, tails = (
        block_column(table, "input_blocks"),
        block_column(table, "output_blocks"),
        column(table, "input_tail_id"),
    )
    path = concatenate(blocks, answers)
    require_chained(path)
    groups = sharing_groups(path, column(table, "session_id"))
    references = concatenate(blocks, one_each(tails, tails >= 0), answers)
    is_global = _global_references(references, groups, path)
    place, global_ids, private_ids = _places(references, is_global, groups)
    return Source(
        table=table,
        arrival_ns=arrival,
        span_ns=int(arrival[-1]) + max(1, int(arrival[-1]) // max(1, len(arrival) - 1)),
        group_of=groups.group_of,
        references=references,
        input_blocks=blocks.lengths,
        tail=(tails >= 0).astype(np.int64),
        is_global=is_global,
        place=place,
        global_ids=global_ids,
        private_ids=private_ids,
        parent_row=rows_named(column(table, "request_id"), column(table, "parent_request_id")),
        block_tokens=footer.block_tokens,
        prompt_tokens=prompt_tokens(table, footer),
    )


def _global_references(references: Blocks, groups: Groups, path: Blocks) -> NDArray[np.bool_]:
    """Which references name a global prefix: the leading ones of each prompt + answer; never a tail."""
    is_global = np.zeros(int(references.ids.max(initial=-1)) + 1, dtype=np.bool_)
    place = np.arange(len(path.ids)) - np.repeat(path.offsets[:-1], path.lengths)
    is_global[path.ids[place < np.repeat(groups.global_blocks, path.lengths)]] = True
    return is_global[references.ids]


def _places(references: Blocks, is_global: NDArray[np.bool_], groups: Groups) -> tuple[Ints, int, Ints]:
    """Dense numbers: of global ids among themselves, of private ids inside each group; and how many of both."""
    place = np.empty(len(references.ids), dtype=np.int64)
    names, place[is_global] = np.unique(references.ids[is_global], return_inverse=True)
    group = np.repeat(groups.group_of, references.lengths)[~is_global]
    pairs, inverse = np.unique(group << 32 | references.ids[~is_global].astype(np.int64), return_inverse=True)
    private = np.bincount(pairs >> 32, minlength=groups.count).astype(np.int64)
    first = np.cumsum(private) - private
    place[~is_global] = inverse - first[group]
    return place, len(names), private


def draw(source: Source, k: float, duration_ns: int | None, rng: np.random.Generator) -> Draw:
    """Each group about Poisson(k) times, over the trace's own span or, repeated, over a longer duration."""
    starts = np.full(len(source.private_ids), source.span_ns)
    np.minimum.at(starts, source.group_of, source.arrival_ns)
    order, heavy = _like_beside_like(source, starts)
    reach = min(MAX_JITTER_NS if len(starts) >= 2 * LEAST_STRATA else FEW_JITTER_NS, source.span_ns // 20)
    repeats = 1 if duration_ns is None else -(-duration_ns // source.span_ns)
    groups, shifts = [], []
    for repeat in range(repeats):
        begin = repeat * source.span_ns
        group = np.repeat(np.arange(len(starts)), stratified_counts(order, heavy, k, rng))
        moved = np.abs(starts[group] + rng.integers(-reach, reach + 1, len(group)))  # reflected at 0
        groups.append(group)
        shifts.append(begin + moved - starts[group])
    return Draw(group=np.concatenate(groups), shift_ns=np.concatenate(shifts), end_ns=duration_ns)


def _like_beside_like(source: Source, starts: Ints) -> tuple[Ints, int]:
    """All groups, those that reuse most first, in half octaves; inside one of these by start. And how many are heavy.

    Neighbours then stand for each other: a draw keeps what makes the hit curve and, as most groups are single requests,
    the rate of every minute.
    """
    prompts = np.bincount(source.group_of, weights=source.prompt_tokens, minlength=len(starts))
    reused = np.maximum(prompts - source.private_ids * source.block_tokens, 0)
    heavy = int((reused >= max(1.0, HEAVY_SHARE * float(reused.sum()))).sum())
    return np.lexsort((starts, -np.rint(2 * np.log2(1 + reused)))), heavy


def stratified_counts(order: Ints, heavy: int, k: float, rng: np.random.Generator) -> Ints:
    """How often each group is drawn: Poisson(k), given that each stratum of neighbours in `order` is drawn k times its number.

    The first `heavy` ones are a stratum each.

    Poisson counts under a fixed sum are multinomial. There are as many strata as groups, or 16 and more, so that of a few
    large groups none is left out by chance.
    """
    width = max(1, min(STRATUM, len(order) // LEAST_STRATA))
    counts = np.zeros(len(order), dtype=np.int64)
    offset = rng.random()  # one for all strata, so that what they round up and down evens out
    for begin in [*range(heavy), *range(heavy, len(order), width)]:
        stratum = order[begin : begin + (1 if begin < heavy else width)]
        draws = int(k * (begin + len(stratum)) + offset) - int(k * begin + offset)
        counts[stratum] = rng.multinomial(draws, np.full(len(stratum), 1 / len(stratum)))
    return counts


@dataclass(frozen=True, slots=True)
class _Schedule:
    """Output requests in order of arrival. Shapes: [output requests]; first_id [copies]."""

    copy: Ints
    row: Ints
    arrival_ns: Ints
    parent: Ints  # output request, -1 for none
    first_id: Ints  # where a copy's private ids begin in the table of assigned ids
    distinct_ids: int  # length of that table


def _schedule(source: Source, drawn: Draw) -> _Schedule:
    by_group = np.argsort(source.group_of, kind="stable")
    size = np.bincount(source.group_of, minlength=len(source.private_ids))
    first_row = np.cumsum(size) - size
    inside = np.empty(len(by_group), dtype=np.int64)  # place of each row in its group
    inside[by_group] = np.arange(len(by_group)) - np.repeat(first_row, size)

    copy = np.repeat(np.arange(len(drawn.group)), size[drawn.group])
    first_of_copy = np.cumsum(size[drawn.group]) - size[drawn.group]
    row = by_group[first_row[drawn.group][copy] + np.arange(len(copy)) - first_of_copy[copy]]
    arrival = source.arrival_ns[row] + drawn.shift_ns[copy]
    order = np.lexsort((row, copy, arrival))
    if drawn.end_ns is not None:
        order = order[arrival[order] < drawn.end_ns]
    rank = np.full(len(copy), -1, dtype=np.int64)
    rank[order] = np.arange(len(order))
    parent_row = source.parent_row[row]
    has_parent = (parent_row >= 0) & (source.group_of[parent_row] == source.group_of[row])
    parent = np.where(has_parent, rank[np.where(has_parent, first_of_copy[copy] + inside[parent_row], 0)], -1)
    private = source.private_ids[drawn.group]
    return _Schedule(
        copy=copy[order],
        row=row[order],
        arrival_ns=arrival[order],
        parent=parent[order],
        first_id=source.global_ids + np.cumsum(private) - private,
        distinct_ids=source.global_ids + int(private.sum()),
    )


def rows(source: Source, drawn: Draw, totals: Totals) -> Iterator[Request]:
    """Trace rows of all copies by arrival. Memory: 4 bytes for each block id written, plus the source."""
    schedule = _schedule(source, drawn)
    carried = _carried_values(source.table)
    named = _is_present(source.table, "input_blocks"), _is_present(source.table, "output_blocks")
    sessions: DenseIds[tuple[int, int]] = DenseIds()
    source_session = column(source.table, "session_id").tolist()
    wait_for = _WaitFor(source, schedule)
    ids = _Ids(source, schedule)
    places = zip(
        schedule.copy.tolist(), schedule.row.tolist(), schedule.arrival_ns.tolist(), schedule.parent.tolist(), strict=True
    )
    for request_id, (copy, row, arrival_ns, parent) in enumerate(places):
        request = cast(Request, {name: values[row] for name, values in carried})
        request["request_id"], request["arrival_ns"] = request_id, arrival_ns
        request["parent_request_id"] = parent if parent >= 0 else None
        request["wait_for"] = wait_for.of(copy, row)
        if source_session[row] >= 0:
            seen = len(sessions)
            request["session_id"] = sessions[copy, source_session[row]]
            totals.sessions += len(sessions) - seen
        request["input_tokens_count_source"] = None if request.get("input_tokens") is None else "generated"
        request["output_tokens_count_source"] = None if request.get("output_tokens") is None else "generated"
        assigned, known = ids.of(copy, row)
        inputs = int(source.input_blocks[row])
        tail = int(source.tail[row])
        if named[0][row]:
            request["input_blocks"] = cast(list[int], assigned[:inputs])
        if tail:
            request["input_tail_id"] = int(assigned[inputs])
        if named[1][row]:
            request["output_blocks"] = cast(list[int], assigned[inputs + tail :])
        totals.sessions += source_session[row] < 0  # a request without a session is one by itself
        _count(totals, source, request, row, known, ids.next)
        yield request


class _Ids:
    """Output ids, given in first-seen order."""

    def __init__(self, source: Source, schedule: _Schedule) -> None:
        if schedule.distinct_ids > MAX_ID:
            raise TraceError("more block ids than an int32 can count", seen=str(schedule.distinct_ids), next_step="Ask for less")
        self._first = schedule.first_id.tolist()
        self._place, self._is_private = source.place, ~source.is_global
        self._bounds = source.references.offsets.tolist()
        self._assigned = np.full(schedule.distinct_ids, -1, dtype=np.int32)
        self.next = 0

    def of(self, copy: int, row: int) -> tuple[NDArray[np.int32], int]:
        """Ids of a row's references, and how many leading ones were known before."""
        begin, end = self._bounds[row], self._bounds[row + 1]
        places = self._place[begin:end] + self._is_private[begin:end] * self._first[copy]
        ids = self._assigned[places]
        new = np.flatnonzero(ids < 0)
        if not len(new):
            return ids, end - begin
        ids[new] = np.arange(self.next, self.next + len(new))
        self._assigned[places[new]] = ids[new]
        self.next += len(new)
        return ids, int(new[0])


class _WaitFor:
    """`wait_for` lists in output request ids."""

    def __init__(self, source: Source, schedule: _Schedule) -> None:
        self._lists = source.table["wait_for"].to_pylist() if source.table["wait_for"].null_count < len(source.table) else []
        self._row_of = {one: row for row, one in enumerate(source.table["request_id"].to_pylist())} if self._lists else {}
        pairs = zip(schedule.copy.tolist(), schedule.row.tolist(), strict=True) if self._lists else ()
        self._output = {pair: request_id for request_id, pair in enumerate(pairs)}

    def of(self, copy: int, row: int) -> list[int] | None:
        if not self._lists or self._lists[row] is None:
            return None
        found = (self._output.get((copy, self._row_of.get(one, -1))) for one in self._lists[row])
        return [one for one in found if one is not None]


def _carried_values(table: pa.Table) -> list[tuple[str, list[Any]]]:
    """Columns that hold anything, as Python values."""
    return [(name, table[name].to_pylist()) for name in CARRIED if table[name].null_count < len(table)]


def _is_present(table: pa.Table, name: str) -> list[bool]:
    return cast(list[bool], table[name].is_valid().to_pylist())


def _count(totals: Totals, source: Source, request: Request, row: int, known: int, next_id: int) -> None:
    prompt = int(source.prompt_tokens[row])
    inputs = int(source.input_blocks[row])
    served = min(known, inputs) * source.block_tokens
    if known > inputs and source.tail[row]:  # the same partial block came before: its full pages are cached
        served = prompt
    totals.requests += 1
    totals.input_tokens += prompt
    totals.output_tokens += request.get("output_tokens") or 0
    totals.served_tokens += min(served, max(prompt - 1, 0) // BASE_BLOCK_TOKENS * BASE_BLOCK_TOKENS)
    totals.last_arrival_ns = request["arrival_ns"]
    totals.block_ids = next_id
