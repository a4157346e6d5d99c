"""Where messages begin and end inside the prompts of a trace, so that equal blocks get equal text. Pure.

A chat template's own tokens stand inside the prompt's blocks, so they belong to them: whoever shares a block in which a
message ends has the end of a message there too. Positions are tokens from the beginning of the prompt, template included.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from synth.frame import Frame

type Ids = NDArray[np.int32]
SEEN, MARKED = 1, 2  # flags of a block
RECENT = 1 << 15  # marks kept in a dict before they are sorted in
CLOSE, TURN = 0, 1  # a user's message ends and an answer begins; an answer ends and a user's message begins


class Segment(NamedTuple):
    """Words of one message, without its anchor."""

    role: str
    begin: int
    end: int


class Previous(NamedTuple):
    input_tokens: int
    end_tokens: int  # prompt and answer


class Prompt(NamedTuple):
    segments: list[Segment]
    is_exact: bool  # False: too short for its template, so it has more tokens than the trace says
    loses_block: bool  # its end falls into a block that others know without it: that block is not shared


@dataclass(slots=True)
class Marks:
    """(start, kind) by block. The older ones lie in arrays sorted by block, since a million prompts have some millions."""

    _recent: dict[int, list[int]] = field(default_factory=dict)  # 2 * start + kind
    _count: int = 0
    _blocks: NDArray[np.int32] = field(default_factory=lambda: np.empty(RECENT, dtype=np.int32))
    _packed: NDArray[np.uint32] = field(default_factory=lambda: np.empty(RECENT, dtype=np.uint32))

    def add(self, block: int, start: int, kind: int) -> None:
        """Only while the block is new: all marks of a block are added one after the other."""
        if len(self._recent) >= RECENT and block not in self._recent:
            self._sort_in()
        self._recent.setdefault(block, []).append(2 * start + kind)

    def of(self, blocks: list[int]) -> list[tuple[int, int]]:
        """Marks of these blocks, all of which have some, in the blocks' order."""
        found: list[int] = []
        for block in blocks:
            found += self._recent.get(block) or self._older(block)
        return [(packed >> 1, packed & 1) for packed in found]

    def _older(self, block: int) -> list[int]:
        blocks = self._blocks[: self._count]
        wanted = np.int32(block)  # of the array's own type: no copy
        return list(map(int, self._packed[blocks.searchsorted(wanted) : blocks.searchsorted(wanted, "right")]))

    def _sort_in(self) -> None:
        items = sorted(self._recent.items())
        blocks = np.array([block for block, marks in items for _ in marks], dtype=np.int32)
        packed = np.array([mark for _, marks in items for mark in marks], dtype=np.uint32)
        self._recent.clear()
        before, after = self._count, self._count + len(blocks)
        if after > len(self._blocks):
            self._blocks = np.concatenate([self._blocks, np.empty(after, dtype=np.int32)])
            self._packed = np.concatenate([self._packed, np.empty(after, dtype=np.uint32)])
        self._blocks[before:after], self._packed[before:after] = blocks, packed
        self._count = after
        if before and blocks[0] < self._blocks[before - 1]:  # ids count up in a trace as recorded, not in a part of one
            order = np.argsort(self._blocks[:after], kind="stable")
            self._blocks[:after], self._packed[:after] = self._blocks[order], self._packed[order]


@dataclass(slots=True, kw_only=True)
class OpenSessions:
    """The turn before, of sessions that go on. One that has had its last turn is forgotten."""

    last_row: NDArray[np.int64]  # [sessions], by session id
    _before: dict[int, Previous] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._before)

    def turn(self, session: int, row: int, now: Previous) -> Previous | None:
        """The turn before this one, which takes its place. Negative ids are no session."""
        if session < 0:
            return None
        before = self._before.pop(session, None)
        if row < self.last_row[session]:
            self._before[session] = now
        return before


@dataclass(slots=True)
class Layout:
    """Blocks seen so far, and the marks inside them: a byte a block, 8 a mark. Requests come in order of arrival."""

    frame: Frame
    block_tokens: int
    _flags: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(1 << 16, dtype=np.uint8))  # by block id
    _marks: Marks = field(default_factory=Marks)

    def prompt(self, input_blocks: Ids, output_blocks: Ids, input_tokens: int, previous: Previous | None) -> Prompt:
        """`previous`: the turn before, in the same session."""
        path = np.concatenate([input_blocks, output_blocks])
        self._make_room(int(path.max(initial=0)))
        frame = self.frame
        end = input_tokens - frame.close
        flags = self._flags[input_blocks].tobytes()
        inherited = _leading(flags)
        segments: list[Segment] = []
        at, role = frame.head, "user"
        is_known = False
        for start, kind in self._marks.of(_marked(input_blocks, flags, inherited)):
            if start == end and kind == CLOSE:
                is_known = True  # this very prompt was there before
            if start >= end:
                break
            segments.append(Segment(role, at, start))
            role = "assistant" if kind == CLOSE else "user"
            at = start + (frame.close + frame.anchor if kind == CLOSE else frame.turn)
        own: list[tuple[int, int]] = []
        begin = max(at, inherited * self.block_tokens)
        has_room = previous is not None and previous.end_tokens + frame.turn <= end
        if role == "user" and previous is not None and has_room and begin <= previous.input_tokens - frame.close:
            stop = previous.input_tokens - frame.close  # the source names no blocks of answers: it ends in a new block
            segments.append(Segment(role, at, stop))
            own.append((stop, CLOSE))
            at, role = stop + frame.close + frame.anchor, "assistant"
            begin = at
        if role == "assistant":
            wanted = previous.end_tokens if previous is not None else begin
            stop = max(begin, min(wanted, end - frame.turn))  # a short turn takes its template's tokens from the answer
            segments.append(Segment(role, at, stop))
            own.append((stop, TURN))
            at, role = stop + frame.turn, "user"
        segments.append(Segment("user", at, max(at, end)))
        loses_block = False
        if not is_known:
            own.append((max(at, end), CLOSE))
        for start, kind in own:
            loses_block |= not self._mark(path, start, kind) and start < len(input_blocks) * self.block_tokens
        self._flags[path] |= SEEN
        return Prompt(segments, end >= at, loses_block)

    def _make_room(self, block_id: int) -> None:
        if block_id >= len(self._flags):
            more = np.zeros(block_id + len(self._flags), dtype=np.uint8)
            more[: len(self._flags)] = self._flags
            self._flags = more

    def _mark(self, path: Ids, start: int, kind: int) -> bool:
        """Whether the block in which it starts is this request's own to mark."""
        place = start // self.block_tokens
        if place >= len(path) or self._flags[path[place]] & SEEN:
            return False
        block = int(path[place])
        self._marks.add(block, start, kind)
        self._flags[block] |= MARKED
        return True


def _leading(flags: bytes) -> int:
    """Blocks at the front that were there before."""
    found = flags.find(b"\0")
    return len(flags) if found < 0 else found


def _marked(blocks: Ids, flags: bytes, end: int) -> list[int]:
    places = []
    at = flags.find(SEEN | MARKED, 0, end)
    while at >= 0:
        places.append(at)
        at = flags.find(SEEN | MARKED, at + 1, end)
    return blocks[places].tolist() if places else []
