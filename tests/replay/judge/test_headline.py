"""What the words say is what the figures say."""

from replay.report.reading import judge_run


def headline(story):
    return judge_run(story.write()).headline


def test_kv_fills_at_5x(kv_fills_at_5x):
    assert headline(kv_fills_at_5x) == [
        "Prefix hit rate falls from 61.2% to 38.4% between 1x and 5x (predicted 61.0% and 37.0%).",
        "Preemptions start between 2x and 5x: 37 at 5x.",
        "5x is past the wall: KV full, preemptions, hit-rate collapse, queue growth.",
        "TTFT p99 grows 75.3 times between 1x and 5x: 80 ms to 6.0 s.",
        "At 5x the plan offers 50.0 requests/s, the server answers 41.7.",
    ]


def test_order_of_the_scales_does_not_change_the_words(kv_fills_at_5x):
    before = headline(kv_fills_at_5x)
    kv_fills_at_5x.scales.reverse()

    assert headline(kv_fills_at_5x) == before


def test_all_is_well(story):
    story.at(1).requests(300, every_ms=100).server(kv=0.3)
    story.at(2).requests(600, every_ms=50).server(kv=0.5)

    assert headline(story) == [
        "Prefix hit rate stays near 60.0% between 1x and 2x (predicted 60.0% and 60.0%).",
        "No preemptions up to 2x.",
        "Latency stays flat up to 2x.",
        "TTFT p99 does not grow between 1x and 2x: 50 ms to 50 ms.",
    ]


def test_a_single_scale_is_compared_with_nothing(story):
    story.at(3).requests(300, every_ms=100).server(kv=0.3)

    assert headline(story) == [
        "Prefix hit rate 60.0% at 3x (predicted 60.0%).",
        "No preemptions at 3x.",
        "TTFT p50 50 ms, p99 50 ms at 3x.",
    ]


def test_preemptions_at_the_lowest_scale_have_no_bracket(story):
    story.at(2).requests(300, every_ms=100).server(kv=0.99, preemptions=4)
    story.at(4).requests(600, every_ms=50).server(kv=0.99, preemptions=9)

    assert "Preemptions start at 2x already: 4 at 2x, 9 at 4x." in headline(story)


def test_an_invalid_point_is_named_first_and_compared_with_nothing(story):
    story.at(1).requests(300, every_ms=100, ttft_ms=20.0).server(kv=0.3)
    story.at(5).requests(1500, every_ms=20, ttft_ms=20.0, late_ms=60.0, cached=100).server(kv=0.3)

    lines = headline(story)

    assert lines[0] == "5x is not valid: requests went out late: p99 60.0 ms (limit 10.0 ms), worst 60.0 ms."
    assert not any("between" in line for line in lines)


def test_unknown_figures_give_no_sentence(story):
    story.at(1).requests(300, every_ms=100, cached=None)
    story.at(2).requests(600, every_ms=50, cached=None)

    assert headline(story) == ["Latency stays flat up to 2x.", "TTFT p99 does not grow between 1x and 2x: 50 ms to 50 ms."]


def test_nothing_sent_and_nothing_answered(story, outcome):
    scale = story.at(1).requests(5, every_ms=100)
    scale.outcomes = [outcome(i, planned_ms=100.0 * i, error="connect", error_text="refused") for i in range(5)]

    assert headline(story) == ["5 of 5 requests failed at 1x."]

    scale.outcomes = []

    assert headline(story) == ["Nothing was sent."]
