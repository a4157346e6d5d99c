"""Engines from first principles: sizes as model cards print them, times by hand."""

import pytest

from replay.sim.engines import engine_named
from replay.sim.hardware import MODELS, RATES
from replay.sim.presets import preset_named
from tracer.errors import TraceError

CARDS = {"llama3-1b": 1.24, "llama3-8b": 8.03, "llama3-70b": 70.6, "qwen3-8b": 8.2, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5}


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_those_of_the_model_card(model: str) -> None:
    assert engine_named(f"mi300x:{model}").model.parameters == pytest.approx(CARDS[model] * 1e9, rel=0.005)


@pytest.mark.parametrize("gpu", RATES)
def test_every_gpu_serves_the_8b_model(gpu: str) -> None:
    engine = engine_named(f"{gpu}:llama3-8b")

    assert engine.kv_blocks > 1000
    assert 3e-3 < engine.step_s(1, 700, 700) < 40e-3  # from B200 to A10
    assert "data sheet" in RATES[gpu].source


def test_a_step_of_one_user_reads_the_weights_once() -> None:
    """Llama 3.1 8B: 8.03 G parameters less the input table of 128,256 * 4,096, at 70 % of 3.35 TB/s; KV 128 KiB a token."""
    read = 2 * (8.03e9 - 128256 * 4096) + 700 * 131072

    assert engine_named("h100:llama3-8b").step_s(1, 700, 700) == pytest.approx(read / (0.7 * 3.35e12) + 1e-3, rel=1e-3)


def test_eight_bits_halve_the_weights_and_leave_more_room_for_kv() -> None:
    wide, narrow = engine_named("h200:qwen3-32b"), engine_named("h200:qwen3-32b", dtype="fp8")

    assert narrow.costs.weights_s == pytest.approx(wide.costs.weights_s / 2, rel=0.05)
    assert narrow.costs.token_s == pytest.approx(wide.costs.token_s / 2, rel=0.01)
    assert (narrow.kv_tokens or 0) > 1.4 * (wide.kv_tokens or 0)
    assert engine_named("h200:qwen3-32b", kv_dtype="fp8").kv_tokens == pytest.approx(2 * (wide.kv_tokens or 0), rel=1e-4)
    assert engine_named("a100:qwen3-8b", dtype="fp8").costs.token_s == engine_named("a100:qwen3-8b").costs.token_s


def test_more_gpus_share_the_work_and_pay_for_the_links() -> None:
    one, four = engine_named("h200:llama3-8b"), engine_named("h200:llama3-8b", gpus=4)

    assert four.gpus == 4
    assert four.costs.weights_s == pytest.approx(one.costs.weights_s / 4)
    assert one.costs.token_overhead_s == 0
    assert four.costs.token_overhead_s == pytest.approx(2 * 32 * 2 * 3 / 4 * 4096 * 2 / 450e9)


def test_keys_are_copied_where_there_are_fewer_heads_than_gpus() -> None:
    eight, sixteen = (engine_named("h200:llama3-8b", gpus=count) for count in (8, 16))

    assert sixteen.costs.context_token_s == pytest.approx(eight.costs.context_token_s, rel=0.01)  # 8 heads on 16 GPUs


def test_a_small_batch_reads_few_experts_and_a_large_one_all() -> None:
    costs = engine_named("h100:qwen3-30b-a3b").costs

    assert costs.expert_share == 8 / 128
    assert costs.step_s(1, 0, 0) < costs.step_s(8, 0, 0) < costs.step_s(200, 0, 0)
    whole = costs.weights_s + costs.expert_weights_s + costs.overhead_s
    assert costs.step_s(200, 0, 0) == pytest.approx(whole, rel=0.01)


def test_presets_keep_their_names() -> None:
    assert engine_named("h100-llama3-8b") == preset_named("h100-llama3-8b")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("abacus:llama3-8b", {}, "no such GPU"),
        ("h100:abacus", {}, "no such model"),
        ("h100:llama3-70b", {}, "does not fit"),
        ("h100-llama3-8b", {"gpus": 2}, "fixed"),
    ],
)
def test_what_is_not_known_is_named(name: str, options: dict[str, int], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        engine_named(name, **options)  # type: ignore[arg-type]
