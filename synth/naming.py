"""Drawn requests become trace columns: block ids, chained and dense in order of first use. Pure.

A prompt is what it keeps of its parent's prompt and answer (a start: of a global prefix), then blocks of its own. All rows
of a table are named at once, parents before those that go on from them.
"""

from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from synth.generate import MAX_ID, Totals
from synth.learned import Model
from synth.links import START, TURN
from tracer.blocks import Blocks
from tracer.errors import TraceError

type Floats = NDArray[np.float64]
type Ints = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class Drawn:
    """All [requests]. `number` counts requests in the order drawn, `parent` is such a number or -1."""

    number: Ints
    parent: Ints
    family: Ints  # number of the session's first request
    kind: NDArray[np.int8]  # START, TURN or SHARE
    depth: Ints
    arrival_ns: Ints
    end_ns: Ints  # arrival -> end, -1: not known
    think_ns: Ints  # -1: not known
    prefix: Ints  # global prefix of a start
    kept: Ints  # leading blocks of the parent's prompt and answer; of a start: of its global prefix
    based: Ints  # the same before sharing is dialed: what the prompt's length is made of, beside new tokens
    input_tokens: Ints
    output_tokens: Ints
    path_blocks: Ints  # prompt and answer
    learned_based: Ints  # these three before lengths are dialed: what goes on from the request is decided by them
    learned_input: Ints
    learned_path: Ints
    new_score: Floats  # normal score of the new tokens

    def __len__(self) -> int:
        return len(self.number)

    def take(self, chosen: NDArray[np.generic]) -> "Drawn":
        return Drawn(**{one.name: getattr(self, one.name)[chosen] for one in fields(self)})

    @classmethod
    def joined(cls, parts: list["Drawn"]) -> "Drawn":
        return cls(**{one.name: np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(cls)})


