"""Regimes and causes: named only where the figures show them."""

from replay.report.reading import judge_run


def verdicts(story):
    return [(one.regime, one.cause) for one in judge_run(story.write()).points]


def carried(story):
    story.at(1).requests(300, every_ms=100, ttft_ms=80.0).server(kv=0.3)


def test_kv_fills_at_5x(kv_fills_at_5x):
    assert verdicts(kv_fills_at_5x) == [
        ("flat", None),
        ("flat", None),
        ("wall", "KV full, preemptions, hit-rate collapse, queue growth"),
    ]


def test_twice_the_load_at_the_same_latency_is_flat(story):
    carried(story)
    story.at(2).requests(600, every_ms=50, ttft_ms=100.0).server(kv=0.6)

    assert verdicts(story)[1] == ("flat", None)


def test_preemptions_alone_bend_the_curve(story):
    carried(story)
    story.at(2).requests(600, every_ms=50, ttft_ms=90.0).server(kv=0.99, preemptions=5)

    assert verdicts(story)[1] == ("knee", "KV full, preemptions")


def test_a_queue_before_a_half_empty_kv_cache_is_not_called_kv_full(story):
    carried(story)
    story.at(2).requests(600, every_ms=50, ttft_ms=900.0, tpot_ms=25.0).server(kv=0.4, waiting=30)

    assert verdicts(story)[1] == ("knee", "queue growth, batch saturation")


def test_a_smaller_hit_rate_alone_explains_slower_first_tokens(story):
    carried(story)
    story.at(2).requests(600, every_ms=50, ttft_ms=300.0, cached=380).server(kv=0.6)

    assert verdicts(story)[1] == ("knee", "hit-rate collapse")


def test_without_evidence_the_cause_is_unknown(story):
    carried(story)
    story.at(2).requests(600, every_ms=50, ttft_ms=300.0).server(kv=0.6)
    story.at(3).requests(900, every_ms=33, ttft_ms=300.0)

    assert verdicts(story)[1:] == [("knee", "unknown"), ("knee", "unknown (no server metrics)")]


def test_what_piles_up_is_a_wall_even_at_the_lowest_scale(story):
    story.at(1).requests(300, every_ms=100, ttft_ms=lambda i: 50.0 * i).server(kv=0.4, waiting=40)

    assert verdicts(story) == [("wall", "queue growth")]


def test_a_handful_in_flight_at_the_end_is_no_wall(story):
    story.at(1).requests(60, every_ms=100, ttft_ms=lambda i: 1000.0 if i > 50 else 50.0).server(kv=0.4)

    assert verdicts(story) == [("flat", None)]


def test_sessions_that_wait_for_answers_send_less_and_hit_the_wall_all_the_same(story):
    carried(story)
    slow = story.at(5, later_turns=1000).requests(1500, every_ms=20, ttft_ms=3000.0).server(kv=0.99, waiting=40)
    slow.facts["planned_span_s"] = 10.0  # the plan had three times the load that the sessions came to send

    regime, cause = verdicts(story)[1]

    assert (regime, cause) == ("wall", "KV full, queue growth")
    assert "load_not_reached" in [note.kind for note in judge_run(story.write()).points[1].notes]


def test_failing_requests_are_a_wall(story):
    carried(story)
    busy = story.at(2).requests(600, every_ms=50, ttft_ms=80.0)
    busy.outcomes[::5] = [
        busy.outcomes[0].__class__(
            request_id=one.request_id,
            source_request_id=0,
            session_id=0,
            turn=0,
            planned_ns=one.planned_ns,
            sent_ns=one.sent_ns,
            end_ns=one.end_ns,
            planned_input_tokens=1,
            planned_output_tokens=1,
            error_kind="http_status",
            http_status=503,
            error_text="HTTP 503: <b>overloaded</b>",
        )
        for one in busy.outcomes[::5]
    ]
    busy.server(kv=0.6)

    assert verdicts(story)[1] == ("wall", "requests fail")


def test_an_invalid_lowest_scale_is_no_base(story):
    story.at(1).requests(300, every_ms=100, ttft_ms=20.0, late_ms=25.0).server(kv=0.3)
    story.at(2).requests(600, every_ms=50, ttft_ms=100.0).server(kv=0.6)
    story.at(5).requests(1500, every_ms=20, ttft_ms=110.0).server(kv=0.7)

    assert verdicts(story) == [("invalid", "client"), ("flat", None), ("flat", None)]


def test_nothing_answered_and_nothing_failed_is_unknown(story):
    story.at(1).requests(0, every_ms=100)
    story.scales[0].facts["planned_span_s"] = 0.0

    assert verdicts(story) == [("unknown", None)]
