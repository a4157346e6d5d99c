"""What to send and when: a trace turned into a plan. Pure; ids and times only, no tokens yet (see prompts.py)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracer.blocks import Blocks

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan as columns, sorted by planned_ns: a million requests fit in memory. A request's number is its row.

    Its prompt is `blocks` (full trace blocks), then `tail_tokens` tokens under `tail_id`.
    Shapes: every column [requests], int64; -1 stands for "none" in think_ns, parent, tail_id and abort_ns (never shown to users).
    """

    block_tokens: int
    source_request_id: Ints
    session_id: Ints
    turn: Ints
    planned_ns: Ints  # open loop: when to send. Later turns: the recorded time, kept for offered-load charts only
    think_ns: Ints  # later turns: wait after the previous turn's end; none means open loop
    parent: Ints  # row of the previous turn of this session
    parent_tokens: Ints  # leading tokens that parent's prompt + answer and this prompt have in common
    tail_id: Ints
    tail_tokens: Ints
    input_tokens: Ints
    output_tokens: Ints  # recorded: of a request that was hung up on, what had come until then
    asked_tokens: Ints  # to ask for where hang-ups are replayed: more than that, so that there is something to hang up on
    abort_ns: Ints  # after being sent, its client hangs up; none: it stays
    blocks: Blocks
    answer_blocks: Blocks  # full blocks over prompt + answer beyond `blocks`, empty if the trace has none
    server: Ints | None = None  # which of several it goes to, see route.py; None: there is one
    notes: tuple[str, ...] = ()  # what was changed on the way: stamps spread inside their grid, rows left out, ...

    def __len__(self) -> int:
        return len(self.planned_ns)

    def answer_tokens(self, *, hang_up: bool) -> Ints:
        """To ask for, whether or not hang-ups are replayed."""
        return self.asked_tokens if hang_up else self.output_tokens
