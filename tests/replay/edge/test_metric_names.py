"""Metric names of engines, old and new, come out as ours; absent stays absent; counters survive a restart."""

import numpy as np
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
        (
            'trtllm_num_requests_running{model_name="m"} 3\ntrtllm_num_requests_waiting{model_name="m"} 2\n'
            'trtllm_kv_cache_utilization{model_name="m"} 0.5\ntrtllm_prompt_tokens_total{model_name="m"} 900\n'
            'trtllm_prompt_cached_tokens_total{model_name="m"} 300\ntrtllm_generation_tokens_total{model_name="m"} 40\n'
            'trtllm_num_paused_requests{model_name="m"} 1\n',
            {
                "running": 3,
                "waiting": 2,
                "kv_usage": 0.5,
                "prefix_queries_tokens": 900,
                "prefix_hits_tokens": 300,
                "prompt_tokens": 900,
                "generation_tokens": 40,
            },
        ),
        (
            "# TYPE tgi_queue_size gauge\ntgi_queue_size 7\ntgi_batch_current_size 4\n"
            'tgi_request_input_length_bucket{le="+Inf"} 9\ntgi_request_input_length_sum 800\ntgi_request_input_length_count 9\n'
            "tgi_request_generated_tokens_sum 90\n",
            {"running": 4, "waiting": 7, "prompt_tokens": 800, "generation_tokens": 90},
        ),
        (
            "llamacpp:requests_processing 2\nllamacpp:requests_deferred 5\nllamacpp:prompt_tokens_total 100\n"
            "llamacpp:prompt_tokens_cached_total 300\nllamacpp:tokens_predicted_total 60\n",
            {
                "running": 2,
                "waiting": 5,
                "prefix_queries_tokens": 400,
                "prefix_hits_tokens": 300,
                "prompt_tokens": 400,
                "generation_tokens": 60,
            },
        ),
        ("llamacpp:prompt_tokens_total 100\nllamacpp:kv_cache_usage_ratio 0.4\n", {"kv_usage": 0.4}),  # before they told hits
        (
            'dynamo_frontend_inflight_requests{model="m"} 9\ndynamo_frontend_queued_requests{model="m"} 4\n'
            'dynamo_frontend_input_sequence_tokens_sum{model="m"} 500\ndynamo_frontend_cached_tokens_sum{model="m"} 200\n'
            'dynamo_frontend_output_tokens_total{model="m"} 70\n',
            {
                "running": 5,
                "waiting": 4,
                "prefix_queries_tokens": 500,
                "prefix_hits_tokens": 200,
                "prompt_tokens": 500,
                "generation_tokens": 70,
            },
        ),
        (
            'dynamo_component_gpu_cache_usage_percent{dp_rank="0"} 0.2\n'
            'dynamo_component_gpu_cache_usage_percent{dp_rank="1"} 0.6\n',
            {"kv_usage": pytest.approx(0.4)},
        ),
        ("something_else 1\n", {}),
    ],
)
def test_names_are_normalised(text: str, values: dict[str, float]) -> None:
    assert read_metrics(text).values == values


def test_kv_size_is_read_from_the_cache_config() -> None:
    state = read_metrics('vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1\n')

    assert (state.block_tokens, state.kv_capacity_tokens) == (16, 1600)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1\n' * 2, 3200),
        ("trtllm_kv_cache_tokens_per_block 32\ntrtllm_kv_cache_max_blocks 100\n", 3200),
        ("sglang:max_total_num_tokens 3200\n", 3200),
        ("tgi_queue_size 1\n", None),
    ],
)
def test_kv_size_of_other_engines(text: str, tokens: int | None) -> None:
    assert read_metrics(text).kv_capacity_tokens == tokens


def page(rng: np.random.Generator) -> str:
    """An exposition as vLLM, TGI or llama.cpp write one, other metrics between."""
    names = ["vllm:num_preemptions_total", "vllm:prompt_tokens_total", "tgi_queue_size", "llamacpp:tokens_predicted_total"]
    names += ["vllm:num_requests_running", "go_threads", 'vllm:e2e_request_latency_seconds_bucket{le="0.5"}']
    lines = []
    for name in rng.permutation(names).tolist():
        lines += [
            f"# HELP {name.split('{')[0]} Words.",
            f"# TYPE {name.split('{')[0]} gauge",
            f"{name} {rng.integers(0, 10**6)}.0",
        ]
    return "".join(line + "\n" for line in lines)


@pytest.mark.parametrize("seed", range(5))
def test_a_page_that_is_cut_off_tells_less_but_never_another_number(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = page(rng)
    whole = read_metrics(text).values
    assert len(whole) >= 4

    for end in range(len(text)):
        assert read_metrics(text[:end]).values.items() <= whole.items()


def test_lines_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError):
        read_metrics("vllm:num_requests_running many\n")


def test_counters_count_from_the_start_across_a_restart_of_the_server() -> None:
    base = CounterBase()

    seen = [base.since_start({"preemptions": value})["preemptions"] for value in (100, 103, 2, 5)]

    assert seen == [0, 3, 5, 8]


def test_a_counter_that_shows_only_from_the_first_request_on_began_at_zero() -> None:
    base = CounterBase()

    seen = [base.since_start(values) for values in ({"prompt_tokens": 70.0}, {"prompt_tokens": 90.0, "prefix_hits_tokens": 5.0})]

    assert seen == [{"prompt_tokens": 0}, {"prompt_tokens": 20, "prefix_hits_tokens": 5}]


def test_a_counter_that_is_not_there_stays_absent() -> None:
    base = CounterBase()

    assert base.since_start({"running": 3}) == {}
