"""Which configuration is taken: the best one, the cheapest of those that are alike, and what noise leaves open."""

import numpy as np
import pytest

from replay.judge.choice import Candidate, Met, choose, lead_per_s

LISTS = {"seqs": (16, 32, 64)}


def candidate(
    number: int, goodput: float, *, meets: bool = True, may_meet: bool = True, met: list[float] | None = None
) -> Candidate:
    due = np.arange(0, 100, 1 / goodput)
    return Candidate(
        number=number,
        values={"seqs": LISTS["seqs"][number]},
        goodput_per_s=goodput,
        meets=meets,
        may_meet=may_meet,
        met=[Met((0.0, 100.0), due)],
    )


def test_the_best_is_taken_and_an_end_of_the_grid_is_named() -> None:
    found = choose([candidate(0, 5), candidate(1, 7), candidate(2, 9)], LISTS)

    assert found is not None
    assert (found.recommended, found.best, found.alike, found.unsure) == (2, 2, [], [])
    assert [(edge.key, edge.value, edge.is_largest) for edge in found.edges] == [("seqs", 64, True)]


def test_of_alike_ones_the_cheapest_is_taken_and_no_end_is_named() -> None:
    candidates = [candidate(0, 5), candidate(1, 8.96), candidate(2, 9)]

    cheap = choose(candidates, LISTS, ["seqs"])

    assert cheap is not None
    assert (cheap.recommended, cheap.best, cheap.alike) == (1, 2, [1])
    assert cheap.reason == "the least seqs of 2 that are alike (within 1% of the best)"
    assert cheap.edges == []


def test_one_that_meets_the_limits_goes_before_one_with_more_goodput() -> None:
    found = choose([candidate(0, 5), candidate(1, 9, meets=False, may_meet=False)], LISTS)

    assert found is not None and found.recommended == 0 and found.meets


def test_if_none_meets_the_nearest_is_named_as_such() -> None:
    found = choose([candidate(0, 5, meets=False), candidate(1, 6, meets=False)], LISTS)

    assert found is not None and (found.recommended, found.meets) == (1, False)


def test_without_candidates_there_is_no_choice() -> None:
    assert choose([], LISTS) is None


def test_a_lead_that_comes_and_goes_is_not_sure_and_a_steady_one_is() -> None:
    every = np.arange(0.0, 100.0, 0.1)
    steady_loss, one_bad_stretch = every[np.arange(len(every)) % 10 != 0], every[(every < 30) | (every > 40)]

    sure = lead_per_s([Met((0.0, 100.0), every)], [Met((0.0, 100.0), steady_loss)])
    unsure = lead_per_s([Met((0.0, 100.0), every)], [Met((0.0, 100.0), one_bad_stretch)])

    assert sure[0] == pytest.approx(unsure[0], rel=0.02) == pytest.approx(1.0, rel=0.02)
    assert sure[1] > 0 > unsure[1]
