"""Formulas of latency, load and cache figures, by value and by law."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.judge import metrics
from replay.judge.metrics import Facts
from replay.judge.summary import Slo
from replay.outcome import Outcome, Sample

few = settings(deadline=None, max_examples=60)
FACTS = Facts(index=0, scale=1.0, planned=10, planned_span_s=10.0)


@few
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400))
def test_nearest_rank_is_the_smallest_value_with_enough_values_at_or_below_it(values):
    found = metrics.percentiles(values)

    for per_cent, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        wanted = next(v for v in sorted(values) if sum(other <= v for other in values) * 100 >= per_cent * len(values))
        assert value == wanted
    assert found.p50 <= found.p90 <= found.p99 <= found.max == max(values)
    assert found.count == len(values)


def test_p99_of_100_is_the_99th_and_of_99_the_highest():
    assert metrics.percentiles(range(1, 101)).p99 == 99
    assert metrics.percentiles(range(1, 100)).p99 == 99 == metrics.percentiles(range(1, 100)).max


def test_no_values_have_no_percentiles():
    assert metrics.percentiles([]) is None


def test_latencies_of_one_request(outcome):
    one = outcome(planned_ms=1000, late_ms=40, ttft_ms=60, tpot_ms=5, output_tokens=11)

    found = metrics.latency([one])

    assert found.ttft_schedule_ms.p50 == pytest.approx(100)
    assert found.ttft_service_ms.p50 == pytest.approx(60)
    assert found.tpot_ms.p50 == pytest.approx(5)
    assert found.e2e_schedule_ms.p50 == pytest.approx(150)
    assert found.e2e_service_ms.p50 == pytest.approx(110)
    assert found.itl_ms.count == 10 and found.itl_ms.p50 == 5


def test_reasoning_is_a_first_token_too(outcome):
    one = outcome(ttft_ms=500, first_reasoning_ns=90_000_000)

    assert metrics.ttft_ms(one) == 90


def test_one_token_has_no_tpot_and_a_failure_has_no_latency(outcome):
    single, failed = outcome(output_tokens=1), outcome(error="http_status")

    found = metrics.latency([single, failed])

    assert found.tpot_ms is None
    assert found.ttft_schedule_ms.count == 1


def test_a_server_stall_shows_in_schedule_latency_though_a_waiting_client_hides_it_from_service_latency(outcome):
    """Coordinated omission: a client with one connection sends nothing while the server stalls for two seconds."""
    stall_ms, until_ms = 2000, 12_000
    rows = [outcome(i, planned_ms=100.0 * i, ttft_ms=20) for i in range(100)]
    rows += [
        outcome(i, planned_ms=100.0 * i, late_ms=until_ms - 100.0 * i + 20.0 * (i - 100), ttft_ms=20)
        for i in range(100, 100 + stall_ms // 100)
    ]

    found = metrics.latency(rows)

    assert found.ttft_service_ms.p99 < 25
    assert found.ttft_schedule_ms.p99 > 1900


def test_tokens_of_one_chunk_came_together(outcome):
    one = outcome(chunk_gaps_us=[30_000, 8_000], chunk_tokens=[1, 3, 1])

    assert metrics.token_gaps_ms(one).tolist() == [30, 0, 0, 8]


def test_a_chunk_without_a_token_lengthens_the_next_gap(outcome):
    one = outcome(chunk_gaps_us=[30_000, 8_000], chunk_tokens=[1, 0, 1])

    assert metrics.token_gaps_ms(one).tolist() == [38]


@few
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 10**6)), max_size=30), st.integers(1, 4))
def test_token_gaps_have_one_place_less_than_tokens_and_lose_no_time(chunks, first):
    one = Outcome(
        request_id=0,
        source_request_id=0,
        session_id=0,
        turn=0,
        planned_ns=0,
        planned_input_tokens=1,
        planned_output_tokens=1,
        chunk_gaps_us=[gap for _, gap in chunks],
        chunk_tokens=[first, *(tokens for tokens, _ in chunks)],
    )

    gaps = metrics.token_gaps_ms(one)

    seen = max((i for i, (tokens, _) in enumerate(chunks) if tokens), default=-1) + 1  # after the last token nobody waits
    assert len(gaps) == first + sum(tokens for tokens, _ in chunks) - 1
    assert math.isclose(gaps.sum(), sum(gap for _, gap in chunks[:seen]) / 1000, abs_tol=1e-6)


def test_without_token_counts_there_are_only_chunk_gaps(outcome):
    found = metrics.latency([outcome(), outcome(chunk_tokens=None)])

    assert found.itl_ms is None
    assert found.chunk_gap_ms.count == 20


@pytest.mark.parametrize(
    ("span_s", "planned", "seen_s", "is_whole", "window"),
    [
        (100.0, 1000, 130.0, True, (10.0, 100.0)),
        (3600.0, 1000, 3700.0, True, (30.0, 3600.0)),
        (100.0, 1000, 60.0, False, (10.0, 60.0)),
        (100.0, 1000, 4.0, False, (0.0, 4.0)),
        (10.0, 49, 14.0, True, (0.0, 14.0)),
        (0.0, 1, 2.0, True, (0.0, 2.0)),
    ],
)
def test_steady_window_leaves_out_warm_up_and_drain(span_s, planned, seen_s, is_whole, window):
    assert metrics.steady_window(span_s, planned, seen_s, is_whole) == window


def test_errors_are_misses_and_a_single_token_misses_no_tpot(outcome):
    slos = [Slo(metric="ttft", limit_ms=100), Slo(metric="tpot", limit_ms=20)]
    rows = [outcome(ttft_ms=50), outcome(ttft_ms=150), outcome(tpot_ms=30), outcome(output_tokens=1), outcome(error="timeout")]

    assert metrics.goodput(rows, slos, window_s=4.0) == (0.5, 0.4)


@pytest.mark.parametrize("by", ["cancelled", "client_abort"])
def test_a_request_cut_off_is_a_miss_only_if_it_had_broken_a_limit(outcome, by):
    slos = [Slo(metric="ttft", limit_ms=100)]
    early = outcome(error=by, end_ns=90_000_000)
    waiting = outcome(error=by, end_ns=500_000_000)

    assert metrics.goodput([outcome(), early], slos, 1.0) == (1.0, 1.0)
    assert metrics.goodput([outcome(), waiting], slos, 1.0) == (1.0, 0.5)


def test_without_slos_there_is_no_goodput(outcome):
    assert metrics.goodput([outcome()], [], 1.0) == (None, None)


def test_hit_rate_weighs_tokens_and_takes_only_answers_that_name_both_counts(outcome):
    rows = [outcome(input_tokens=3000, cached=3000), outcome(input_tokens=1000, cached=0), outcome(cached=None)]

    found = metrics.cache(rows, [], FACTS, (0.0, 10.0))

    assert found.hit_rate_usage == 0.75


def test_what_was_not_measured_is_null_and_never_zero(outcome):
    found = metrics.cache([outcome(cached=None)], [Sample(t_ns=0)], FACTS, (0.0, 10.0))

    values = {name: getattr(found, name) for name in found.__struct_fields__}
    assert set(values.values()) == {None}
    assert metrics.exact_share([outcome(token_count_source=None)], "input_tokens", "planned_input_tokens") is None


def test_counters_are_read_where_they_were_last_known_and_gauges_inside_the_window(outcome):
    samples = [
        Sample(t_ns=0, kv_usage=0.1, waiting=0, running=1, prefix_queries_tokens=0, prefix_hits_tokens=0, preemptions=0),
        Sample(
            t_ns=2 * 10**9, kv_usage=0.97, waiting=4, running=9, preemptions=3, prefix_queries_tokens=100, prefix_hits_tokens=25
        ),
        Sample(t_ns=3 * 10**9, kv_usage=0.5, waiting=2, running=5),
        Sample(t_ns=9 * 10**9),
    ]

    found = metrics.cache([], samples, FACTS, (1.0, 8.0))

    assert found.hit_rate_metrics == 0.25
    assert (found.preemptions, found.first_preemption_s) == (3, 2.0)
    assert (found.kv_usage_p50, found.kv_usage_max, found.kv_full_share) == (0.5, 0.97, 0.5)
    assert (found.waiting_p50, found.waiting_max, found.running_max) == (2, 4, 9)


def test_a_turn_is_late_when_the_answer_before_it_took_longer_than_recorded(outcome):
    on_time, late = outcome(turn=1), outcome(turn=1, planned_ms=700, recorded_ns=0)

    assert not metrics.is_late_turn(on_time)
    assert metrics.is_late_turn(late)
    assert not metrics.is_late_turn(outcome(turn=0, planned_ms=700, recorded_ns=0))


def test_counted_gaps_have_the_percentiles_of_all_gaps(outcome):
    rng = np.random.default_rng(3)
    rows = [outcome(chunk_gaps_us=rng.geometric(0.01, 5000).tolist(), chunk_tokens=None) for _ in range(250)]

    found = metrics.latency([outcome(chunk_gaps_us=[], chunk_tokens=None)], rows).chunk_gap_ms
    wanted = metrics.percentiles(np.concatenate([one.chunk_gaps_us for one in rows]) / 1e3)

    assert found.mean == pytest.approx(wanted.mean)
    assert msgspec.structs.replace(found, mean=0) == msgspec.structs.replace(wanted, mean=0)
