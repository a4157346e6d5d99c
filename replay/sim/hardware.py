"""Simulated engines of any GPU and model from first principles. One table of GPUs, one of models, and the arithmetic. Pure.

Memory and its source are in tracer/analysis/kv.py, as are the sizes of weights and KV; here is how fast they are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from replay.sim.presets import Gpu, Model, Preset, StepCosts
from tracer.analysis import kv
from tracer.errors import TraceError

type Dtype = Literal["bf16", "fp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Peaks as data sheets print them, dense: half of what they print "with sparsity"."""

    memory: str  # name in kv.GPUS
    bytes_per_s: float
    flops_16_bit: float
    flops_8_bit: float | None  # FP8; None: no such unit, 8-bit weights are computed with at 16 bits
    link_bytes_per_s: float  # to the other GPUs of a replica, one direction: half of what data sheets print
    source: str


RATES: dict[str, Rates] = {
    "a10": Rates(
        memory="a10",
        bytes_per_s=600e9,
        flops_16_bit=125e12,
        flops_8_bit=None,
        link_bytes_per_s=32e9,
        source="NVIDIA A10 data sheet: 600 GB/s, 125 TFLOPS BF16 (250 sparse), PCIe Gen4 64 GB/s",
    ),
    "a100-40g": Rates(
        memory="a100-40g",
        bytes_per_s=1.555e12,
        flops_16_bit=312e12,
        flops_8_bit=None,
        link_bytes_per_s=300e9,
        source="NVIDIA A100 data sheet, 40 GB SXM: 1,555 GB/s, 312 TFLOPS BF16 (624 sparse), NVLink 600 GB/s",
    ),
    "a100": Rates(
        memory="a100-80g",
        bytes_per_s=2.039e12,
        flops_16_bit=312e12,
        flops_8_bit=None,
        link_bytes_per_s=300e9,
        source="NVIDIA A100 data sheet, 80 GB SXM: 2,039 GB/s, 312 TFLOPS BF16 (624 sparse), NVLink 600 GB/s",
    ),
    "l40s": Rates(
        memory="l40s",
        bytes_per_s=864e9,
        flops_16_bit=362.05e12,
        flops_8_bit=733e12,
        link_bytes_per_s=32e9,
        source="NVIDIA L40S data sheet: 864 GB/s, 362.05 TFLOPS BF16, 733 FP8 (733 and 1,466 sparse), PCIe Gen4 64 GB/s",
    ),
    "h100": Rates(
        memory="h100-80g",
        bytes_per_s=3.35e12,
        flops_16_bit=989e12,
        flops_8_bit=1979e12,
        link_bytes_per_s=450e9,
        source="NVIDIA H100 data sheet, SXM: 3.35 TB/s; 1,979 TFLOPS BF16 and 3,958 FP8, both sparse; NVLink 900 GB/s",
    ),
    "h200": Rates(
        memory="h200",
        bytes_per_s=4.8e12,
        flops_16_bit=989e12,
        flops_8_bit=1979e12,
        link_bytes_per_s=450e9,
        source="NVIDIA H200 data sheet, SXM: 4.8 TB/s; 1,979 TFLOPS BF16 and 3,958 FP8, both sparse; NVLink 900 GB/s",
    ),
    "b200": Rates(
        memory="b200",
        bytes_per_s=8e12,
        flops_16_bit=2.25e15,
        flops_8_bit=4.5e15,
        link_bytes_per_s=900e9,
        source="NVIDIA DGX B200 data sheet, of 8 GPUs: 64 TB/s, 72 PFLOPS FP8 sparse, NVLink 14.4 TB/s; BF16 is half of FP8",
    ),
    "mi300x": Rates(
        memory="mi300x",
        bytes_per_s=5.3e12,
        flops_16_bit=1307.4e12,
        flops_8_bit=2614.9e12,
        link_bytes_per_s=448e9,
        source="AMD Instinct MI300X data sheet: 5.3 TB/s, 1,307.4 TFLOPS BF16, 2,614.9 FP8; 7 Infinity Fabric links of 128 GB/s",
    ),
}


def _llama(hidden: int, inner: int, layers: int, heads: int, ties: bool = False) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": ties,
    }


def _qwen3(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        **more,
    }


# The config.json of each name's repository on Hugging Face, as far as it matters here.
MODELS: dict[str, dict[str, Any]] = {
    "llama3-1b": _llama(2048, 8192, 16, 32, ties=True),  # meta-llama/Llama-3.2-1B
    "llama3-8b": _llama(4096, 14336, 32, 32),  # meta-llama/Llama-3.1-8B
    "llama3-70b": _llama(8192, 28672, 80, 64),  # meta-llama/Llama-3.1-70B
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),  # Qwen/Qwen3-8B
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),  # Qwen/Qwen3-32B
    "qwen3-30b-a3b": _qwen3(  # Qwen/Qwen3-30B-A3B
        2048,
        6144,
        48,
        32,
        model_type="qwen3_moe",
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        decoder_sparse_step=1,
    ),
}

