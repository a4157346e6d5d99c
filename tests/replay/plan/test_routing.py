"""Which server a request goes to: one rule for a plan and for simulated engines."""

from dataclasses import replace

import numpy as np
import pytest

from replay.plan.plan import Plan
from replay.plan.predict import predict, predict_routed
from replay.plan.route import MAX_LEAD, Router, longest_prefix, routed
from tracer.blocks import Blocks

ROUTERS: list[Router] = ["prefix", "sticky", "rr"]


def plan_of(paths: list[list[int]], *, gap_s: float = 1.0, output_tokens: int = 1, sessions: list[int] | None = None) -> Plan:
    """Prompts of these blocks and one token more, evenly in time, each its own session unless said."""
    n = len(paths)
    none = np.full(n, -1)
    return Plan(
        block_tokens=16,
        source_request_id=np.arange(n),
        session_id=np.arange(n) if sessions is None else np.array(sessions),
        turn=np.zeros(n, dtype=np.int64),
        planned_ns=(np.arange(n) * gap_s * 1e9).astype(np.int64),
        think_ns=none,
        parent=none,
        parent_tokens=np.zeros(n, dtype=np.int64),
        tail_id=10**6 + np.arange(n),
        tail_tokens=np.ones(n, dtype=np.int64),
        input_tokens=np.array([len(path) * 16 + 1 for path in paths]),
        output_tokens=np.full(n, output_tokens),
        asked_tokens=np.full(n, output_tokens),
        abort_ns=none,
        blocks=Blocks.from_lists(paths),
        answer_blocks=Blocks.from_lists([()] * n),
    )


def servers(plan: Plan, router: Router, kv_tokens: list[int | None]) -> list[int]:
    chosen = routed(plan, router, kv_tokens, answers_reused=False).server
    assert chosen is not None
    return chosen.tolist()


def families(count: int, requests: int, rng: np.random.Generator, depth: int = 20) -> list[list[int]]:
    """Requests below one of `count` system prompts of `depth` blocks, in random order, with a block of their own."""
    which = rng.integers(0, count, requests).tolist()
    return [[*range(one * depth, (one + 1) * depth), count * depth + number] for number, one in enumerate(which)]


def test_one_server_is_no_choice() -> None:
    plan = plan_of([[0], [1]])

    assert routed(plan, "prefix", [None], answers_reused=False) is plan


def test_round_robin_goes_in_turn_and_sticky_by_session() -> None:
    plan = plan_of([[0], [1], [2], [3], [4]], sessions=[0, 0, 1, 2, 1])

    assert servers(plan, "rr", [None, None]) == [0, 1, 0, 1, 0]
    assert servers(plan, "sticky", [None, None]) == [0, 0, 1, 0, 1]


def test_prefix_finds_the_server_that_has_the_prompts_beginning() -> None:
    plan = plan_of([[0, 1], [5, 6], [0, 1, 2], [5, 6, 7], [5, 6, 8]], gap_s=0.01, output_tokens=100)

    assert servers(plan, "prefix", [None, None]) == [0, 1, 0, 1, 1]


def test_prefix_leaves_a_server_that_is_far_busier_by_the_schedule() -> None:
    same = [[0, 1, 2, number + 10] for number in range(MAX_LEAD + 3)]

    crowded = servers(plan_of(same, gap_s=0.001, output_tokens=1000), "prefix", [None, None])
    slow = servers(plan_of(same, gap_s=60, output_tokens=1000), "prefix", [None, None])

    assert crowded == [0] * (MAX_LEAD + 1) + [1, 1]  # then both have it, and the second is less busy
    assert slow == [0] * len(same)


def test_prefix_knows_what_a_small_cache_has_lost() -> None:
    paths = [[10 * n + i for i in range(10)] for n in range(13)]
    plan = plan_of([*paths[:10], *paths[:1]], gap_s=60)

    kept = servers(plan, "prefix", [1000 * 16, 1000 * 16])
    lost = servers(plan, "prefix", [20 * 16, 1000 * 16])

    assert kept[:10] == lost[:10] == [0, 1] * 5
    assert kept[10] == 0  # it is there still
    assert servers(plan_of([*paths[:11], *paths[:1]], gap_s=60), "prefix", [20 * 16, 1000 * 16])[11] == 1  # as if it were new


def test_of_equals_the_least_busy_and_then_the_one_with_the_least_to_do_so_far() -> None:
    assert longest_prefix(lambda number: (0, 3)[number], [0, MAX_LEAD], [0, 0]) == 1
    assert longest_prefix(lambda number: (0, 3)[number], [0, MAX_LEAD + 1], [0, 0]) == 0
    assert longest_prefix(lambda number: 2, [1, 0, 0], [0, 9, 5]) == 2


@pytest.mark.parametrize("router", ROUTERS)
def test_the_prediction_is_that_of_each_cache_for_its_own_requests(router: Router) -> None:
    kv_tokens = [80 * 16, 80 * 16, 80 * 16]
    plan = plan_of(families(6, 300, np.random.default_rng(3)))

    prediction = predict_routed(routed(plan, router, kv_tokens, answers_reused=False), kv_tokens, answers_reused=False)

    assert len(prediction.by_server) == 3 and prediction.kv_capacity_tokens == 3 * 80 * 16
    rates = [one.at_capacity for one in prediction.by_server if one is not None and one.at_capacity is not None]
    assert prediction.at_capacity is not None and min(rates) <= prediction.at_capacity <= max(rates)
    assert prediction.infinite <= predict(plan, None, answers_reused=False).infinite


def test_prefix_hits_more_than_sticky_and_round_robin_where_caches_are_small() -> None:
    kv_tokens: list[int | None] = [90 * 16] * 3
    plan = plan_of(families(9, 600, np.random.default_rng(5)))

    def rate(router: Router) -> float:
        seen = predict_routed(routed(plan, router, kv_tokens, answers_reused=False), kv_tokens, answers_reused=False)
        assert seen.at_capacity is not None
        return seen.at_capacity

    assert rate("prefix") > rate("rr") + 0.3
    assert rate("prefix") > rate("sticky") + 0.3


def test_a_server_without_requests_is_no_error() -> None:
    plan = replace(plan_of([[0], [0, 1]]), server=np.array([1, 1]))

    prediction = predict_routed(plan, [None, None], answers_reused=False)

    assert prediction.by_server[0] is None and prediction.at_capacity is None
    assert prediction.infinite == pytest.approx(16 / 50)
