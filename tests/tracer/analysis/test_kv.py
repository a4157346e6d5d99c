"""KV bytes and weights of published models, counted from their config.json."""

import pytest

from tracer.analysis import kv
from tracer.errors import TraceError

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8"},
}
GEMMA3_27B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_hidden_layers": 62,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
    },
}
GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "vocab_size": 201088,
    "quantization_config": {"quant_method": "mxfp4"},
}
MIXTRAL = LLAMA_8B | {"num_local_experts": 8, "vocab_size": 32000, "sliding_window": None}
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 48,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "vocab_size": 151936,
}
MPT_7B = {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("config", "attention", "wanted"),
    [
        (LLAMA_8B, "GQA", 128 * 1024),
        (LLAMA_70B, "GQA", 320 * 1024),
        (DEEPSEEK_V3, "MLA", (512 + 64) * 61 * 2),
        (QWEN3_30B, "GQA", 96 * 1024),
        (MPT_7B, "MHA", 512 * 1024),
        (MPT_7B | {"attn_config": {"kv_n_heads": 1}}, "MQA", 16 * 1024),
    ],
)
def test_kv_bytes_per_token_of_published_shapes(config, attention: str, wanted: int) -> None:
    found = kv.kv_bytes_per_token(config)

    assert (found.attention, found.per_token, found.per_token_beyond_window) == (attention, wanted, wanted)
    assert found.window_tokens is None


@pytest.mark.parametrize(
    ("config", "billions", "bytes_each"),
    [(LLAMA_8B, 8.03, 2), (LLAMA_70B, 70.6, 2), (MIXTRAL, 46.7, 2), (QWEN3_30B, 30.5, 2), (GEMMA3_27B, 27.0, 2)]
    + [(DEEPSEEK_V3, 671, 1), (MPT_7B, 6.65, 2)],
)
def test_weights_are_those_of_the_model_card_within_two_percent(config, billions: float, bytes_each: int) -> None:
    assert kv.weight_bytes(config) == pytest.approx(billions * 1e9 * bytes_each, rel=0.02)


def test_mxfp4_quantizes_experts_only() -> None:
    assert kv.weight_bytes(GPT_OSS_120B) == pytest.approx(65.3e9, rel=0.02)  # size of its files: 60.8 GiB


def test_layers_with_a_sliding_window_keep_old_tokens_nowhere_else() -> None:
    gemma, oss = kv.kv_bytes_per_token(GEMMA3_27B), kv.kv_bytes_per_token(GPT_OSS_120B)

    assert (gemma.full_layers, gemma.window_layers, gemma.window_tokens) == (10, 52, 1024)
    assert gemma.per_token == 62 * 2 * 16 * 128 * 2 and gemma.per_token_beyond_window == 10 * 2 * 16 * 128 * 2
    assert oss.per_token_beyond_window == oss.per_token / 2 == 18 * 2 * 8 * 64 * 2


@pytest.mark.parametrize(
    ("extra", "full", "window"),
    [
        ({"sliding_window": 4096}, 0, 32),  # Mistral 7B v0.1
        ({"sliding_window": 4096, "model_type": "gemma2"}, 16, 16),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28}, 28, 4),
        ({"full_attention_interval": 4}, 8, 0),  # three of four layers are linear
        ({"layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8}, 8, 0),
    ],
)
def test_older_files_say_by_a_rule_which_layers_have_a_window(extra, full: int, window: int) -> None:
    found = kv.kv_bytes_per_token(LLAMA_8B | extra)

    assert (found.full_layers, found.window_layers) == (full, window)


def test_an_8_bit_kv_cache_is_half() -> None:
    quantized = LLAMA_8B | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}

    assert kv.kv_bytes_per_token(quantized).per_token == kv.kv_bytes_per_token(LLAMA_8B, 1).per_token == 64 * 1024


def test_what_one_h100_holds_beside_an_8b_model() -> None:
    one = kv.budget(kv.gpu_named("h100-80g"), 1, LLAMA_8B)

    assert one.kv_tokens == pytest.approx((72e9 - 16.06e9) / 131072, rel=0.001)  # 0.43 M
    assert kv.replicas_for(16_000_000, one) == 38
    assert kv.replicas_for(0, one) == 1


def test_tensor_parallelism_shares_out_heads_but_copies_a_latent_and_single_heads() -> None:
    h200 = kv.gpu_named("h200")

    assert kv.budget(h200, 2, LLAMA_8B).kv_tokens > 2 * kv.budget(h200, 1, LLAMA_8B).kv_tokens  # weights are shared too
    assert kv.budget(h200, 16, LLAMA_8B).kv_tokens < 1.1 * kv.budget(h200, 8, LLAMA_8B).kv_tokens  # 8 KV heads
    deepseek = kv.budget(h200, 8, DEEPSEEK_V3)
    assert deepseek.kv_tokens == pytest.approx((141e9 * 0.9 - 671e9 / 8) / 70272, rel=0.05)


def test_a_window_is_an_upper_bound_of_its_own() -> None:
    one = kv.budget(kv.gpu_named("h100-80g"), 1, GEMMA3_27B)

    assert one.kv_tokens_beyond_window == pytest.approx(6.2 * one.kv_tokens, rel=0.001)


def test_without_a_model_weights_take_nothing() -> None:
    one = kv.budget_without_model(kv.gpu_named("a10"), 2, 1e6)

    assert one.kv_tokens == 43_200 and one.weight_bytes is None


def test_faults_are_named() -> None:
    with pytest.raises(TraceError, match="does not fit"):
        kv.budget(kv.gpu_named("a10"), 1, LLAMA_70B)
    with pytest.raises(TraceError, match="no such GPU.*h100-80g"):
        kv.gpu_named("h1000")
    with pytest.raises(TraceError, match="no model configuration"):
        kv.kv_bytes_per_token({"architectures": []})
    with pytest.raises(TraceError, match="tensor parallelism"):
        kv.budget(kv.gpu_named("a10"), 0, LLAMA_8B)
