"""Laws of scaling: what "k times" keeps, what it makes fresh, and what it does to the cache."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.errors import PlanError
from replay.plan.plan import Plan
from replay.plan.predict import plan_curve
from replay.plan.scale import scale_plan
from tracer.blocks import Blocks, first_unchained


def make_plan(sessions: int, turns: int, gap_ns: int, global_blocks: int = 4) -> Plan:
    """Sessions of growing prompts below one global prefix, 16-token blocks, one answer block per turn."""
    rows = []
    next_id = global_blocks
    for session in range(sessions):
        path = list(range(global_blocks))
        for turn in range(turns):
            blocks = [*path, next_id, next_id + 1]
            answer = [next_id + 2]
            next_id += 3
            rows.append((session * gap_ns + turn * 3 * gap_ns, session, turn, blocks, answer))
            path = blocks + answer
    rows.sort(key=lambda row: (row[0], row[1]))
    place = {(session, turn): i for i, (_, session, turn, _, _) in enumerate(rows)}
    parent = np.array([place.get((session, turn - 1), -1) for _, session, turn, _, _ in rows])
    count = len(rows)
    blocks = Blocks.from_lists([row[3] for row in rows])
    return Plan(
        block_tokens=16,
        source_request_id=np.arange(count),
        session_id=np.array([row[1] for row in rows]),
        turn=np.array([row[2] for row in rows]),
        planned_ns=np.array([row[0] for row in rows]),
        think_ns=np.where(parent >= 0, gap_ns, -1),
        parent=parent,
        parent_tokens=np.where(parent >= 0, 16, 0),
        tail_id=np.full(count, -1),
        tail_tokens=np.zeros(count, dtype=np.int64),
        input_tokens=blocks.lengths * 16,
        output_tokens=np.full(count, 16),
        asked_tokens=np.full(count, 16),
        abort_ns=np.full(count, -1),
        blocks=blocks,
        answer_blocks=Blocks.from_lists([row[4] for row in rows]),
    )


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("by", ["users", "time"])
def test_once_is_the_plan_itself(by: str) -> None:
    plan = make_plan(10, 2, 10**9)

    assert scale_plan(plan, 1, by, rng()) is plan  # type: ignore[arg-type]


@pytest.mark.parametrize(("k", "by"), [(0, "users"), (0.5, "users"), (-1, "time")])
def test_factors_that_cannot_be_are_refused(k: float, by: str) -> None:
    with pytest.raises(PlanError, match="cannot scale so"):
        scale_plan(make_plan(3, 1, 10**9), k, by, rng())  # type: ignore[arg-type]


@given(st.integers(5, 30), st.integers(1, 4), st.floats(0.2, 20))
@settings(max_examples=20, deadline=None)
def test_by_time_divides_gaps_and_think_times_and_keeps_the_hit_curve(sessions: int, turns: int, k: float) -> None:
    plan = make_plan(sessions, turns, 10**9)

    scaled = scale_plan(plan, k, "time", rng())

    assert np.abs(scaled.planned_ns - plan.planned_ns / k).max() <= 1
    assert ((scaled.think_ns >= 0) == (plan.think_ns >= 0)).all()
    before, after = (plan_curve(one, answers_reused=True) for one in (plan, scaled))
    assert before.curve() == after.curve()


@given(st.integers(45, 80), st.integers(1, 4), st.integers(2, 5), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_by_users_copies_groups_whole_with_fresh_private_ids(sessions: int, turns: int, k: int, seed: int) -> None:
    plan = make_plan(sessions, turns, 10**9)

    scaled = scale_plan(plan, k, "users", rng(seed))

    assert len(scaled) == k * len(plan)
    assert (np.diff(scaled.planned_ns) >= 0).all()
    assert first_unchained(scaled.blocks) is None
    private = {}
    for session, blocks in zip(scaled.session_id.tolist(), scaled.blocks, strict=True):
        assert blocks[:4].tolist() == [0, 1, 2, 3]  # the global prefix stays shared
        private.setdefault(session, set()).update(blocks[4:].tolist())
    assert len(private) == k * sessions
    assert sum(len(ids) for ids in private.values()) == len(set().union(*private.values()))


@given(st.integers(45, 60), st.integers(2, 4), st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_by_users_keeps_gaps_and_parents_inside_a_copy(sessions: int, turns: int, seed: int) -> None:
    plan = make_plan(sessions, turns, 10**9)

    scaled = scale_plan(plan, 3, "users", rng(seed))

    assert ((scaled.turn == 0) == (scaled.parent < 0)).all()
    later = np.flatnonzero(scaled.parent >= 0)
    before = scaled.parent[later]
    assert (scaled.session_id[before] == scaled.session_id[later]).all()
    assert (scaled.turn[before] == scaled.turn[later] - 1).all()
    assert (scaled.planned_ns[later] - scaled.planned_ns[before] == 3 * 10**9).all()
    for one, parent in zip(later.tolist(), before.tolist(), strict=True):
        shared = len(scaled.blocks[parent])
        assert scaled.blocks[one][:shared].tolist() == scaled.blocks[parent].tolist()
        assert scaled.blocks[one][shared] == scaled.answer_blocks[parent][0]


def test_a_fraction_is_the_chance_of_one_more_copy() -> None:
    plan = make_plan(2000, 1, 10**7)

    scaled = scale_plan(plan, 1.25, "users", rng())

    assert len(scaled) / len(plan) == pytest.approx(1.25, abs=0.04)


def test_more_users_need_that_much_more_memory_for_the_same_hit_rate() -> None:
    plan = make_plan(400, 6, 10**9)

    one, three = (plan_curve(scale_plan(plan, k, "users", rng()), answers_reused=True) for k in (1, 3))

    for capacity in (60, 120, 240, 480, 960, 1920):
        assert three.hit_rate_at(capacity) == pytest.approx(one.hit_rate_at(capacity // 3), abs=0.05)
