"""Who is due when, in virtual time: hours pass in milliseconds."""

import numpy as np

from replay.plan.pacer import Pacer
from replay.plan.plan import Plan
from tracer.blocks import Blocks


def plan_of(planned_s: list[float], parent: list[int], think_s: list[float]) -> Plan:
    count = len(planned_s)
    zeros, none = np.zeros(count, dtype=np.int64), np.full(count, -1)
    return Plan(
        block_tokens=16,
        source_request_id=np.arange(count),
        session_id=zeros,
        turn=zeros,
        planned_ns=np.array([round(s * 1e9) for s in planned_s]),
        think_ns=np.array([round(s * 1e9) if s >= 0 else -1 for s in think_s]),
        parent=np.array(parent),
        parent_tokens=zeros,
        tail_id=none,
        tail_tokens=zeros,
        input_tokens=zeros + 16,
        output_tokens=zeros + 1,
        asked_tokens=zeros + 1,
        abort_ns=zeros - 1,
        blocks=Blocks.from_lists([()] * count),
        answer_blocks=Blocks.from_lists([()] * count),
    )


def test_open_loop_requests_are_due_at_their_planned_time_each_once() -> None:
    pacer = Pacer(plan_of([0, 2, 2, 5], [-1] * 4, [-1] * 4))

    assert pacer.take_due(0) == [(0, 0)]
    assert pacer.next_due_ns() == 2_000_000_000
    assert pacer.take_due(1_999_999_999) == []
    assert [request for _, request in pacer.take_due(4_000_000_000)] == [1, 2]
    assert not pacer.is_finished
    assert pacer.take_due(10**12) == [(5_000_000_000, 3)]
    assert pacer.is_finished


def test_a_later_turn_waits_for_the_answer_and_the_think_time() -> None:
    pacer = Pacer(plan_of([0, 1], [-1, 0], [-1, 3.0]))

    pacer.take_due(0)

    assert pacer.take_due(10**12) == []
    assert pacer.next_due_ns() is None
    assert not pacer.is_finished
    pacer.ended(0, 7_000_000_000)
    assert pacer.next_due_ns() == 10_000_000_000
    assert pacer.take_due(10_000_000_000) == [(10_000_000_000, 1)]


def test_a_later_turn_without_think_time_is_open_loop() -> None:
    pacer = Pacer(plan_of([0, 4], [-1, 0], [-1, -1]))

    assert [request for _, request in pacer.take_due(4_000_000_000)] == [0, 1]


def test_an_hour_of_sessions_goes_out_in_order_and_whole() -> None:
    sessions, turns = 500, 8
    planned, parent, think = [], [], []
    for session in range(sessions):
        for turn in range(turns):
            planned.append(session * 7.2)
            parent.append(len(planned) - 2 if turn else -1)
            think.append(30.0 if turn else -1)
    pacer = Pacer(plan_of(planned, parent, think))
    now_ns, sent, ends = 0, [], []

    while not pacer.is_finished or ends:
        events = [t for t in (pacer.next_due_ns(), min(ends)[0] if ends else None) if t is not None]
        now_ns = max(now_ns, min(events))
        for end in [end for end in ends if end[0] <= now_ns]:
            ends.remove(end)
            pacer.ended(end[1], end[0])
        for due_ns, request in pacer.take_due(now_ns):
            sent.append((due_ns, request))
            ends.append((now_ns + 2_000_000_000, request))

    assert len(sent) == len({request for _, request in sent}) == sessions * turns
    assert [due for due, _ in sent] == sorted(due for due, _ in sent)
    assert sent[-1][0] == round(((sessions - 1) * 7.2 + (turns - 1) * 32) * 1e9)


def test_what_follows_a_request_are_the_turns_that_come_at_once_and_then_who_waits_for_a_place() -> None:
    #      0 -> 1 -> 2 -> (9 s) 3;   4 and 5 are sessions of one turn
    pacer = Pacer(plan_of([0, 0, 0, 0, 1, 2], [-1, 0, 1, 2, -1, -1], [-1, 0, 0.1, 9, -1, -1]), at_once=1)

    assert pacer.take_due(0) == [(0, 0)]
    assert pacer.follow(0, soon_ns=200_000_000, most=16) == [1, 2, 4, 5]
    assert pacer.follow(0, soon_ns=200_000_000, most=1) == [1]
    assert pacer.follow(0, soon_ns=50_000_000, most=16) == [1, 4, 5]
    assert pacer.follow(2, soon_ns=10**10, most=2) == [3, 4]
    assert pacer.take_due(10**12) == []  # looking ahead takes nothing


def test_two_turns_that_wait_for_the_same_answer_are_not_followed() -> None:
    pacer = Pacer(plan_of([0, 0, 0], [-1, 0, 0], [-1, 0, 0]))

    assert pacer.follow(0, soon_ns=10**9, most=16) == []
