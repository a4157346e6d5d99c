"""What the simulated GPU and model are. Every number names its public source.

Step time is a roofline: the larger of bytes moved / (bandwidth * efficiency) and FLOPs / (peak * efficiency), plus a
fixed overhead. Bytes: all weights once a step, and the KV of every context. FLOPs: 2 per parameter and token, plus
attention. See Williams et al., "Roofline" (CACM 2009); Pope et al., "Efficiently Scaling Transformer Inference" (2022).
"""

from dataclasses import dataclass, replace
from typing import Literal

from tracer.errors import TraceError

Eviction = Literal["lru", "fifo", "priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    parameters: float
    layers: int
    query_width: int  # attention heads * head size
    kv_bytes_per_token: int  # 2 (K and V) * layers * KV heads * head size * 2 bytes
    max_model_len: int

    @property
    def weight_bytes(self) -> float:
        return 2 * self.parameters  # 16-bit weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: float  # dense 16-bit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What a step costs, in seconds: of the step itself, a computed token, a token of context, a query-key pair."""

    overhead_s: float
    token_overhead_s: float = 0.0  # per computed token, beside what is overlapped: host work, all-reduce
    weights_s: float  # reading what every token goes through
    expert_weights_s: float = 0.0  # reading all experts
    expert_share: float = 0.0  # of the experts, that one token goes through
    context_token_s: float
    token_s: float
    pair_s: float

    def step_s(self, tokens: int, context_tokens: int, attended_tokens: int) -> float:
        """overhead + per-token overhead + max(memory time, compute time): a roofline, each side at its sustained rate.

        memory time = weights + experts touched + KV of every context; n tokens touch 1 - (1 - share) ** n of the experts,
        if they choose independently. compute time = tokens * FLOPs of a token + pairs * FLOPs of a pair. Williams and
        others, "Roofline" (CACM 2009); Pope and others, arXiv 2211.05102; Yuan and others, "LLM Inference Unveiled",
        arXiv 2402.16363.
        """
        memory_s = self.weights_s + context_tokens * self.context_token_s
        if self.expert_weights_s:
            memory_s += self.expert_weights_s * (1 - (1 - self.expert_share) ** tokens)
        compute_s = tokens * self.token_s + attended_tokens * self.pair_s
        return max(memory_s, compute_s) + self.overhead_s + tokens * self.token_overhead_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """`kv_tokens` None: what GPU memory leaves after the weights. Efficiencies are shares of the data-sheet peak."""

    model: Model
    gpu: Gpu
    bandwidth_efficiency: float
    flops_efficiency: float
    overhead_s: float
    memory_utilization: float = 0.9  # vLLM's gpu_memory_utilization
    max_num_batched_tokens: int = 8192  # vLLM's default for an online server on a large GPU
    max_num_seqs: int = 256
    block_tokens: int = 16
    kv_tokens: int | None = None
    gpus: int = 1  # of one replica
    request_overhead_s: float = 0.0  # before the scheduler sees a request: HTTP, tokenizing
    given_costs: StepCosts | None = None  # instead of those of model, GPU and efficiencies
    chunked_prefill: bool = True  # False: a prompt is computed in one step, as vLLM does without enable_chunked_prefill
    eviction: Eviction = "lru"  # see eviction.py
    protected_tokens: int = 0  # priority: of the beginning of every request
    offload_tokens: int = 0  # host memory for evicted blocks, of one replica
    # PCIe 4.0 x16: 16 GT/s * 16 lanes * 128/130 / 8 = 31.5 GB/s (PCI-SIG); 80 % of it, as large copies reach.
    offload_bytes_per_s: float = 25e9  # host to one GPU

    @property
    def kv_blocks(self) -> int:
        if self.kv_tokens is not None:
            return self.kv_tokens // self.block_tokens
        left = self.gpu.memory_bytes * self.memory_utilization - self.model.weight_bytes
        return int(left // (self.model.kv_bytes_per_token * self.block_tokens))

    @property
    def offload_blocks(self) -> int:
        return self.offload_tokens // self.block_tokens

    @property
    def load_block_s(self) -> float:
        """From host memory; every GPU of a replica loads its own part."""
        return self.block_tokens * self.model.kv_bytes_per_token / (self.offload_bytes_per_s * self.gpus)

    def step_s(self, tokens: int, context_tokens: int, attended_tokens: int) -> float:
        """Seconds of one step.

        tokens: computed in this step, over all requests. context_tokens: KV read, the sum of the context lengths.
        attended_tokens: query-key pairs, the sum over computed tokens of their context length.
        """
        return self.costs.step_s(tokens, context_tokens, attended_tokens)

    @property
    def costs(self) -> StepCosts:
        if self.given_costs is not None:
            return self.given_costs
        model, gpu = self.model, self.gpu
        bytes_per_s, flops_per_s = gpu.bytes_per_s * self.bandwidth_efficiency, gpu.flops_per_s * self.flops_efficiency
        return StepCosts(
            overhead_s=self.overhead_s,
            weights_s=model.weight_bytes / bytes_per_s,
            context_token_s=model.kv_bytes_per_token / bytes_per_s,
            token_s=2 * model.parameters / flops_per_s,
            # QK^T and the weighted sum of V: 2 FLOPs each per pair, layer and query channel.
            pair_s=4 * model.layers * model.query_width / flops_per_s,
        )


# NVIDIA H100 SXM data sheet: 80 GB, 3.35 TB/s, 989 TFLOPS BF16 without sparsity.
_H100 = Gpu(name="H100-SXM-80GB", memory_bytes=80e9, bytes_per_s=3.35e12, flops_per_s=989e12)
# NVIDIA A100 data sheet, 40 GB: 1,555 GB/s, 312 TFLOPS BF16.
_A100 = Gpu(name="A100-40GB", memory_bytes=40e9, bytes_per_s=1.555e12, flops_per_s=312e12)
# NVIDIA A10 data sheet: 24 GB, 600 GB/s, 125 TFLOPS BF16.
_A10 = Gpu(name="A10-24GB", memory_bytes=24e9, bytes_per_s=600e9, flops_per_s=125e12)
# NVIDIA L4 data sheet: 24 GB, 300 GB/s, 121 TFLOPS BF16 (242 with sparsity).
_L4 = Gpu(name="L4-24GB", memory_bytes=24e9, bytes_per_s=300e9, flops_per_s=121e12)

# meta-llama/Llama-3.1-8B config.json: 32 layers, 32 heads and 8 KV heads of 128, 131072 positions; model card: 8.03 B.
_LLAMA_8B = Model(
    name="llama-3.1-8b",
    parameters=8.03e9,
    layers=32,
    query_width=32 * 128,
    kv_bytes_per_token=2 * 32 * 8 * 128 * 2,  # 128 KiB
    max_model_len=131072,
)
# meta-llama/Llama-3.2-1B config.json: 16 layers, 32 heads and 8 KV heads of 64, 131072 positions; model card: 1.24 B.
_LLAMA_1B = Model(
    name="llama-3.2-1b",
    parameters=1.24e9,
    layers=16,
    query_width=32 * 64,
    kv_bytes_per_token=2 * 16 * 8 * 64 * 2,  # 32 KiB
    max_model_len=131072,
)
# mosaicml/mpt-7b config.json: 32 layers, 32 heads of 128 with as many KV heads, 2048 positions; model card: 6.7 B
# (6.65 B counted from the shapes).
_MPT_7B = Model(
    name="mpt-7b",
    parameters=6.65e9,
    layers=32,
    query_width=32 * 128,
    kv_bytes_per_token=2 * 32 * 32 * 128 * 2,  # 512 KiB
    max_model_len=2048,
)

PRESETS: dict[str, Preset] = {
    # The ideal roofline, nothing lost: 16.06 GB / 3.35 TB/s = 4.8 ms a step for one user; 64 users of ~680 tokens read
    # 5.7 GB of KV more, 6.5 ms, so 64 / (6.5 / 4.8) = 47 times the throughput.
    "h100-llama3-8b": Preset(model=_LLAMA_8B, gpu=_H100, bandwidth_efficiency=1.0, flops_efficiency=1.0, overhead_s=0.0),
    # Small model on a large GPU, so that a laptop can replay long prompts. Efficiencies: 60-70 % of either peak is what
    # tuned kernels reach (Databricks, "LLM Inference Performance Engineering: Best Practices", model bandwidth
    # utilization); overhead: the host side of a step, about 1 ms before overlap (vLLM blog, "vLLM V1", January 2025).
    "h100-llama3-1b": Preset(model=_LLAMA_1B, gpu=_H100, bandwidth_efficiency=0.7, flops_efficiency=0.6, overhead_s=1e-3),
    # Databricks, "LLM Inference Performance Engineering: Best Practices" (2023), MPT-7B, 512 in, 64 out, one A100-40GB:
    # 0.9 requests/s alone, 12.5 at batch 64, 1 -> 4 users 3.5x, 32 -> 64 only about 20 % more. They report 50-60 % of
    # the bandwidth in use; the two efficiencies here are fitted within that range to their throughputs.
    "a100-mpt-7b": Preset(model=_MPT_7B, gpu=_A100, bandwidth_efficiency=0.53, flops_efficiency=0.55, overhead_s=0.5e-3),
    # Same article: on one A10 the same load runs out of memory at batch 32.
    "a10-mpt-7b": Preset(model=_MPT_7B, gpu=_A10, bandwidth_efficiency=0.6, flops_efficiency=0.55, overhead_s=0.5e-3),
    # For the demo: a small GPU whose KV memory is cut to 60,000 tokens, so that the chat traffic one laptop can send
    # fills it. Efficiencies as for h100-llama3-1b.
    "laptop-demo": Preset(
        model=_LLAMA_1B,
        gpu=_L4,
        bandwidth_efficiency=0.7,
        flops_efficiency=0.6,
        overhead_s=1e-3,
        max_num_batched_tokens=2048,  # vLLM's default on a small GPU
        kv_tokens=60_000,
    ),
}


EVICTIONS: tuple[Eviction, ...] = ("lru", "fifo", "priority")


def preset_named(name: str) -> Preset:
    if name not in PRESETS:
        raise TraceError("no such preset", seen=repr(name), wanted=" | ".join(PRESETS))
    return PRESETS[name]


def changed(preset: Preset, **wishes: object) -> Preset:
    """The preset with other limits, those that are not None. Raises TraceError for one that cannot run.

    Without chunked prefill and told no budget, a step takes the longest prompt, as in vLLM's `SchedulerConfig`.
    """
    if wishes.get("chunked_prefill") is False and wishes.get("max_num_batched_tokens") is None:
        wishes["max_num_batched_tokens"] = max(preset.max_num_batched_tokens, preset.model.max_model_len)
    preset = replace(preset, **{key: value for key, value in wishes.items() if value is not None})  # type: ignore[arg-type]
    at_least_one = {
        "block_tokens": preset.block_tokens,
        "max_num_seqs": preset.max_num_seqs,
        "max_num_batched_tokens": preset.max_num_batched_tokens,
    }
    for key, value in at_least_one.items():
        _require_one(key, value)
    _require_one("KV blocks (kv_tokens / block size)", preset.kv_blocks)
    _check_variant(preset)
    return preset


def _check_variant(preset: Preset) -> None:
    wrong = "the simulated server cannot run so"
    if preset.eviction not in EVICTIONS:
        raise TraceError(wrong, seen=f"eviction = {preset.eviction}", wanted=" | ".join(EVICTIONS))
    if (preset.eviction == "priority") != (preset.protected_tokens > 0):
        raise TraceError(
            wrong,
            seen=f"eviction = {preset.eviction} with protected_tokens = {preset.protected_tokens}",
            wanted="priority with the tokens at the beginning of each request that outlive others, or neither",
        )
    if preset.offload_tokens < 0 or preset.offload_bytes_per_s <= 0:
        raise TraceError(wrong, seen="host memory or its bandwidth below 0", wanted="more than 0")
    if preset.offload_tokens and not preset.model.kv_bytes_per_token:
        raise TraceError(
            "bytes of KV are not known of this engine, so no transfer can be timed",
            seen=f"{preset.model.name} with offload_tokens = {preset.offload_tokens}",
            wanted="a preset or GPU:MODEL",
        )


def _require_one(key: str, value: int) -> None:
    if value < 1:
        raise TraceError("the simulated server cannot run so", seen=f"{key} = {value}", wanted="at least 1")
