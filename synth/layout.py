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
class Layout:
    """Blocks seen so far, and the marks inside them. Requests come in order of arrival."""

    frame: Frame
    block_tokens: int
    _seen: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(1 << 16, dtype=bool))  # by block id
    _has_marks: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(1 << 16, dtype=bool))
    _marks: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def prompt(self, input_blocks: Ids, output_blocks: Ids, input_tokens: int, previous: Previous | None) -> Prompt:
        """`previous`: the turn before, in the same session."""
        path = np.concatenate([input_blocks, output_blocks])
        self._make_room(int(path.max(initial=0)))
        frame = self.frame
        end = input_tokens - frame.close
        inherited = self._inherited(input_blocks)
        segments: list[Segment] = []
        at, role = frame.head, "user"
        is_known = False
        for start, kind in self._marks_of(input_blocks[:inherited]):
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
        self._seen[path] = True
        return Prompt(segments, end >= at, loses_block)

    def _make_room(self, block_id: int) -> None:
        if block_id >= len(self._seen):
            more = np.zeros(block_id + len(self._seen), dtype=bool)
            self._seen, self._has_marks = np.concatenate([self._seen, more]), np.concatenate([self._has_marks, more])

    def _inherited(self, blocks: Ids) -> int:
        """Leading blocks that were there before."""
        seen = self._seen[blocks]
        return len(blocks) if seen.all() else int(np.argmin(seen))

    def _marks_of(self, blocks: Ids) -> list[tuple[int, int]]:
        return [mark for block in blocks[self._has_marks[blocks]].tolist() for mark in self._marks[block]]

    def _mark(self, path: Ids, start: int, kind: int) -> bool:
        """Whether the block in which it starts is this request's own to mark."""
        place = start // self.block_tokens
        if place >= len(path) or self._seen[path[place]]:
            return False
        block = int(path[place])
        self._marks.setdefault(block, []).append((start, kind))
        self._has_marks[block] = True
        return True
