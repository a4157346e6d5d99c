"""A plan through simulated engines in virtual time: conservation laws, order of time, routers, and what more memory does."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.errors import PlanError
from replay.outcome import Outcome, Sample
from replay.plan.build import COLUMNS, build_plan
from replay.plan.plan import Plan
from replay.plan.predict import plan_curve
from replay.plan.route import Router
from replay.sim.presets import preset_named
from replay.sim.virtual import Fleet, play
from tracer.schema import SCHEMA, Footer

SMALL = replace(preset_named("laptop-demo"), kv_tokens=4096, max_num_seqs=8, max_num_batched_tokens=512)


def plan_of(rows: list[dict[str, Any]], block_tokens: int = 16) -> Plan:
    whole = [{"request_id": number, **row} for number, row in enumerate(rows)]
    schema = pa.schema([SCHEMA.field(name) for name in COLUMNS])
    table = pa.Table.from_pylist([{name: row.get(name) for name in COLUMNS} for row in whole], schema=schema)
    return build_plan(table, Footer(block_tokens=block_tokens), np.random.default_rng(0))


def chats(sessions: int, turns: int, new: int = 60, output: int = 30, gap_s: float = 0.5) -> Plan:
    """Conversations behind one system prompt of 10 blocks; each turn goes on from all before."""
    rows: list[dict[str, Any]] = []
    next_id = 10
    for session in range(sessions):
        path, total = list(range(10)), 160
        for turn in range(turns):
            total += new
            fresh = total // 16 - len(path)
            path = path + list(range(next_id, next_id + fresh))
            next_id += fresh
            answer = list(range(next_id, next_id + (total + output) // 16 - len(path)))
            next_id += len(answer)
            arrival_ns = int((session * gap_s + turn * 20) * 1e9)
            row = {"arrival_ns": arrival_ns, "session_id": session, "turn": turn, "input_tokens": total}
            rows.append({**row, "output_tokens": output, "input_blocks": path, "output_blocks": answer})
            if turn:
                rows[-1]["think_ns"] = 2_000_000_000
            path, total = path + answer, total + output
    return plan_of(sorted(rows, key=lambda row: int(row["arrival_ns"])))


def played(plan: Plan, **options: Any) -> tuple[list[Outcome], list[Sample]]:
    settings_of = {"preset": SMALL, "replicas": 1, "router": "prefix", "sample_s": 0.25, **options}
    everything = list(play(plan, settings_of.pop("preset"), **settings_of))
    return [one for one in everything if isinstance(one, Outcome)], [one for one in everything if isinstance(one, Sample)]


@given(
    sessions=st.integers(1, 12),
    turns=st.integers(1, 4),
    new=st.integers(1, 300),
    output=st.integers(1, 60),
    gap_s=st.sampled_from([0.0, 0.05, 2.0]),
    replicas=st.integers(1, 3),
    router=st.sampled_from(["prefix", "sticky", "rr"]),
)
@settings(max_examples=40, deadline=None)
def test_no_request_no_token_and_no_block_is_lost(
    sessions: int, turns: int, new: int, output: int, gap_s: float, replicas: int, router: Router
) -> None:
    plan = chats(sessions, turns, new, output, gap_s)

    outcomes, samples = played(plan, replicas=replicas, router=router)

    assert sorted(one.request_id for one in outcomes) == list(range(len(plan)))
    done = [one for one in outcomes if one.error_kind is None]
    assert all(one.input_tokens == one.planned_input_tokens and one.output_tokens == one.planned_output_tokens for one in done)
    assert samples[-1].generation_tokens == sum(one.output_tokens or 0 for one in done)
    assert samples[-1].prefix_queries_tokens == sum(one.input_tokens or 0 for one in done)
    assert samples[-1].prefix_hits_tokens == sum(one.cached_tokens or 0 for one in done)
    assert (samples[-1].kv_usage, samples[-1].running, samples[-1].waiting) == (0, 0, 0)
    assert all(len(one.chunk_gaps_us) == (one.output_tokens or 0) - 1 for one in done)
    assert [sample.t_ns for sample in samples] == sorted(sample.t_ns for sample in samples)


def test_every_block_is_free_again_at_the_end() -> None:
    fleet = Fleet(chats(10, 3), SMALL, 2, "rr")
    while fleet.is_busy:
        list(fleet.advance())

    assert all(engine.cache.free == engine.cache.total for engine in fleet.engines)
    assert fleet.names._paths == {} and fleet.in_flight == {} and fleet.after == {}


def impatient(plan: Plan, every: int, patience_ns: int, asked_more: int) -> Plan:
    """Every so many requests its client goes away after a while, out of answers that would have been longer."""
    leaves = np.arange(len(plan)) % every == 0
    return replace(
        plan,
        abort_ns=np.where(leaves, patience_ns * (1 + np.arange(len(plan)) % 3), -1),
        asked_tokens=np.where(leaves, plan.output_tokens + asked_more, plan.output_tokens),
    )


@given(
    sessions=st.integers(1, 10),
    turns=st.integers(1, 3),
    new=st.integers(1, 300),
    output=st.integers(1, 60),
    gap_s=st.sampled_from([0.0, 0.05, 2.0]),
    every=st.integers(1, 3),
    patience_ms=st.sampled_from([0, 1, 30, 200, 1000, 60_000]),
    asked_more=st.sampled_from([0, 1, 40]),
    replicas=st.integers(1, 2),
)
@settings(max_examples=60, deadline=None)
def test_hang_ups_lose_no_request_and_no_block(
    sessions: int, turns: int, new: int, output: int, gap_s: float, every: int, patience_ms: int, asked_more: int, replicas: int
) -> None:
    plan = impatient(chats(sessions, turns, new, output, gap_s), every, patience_ms * 1_000_000, asked_more)
    fleet = Fleet(plan, SMALL, replicas, "rr", hang_up=True)

    outcomes, samples = played(plan, replicas=replicas, fleet=fleet)

    assert sorted(one.request_id for one in outcomes) == list(range(len(plan)))
    assert all(engine.cache.free == engine.cache.total and engine.idle for engine in fleet.engines)
    assert (fleet.in_flight, fleet.may_leave, fleet.leaving, fleet.names._paths) == ({}, {}, [], {})
    assert {one.error_kind for one in outcomes} <= {None, "client_abort"}
    for one in outcomes:
        patience_ns = int(plan.abort_ns[one.request_id])
        assert one.end_ns is not None and one.sent_ns is not None
        if one.error_kind is None:
            assert one.output_tokens == plan.asked_tokens[one.request_id]
            assert patience_ns < 0 or one.end_ns <= one.sent_ns + patience_ns
        else:
            assert one.end_ns == one.sent_ns + patience_ns >= (one.last_token_ns or 0)
        assert len(one.chunk_gaps_us) == max((one.output_tokens or 0) - 1, 0)
    end_of = {(one.session_id, one.turn): one.end_ns or 0 for one in outcomes}
    for one in outcomes:
        assert not one.turn or one.planned_ns == end_of[one.session_id, one.turn - 1] + 2_000_000_000
    assert [sample.t_ns for sample in samples] == sorted(sample.t_ns for sample in samples)
    assert samples[-1].generation_tokens is not None
    assert samples[-1].generation_tokens >= sum(one.output_tokens or 0 for one in outcomes)


def test_who_hangs_up_gets_what_came_until_then_and_frees_the_engine() -> None:
    plan = plan_of([{"arrival_ns": 0, "input_tokens": 100, "output_tokens": 500}] * 2)
    (patient, _), _ = played(plan)
    assert patient.first_token_ns is not None and patient.last_token_ns is not None
    middle_ns = (patient.first_token_ns + patient.last_token_ns) // 2

    outcomes, samples = played(impatient(plan, 2, middle_ns, 0), hang_up=True)

    left, stays = outcomes
    assert (left.error_kind, left.http_status, left.finish_reason, left.cached_tokens) == ("client_abort", 200, None, None)
    assert (left.end_ns, left.input_tokens, left.chunk_tokens) == (middle_ns, 100, [1] * (left.output_tokens or 0))
    assert left.chunk_gaps_us == patient.chunk_gaps_us[: len(left.chunk_gaps_us)] and 100 < len(left.chunk_gaps_us) < 400
    assert (stays.error_kind, stays.output_tokens) == (None, 500)
    assert stays.last_token_ns is not None and stays.last_token_ns < patient.last_token_ns  # alone in the batch from then on
    assert [one.error_kind for one in played(impatient(plan, 2, middle_ns, 0))[0]] == [None, None]


def test_later_turns_wait_for_the_answer_and_think() -> None:
    outcomes, _ = played(chats(3, 4))
    end_of = {(one.session_id, one.turn): one.end_ns for one in outcomes}

    for one in outcomes:
        if one.turn:
            before = end_of[one.session_id, one.turn - 1]
            assert before is not None and one.planned_ns == before + 2_000_000_000
            assert one.cached_tokens is not None and one.cached_tokens > 160


@pytest.mark.parametrize("gap_s", [0.02, 0.3])
def test_more_memory_never_lowers_the_hit_rate(gap_s: float) -> None:
    plan = chats(30, 3, new=120, gap_s=gap_s)
    rates = []
    for kv_tokens in (1024, 2048, 4096, 16384):
        outcomes, _ = played(plan, preset=replace(SMALL, kv_tokens=kv_tokens, max_num_seqs=2))
        rates.append(sum(one.cached_tokens or 0 for one in outcomes) / sum(one.input_tokens or 1 for one in outcomes))

    assert rates == sorted(rates)
    assert rates[-1] > rates[0]


def test_a_router_that_knows_prefixes_finds_more_than_one_that_takes_turns() -> None:
    plan = chats(12, 4)
    rates = {}
    for router in ("prefix", "sticky", "rr"):
        outcomes, _ = played(plan, replicas=3, router=router)
        rates[router] = sum(one.cached_tokens or 0 for one in outcomes) / sum(one.input_tokens or 1 for one in outcomes)

    assert rates["prefix"] >= rates["sticky"] > rates["rr"]


def test_a_request_that_fits_nowhere_is_refused_and_its_session_goes_on() -> None:
    rows = [
        {"arrival_ns": 0, "session_id": 0, "turn": 0, "input_tokens": 9000, "output_tokens": 5},
        {"arrival_ns": 10**9, "session_id": 0, "turn": 1, "input_tokens": 100, "output_tokens": 5, "think_ns": 10**9},
    ]

    outcomes, _ = played(plan_of(rows))

    assert [(one.http_status, one.error_kind) for one in outcomes] == [(400, "http_status"), (200, None)]


def test_blocks_of_another_size_name_the_same_sharing() -> None:
    rows = [
        {"arrival_ns": number * 10**10, "input_tokens": 70, "output_tokens": 3, "input_blocks": [0, 1 + number]}
        for number in range(3)
    ]

    outcomes, _ = played(plan_of(rows, block_tokens=32))

    assert [one.cached_tokens for one in outcomes] == [0, 32, 32]
    with pytest.raises(PlanError, match="do not fit"):
        played(plan_of(rows, block_tokens=24))


def test_hits_are_those_of_the_analysis_where_requests_do_not_overlap() -> None:
    """Two turns and a stranger with the same system prompt of two blocks, a minute apart."""
    rows = [
        {"input_tokens": 56, "output_tokens": 24, "input_blocks": [0, 1, 2], "output_blocks": [3, 4]},
        {"input_tokens": 100, "output_tokens": 20, "input_blocks": [0, 1, 2, 3, 4, 5], "output_blocks": [6]},
        {"input_tokens": 50, "output_tokens": 20, "input_blocks": [0, 1, 7], "output_blocks": [8]},
    ]
    plan = plan_of([{**row, "arrival_ns": number * 60 * 10**9} for number, row in enumerate(rows)])

    outcomes, samples = played(plan, preset=replace(preset_named("h100-llama3-8b"), kv_tokens=10_000))

    curve = plan_curve(plan, answers_reused=True)
    hits = sum(one.cached_tokens or 0 for one in outcomes)
    assert hits == curve.hits_infinite * 16 - 16  # the last token of an answer is sampled but never computed
    assert samples[-1].t_ns == pytest.approx(120e9, abs=5e9)
    assert all(0 <= (one.kv_usage or 0) <= 1 for one in samples)
