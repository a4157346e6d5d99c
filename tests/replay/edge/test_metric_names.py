"""Metric names of engines, old and new, come out as ours; absent stays absent; counters survive a restart."""

import pytest

from replay.edge.engines import CounterBase, read_metrics


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('vllm:num_requests_running{engine="0"} 3\nvllm:num_preemptions_total 2\n', {"running": 3, "preemptions": 2}),
        ("vllm:gpu_cache_usage_perc 0.5\nvllm:num_preemptions 1\n", {"kv_usage": 0.5, "preemptions": 1}),
        ("sglang:num_queue_reqs 4\nsglang:token_usage 0.25\n", {"waiting": 4, "kv_usage": 0.25}),
        (
            'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.4\n',
            {"kv_usage": pytest.approx(0.3)},
        ),
        ('vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} 2\n', {"running": 3}),
        ("something_else 1\n", {}),
    ],
)
def test_names_are_normalised(text: str, values: dict[str, float]) -> None:
    assert read_metrics(text).values == values


def test_kv_size_is_read_from_the_cache_config() -> None:
    state = read_metrics('vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1\n')

    assert (state.block_tokens, state.kv_capacity_tokens) == (16, 1600)


def test_counters_count_from_the_start_across_a_restart_of_the_server() -> None:
    base = CounterBase()

    seen = [base.since_start({"preemptions": value})["preemptions"] for value in (100, 103, 2, 5)]

    assert seen == [0, 3, 5, 8]


def test_a_counter_that_is_not_there_stays_absent() -> None:
    base = CounterBase()

    assert base.since_start({"running": 3}) == {}
