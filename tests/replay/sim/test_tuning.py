"""Factors on costs go where the simulated run is like the measured one, unless the steps have told the costs."""

from dataclasses import replace

import numpy as np
import pytest

from replay.outcome import Outcome
from replay.sim.fitting import NAMES
from replay.sim.tuning import Point, Tries, changed_by, tuned
from replay.sim.virtual import play
from tests.replay.sim.test_seen import COSTS, ENGINE
from tests.replay.sim.test_virtual_play import chats

WRONG = changed_by(ENGINE, np.log([1.4, 1.0, 0.8, 0.5]))


@pytest.fixture(scope="module")
def point() -> Point:
    plan = chats(40, 3)
    outcomes = [one for one in play(plan, ENGINE, replicas=1, router="rr", sample_s=1e9) if isinstance(one, Outcome)]
    return Point(
        plan=plan, outcomes={one.request_id: one for one in outcomes}, held_back=[(float(plan.planned_ns[-1]) / 1e9, np.inf)]
    )


def test_costs_that_no_step_told_are_moved_to_where_ttft_and_tpot_are_right(point: Point) -> None:
    tries = Tries([point])

    found = tuned(tries, WRONG, dict.fromkeys(NAMES, float("inf")))

    assert np.abs(tries.residuals(WRONG)).mean() > 0.2
    assert np.abs(tries.residuals(found)).mean() < 0.02
    assert found.costs.weights_s == pytest.approx(COSTS.weights_s, rel=0.1)


def test_costs_that_the_steps_told_stay_whatever_the_queues_say(point: Point) -> None:
    busier = replace(ENGINE, max_num_seqs=1)  # the model is wrong, not the costs
    tries = Tries([point])

    found = tuned(tries, busier, dict.fromkeys(NAMES, 0.001))

    assert np.abs(tries.residuals(busier)).mean() > 0.2
    assert found.costs.weights_s == pytest.approx(COSTS.weights_s, rel=0.1)
    assert found.costs.token_s == pytest.approx(COSTS.token_s, rel=0.1)
