"""A plan cut into shares of hosts and of their processes."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.plan.plan import Plan
from replay.plan.share import Shard, plan_digest, share_rows
from tracer.blocks import Blocks


def plan_of(sessions: list[int]) -> Plan:
    n = len(sessions)
    zeros = np.zeros(n, dtype=np.int64)
    no_blocks = Blocks.from_lists([()] * n)
    return Plan(
        block_tokens=16,
        source_request_id=np.arange(n),
        session_id=np.array(sessions, dtype=np.int64),
        turn=zeros,
        planned_ns=np.arange(n) * 10**9,
        think_ns=zeros - 1,
        parent=zeros - 1,
        parent_tokens=zeros,
        tail_id=zeros,
        tail_tokens=zeros + 5,
        input_tokens=zeros + 5,
        output_tokens=zeros + 1,
        asked_tokens=zeros + 1,
        abort_ns=zeros - 1,
        blocks=no_blocks,
        answer_blocks=no_blocks,
    )


@settings(deadline=None, max_examples=60)
@given(
    sessions=st.lists(st.integers(0, 40), min_size=1, max_size=120),
    workers=st.lists(st.integers(1, 4), min_size=1, max_size=9),
)
def test_shards_of_any_number_of_hosts_and_processes_are_the_plan_once_in_whole_sessions(
    sessions: list[int], workers: list[int]
) -> None:
    plan, hosts = plan_of(sessions), len(workers)

    shares = [
        share_rows(plan, number, count, Shard(index=host, count=hosts))
        for host, count in enumerate(workers)
        for number in range(count)
    ]

    assert sorted(np.concatenate(shares).tolist()) == list(range(len(plan)))
    assert all((np.diff(rows) > 0).all() for rows in shares)
    owners = [set(plan.session_id[rows].tolist()) for rows in shares]
    assert len(set.union(*owners)) == sum(map(len, owners))


def test_processes_of_a_host_share_its_part_evenly() -> None:
    plan = plan_of(list(range(4000)))

    sizes = [len(share_rows(plan, number, 2, Shard(index=1, count=2))) for number in (0, 1)]

    assert all(900 < size < 1100 for size in sizes)


def test_a_digest_tells_plans_apart_and_notes_do_not_count() -> None:
    plan = plan_of([0, 1, 1])
    later = replace(plan, planned_ns=plan.planned_ns + 1)

    assert plan_digest(plan) == plan_digest(replace(plan_of([0, 1, 1]), notes=("spread",)))
    assert len({plan_digest(one) for one in (plan, later, plan_of([0, 1, 2]), replace(plan, server=np.array([0, 1, 0])))}) == 4
