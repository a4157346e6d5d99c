"""The same traffic, k times as much. Pure. What "k times" means changes the cache, so it is always named."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np

from replay.errors import PlanError
from replay.plan.plan import Ints, Plan
from tracer.analysis.groups import sharing_groups
from tracer.blocks import Blocks

By = Literal["users", "time"]
MAX_SHIFT_NS = 30 * 10**9


def scale_plan(plan: Plan, k: float, by: By, rng: np.random.Generator) -> Plan:
    """A plan with k times the load; k = 1 is the plan itself. Raises PlanError for a k that `by` cannot do."""
    if k <= 0 or (by == "users" and k < 1):
        raise PlanError("cannot scale so", seen=f"{k:g}x by {by}", wanted="k >= 1 by users, k > 0 by time")
    return plan if k == 1 else _BY[by](plan, k, rng)


def _by_time(plan: Plan, k: float, _rng: np.random.Generator) -> Plan:
    """Divide gaps and think times by k: reuse order, and so the LRU hit rate, stays; concurrency grows."""
    think = np.where(plan.think_ns >= 0, (plan.think_ns / k).astype(np.int64), -1)
    return replace(plan, planned_ns=(plan.planned_ns / k).astype(np.int64), think_ns=think)


def _by_users(plan: Plan, k: float, rng: np.random.Generator) -> Plan:
    """k independent copies of each sharing group; a fraction of k is a group's chance of one more copy.

    Global prefixes stay shared, every other id is fresh in each copy, so reuse distance grows k-fold. The original
    stays in place; a copy's group starts a little earlier or later, which keeps the rate profile.
    """
    groups = sharing_groups(plan.blocks, plan.session_id)
    copies = np.full(groups.count, int(k)) + (rng.random(groups.count) < k - int(k))
    reach = min(MAX_SHIFT_NS, int(plan.planned_ns[-1]) // 20)
    start = np.full(groups.count, np.iinfo(np.int64).max)
    np.minimum.at(start, groups.group_of, plan.planned_ns)
    first_free = _first_free(plan)
    parts = [plan]
    for copy in range(1, int(copies.max())):
        rows = np.flatnonzero(copies[groups.group_of] > copy)
        moved = np.abs(start + rng.integers(-reach, reach + 1, groups.count))  # reflected at 0, where the trace begins
        shift = (moved - start)[groups.group_of[rows]]
        parts.append(_copy(plan, rows, groups.global_blocks, copy * first_free, shift))
    return _merged(plan, parts)


def fresh_copies(plan: Plan, count: int, *, is_fresh: bool = True) -> Plan:
    """The plan `count` times, one after the other; global prefixes stay shared, other ids are fresh in each copy."""
    groups = sharing_groups(plan.blocks, plan.session_id)
    span = int(plan.planned_ns[-1]) + int(plan.planned_ns[-1]) // len(plan)
    step = _first_free(plan) if is_fresh else 0
    rows = np.arange(len(plan))
    copies = (_copy(plan, rows, groups.global_blocks, n * step, np.full(len(plan), n * span)) for n in range(1, count))
    return _merged(plan, [plan, *copies])


def rows_of(plan: Plan, rows: Ints) -> Plan:
    """These rows, in this order; a parent that is not among them is none."""
    return replace(
        _copy(plan, rows, np.zeros(len(plan), dtype=np.int64), 0, np.zeros(len(rows), dtype=np.int64)), notes=plan.notes
    )


def _first_free(plan: Plan) -> int:
    return 1 + max(int(part.max(initial=-1)) for part in (plan.blocks.ids, plan.answer_blocks.ids, plan.tail_id))


def _copy(plan: Plan, rows: Ints, global_blocks: Ints, id_shift: int, time_shift: Ints) -> Plan:
    """These rows with all ids below the global prefixes moved by `id_shift`."""
    blocks = plan.blocks.rows(rows)
    place = np.arange(len(blocks.ids)) - np.repeat(blocks.offsets[:-1], blocks.lengths)
    private = place >= np.repeat(global_blocks[rows], blocks.lengths)
    answers = plan.answer_blocks.rows(rows)
    new_place = np.full(len(plan), -1, dtype=np.int64)
    new_place[rows] = np.arange(len(rows))
    parent = plan.parent[rows]
    return Plan(
        block_tokens=plan.block_tokens,
        source_request_id=plan.source_request_id[rows],
        session_id=plan.session_id[rows],
        turn=plan.turn[rows],
        planned_ns=plan.planned_ns[rows] + time_shift,
        think_ns=plan.think_ns[rows],
        parent=np.where(parent >= 0, new_place[parent], -1),
        parent_tokens=plan.parent_tokens[rows],
        tail_id=np.where(plan.tail_id[rows] >= 0, plan.tail_id[rows] + id_shift, -1),
        tail_tokens=plan.tail_tokens[rows],
        input_tokens=plan.input_tokens[rows],
        output_tokens=plan.output_tokens[rows],
        asked_tokens=plan.asked_tokens[rows],
        abort_ns=plan.abort_ns[rows],
        blocks=Blocks(offsets=blocks.offsets, ids=(blocks.ids + np.where(private, id_shift, 0)).astype(np.int32)),
        answer_blocks=Blocks(offsets=answers.offsets, ids=(answers.ids + id_shift).astype(np.int32)),
        server=None if plan.server is None else plan.server[rows],
    )


def _merged(plan: Plan, parts: list[Plan]) -> Plan:
    """All copies in one plan, by time."""
    counts = [len(part) for part in parts]
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    sessions = int(plan.session_id.max()) + 1
    joined = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("source_request_id", "turn", "think_ns", "parent_tokens", "tail_id", "tail_tokens")
        + ("input_tokens", "output_tokens", "asked_tokens", "abort_ns")
    }
    planned = np.concatenate([part.planned_ns for part in parts])
    session = np.concatenate([part.session_id + n * sessions for n, part in enumerate(parts)])
    parent = np.concatenate(
        [np.where(part.parent >= 0, part.parent + start, -1) for part, start in zip(parts, starts, strict=True)]
    )
    order = np.argsort(planned, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    parent = np.where(parent >= 0, place[parent], -1)[order]
    return Plan(
        block_tokens=plan.block_tokens,
        session_id=session[order],
        planned_ns=planned[order],
        parent=parent,
        blocks=_stacked([part.blocks for part in parts]).rows(order),
        answer_blocks=_stacked([part.answer_blocks for part in parts]).rows(order),
        notes=plan.notes,
        **{name: values[order] for name, values in joined.items()},
    )


def _stacked(parts: list[Blocks]) -> Blocks:
    lengths = np.concatenate([part.lengths for part in parts])
    return Blocks(offsets=np.concatenate([[0], np.cumsum(lengths)]), ids=np.concatenate([part.ids for part in parts]))


_BY: dict[str, Callable[[Plan, float, np.random.Generator], Plan]] = {"users": _by_users, "time": _by_time}
