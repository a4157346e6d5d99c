"""Figures over time: nothing is lost in the bins, and nothing is made up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.judge.series import MAX_BINS, series
from replay.outcome import Outcome, Sample

few = settings(deadline=None, max_examples=50)


def ended(planned_ns, end_ns, error_kind=None):
    return Outcome(
        request_id=0,
        source_request_id=0,
        session_id=0,
        turn=0,
        planned_ns=planned_ns,
        sent_ns=planned_ns,
        end_ns=end_ns,
        planned_input_tokens=1,
        planned_output_tokens=1,
        error_kind=error_kind,
    )


times = st.integers(0, 3600 * 10**9)
rows = st.lists(st.builds(ended, times, times, st.sampled_from([None, "timeout"])), max_size=60)


@few
@given(rows, st.floats(0.1, 100_000))
def test_every_request_is_in_exactly_one_bin_of_each_rate(outcomes, duration_s):
    found = series(outcomes, [], duration_s)

    width = 2 * found.t_s[0]
    assert len(found.t_s) <= MAX_BINS
    assert found.t_s[-1] + width / 2 >= duration_s
    assert sum(found.offered_per_s) * width == pytest.approx(len(outcomes))
    assert sum(found.sent_per_s) * width == pytest.approx(len(outcomes))
    assert (sum(found.completed_per_s) + sum(found.failed_per_s)) * width == pytest.approx(len(outcomes))


@few
@given(st.lists(st.integers(0, 9), min_size=1, max_size=50))
def test_preemptions_in_the_bins_add_up_to_the_counter(steps):
    totals = [sum(steps[: i + 1]) for i in range(len(steps))]
    samples = [Sample(t_ns=i * 10**9, preemptions=total) for i, total in enumerate(totals)]

    found = series([], samples, float(len(steps)))

    assert sum(value for value in found.preemptions if value is not None) == totals[-1]


def test_a_stall_stands_where_its_requests_were_due_and_empty_bins_are_null(outcome):
    rows = [outcome(planned_ms=t, ttft_ms=50) for t in (100, 4100)] + [outcome(planned_ms=2100, ttft_ms=2000)]

    found = series(rows, [], 5.0)

    at = dict(zip(found.t_s, found.ttft_p99_ms, strict=True))
    assert at[2.25] == pytest.approx(2000.3)
    assert at[0.25] == at[4.25] == pytest.approx(50.3)
    assert at[1.25] is None and found.hit_rate[2] is None


def test_gauges_show_the_highest_of_a_bin(outcome):
    samples = [Sample(t_ns=int(t * 1e9), waiting=waiting, kv_usage=None) for t, waiting in ((0.1, 1), (0.2, 7), (0.4, 2))]

    found = series([], samples, 0.5)

    assert found.waiting == [7]
    assert found.kv_usage == [None]


def test_hit_rate_falls_back_to_the_servers_counters(outcome):
    samples = [Sample(t_ns=int(t * 1e9), prefix_queries_tokens=100 * t, prefix_hits_tokens=40 * t) for t in (0, 0.4, 0.9)]

    by_usage = series([outcome(cached=300)], samples, 1.0)
    by_counters = series([outcome(cached=None)], samples, 1.0)

    assert by_usage.hit_rate == [0.3, None]
    assert by_counters.hit_rate == [pytest.approx(0.4), pytest.approx(0.4)]


def test_a_killed_run_does_not_know_what_was_offered_at_its_end(outcome):
    found = series([outcome()], [], 1.0, was_killed=True)

    assert found.offered_per_s == found.sent_per_s == [None, None]
    assert sum(found.completed_per_s) > 0
