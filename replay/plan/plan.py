"""What to send and when: a trace turned into a plan. Pure; ids and times only, no tokens yet (see prompts.py)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.blocks import Blocks

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A request to be sent. Its prompt is `blocks` (full trace blocks), then `tail_tokens` tokens under `tail_id`."""

    request_id: int  # place in the plan
    source_request_id: int
    session_id: int
    turn: int
    planned_ns: int  # open loop: when to send. Later turns: the recorded time, kept for offered-load charts only
    think_ns: int | None  # later turns: wait after the previous turn's end; None means open loop
    parent: int | None  # request_id of the previous turn of this session
    parent_tokens: int  # leading tokens that parent's prompt + answer and this prompt have in common
    blocks: NDArray[np.int32]
    tail_id: int | None
    tail_tokens: int
    input_tokens: int
    output_tokens: int
    answer_blocks: NDArray[np.int32]  # full blocks over prompt + answer beyond `blocks`, empty if the trace has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan as columns, sorted by planned_ns: a million requests fit in memory; `plan[i]` gives one as an object.

    Shapes: every column [requests], int64; -1 stands for "none" in think_ns, parent and tail_id (never shown to users).
    """

    block_tokens: int
    source_request_id: Ints
    session_id: Ints
    turn: Ints
    planned_ns: Ints
    think_ns: Ints
    parent: Ints
    parent_tokens: Ints
    tail_id: Ints
    tail_tokens: Ints
    input_tokens: Ints
    output_tokens: Ints
    blocks: Blocks
    answer_blocks: Blocks
    notes: tuple[str, ...] = ()  # what was changed on the way: stamps spread inside their grid, rows left out, ...

    def __len__(self) -> int:
        return len(self.planned_ns)

    def __iter__(self) -> Iterator[Planned]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Planned:
        def value(column: NDArray[Any]) -> int:
            return int(column[i])

        def optional(column: NDArray[Any]) -> int | None:
            return None if column[i] < 0 else int(column[i])

        return Planned(
            request_id=i,
            source_request_id=value(self.source_request_id),
            session_id=value(self.session_id),
            turn=value(self.turn),
            planned_ns=value(self.planned_ns),
            think_ns=optional(self.think_ns),
            parent=optional(self.parent),
            parent_tokens=value(self.parent_tokens),
            blocks=self.blocks[i],
            tail_id=optional(self.tail_id),
            tail_tokens=value(self.tail_tokens),
            input_tokens=value(self.input_tokens),
            output_tokens=value(self.output_tokens),
            answer_blocks=self.answer_blocks[i],
        )