class Naming:
    """Gives blocks their ids, dense in order of first use; remembers the prompts that somebody still goes on from."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.next_id = 0
        self.own_ids = [np.empty(0, dtype=np.int32) for _ in model.prefixes]  # of each global prefix, without those above it
        self.prefixes = self._prefixes()
        self.known = Blocks(offsets=np.zeros(1, dtype=np.int64), ids=np.empty(0, dtype=np.int32))
        self.known_numbers = np.empty(0, dtype=np.int64)
        self.known_request_ids = np.empty(0, dtype=np.int64)
        self.session_of: dict[int, int] = {}

    def table(self, rows: Drawn, still_to_come: Drawn, totals: Totals) -> pa.Table:
        """Columns of rows in order of arrival."""
        model, size = self.model, self.model.block_tokens
        input_blocks = rows.input_tokens // size
        has_tail = (rows.input_tokens % size > 0) & model.has_tails if model.has_blocks else np.zeros(len(rows), dtype=bool)
        if not model.has_blocks:
            input_blocks = np.zeros_like(input_blocks)
            rows.path_blocks, rows.kept = input_blocks, input_blocks
        fresh = rows.path_blocks - rows.kept + has_tail
        of_prefixes = self._prefixes_first_used(rows)
        base = self.next_id + np.cumsum(fresh) - fresh + np.cumsum(of_prefixes)
        end = int(base[-1] + fresh[-1])
        if end > MAX_ID:
            raise TraceError("more block ids than an int32 can count", seen=f"{end}", next_step="Ask for fewer requests")
        self._name_prefixes(base, of_prefixes)
        path = self._paths(rows, base, input_blocks, has_tail)
        self.next_id = end
        found = self._columns(rows, path, input_blocks, has_tail, base, totals)
        self._remember(rows, path, still_to_come, totals)
        _count(totals, rows, int((rows.kept.sum() - of_prefixes.sum()) * size), end)
        return found

    def _prefixes_first_used(self, rows: Drawn) -> Ints:
        """[requests] blocks of global prefixes that a request is the first to have."""
        blocks = np.zeros(len(rows), dtype=np.int64)
        self._new_prefixes: list[tuple[int, int, int]] = []  # request, prefix, blocks of it that are new
        for node, (at, need) in self._needs(rows).items():
            named = self._above(node) + len(self.own_ids[node])
            reached = np.maximum.accumulate(np.maximum(need, named))
            new = np.diff(reached, prepend=named)
            for one in np.flatnonzero(new).tolist():
                self._new_prefixes.append((int(at[one]), node, int(new[one])))
                blocks[at[one]] += new[one]
        self._new_prefixes.sort()
        return blocks

    def _needs(self, rows: Drawn) -> dict[int, tuple[Ints, Ints]]:
        """Prefix -> the requests that have it or one below it, and how many of its blocks."""
        starts = np.flatnonzero((rows.kind == START) & (rows.kept > 0))
        found: dict[int, list[tuple[Ints, Ints]]] = {}
        for prefix in np.unique(rows.prefix[starts]).tolist():
            at = starts[rows.prefix[starts] == prefix]
            need = rows.kept[at]
            node: int | None = prefix
            while node is not None:
                if need.max() > self._above(node) + len(self.own_ids[node]):
                    found.setdefault(node, []).append((at, need))
                need, node = np.minimum(need, self._above(node)), self.model.prefixes[node].under
        joined = {}
        for node, parts in found.items():
            at, need = (np.concatenate(part) for part in zip(*parts, strict=True))
            order = np.argsort(at)
            joined[node] = at[order], need[order]
        return joined

    def _above(self, node: int) -> int:
        under = self.model.prefixes[node].under
        return 0 if under is None else self.model.prefixes[under].blocks

    def _name_prefixes(self, base: Ints, of_prefixes: Ints) -> None:
        given: dict[int, int] = {}
        for at, node, new in self._new_prefixes:
            first = int(base[at] - of_prefixes[at]) + given.get(at, 0)
            given[at] = given.get(at, 0) + new
            self.own_ids[node] = np.concatenate([self.own_ids[node], np.arange(first, first + new, dtype=np.int32)])
        if self._new_prefixes:
            self.prefixes = self._prefixes()

    def _prefixes(self) -> Blocks:
        """Ids of each global prefix so far, those above it first."""
        found: list[NDArray[np.int32]] = []
        for one, own in zip(self.model.prefixes, self.own_ids, strict=True):
            above = found[one.under][: self.model.prefixes[one.under].blocks] if one.under is not None else own[:0]
            found.append(np.concatenate([above, own]))
        return Blocks.from_lists(found)

    def _paths(self, rows: Drawn, base: Ints, input_blocks: Ints, has_tail: NDArray[np.bool_]) -> Blocks:
        """Prompt and answer ids of each row: those kept from its parent, then its own; parents first."""
        prefixes = self.prefixes
        store = np.concatenate([self.known.ids, prefixes.ids, np.empty(int(rows.path_blocks.sum()), dtype=np.int32)])
        offsets = len(self.known.ids) + len(prefixes.ids) + np.cumsum(rows.path_blocks) - rows.path_blocks
        fresh = rows.path_blocks - rows.kept
        place = _spans(rows.kept, fresh)
        past_tail = np.repeat(has_tail, fresh) & (place >= np.repeat(input_blocks, fresh))  # the tail's id lies between
        store[_spans(offsets + rows.kept, fresh)] = np.repeat(base - rows.kept, fresh) + place + past_tail

        by_number = np.argsort(rows.number)
        in_rows = _find(rows.number[by_number], rows.parent)
        in_known = _find(self.known_numbers, rows.parent)
        source = np.full(len(rows), -1, dtype=np.int64)
        is_start = rows.kind == START
        source[is_start] = len(self.known.ids) + prefixes.offsets[rows.prefix[is_start]]
        from_known = ~is_start & (in_known >= 0)
        source[from_known] = self.known.offsets[in_known[from_known]]
        level = np.zeros(len(rows), dtype=np.int64)
        within = np.where(~is_start & (in_rows >= 0), by_number[np.maximum(in_rows, 0)], -1)
        inside = np.flatnonzero(within >= 0)
        source[inside] = offsets[within[inside]]
        pending = inside
        while len(pending):  # how many parents of a row are in this table: they must be written before it
            deeper = level[within[pending]] + 1
            pending = pending[deeper > level[pending]]
            level[pending] = level[within[pending]] + 1
        for one in range(int(level.max(initial=0)) + 1):
            chosen = np.flatnonzero((level == one) & (rows.kept > 0))
            store[_spans(offsets[chosen], rows.kept[chosen])] = store[_spans(source[chosen], rows.kept[chosen])]
        ids = store[len(self.known.ids) + len(prefixes.ids) :]
        return Blocks(offsets=np.concatenate([[0], np.cumsum(rows.path_blocks)]), ids=ids)

    def _columns(
        self, rows: Drawn, path: Blocks, input_blocks: Ints, has_tail: NDArray[np.bool_], base: Ints, totals: Totals
    ) -> pa.Table:
        model, count = self.model, len(rows)
        request_id = np.arange(count) + totals.requests
        inputs = _lists(path, np.zeros_like(input_blocks), input_blocks)
        columns: dict[str, pa.Array] = {
            "request_id": pa.array(request_id),
            "arrival_ns": pa.array(rows.arrival_ns),
            "end_ns": _known(rows.end_ns),
            "input_tokens": pa.array(rows.input_tokens),
            "output_tokens": pa.array(rows.output_tokens),
        }
        if model.has_blocks:
            tail = base + input_blocks - rows.kept
            columns["input_blocks"] = inputs
            columns["input_tail_id"] = _known(np.where(has_tail, tail, -1))
            if model.has_answers:
                columns["output_blocks"] = _lists(path, input_blocks, rows.path_blocks)
        if model.has_sessions:
            columns["session_id"] = pa.array(self._sessions(rows, totals))
            columns["parent_request_id"] = _known(np.where(rows.kind == TURN, self._request_ids(rows, request_id), -1))
            columns["turn"] = pa.array(rows.depth)
            columns["think_ns"] = _known(rows.think_ns)
        for name in ("model", "endpoint"):
            if getattr(model, name) is not None:
                columns[name] = pa.array([getattr(model, name)] * count)
        return pa.table(columns)

    def _request_ids(self, rows: Drawn, request_id: Ints) -> Ints:
        by_number = np.argsort(rows.number)
        in_rows, in_known = _find(rows.number[by_number], rows.parent), _find(self.known_numbers, rows.parent)
        here = np.where(in_rows >= 0, request_id[by_number[np.maximum(in_rows, 0)]], -1)
        if not len(self.known_numbers):
            return here
        return np.where(in_known >= 0, self.known_request_ids[np.maximum(in_known, 0)], here)

    def _sessions(self, rows: Drawn, totals: Totals) -> Ints:
        """Dense in order of first request."""
        names, first, inverse = np.unique(rows.family, return_index=True, return_inverse=True)
        number = np.empty(len(names), dtype=np.int64)
        for one in np.argsort(first).tolist():
            name = int(names[one])
            if name not in self.session_of:
                self.session_of[name] = totals.sessions
                totals.sessions += 1
            number[one] = self.session_of[name]
        return number[inverse]

    def _remember(self, rows: Drawn, path: Blocks, still_to_come: Drawn, totals: Totals) -> None:
        needed = np.unique(still_to_come.parent[still_to_come.parent >= 0])
        alive = np.unique(still_to_come.family).tolist()
        self.session_of = {one: self.session_of[one] for one in alive if one in self.session_of}
        old = np.flatnonzero(np.isin(self.known_numbers, needed))
        new = np.flatnonzero(np.isin(rows.number, needed))
        kept = _joined(self.known.rows(old), path.rows(new))
        numbers = np.concatenate([self.known_numbers[old], rows.number[new]])
        request_ids = np.concatenate([self.known_request_ids[old], totals.requests + new])
        order = np.argsort(numbers)
        self.known = kept.rows(order)
        self.known_numbers, self.known_request_ids = numbers[order], request_ids[order]


def _count(totals: Totals, rows: Drawn, served_tokens: int, end: int) -> None:
    totals.requests += len(rows)
    totals.input_tokens += int(rows.input_tokens.sum())
    totals.output_tokens += int(rows.output_tokens.sum())
    totals.served_tokens += served_tokens
    totals.last_arrival_ns = int(rows.arrival_ns[-1])
    totals.block_ids = end


def _joined(first: Blocks, second: Blocks) -> Blocks:
    offsets = np.concatenate([first.offsets, first.offsets[-1] + second.offsets[1:]])
    return Blocks(offsets=offsets, ids=np.concatenate([first.ids, second.ids]))


def _spans(first: Ints, lengths: Ints) -> Ints:
    """first, first + 1, ... for each length, one after another."""
    ends = np.cumsum(lengths)
    return np.repeat(first - (ends - lengths), lengths) + np.arange(int(ends[-1]) if len(ends) else 0)


def _find(ordered: Ints, wanted: Ints) -> Ints:
    """Place of each wanted value, -1 where it is not."""
    if not len(ordered):
        return np.full(len(wanted), -1, dtype=np.int64)
    at = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
    return np.where(ordered[at] == wanted, at, -1)


def _lists(path: Blocks, begin: Ints, end: Ints) -> pa.ListArray:
    lengths = end - begin
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = path.ids[_spans(path.offsets[:-1] + begin, lengths)]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids, type=pa.int32()))


def _known(values: Ints) -> pa.Array:
    return pa.array(values, mask=values < 0)
