"""A trace turned into a plan. Pure: columns in, columns out."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replay.errors import PlanError
from replay.plan.plan import Ints, Plan
from tracer.blocks import Blocks
from tracer.schema import Footer
from tracer.tracefile import blocks as block_column
from tracer.tracefile import column

COLUMNS = [
    "request_id",
    "session_id",
    "turn",
    "arrival_ns",
    "end_ns",
    "think_ns",
    "input_tokens",
    "output_tokens",
    "input_blocks",
    "input_tail_id",
    "output_blocks",
]


def build_plan(
    table: pa.Table,
    footer: Footer,
    rng: np.random.Generator,
    *,
    limit: int | None = None,
    dequantise: bool = True,
) -> Plan:
    """Rows (columns of `COLUMNS`) as a plan: usable ones only, at most `limit`, starting at 0 ns.

    Stamps that lie on a coarse grid are spread uniformly inside it unless `dequantise` is False: else a replay would fire
    bursts that only the recording clock made.
    """
    notes: list[str] = []
    usable = (column(table, "input_tokens") > 0) & (column(table, "output_tokens") > 0)
    if dropped := int((~usable).sum()):
        notes.append(f"{dropped} of {len(usable)} rows left out: no prompt or answer length (failed requests)")
    table = table.filter(pa.array(usable))
    if limit is not None:
        table = table.slice(0, limit)
    if table.num_rows == 0:
        raise PlanError("the trace has no request to replay", wanted="rows with input_tokens and output_tokens")

    planned = column(table, "arrival_ns")
    if footer.time_grid_ns and dequantise:
        planned = planned + rng.integers(0, footer.time_grid_ns, len(planned))
        notes.append(f"arrival stamps spread uniformly inside the recorded grid of {footer.time_grid_ns / 1e9:g} s")
    order = np.argsort(planned, kind="stable")
    table, planned = table.take(pa.array(order)), planned[order] - planned.min()

    blocks, tail_id = block_column(table, "input_blocks"), column(table, "input_tail_id")
    input_tokens = column(table, "input_tokens")
    blocks, notes_on_blocks = _trusted_blocks(blocks, input_tokens, footer.block_tokens)
    notes += notes_on_blocks
    answers = block_column(table, "output_blocks")
    parent, parent_tokens, session, turn = _sessions(table, blocks, answers, footer.block_tokens)
    return Plan(
        block_tokens=footer.block_tokens,
        source_request_id=column(table, "request_id"),
        session_id=session,
        turn=turn,
        planned_ns=planned,
        think_ns=_think_ns(table, planned, parent),
        parent=parent,
        parent_tokens=np.minimum(parent_tokens, np.maximum(input_tokens - 1, 0)),
        tail_id=_named_tails(tail_id, blocks, answers, input_tokens, footer.block_tokens),
        tail_tokens=input_tokens - blocks.lengths * footer.block_tokens,
        input_tokens=input_tokens,
        output_tokens=column(table, "output_tokens"),
        blocks=blocks,
        answer_blocks=answers,
        notes=tuple(notes),
    )


def _trusted_blocks(blocks: Blocks, input_tokens: Ints, block_tokens: int) -> tuple[Blocks, list[str]]:
    """Blocks that the prompt's own length covers: a tokenizer that differs from the server's can name too many."""
    room = input_tokens // block_tokens
    notes = []
    if (blocks.lengths == 0).all() and (room > 0).any():
        notes.append("the trace names no prefix blocks: every prompt is its own, nothing is shared")
    if not (blocks.lengths > room).any():
        return blocks, notes
    notes.append(f"{int((blocks.lengths > room).sum())} rows name more blocks than their prompt holds; the rest was cut")
    place = np.arange(len(blocks.ids)) - np.repeat(blocks.offsets[:-1], blocks.lengths)
    keep = place < np.repeat(room, blocks.lengths)
    offsets = np.concatenate([[0], np.cumsum(np.minimum(blocks.lengths, room))])
    return Blocks(offsets=offsets, ids=blocks.ids[keep]), notes


def _named_tails(tail_id: Ints, blocks: Blocks, answers: Blocks, input_tokens: Ints, block_tokens: int) -> Ints:
    """Every prompt that goes on after its last full block gets a name for the rest; unnamed rests are private."""
    has_tail = input_tokens > blocks.lengths * block_tokens
    first_free = 1 + max(int(part.max(initial=-1)) for part in (blocks.ids, answers.ids, tail_id))
    fresh = first_free + np.arange(len(tail_id))
    # A recorded tail is shorter than a block; a longer rest is one whose blocks are not known, so it is private.
    is_recorded = (tail_id >= 0) & (input_tokens - blocks.lengths * block_tokens < block_tokens)
    return np.where(has_tail, np.where(is_recorded, tail_id, fresh), -1)


def _sessions(table: pa.Table, blocks: Blocks, answers: Blocks, block_tokens: int) -> tuple[Ints, Ints, Ints, Ints]:
    """(parent, leading tokens shared with parent's prompt + answer, session, turn) per request; -1 where none."""
    recorded = column(table, "session_id").tolist()
    input_tokens = column(table, "input_tokens")
    lengths = input_tokens + column(table, "output_tokens")
    count = len(recorded)
    parent = np.full(count, -1, dtype=np.int64)
    shared = np.zeros(count, dtype=np.int64)
    session = np.zeros(count, dtype=np.int64)
    turn = np.zeros(count, dtype=np.int64)
    numbers: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, name in enumerate(recorded):
        session[i] = numbers.setdefault(name if name >= 0 else -2 - i, len(numbers))
        before = last.get(name) if name >= 0 else None
        if name >= 0:
            last[name] = i
        if before is None:
            continue
        parent[i] = before
        turn[i] = turn[before] + 1
        path = np.concatenate([blocks[before], answers[before]])
        common = _common(path, blocks[i])
        # A prompt that carries on all full blocks of the turn before carries on its last few tokens as well.
        is_whole = common == len(path) == lengths[before] // block_tokens and lengths[before] < input_tokens[i]
        shared[i] = lengths[before] if is_whole else common * block_tokens
    return parent, shared, session, turn


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    limit = min(len(a), len(b))
    differ = np.flatnonzero(a[:limit] != b[:limit])
    return int(differ[0]) if len(differ) else limit


def _think_ns(table: pa.Table, planned_ns: Ints, parent: Ints) -> Ints:
    """Recorded think time; else this arrival - the parent's recorded end; else none, and the turn is open loop."""
    recorded, end_ns = column(table, "think_ns"), column(table, "end_ns")
    parent_end = planned_ns[parent] + end_ns[parent]
    derived = np.where(end_ns[parent] >= 0, np.maximum(planned_ns - parent_end, 0), -1)
    return np.where(parent >= 0, np.where(recorded >= 0, recorded, derived), -1)
