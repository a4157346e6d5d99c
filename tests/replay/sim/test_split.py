"""Prefill and decode apart: nothing is lost on either side, a lone request pays the transfer only, decode is undisturbed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.errors import PlanError
from replay.outcome import Outcome, Sample
from replay.plan.plan import Plan
from replay.sim.engines import measured
from replay.sim.presets import Preset, StepCosts, preset_named
from replay.sim.split import Split, SplitFleet
from replay.sim.virtual import play
from tests.replay.sim.test_virtual_play import SMALL, chats, impatient, plan_of


def apart(plan: Plan, split: Split, preset: Preset = SMALL, **options: Any) -> tuple[list[Outcome], list[Sample], SplitFleet]:
    fleet = SplitFleet(plan, preset, split, "prefix", **options)
    seen = list(play(plan, preset, replicas=split.prefill + split.decode, router="prefix", sample_s=0.25, fleet=fleet))
    return [one for one in seen if isinstance(one, Outcome)], [one for one in seen if isinstance(one, Sample)], fleet


@given(
    sessions=st.integers(1, 12),
    turns=st.integers(1, 4),
    new=st.integers(1, 300),
    output=st.integers(1, 60),
    gap_s=st.sampled_from([0.0, 0.05, 2.0]),
    prefill=st.integers(1, 3),
    decode=st.integers(1, 3),
    link_gbps=st.sampled_from([0.1, 400.0]),
)
@settings(max_examples=30, deadline=None)
def test_no_request_no_token_and_no_block_is_lost_on_either_side(
    sessions: int, turns: int, new: int, output: int, gap_s: float, prefill: int, decode: int, link_gbps: float
) -> None:
    plan = chats(sessions, turns, new, output, gap_s)

    outcomes, samples, fleet = apart(plan, Split(prefill=prefill, decode=decode, link_gbps=link_gbps))

    assert sorted(one.request_id for one in outcomes) == list(range(len(plan)))
    done = [one for one in outcomes if one.error_kind is None]
    assert all(one.input_tokens == one.planned_input_tokens and one.output_tokens == one.planned_output_tokens for one in done)
    assert all(len(one.chunk_gaps_us) == (one.output_tokens or 0) - 1 for one in done)
    assert all(engine.cache.free == engine.cache.total for engine in fleet.engines)
    assert (fleet.in_flight, fleet.sent, fleet.first_s) == ({}, {}, {})
    last = samples[-1]
    assert last.generation_tokens == sum(one.output_tokens or 0 for one in done)
    assert last.prefix_queries_tokens == sum(one.input_tokens or 0 for one in done)
    assert last.prefix_hits_tokens == sum(one.cached_tokens or 0 for one in done)


@given(
    sessions=st.integers(1, 10),
    new=st.integers(1, 300),
    output=st.integers(1, 40),
    gap_s=st.sampled_from([0.0, 0.05, 2.0]),
    every=st.integers(1, 2),
    patience_ms=st.sampled_from([0, 5, 50, 200, 1000]),
    link_gbps=st.sampled_from([0.05, 400.0]),
)
@settings(max_examples=40, deadline=None)
def test_hang_ups_lose_nothing_on_either_side_nor_on_the_way(
    sessions: int, new: int, output: int, gap_s: float, every: int, patience_ms: int, link_gbps: float
) -> None:
    plan = impatient(chats(sessions, 3, new, output, gap_s), every, patience_ms * 1_000_000, 20)
    split = Split(prefill=1, decode=2, link_gbps=link_gbps)

    outcomes, _, fleet = apart(plan, split, hang_up=True)
    one_by_one, _, _ = apart(plan, split, hang_up=True, stepwise=True)

    assert outcomes == one_by_one
    assert sorted(one.request_id for one in outcomes) == list(range(len(plan)))
    assert all(engine.cache.free == engine.cache.total and engine.idle for engine in fleet.engines)
    assert (fleet.in_flight, fleet.sent, fleet.first_s, fleet.may_leave, fleet.leaving) == ({}, {}, {}, {}, [])
    assert all(len(one.chunk_gaps_us) == max((one.output_tokens or 0) - 1, 0) for one in outcomes)
    left = [one for one in outcomes if one.error_kind is not None]
    assert all(one.end_ns == one.planned_ns + int(plan.abort_ns[one.request_id]) for one in left)


@pytest.mark.parametrize("link_gbps", [1.0, 400.0, 1e12])
def test_a_lone_request_has_the_same_ttft_and_ends_later_by_the_transfer(link_gbps: float) -> None:
    plan = plan_of([{"arrival_ns": 0, "input_tokens": 1000, "output_tokens": 50}])
    split = Split(prefill=1, decode=1, link_gbps=link_gbps)

    (lone,), _, _ = apart(plan, split)
    whole = next(one for one in play(plan, SMALL, replicas=1, router="rr", sample_s=9.0) if isinstance(one, Outcome))

    assert lone.first_answer_ns == whole.first_answer_ns
    assert (lone.end_ns or 0) - (whole.end_ns or 0) == pytest.approx(split.transfer_s(1000, SMALL) * 1e9, abs=3)
    assert lone.chunk_gaps_us[1:] == whole.chunk_gaps_us[1:]


def test_runs_of_steps_at_once_change_nothing() -> None:
    plan = chats(12, 3, gap_s=0.05)

    fast, _, _ = apart(plan, Split(prefill=2, decode=1))
    slow, _, _ = apart(plan, Split(prefill=2, decode=1), stepwise=True)

    assert fast == slow


def test_long_prompts_do_not_stall_decode() -> None:
    rows = [{"arrival_ns": n * 200_000_000, "input_tokens": 2000, "output_tokens": 150} for n in range(40)]
    plan = plan_of(rows)
    preset = replace(SMALL, kv_tokens=60_000, max_num_seqs=64, max_num_batched_tokens=8192)

    outcomes, _, _ = apart(plan, Split(prefill=1, decode=1), preset)
    together = [one for one in play(plan, preset, replicas=2, router="rr", sample_s=9.0) if isinstance(one, Outcome)]

    def itl_p99(found: list[Outcome]) -> float:
        return float(np.quantile([gap for one in found for gap in one.chunk_gaps_us], 0.99))

    assert itl_p99(outcomes) < 0.5 * itl_p99(together)


def test_what_cannot_be_split_is_refused() -> None:
    plan = plan_of([{"arrival_ns": 0, "input_tokens": 100, "output_tokens": 5}])
    costs = StepCosts(overhead_s=1e-3, weights_s=5e-3, context_token_s=4e-7, token_s=8e-5, pair_s=1e-8)

    with pytest.raises(PlanError, match="split"):
        apart(plan, Split(prefill=0, decode=1))
    with pytest.raises(PlanError, match="split"):
        apart(plan, Split(prefill=1, decode=1, link_gbps=0))
    with pytest.raises(PlanError, match="split"):
        apart(plan, Split(prefill=1, decode=1), measured("mine", costs, max_model_len=4096, kv_tokens=10_000))
    with pytest.raises(PlanError, match="split"):
        apart(plan, Split(prefill=1, decode=1), replace(preset_named("laptop-demo"), offload_tokens=4096))
