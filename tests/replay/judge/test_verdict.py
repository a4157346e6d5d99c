"""Is a point to be trusted, and what does the run exit with?"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.judge.metrics import Facts
from replay.judge.summary import Slo
from replay.judge.verdict import exit_code, judge_point
from replay.outcome import Outcome
from replay.report.reading import judge_run


def kinds(point):
    return [note.kind for note in point.notes]


def test_a_clean_point_is_valid_and_counts_inside_the_window(story):
    story.at(1).requests(200, every_ms=100, ttft_ms=40.0).server(kv=0.3)

    point = judge_run(story.write()).points[0]

    assert point.valid and point.notes == []
    assert point.window_s == (pytest.approx(1.99), pytest.approx(19.9))
    assert point.offered_per_s == pytest.approx(200 / 19.9)
    assert point.requests_per_s == pytest.approx(10, rel=0.02)
    assert point.output_tokens_per_s == pytest.approx(110, rel=0.02)
    assert (point.planned, point.sent, point.completed, point.not_sent) == (200, 200, 200, 0)


@pytest.mark.parametrize(
    ("late_ms", "ttft_ms", "is_valid"), [(5.0, 40.0, True), (20.0, 40.0, False), (20.0, 1000.0, True), (200.0, 1000.0, False)]
)
def test_lateness_is_a_fault_only_against_a_fast_server(story, late_ms, ttft_ms, is_valid):
    story.at(1).requests(200, every_ms=50, ttft_ms=ttft_ms, late_ms=lambda i: late_ms if i % 10 == 0 else 0.2).server(kv=0.3)

    point = judge_run(story.write()).points[0]

    assert point.valid is is_valid
    assert (point.regime == "invalid") is not is_valid
    assert ("client_late" in kinds(point)) is not is_valid


def test_one_late_request_of_few_is_no_verdict(story):
    story.at(1).requests(60, every_ms=50, late_ms=lambda i: 80.0 if i == 30 else 0.2).server(kv=0.3)

    assert judge_run(story.write()).points[0].valid


@pytest.mark.parametrize(
    ("state", "kind"), [({"client_cpu_share": 0.99}, "client_cpu"), ({"client_loop_lag_ns": 10**8}, "client_stalled")]
)
def test_a_busy_or_stalled_client_makes_a_point_invalid(story, state, kind):
    story.at(1).requests(200, every_ms=50).server(kv=0.3, **state)

    point = judge_run(story.write()).points[0]

    assert not point.valid and point.cause == "client" and kind in kinds(point)


def test_one_busy_sample_is_no_limit(story):
    scale = story.at(1).requests(200, every_ms=100).server(kv=0.3)
    scale.samples[5] = scale.samples[5].__class__(t_ns=scale.samples[5].t_ns, client_cpu_share=1.0)

    assert judge_run(story.write()).points[0].valid


def test_exit_code_names_the_client_before_the_slo(story):
    story.at(1).requests(200, every_ms=50, ttft_ms=40.0).server(kv=0.3)
    good = judge_run(story.write(), [Slo(metric="ttft", limit_ms=100)])
    missed = judge_run(story.write(), [Slo(metric="ttft", limit_ms=10)])
    story.at(2).requests(200, every_ms=25, ttft_ms=40.0, late_ms=50.0).server(kv=0.3)
    invalid = judge_run(story.write(), [Slo(metric="ttft", limit_ms=10)])

    assert exit_code(good, attain=0.99) == 0
    assert exit_code(missed) == 0  # no gate was asked for
    assert exit_code(missed, attain=0.99) == 4
    assert exit_code(invalid, attain=0.99) == 3


def test_a_killed_run_says_so_and_counts_until_the_last_thing_seen(story):
    scale = story.at(1).requests(200, every_ms=100, ttft_ms=40.0)
    del scale.outcomes[80:]
    scale.server(kv=0.3)

    point = judge_run(story.write()).points[0]

    assert "stopped_early" in kinds(point) and "other_traffic" not in kinds(point)
    assert point.window_s[1] == pytest.approx(9.0, abs=1)
    assert point.sent_per_s is None
    assert (point.sent, point.not_sent) == (80, 120)


error_kinds = st.sampled_from([None, None, "timeout", "connect", "cancelled", "http_status"])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 10**10), error_kinds), max_size=80), st.integers(0, 20))
def test_every_planned_request_is_completed_failed_or_not_sent(rows, unsent):
    outcomes = [
        Outcome(
            request_id=i,
            source_request_id=i,
            session_id=i,
            turn=0,
            planned_ns=planned_ns,
            sent_ns=planned_ns,
            first_answer_ns=None if kind else planned_ns + 10,
            last_token_ns=None if kind else planned_ns + 10,
            end_ns=planned_ns + 10,
            planned_input_tokens=5,
            planned_output_tokens=1,
            error_kind=kind,
        )
        for i, (planned_ns, kind) in enumerate(rows)
    ]
    facts = Facts(index=0, scale=1.0, planned=len(rows) + unsent, planned_span_s=10.0)

    point = judge_point(facts, outcomes, [], [])

    assert point.planned == point.completed + sum(point.errors.values()) + point.not_sent
    assert point.sent == point.completed + sum(point.errors.values())
