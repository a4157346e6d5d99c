"""The search for a capacity, on servers that are known: a share of requests that falls with load, and misses that cluster."""

from collections.abc import Callable
from math import exp, log

import numpy as np
import pytest

from replay.judge.search import Bracket, Limit, Run, Tried, bracket, next_load, tried
from replay.judge.summary import Little, Slo
from replay.outcome import Outcome

LIMITS = [Limit(slo=Slo(metric="ttft", limit_ms=100.0), share=0.9)]
WANTED, TRUE_CAPACITY = 0.9, 10.0


type Kinds = tuple[list[Outcome], list[Outcome]]


@pytest.fixture(scope="module")
def kinds() -> Kinds:
    """400 that meet the limit and 400 that miss it, due evenly over 100 s."""
    fields = {"request_id": 0, "source_request_id": 0, "session_id": 0, "turn": 0, "recorded_ns": 0}
    fields |= {"ready_ns": 0, "sent_ns": 0, "planned_input_tokens": 8, "planned_output_tokens": 1}
    places = np.linspace(0, 100e9, 400).astype(int).tolist()
    met, missed = (
        [Outcome(**fields, planned_ns=due, first_answer_ns=due + ttft, end_ns=due + ttft) for due in places]
        for ttft in (10**6, 10**9)
    )
    return met, missed


def true_share(load: float) -> float:
    """0.9 at the true capacity."""
    return 1 / (1 + exp(6 * log(load / TRUE_CAPACITY) - log(9)))


def run_at(share: float, kinds: Kinds, rng: np.random.Generator, noise: float = 0.0) -> Run:
    """Stretches of 10 requests with a share of their own around this one. `noise`: the whole run's, likewise."""
    share = float(np.clip(share + noise * rng.normal(), 0.01, 0.99))
    shares = np.repeat(rng.beta(6 * share, 6 * (1 - share), 40), 10)
    outcomes = [kinds[missed][i] for i, missed in enumerate((rng.random(400) >= shares).tolist())]
    return Run(window_s=(0.0, 100.0), is_growing=False, outcomes=outcomes)


def search(run: Callable[[float], Run], *, highest: float = 640.0, repeats: int = 4) -> tuple[Bracket, list[Tried]]:
    runs: dict[float, list[Run]] = {}
    seen: dict[float, Tried] = {}
    for _ in range(200):
        load = next_load(list(seen.values()), start=3.0, lowest=0.3, highest=highest, tolerance=0.1, repeats=repeats)
        if load is None:
            return bracket(list(seen.values())), list(seen.values())
        runs.setdefault(load, []).append(run(load))
        seen[load] = tried(load, runs[load], LIMITS, WANTED)
    raise AssertionError("the search does not end")


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_bracket_holds_the_true_capacity(kinds: Kinds, noise: float) -> None:
    """In 19 of 20 searches, with misses that come in clusters and with runs that differ as a whole."""
    held = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        found, seen = search(lambda load, rng=rng: run_at(true_share(load), kinds, rng, noise=noise))  # type: ignore[misc]
        assert found.low is not None and found.high is not None
        assert all(one.runs >= 2 for one in seen if one.load in (found.low, found.high))
        held += found.low <= TRUE_CAPACITY <= found.high
    assert held >= 19


def test_no_load_is_sure_where_capacity_is_without_end(kinds: Kinds) -> None:
    rng = np.random.default_rng(1)

    found, _ = search(lambda _: run_at(0.99, kinds, rng), highest=20.0)

    assert found == Bracket(low=20.0, high=None, estimate=20.0)


def test_a_server_that_never_meets_is_tried_down_to_the_lowest_load(kinds: Kinds) -> None:
    rng = np.random.default_rng(1)

    found, seen = search(lambda _: run_at(0.3, kinds, rng))

    assert found.low is None and found.estimate is None
    lowest = min(seen, key=lambda one: one.load)
    assert lowest.load == 0.3 and lowest.runs == 2 and lowest.verdict == "misses"


def test_runs_that_differ_widen_the_interval(kinds: Kinds) -> None:
    rng = np.random.default_rng(3)
    alike = [run_at(0.9, kinds, rng) for _ in range(3)]
    apart = [run_at(share, kinds, rng) for share in (0.8, 0.9, 0.99)]

    narrow, wide = (tried(5.0, runs, LIMITS, WANTED).shares[0] for runs in (alike, apart))

    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)
    assert wide.low < wide.seen - 0.1


def test_no_miss_in_few_requests_is_not_sure(kinds: Kinds) -> None:
    few = Run(window_s=(0.0, 100.0), is_growing=False, outcomes=kinds[0][:40])
    many = Run(window_s=(0.0, 100.0), is_growing=False, outcomes=kinds[0])

    assert tried(1.0, [few], LIMITS, WANTED).verdict == "unsure"
    assert tried(1.0, [many], LIMITS, WANTED).verdict == "meets"


def test_one_run_that_grows_may_be_chance_two_are_past_capacity(kinds: Kinds) -> None:
    grows = Run(window_s=(0.0, 100.0), is_growing=True, outcomes=kinds[0])

    once, twice = tried(1.0, [grows], LIMITS, WANTED), tried(1.0, [grows, grows], LIMITS, WANTED)

    assert (once.verdict, twice.verdict) == ("unsure", "misses")
    assert not once.seems_to_meet


@pytest.mark.parametrize(("in_flight", "obeys"), [(10.0, True), (10.8, True), (13.0, False)])
def test_littles_law_is_checked_in_every_run(kinds: Kinds, in_flight: float, obeys: bool) -> None:
    little = Little(in_flight=in_flight, rate_per_s=5.0, time_s=2.0)
    run = Run(window_s=(0.0, 100.0), is_growing=False, outcomes=kinds[0][:10], little=little)

    assert tried(1.0, [run], LIMITS, WANTED).obeys_little is obeys


def test_an_interval_of_few_clusters_of_misses_holds_the_true_share(kinds: Kinds) -> None:
    """Most runs have no cluster and look better than the server is: neither end may be passed more often than now and then."""
    rng = np.random.default_rng(0)
    true = 1 - 0.06  # that share of the stretches of 10 requests misses whole
    limits = [Limit(slo=LIMITS[0].slo, share=true)]
    above = below = 0
    for _ in range(120):
        runs = []
        for _ in range(2):
            missed = np.repeat(rng.random(40) < 1 - true, 10)
            outcomes = [kinds[is_missed][i] for i, is_missed in enumerate(missed.tolist())]
            runs.append(Run(window_s=(0.0, 100.0), is_growing=False, outcomes=outcomes))
        share = tried(1.0, runs, limits, true).shares[0]
        above += share.low > true
        below += share.high < true

    assert above <= 3 and below <= 3
