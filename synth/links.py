"""Which earlier request each request of a trace goes on from, and how much of its prompt the two share. Pure.

A *turn* goes on from the request before it in its conversation. Otherwise a request *shares* with the one that last
touched the deepest block it finds, if that block is no global prefix. All others are *starts*.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from synth.fidelity import rows_named
from tracer.analysis.groups import sharing_groups
from tracer.analysis.reuse import concatenate, prompt_tokens, require_chained
from tracer.blocks import Blocks
from tracer.schema import Footer
from tracer.tracefile import blocks as block_column
from tracer.tracefile import column

Ints = NDArray[np.int64]
START, TURN, SHARE = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """All [requests], in order of arrival. Times in ns, -1: not known."""

    arrival_ns: Ints
    kind: Ints  # START, TURN or SHARE
    parent: Ints  # row, -1 for a start
    kept: Ints  # leading blocks in common with the parent's prompt and answer; of a start: with global prefixes
    depth: Ints  # requests above it, of its own kind: 0 for the first turn, 0 for whom nobody shared before
    path: Blocks  # prompt and answer
    input_blocks: Ints
    global_blocks: Ints
    input_tokens: Ints
    output_tokens: Ints
    think_ns: Ints  # of turns: parent's end -> this arrival
    service_ns: Ints  # arrival -> end
    has_sessions: bool


def find_links(table: pa.Table, footer: Footer) -> Links:
    """Rows in order of arrival, columns `fidelity.COLUMNS` and `end_ns`."""
    arrival, session = column(table, "arrival_ns"), column(table, "session_id")
    inputs = block_column(table, "input_blocks")
    path = concatenate(inputs, block_column(table, "output_blocks"))
    require_chained(path)
    has_sessions = bool((session >= 0).any())
    global_blocks = sharing_groups(path, session if has_sessions else None).global_blocks
    before = _turn_before(table, session) if has_sessions else np.full(len(arrival), -1, dtype=np.int64)
    toucher, seen = _last_touched(path, inputs.lengths)
    kind = np.where(before >= 0, TURN, np.where(seen > global_blocks, SHARE, START))
    parent = np.where(kind == TURN, before, np.where(kind == SHARE, toucher, -1))
    kept = np.where(kind == START, np.minimum(seen, global_blocks), seen)
    for row in np.flatnonzero(kind == TURN).tolist():
        kept[row] = _common(path[parent[row]], inputs[row])
    depth = np.zeros(len(arrival), dtype=np.int64)
    for row in np.flatnonzero(kind != START).tolist():
        if kind[row] == TURN or not has_sessions:
            depth[row] = depth[parent[row]] + 1
    think, service = _times(table, arrival, parent, kind)
    return Links(
        arrival_ns=arrival,
        kind=kind,
        parent=parent,
        kept=kept,
        depth=depth,
        path=path,
        input_blocks=inputs.lengths,
        global_blocks=global_blocks,
        input_tokens=prompt_tokens(table, footer),
        output_tokens=np.maximum(column(table, "output_tokens"), 0),
        think_ns=think,
        service_ns=service,
        has_sessions=has_sessions,
    )


def _turn_before(table: pa.Table, session: Ints) -> Ints:
    """Row of the turn before: the given parent, else the session's last request; -1 for none."""
    given = rows_named(column(table, "request_id"), column(table, "parent_request_id"))
    last: dict[int, int] = {}
    before = np.full(len(session), -1, dtype=np.int64)
    for row, (one, parent) in enumerate(zip(session.tolist(), given.tolist(), strict=True)):
        if one >= 0:
            before[row] = parent if 0 <= parent < row and session[parent] == one else last.get(one, -1)
            last[one] = row
    return before


def _last_touched(path: Blocks, input_blocks: Ints) -> tuple[Ints, Ints]:
    """Who last touched the deepest prompt block that was touched before, and how many leading blocks were; -1 and 0: nobody."""
    last = np.full(int(path.ids.max(initial=-1)) + 1, -1, dtype=np.int64)
    toucher, seen = np.full(len(path), -1, dtype=np.int64), np.zeros(len(path), dtype=np.int64)
    for row in range(len(path)):
        ids = path[row]
        before = last[ids[: input_blocks[row]]]
        found = int(np.argmin(before >= 0)) if len(before) and before.min() < 0 else len(before)
        if found:
            toucher[row], seen[row] = before[found - 1], found
        last[ids] = row
    return toucher, seen


def _common(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    width = min(len(first), len(second))
    differs = np.flatnonzero(first[:width] != second[:width])
    return int(differs[0]) if len(differs) else width


def _times(table: pa.Table, arrival: Ints, parent: Ints, kind: Ints) -> tuple[Ints, Ints]:
    """Think time of turns and service time of requests; where only one is given, the other follows from the gap."""
    think, service = column(table, "think_ns").copy(), column(table, "end_ns").copy()
    turns = np.flatnonzero(kind == TURN)
    above = parent[turns]
    gap = arrival[turns] - arrival[above]
    from_think = np.where(think[turns] >= 0, np.maximum(gap - think[turns], 0), -1)
    service[above] = np.where(service[above] >= 0, service[above], from_think)
    from_service = np.where(service[above] >= 0, np.maximum(gap - service[above], 0), -1)
    think[turns] = np.where(think[turns] >= 0, think[turns], from_service)
    return np.where(kind == TURN, think, -1), service
