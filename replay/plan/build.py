"""A trace turned into a plan. Pure: columns in, columns out.

In two steps, because block ids are nearly all of a trace and a replay can begin before they are read: `outline` makes the plan
from the other columns, filling.py then gives its requests their blocks.
"""

import numpy as np
import pyarrow as pa

from replay.errors import PlanError
from replay.plan.filling import Filling
from replay.plan.plan import Ints, Plan
from tracer.blocks import Blocks
from tracer.schema import Footer
from tracer.tracefile import ListExtent, column
from tracer.tracefile import blocks as block_column

SCALARS = [
    "request_id",
    "session_id",
    "arrival_ns",
    "end_ns",
    "think_ns",
    "input_tokens",
    "output_tokens",
    "max_tokens",
    "client_abort_ns",
    "input_tail_id",
]
BLOCKS = ["input_blocks", "output_blocks"]
COLUMNS = [*SCALARS, *BLOCKS]


def build_plan(
    table: pa.Table,
    footer: Footer,
    rng: np.random.Generator,
    *,
    limit: int | None = None,
    dequantise: bool = True,
) -> Plan:
    """Rows (columns of `COLUMNS`) as a plan; see `outline`."""
    blocks, answers = (block_column(table, name) for name in BLOCKS)
    extents = [ListExtent(values=len(one.ids), largest=int(one.ids.max(initial=-1))) for one in (blocks, answers)]
    filling = outline(table, footer, rng, extents, limit=limit, dequantise=dequantise)
    filling.add(blocks, answers)
    return filling.finished()


def outline(
    table: pa.Table,
    footer: Footer,
    rng: np.random.Generator,
    extents: list[ListExtent],
    *,
    limit: int | None = None,
    dequantise: bool = True,
) -> Filling:
    """Rows (columns of `SCALARS`) as a plan to be filled: usable ones only, at most `limit`, starting at 0 ns.

    `extents`: of the columns of `BLOCKS`. Stamps that lie on a coarse grid are spread uniformly inside it unless `dequantise` is
    False: else a replay would fire bursts that only the recording clock made.
    """
    notes: list[str] = []
    left = column(table, "client_abort_ns") >= 0
    usable = (column(table, "input_tokens") > 0) & ((column(table, "output_tokens") > 0) | left)
    if dropped := int((~usable).sum()):
        notes.append(f"{dropped} of {len(usable)} rows left out: no prompt or answer length (failed requests)")
    rows = np.flatnonzero(usable)[:limit]
    if not len(rows):
        raise PlanError("the trace has no request to replay", wanted="rows with input_tokens and output_tokens")

    planned = column(table, "arrival_ns")[rows]
    if footer.time_grid_ns and dequantise:
        planned = planned + rng.integers(0, footer.time_grid_ns, len(planned))
        notes.append(f"arrival stamps spread uniformly inside the recorded grid of {footer.time_grid_ns / 1e9:g} s")
    order = np.argsort(planned, kind="stable")
    rows, planned = rows[order], planned[order] - planned.min()
    count = len(rows)

    def of(name: str) -> Ints:
        return column(table, name)[rows]

    output, abort = np.maximum(of("output_tokens"), 1), of("client_abort_ns")
    if (abort >= 0).any():
        notes.append(f"{int((abort >= 0).sum())} of {count} requests were hung up on by their clients")
    parent, session, turn = _sessions(of("session_id"))
    tail_id = of("input_tail_id")
    plan = Plan(
        block_tokens=footer.block_tokens,
        source_request_id=of("request_id"),
        session_id=session,
        turn=turn,
        planned_ns=planned,
        think_ns=_think_ns(of("think_ns"), of("end_ns"), planned, parent),
        parent=parent,
        parent_tokens=np.zeros(count, dtype=np.int64),
        tail_id=tail_id,
        tail_tokens=np.zeros(count, dtype=np.int64),
        input_tokens=of("input_tokens"),
        output_tokens=output,
        asked_tokens=_asked_tokens(output, of("max_tokens"), abort),
        abort_ns=abort,
        blocks=_room(count, extents[0]),
        answer_blocks=_room(count, extents[1]),
    )
    first_free = 1 + max(int(tail_id.max()), *(one.largest for one in extents))
    return Filling(plan, rows, first_free, notes)


def _asked_tokens(output: Ints, limit: Ints, abort_ns: Ints) -> Ints:
    """What was asked for where the client went before its end: its own limit if it is known, else as much as a usual answer."""
    has_left = abort_ns >= 0
    usual = int(np.median(output[~has_left])) if not has_left.all() else 1
    return np.where(has_left, np.maximum(output, np.where(limit > 0, limit, usual)), output)


def _room(requests: int, extent: ListExtent) -> Blocks:
    """Memory is taken as it is filled."""
    return Blocks(offsets=np.zeros(requests + 1, dtype=np.int64), ids=np.empty(extent.values, dtype=np.int32))


def _sessions(recorded: Ints) -> tuple[Ints, Ints, Ints]:
    """(row of the turn before, session in first-seen order, turn) per request; -1: none. A row of no session is one."""
    count = len(recorded)
    row = np.arange(count)
    name = np.where(recorded >= 0, recorded, -2 - row)
    order = np.argsort(name, kind="stable")
    begins = np.append(True, name[order[1:]] != name[order[:-1]])
    first = np.flatnonzero(begins)
    nth = np.cumsum(begins) - 1  # of the sessions by name
    session, turn, parent = (np.empty(count, dtype=np.int64) for _ in range(3))
    seen_first = order[first]
    number = np.empty(len(first), dtype=np.int64)
    number[np.argsort(seen_first)] = np.arange(len(first))
    session[order] = number[nth]
    turn[order] = row - first[nth]
    parent[order] = np.where(begins, -1, np.append(-1, order[:-1]))
    return parent, session, turn


def _think_ns(recorded: Ints, end_ns: Ints, planned_ns: Ints, parent: Ints) -> Ints:
    """Recorded think time; else this arrival - the parent's recorded end; else none, and the turn is open loop."""
    parent_end = planned_ns[parent] + end_ns[parent]
    derived = np.where(end_ns[parent] >= 0, np.maximum(planned_ns - parent_end, 0), -1)
    return np.where(parent >= 0, np.where(recorded >= 0, recorded, derived), -1)