# 60-70 % of either peak is what tuned kernels reach (Databricks, "LLM Inference Performance Engineering: Best Practices",
# 2023, model bandwidth utilization); the host side of a step takes about 1 ms before overlap (vLLM blog, "vLLM V1", 2025).
BANDWIDTH_EFFICIENCY, FLOPS_EFFICIENCY, OVERHEAD_S = 0.7, 0.6, 1e-3
# vLLM's defaults for an online server: 2,048 tokens a step and 256 sequences below 70 GiB and on any A100, else 8,192 and
# 1,024 (vllm/engine/arg_utils.py, get_batch_defaults).
SMALL_GPU_BYTES = 70 * 2**30


def engine_of(
    gpu: str, config: Mapping[str, Any], model: str, *, gpus: int = 1, dtype: Dtype | None = None, kv_dtype: Dtype | None = None
) -> Preset:
    """One replica of `gpus` GPUs under tensor parallelism. dtype of weights: None, as the checkpoint says.

    Read in each step: all matrices but the input table, of which a step needs a few rows. FLOPs: 2 per element that a
    token goes through (the output projection is counted for prompt tokens too, a few percent too much).
    Between GPUs: two all-reduces a layer (Shoeybi and others, "Megatron-LM", arXiv 1909.08053), each moving
    2 (n - 1) / n of tokens * hidden * 2 bytes over a GPU's link (ring); their latency is part of the overhead.
    """
    rates = rates_named(gpu)
    config = _stored_as(config, dtype)
    kv_element = None if kv_dtype is None else 1.0 if kv_dtype == "fp8" else 2.0
    memory = kv.gpu_named(rates.memory)
    budget = kv.budget(memory, gpus, config, dtype_bytes=kv_element)
    counts, kv_bytes, bits = kv.elements(config), kv.kv_bytes_per_token(config, kv_element), kv.layer_bits(config)
    full_layers, query_width, hidden = kv.attention_width(config)
    layers = len(kv.layer_kinds(config))
    share = counts.experts_per_token / counts.expert_count if counts.expert_count else 0.0
    flops = (rates.flops_8_bit or rates.flops_16_bit) if bits == 8 else rates.flops_16_bit
    bytes_per_s, flops_per_s = rates.bytes_per_s * BANDWIDTH_EFFICIENCY * gpus, flops * FLOPS_EFFICIENCY * gpus
    whole_weights = kv.weight_bytes(config)
    expert_bytes = counts.experts * bits / 8
    context_bytes = kv_bytes.per_token_beyond_window or kv_bytes.per_token
    copies = _copies(kv_bytes.per_token, budget, gpus)
    costs = StepCosts(
        overhead_s=OVERHEAD_S,
        token_overhead_s=2 * layers * 2 * (gpus - 1) / gpus * hidden * 2 / rates.link_bytes_per_s,
        weights_s=(whole_weights - expert_bytes - 2 * (counts.embeddings - counts.output)) / bytes_per_s,
        expert_weights_s=expert_bytes / bytes_per_s,
        expert_share=share,
        context_token_s=context_bytes * copies / bytes_per_s,
        token_s=2 * (counts.dense + counts.output + counts.experts * share) / flops_per_s,
        pair_s=4 * full_layers * query_width / flops_per_s,
    )
    is_small = memory.memory_bytes < SMALL_GPU_BYTES or gpu.startswith("a100")
    return Preset(
        model=Model(
            name=model,
            parameters=counts.dense + counts.experts + counts.embeddings,
            layers=layers,
            query_width=query_width,
            kv_bytes_per_token=round(kv_bytes.per_token),
            max_model_len=int(kv.text_config(config).get("max_position_embeddings") or 131072),
        ),
        gpu=Gpu(name=gpu, memory_bytes=memory.memory_bytes, bytes_per_s=rates.bytes_per_s, flops_per_s=flops),
        bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
        flops_efficiency=FLOPS_EFFICIENCY,
        overhead_s=OVERHEAD_S,
        max_num_batched_tokens=2048 if is_small else 8192,
        max_num_seqs=256 if is_small else 1024,
        kv_tokens=budget.kv_tokens,
        gpus=gpus,
        given_costs=costs,
    )


def _copies(per_token: float, budget: kv.Budget, gpus: int) -> float:
    """How often the GPUs of a replica hold the same KV: more than once where there are fewer KV heads than GPUs."""
    assert budget.weight_bytes is not None
    left = budget.memory_bytes * budget.utilization - budget.weight_bytes / gpus
    return max(1.0, left * gpus / (budget.kv_tokens * per_token)) if budget.kv_tokens else 1.0


def _stored_as(config: Mapping[str, Any], dtype: Dtype | None) -> Mapping[str, Any]:
    match dtype:
        case None:
            return config
        case "fp8":
            wanted = {"quantization_config": {"quant_method": "fp8"}}
        case "bf16":
            wanted = {"quantization_config": {}}
        case _:
            raise TraceError("no such type of weights", seen=repr(dtype), wanted="bf16 or fp8")
    return {**kv.text_config(config), **wanted}


def rates_named(name: str) -> Rates:
    if name not in RATES:
        raise TraceError("no such GPU", seen=repr(name), wanted=" | ".join(RATES))
    return RATES[name]


def model_named(name: str) -> dict[str, Any]:
    if name not in MODELS:
        raise TraceError(
            "no such model", seen=repr(name), wanted=" | ".join(MODELS), next_step="Or give --model-config config.json"
        )
    return MODELS[name]
