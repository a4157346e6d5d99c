"""Steps of an engine, found again from what clients saw of them, are those that it ran; and costs from them its costs."""

from dataclasses import asdict, replace

import msgspec
import numpy as np
import pytest

from replay.outcome import Outcome
from replay.sim.engines import measured
from replay.sim.fitting import costs_from
from replay.sim.presets import StepCosts
from replay.sim.seen import Starts, Steps, full_batch, heard_of_s, joined, steps_of
from tests.replay.sim.test_virtual_play import plan_of, played

COSTS = StepCosts(overhead_s=1e-3, token_overhead_s=2e-5, weights_s=5e-3, context_token_s=4e-7, token_s=8e-5, pair_s=1e-8)
BUDGET, MOST, BEFORE_S = 256, 6, 3e-3
ENGINE = measured(
    "test",
    COSTS,
    max_model_len=4096,
    kv_tokens=100_000,
    max_num_seqs=MOST,
    max_num_batched_tokens=BUDGET,
    request_overhead_s=BEFORE_S,
)


def outcomes_of(requests: int, gap_s: float, engine: object = ENGINE) -> list[Outcome]:
    """Prompts of all lengths, the longer ones in chunks."""
    rng = np.random.default_rng(0)
    rows = [
        {"arrival_ns": int((i + rng.random()) * gap_s * 1e9), "input_tokens": int(prompt), "output_tokens": int(answer)}
        for i, (prompt, answer) in enumerate(zip(rng.integers(20, 700, requests), rng.integers(5, 80, requests), strict=True))
    ]
    return played(plan_of(rows), preset=engine, router="rr")[0]


def seen(outcomes: list[Outcome], budget: int = BUDGET, most: int = MOST) -> tuple[Steps, Starts]:
    return steps_of(outcomes, max_num_batched_tokens=budget, max_num_seqs=most, before_s=BEFORE_S)


@pytest.mark.parametrize("gap_s", [2.0, 0.3, 0.1])
def test_what_a_step_computed_explains_how_long_it_took(gap_s: float) -> None:
    steps, _ = seen(outcomes_of(200, gap_s))

    clear = steps.part(~steps.doubtful)
    work = zip(clear.tokens.tolist(), clear.context_tokens.tolist(), clear.pairs.tolist(), strict=True)
    wanted = np.array([COSTS.step_s(*one) for one in work]) + BEFORE_S * clear.alone
    wrong = np.abs(clear.seconds / wanted - 1) > 5e-4
    assert wrong.sum() <= 0.002 * len(clear)  # where a step more or less is as possible
    assert len(clear) > 0.95 * len(steps) > 1000
    assert (clear.prompt_tokens > 0).sum() > 50


def test_costs_are_found_and_told_whatever_part_of_the_gaps_is_wrong() -> None:
    outcomes = outcomes_of(200, 0.3)
    rng = np.random.default_rng(1)
    for number, one in enumerate(outcomes):  # a tenth of the tokens reach the client a little late
        late_us = rng.exponential(800, len(one.chunk_gaps_us) + 1) * (rng.random(len(one.chunk_gaps_us) + 1) < 0.1)
        late_us[0] = 0.0
        gaps = np.maximum(np.array(one.chunk_gaps_us) + np.diff(late_us), 1.0).astype(int).tolist()
        outcomes[number] = msgspec.structs.replace(one, chunk_gaps_us=gaps)
    fit = costs_from(seen(outcomes)[0])

    assert fit is not None
    for name, value in asdict(COSTS).items():
        if value:
            assert getattr(fit.costs, name) == pytest.approx(value, rel=0.05), name
            assert fit.relative_error[name] < 0.1


def test_a_cost_that_no_step_depends_on_is_not_told() -> None:
    free = replace(ENGINE, given_costs=replace(COSTS, token_s=1e-9, pair_s=0.0))
    fit = costs_from(seen(outcomes_of(100, 0.3, free))[0])

    assert fit is not None
    assert fit.relative_error["token_s"] == np.inf and fit.relative_error["context_token_s"] < 0.01


def test_the_time_before_scheduling_lies_where_prompts_begin() -> None:
    heard = heard_of_s([seen(outcomes_of(200, 0.3))[1]])

    assert heard is not None and heard[0] == pytest.approx(BEFORE_S, abs=2e-4)


@pytest.mark.parametrize(("gap_s", "wanted"), [(0.1, MOST), (0.5, None)])
def test_a_full_batch_shows_where_requests_wait_beside_it(gap_s: float, wanted: int | None) -> None:
    assert full_batch([seen(outcomes_of(200, gap_s), most=256)[1]]) == wanted


def test_without_single_tokens_there_are_no_steps() -> None:
    several = [
        msgspec.structs.replace(one, chunk_gaps_us=[9000, 9000], chunk_tokens=[1, 4, 4])
        for one in outcomes_of(requests=5, gap_s=1.0)
    ]
    assert len(seen(several)[0]) == 0

    steps, starts = seen([])

    assert len(steps) == len(joined([])) == 0
    assert costs_from(steps) is None and heard_of_s([starts]) is None and full_batch([starts]) is None
