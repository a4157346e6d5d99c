"""Block ids given to a plan piece by piece, in the trace's order, and all that follows from them. Pure."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from replay.plan.plan import Ints, Plan
from tracer.blocks import Blocks

Numbers = NDArray[np.integer]


class Filling:
    """`plan` may be used up to request `filled`: its arrays are written in place.

    `rows`: the row of the trace that each request comes from. `first_free`: no id of the trace is as large.
    """

    def __init__(self, plan: Plan, rows: Ints, first_free: int, notes: list[str]) -> None:
        self.plan, self.filled = plan, 0
        self._rows, self._first_free, self._notes = rows, first_free, notes
        self._all_before = np.maximum.accumulate(rows)  # a request and all before it come from rows up to this one
        self._least_after = np.append(np.minimum.accumulate(rows[::-1])[::-1], np.iinfo(np.int64).max)
        self._read = 0  # rows of the trace that were added
        self._kept = [Blocks.from_lists([]), Blocks.from_lists([])]  # of rows that stand later in the plan than those to come
        self._kept_from = 0
        self._cut = self._named = 0

    @property
    def is_done(self) -> bool:
        return self.filled == len(self.plan)

    def add(self, blocks: Blocks, answers: Blocks) -> None:
        """The next rows of the trace, whether or not the plan has them."""
        self._read += len(blocks)
        here = [_joined(kept, new) for kept, new in zip(self._kept, (blocks, answers), strict=True)]
        end = int(np.searchsorted(self._all_before, self._read))
        self._fill(end, *(_rows(one, self._rows[self.filled : end] - self._kept_from) for one in here))
        keep_from = min(int(self._least_after[end]), self._read)
        self._kept = [_rows(one, np.arange(keep_from, self._read) - self._kept_from) for one in here]
        self._kept_from = keep_from

    @property
    def notes(self) -> tuple[str, ...]:
        plan, notes = self.plan, list(self._notes)
        if self.is_done and not self._named and (plan.input_tokens >= plan.block_tokens).any():
            notes.append("the trace names no prefix blocks: every prompt is its own, nothing is shared")
        if self._cut:
            notes.append(f"{self._cut} rows name more blocks than their prompt holds; the rest was cut")
        return tuple(notes)

    def finished(self) -> Plan:
        """Once all is filled."""
        assert self.is_done
        trimmed = [replace(one, ids=one.ids[: one.offsets[-1]]) for one in (self.plan.blocks, self.plan.answer_blocks)]
        return replace(self.plan, blocks=trimmed[0], answer_blocks=trimmed[1], notes=self.notes)

    def _fill(self, end: int, blocks: Blocks, answers: Blocks) -> None:
        plan, start = self.plan, self.filled
        size, input_tokens = plan.block_tokens, plan.input_tokens[start:end]
        self._named += len(blocks.ids)
        self._cut += int((blocks.lengths > input_tokens // size).sum())
        blocks = _first_blocks(blocks, input_tokens // size)
        _append(plan.blocks, start, blocks)
        _append(plan.answer_blocks, start, answers)
        rest = input_tokens - blocks.lengths * size
        # A recorded tail is shorter than a block; a longer rest is one whose blocks are not known, so it is private. Every
        # prompt that goes on after its last full block gets a name for the rest.
        recorded = plan.tail_id[start:end]
        own = self._first_free + np.arange(start, end)
        plan.tail_id[start:end] = np.where(rest > 0, np.where((recorded >= 0) & (rest < size), recorded, own), -1)
        plan.tail_tokens[start:end] = rest
        later = start + np.flatnonzero(plan.parent[start:end] >= 0)
        plan.parent_tokens[later] = np.minimum(_shared_tokens(plan, later), np.maximum(plan.input_tokens[later] - 1, 0))
        self.filled = end


def _first_blocks(blocks: Blocks, most: Ints) -> Blocks:
    """Blocks that the prompt's own length covers: a tokenizer that differs from the server's can name too many."""
    if not (blocks.lengths > most).any():
        return blocks
    place = np.arange(len(blocks.ids)) - np.repeat(blocks.offsets[:-1], blocks.lengths)
    keep = place < np.repeat(most, blocks.lengths)
    offsets = np.concatenate([[0], np.cumsum(np.minimum(blocks.lengths, most))])
    return Blocks(offsets=offsets, ids=blocks.ids[keep])


def _shared_tokens(plan: Plan, later: Ints) -> Ints:
    """Leading tokens that these later turns have in common with the prompt and the answer of the turn before."""
    parent = plan.parent[later]
    own, before = plan.blocks.lengths_of(later), plan.blocks.lengths_of(parent)
    path = before + plan.answer_blocks.lengths_of(parent)
    compared = np.minimum(own, path)
    starts = np.concatenate([[0], np.cumsum(compared)])
    place = np.arange(starts[-1]) - np.repeat(starts[:-1], compared)
    asked = place < np.repeat(before, compared)
    spoken = ~asked
    expected = np.empty(len(place), dtype=np.int32)
    expected[asked] = plan.blocks.ids[(np.repeat(plan.blocks.offsets[parent], compared) + place)[asked]]
    answer_from = plan.answer_blocks.offsets[parent] - before
    expected[spoken] = plan.answer_blocks.ids[(np.repeat(answer_from, compared) + place)[spoken]]
    differ = np.flatnonzero(plan.blocks.ids[np.repeat(plan.blocks.offsets[later], compared) + place] != expected)
    common = compared.copy()
    turn = np.searchsorted(starts, differ, side="right") - 1
    is_first = np.append(True, turn[1:] != turn[:-1])[: len(turn)]
    common[turn[is_first]] = (differ - starts[turn])[is_first]
    # A prompt that carries on all full blocks of the turn before carries on its last few tokens as well.
    length = plan.input_tokens[parent] + plan.output_tokens[parent]
    is_whole = (common == path) & (path == length // plan.block_tokens) & (length < plan.input_tokens[later])
    return np.where(is_whole, length, common * plan.block_tokens)


def _append(room: Blocks, start: int, new: Blocks) -> None:
    first = room.offsets[start]
    room.offsets[start + 1 : start + 1 + len(new)] = first + new.offsets[1:]
    room.ids[first : first + len(new.ids)] = new.ids


def _rows(blocks: Blocks, rows: Ints) -> Blocks:
    """As `Blocks.rows`, without a look at each id where they stand one after the other."""
    if not len(rows):
        return Blocks.from_lists([])
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 != len(rows) or (np.diff(rows) != 1).any():
        return blocks.rows(rows)
    return blocks.span(first, last + 1)


def _joined(first: Blocks, second: Blocks) -> Blocks:
    if not len(first):
        return second
    offsets = np.concatenate([first.offsets, first.offsets[-1] + second.offsets[1:]])
    return Blocks(offsets=offsets, ids=np.concatenate([first.ids, second.ids]))
