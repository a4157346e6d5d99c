"""Each warning stands where its reason does, and nowhere else."""

import pytest

from replay.report.reading import judge_run


def seen_kinds(story):
    return {note.kind for note in judge_run(story.write()).points[0].notes}


def plain(story, *, server=None, facts=None, **requests):
    scale = story.at(1, **(facts or {})).requests(200, every_ms=100, **requests)
    return scale.server(**({"kv": 0.3} | (server or {})))


def test_nothing_to_say_of_a_clean_point(story):
    plain(story)

    assert seen_kinds(story) == set()


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"facts": {"predicted": 0.65}}, "hit_rate_gap"),
        ({"facts": {"predicted": None}}, "kv_size_unknown"),
        ({"facts": {"stopped": "interrupted"}}, "stopped_early"),
        ({"facts": {"answers_reused": False, "later_turns": 9}}, "answers_not_reused"),
        ({"turn": 1, "answer_spliced": False}, "answers_not_spliced"),
        ({"server": {"prefix_hits_tokens": 0.0}}, "hit_rates_differ"),
        ({"server": {"prompt_tokens": 1e9}}, "other_traffic"),
        ({"planned_input_tokens": 990}, "prompt_tokens_differ"),
        ({"planned_output_tokens": 99}, "output_tokens_differ"),
        ({"facts": {"hit_rate_predicted_infinite": 0.004, "predicted": 0.004}, "cached": 4}, "nothing_shared"),
        ({"facts": {"hit_rate_predicted_infinite": 0.55}}, "cache_warm"),
        ({"ttft_ms": lambda i: 50.0 + 5000.0 * (i % 60 == 0)}, "skewed"),
        ({"facts": {"steady": "growing"}}, "growing"),
        ({"facts": {"trace_input_tokens": 1250.0}}, "part_differs"),
        ({"token_count_source": "chunks"}, "usage_missing"),
        ({"server": {"metrics_missing": ["http://b/metrics"]}}, "metrics_missed"),
        (
            {"server": {"servers": {"http://a/metrics": {"kv_usage": 0.9}, "http://b/metrics": {"kv_usage": 0.1}}}},
            "servers_uneven",
        ),
    ],
)
def test_one_thing_amiss_gives_one_note(story, changes, kind):
    plain(story, **changes)

    assert seen_kinds(story) == {kind}


def test_a_server_that_tells_nothing(story):
    story.at(1).requests(200, every_ms=100, cached=None)

    assert seen_kinds(story) == {"hit_rate_unknown", "no_metrics"}


def test_few_requests(story):
    story.at(1).requests(60, every_ms=100).server(kv=0.3)

    assert seen_kinds(story) == {"few_requests"}


def test_failures_are_counted_by_kind_with_the_servers_words(story, outcome):
    scale = story.at(1).requests(200, every_ms=100)
    for i in (50, 60, 70):
        scale.outcomes[i] = outcome(i, planned_ms=100.0 * i, error="http_status", error_text="HTTP 503:\n over\tloaded")
    scale.outcomes[80] = outcome(80, planned_ms=8000.0, error="timeout")

    notes = judge_run(story.write()).points[0].notes

    (errors,) = [note.seen for note in notes if note.kind == "errors"]
    assert errors == "requests failed: 3 http_status, 1 timeout (3x HTTP 503: over loaded)"


def test_every_note_says_why_and_what_to_do(story):
    plain(story, facts={"predicted": 0.9, "stopped": "interrupted"}, planned_output_tokens=99, late_ms=90.0)

    for note in judge_run(story.write()).points[0].notes:
        assert note.seen and note.why and note.action
        assert not note.seen.endswith(".") and not note.action.endswith(".")  # reports add it


def test_requests_all_due_at_once_are_a_burst_and_their_p99_is_far_from_their_mean(story):
    story.at(1).requests(200, every_ms=0).server(kv=0.3)

    assert seen_kinds(story) == {"burst"}


def test_a_token_wise_cache_is_not_taken_for_a_warm_one(story):
    story.at(1, hit_rate_predicted_infinite=0.6, predicted=0.6).requests(200, every_ms=100, cached=612).server(kv=0.3)

    assert seen_kinds(story) == set()


@pytest.mark.parametrize(
    ("changes", "standing"),
    [
        ({}, "valid"),
        ({"token_count_source": "chunks"}, "valid"),
        ({"planned_output_tokens": 99}, "suspect"),
        ({"late_ms": 40.0}, "invalid"),
    ],
)
def test_a_point_stands_is_suspect_or_is_not_valid(story, changes, standing):
    plain(story, **changes)

    assert judge_run(story.write()).points[0].standing == standing
