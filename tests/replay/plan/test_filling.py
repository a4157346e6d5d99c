"""A plan that gets its blocks piece by piece is the plan made of the whole table."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.plan.build import BLOCKS, COLUMNS, build_plan, outline
from replay.plan.plan import Plan
from tracer.blocks import Blocks
from tracer.schema import SCHEMA, Footer, Request
from tracer.tracefile import ListExtent, blocks

GRID_NS = 3_000_000_000


def conversations(count: int, rng: np.random.Generator) -> list[Request]:
    """Turns that carry on the turn before wholly, partly or not at all; some failed, some with blocks that do not fit."""
    rows: list[Request] = []
    paths: dict[int, list[int]] = {}
    next_id = 3
    for i in range(count):
        session = int(rng.integers(0, 1 + count // 3))
        path = paths.get(session, [0, 1, 2])
        kept = path[: len(path) - int(rng.integers(0, 3))]
        new, answer = int(rng.integers(0, 4)), int(rng.integers(0, 3))
        asked = kept + list(range(next_id, next_id + new))
        spoken = list(range(next_id + new, next_id + new + answer))
        next_id += new + answer
        paths[session] = asked + spoken
        tail = int(rng.integers(0, 16))
        has_failed, is_cut = rng.random() < 0.1, rng.random() < 0.1
        rows.append(
            {
                "request_id": i,
                "session_id": session if rng.random() < 0.9 else None,
                "arrival_ns": i // 4 * GRID_NS,
                "input_tokens": None if has_failed else max(1, len(asked) * 16 + (-20 if is_cut else tail)),
                "output_tokens": max(1, answer * 16 + 16 - tail),
                "input_blocks": asked,
                "input_tail_id": 100_000 + i if rng.random() < 0.5 else None,
                "output_blocks": spoken,
            }
        )
    return rows


def columns_of(rows: list[Request]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=SCHEMA).select(COLUMNS)


def differing(one: Plan, other: Plan) -> list[str]:
    def arrays(plan: Plan, name: str) -> tuple[object, ...]:
        value = getattr(plan, name)
        return (value.offsets, value.ids) if isinstance(value, Blocks) else (value,)

    names = [field.name for field in dataclasses.fields(Plan)]
    return [name for name in names if not all(map(np.array_equal, arrays(one, name), arrays(other, name)))]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(0, 2**32), st.booleans(), st.sampled_from([None, 7]), st.lists(st.integers(0, 60)))
def test_pieces_make_the_plan_of_the_whole(count: int, seed: int, dequantise: bool, limit: int | None, cuts: list[int]) -> None:
    rows = conversations(count, np.random.default_rng(seed))
    rows.append(rows[-1] | {"request_id": count, "input_tokens": 100, "output_tokens": 1})  # one that can be replayed
    table = columns_of(rows)
    footer = Footer(time_grid_ns=GRID_NS)
    whole = build_plan(table, footer, np.random.default_rng(seed), limit=limit, dequantise=dequantise)
    columns = [blocks(table, name) for name in BLOCKS]
    extents = [ListExtent(values=len(one.ids), largest=int(one.ids.max(initial=-1))) for one in columns]

    filling = outline(table, footer, np.random.default_rng(seed), extents, limit=limit, dequantise=dequantise)
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    for start, end in zip(edges, edges[1:], strict=False):
        filling.add(*(one.rows(np.arange(start, end)) for one in columns))
        filled = filling.filled
        assert np.array_equal(filling.plan.blocks.rows(np.arange(filled)).ids, whole.blocks.rows(np.arange(filled)).ids)
        assert np.array_equal(filling.plan.parent_tokens[:filled], whole.parent_tokens[:filled])

    assert filling.is_done
    assert differing(filling.finished(), whole) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_later_turn_shares_the_leading_blocks_that_both_have_and_a_whole_conversation_to_its_last_token(seed: int) -> None:
    rows = conversations(80, np.random.default_rng(seed))

    plan = build_plan(columns_of(rows), Footer(), np.random.default_rng(0))

    for i, parent in enumerate(plan.parent.tolist()):
        if parent < 0:
            assert plan.parent_tokens[i] == 0
            continue
        path = [*plan.blocks[parent], *plan.answer_blocks[parent]]
        own = plan.blocks[i].tolist()
        common = next((n for n, (a, b) in enumerate(zip(path, own, strict=False)) if a != b), min(len(path), len(own)))
        length = int(plan.input_tokens[parent] + plan.output_tokens[parent])
        goes_on = common == len(path) == length // 16 and length < plan.input_tokens[i]
        assert plan.parent_tokens[i] == min(length if goes_on else common * 16, plan.input_tokens[i] - 1)
