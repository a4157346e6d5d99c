"""Bytes of KV per token and of weights from a model's config.json, and what a GPU has left for KV. Pure.

Formulas are of the model's shape alone; activations, CUDA graphs and paging waste are not in them, so a server reports
somewhat fewer KV tokens at start. Where a server runs already, its own figure is the better one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tracer.analysis.memory import ten_gb_more
from tracer.analysis.reuse import HitCurve
from tracer.errors import TraceError

Config = Mapping[str, Any]
LayerKind = Literal["full", "window", "none"]


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    memory_bytes: float  # decimal GB, as data sheets print it; the card holds a few percent more
    source: str


GPUS: dict[str, Gpu] = {
    one.name: one
    for one in (
        Gpu(name="a10", memory_bytes=24e9, source="NVIDIA A10 data sheet: 24 GB GDDR6"),
        Gpu(name="a100-40g", memory_bytes=40e9, source="NVIDIA A100 data sheet: 40 GB HBM2"),
        Gpu(name="a100-80g", memory_bytes=80e9, source="NVIDIA A100 data sheet: 80 GB HBM2e"),
        Gpu(name="l40s", memory_bytes=48e9, source="NVIDIA L40S data sheet: 48 GB GDDR6"),
        Gpu(name="h100-80g", memory_bytes=80e9, source="NVIDIA H100 data sheet, SXM: 80 GB HBM3"),
        Gpu(name="h200", memory_bytes=141e9, source="NVIDIA H200 data sheet: 141 GB HBM3e"),
        Gpu(name="b200", memory_bytes=180e9, source="NVIDIA DGX B200 data sheet: 1,440 GB over 8 GPUs"),
        Gpu(name="mi300x", memory_bytes=192e9, source="AMD Instinct MI300X data sheet: 192 GB HBM3"),
    )
}


class KvBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of KV that one token costs over all layers and GPUs, without copies."""

    per_token: float  # inside the sliding window, or where there is none
    per_token_beyond_window: float  # of tokens older than the window: only layers with full attention keep them
    window_tokens: int | None
    attention: Literal["MHA", "MQA", "GQA", "MLA"]
    full_layers: int
    window_layers: int


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    gpu: str
    tensor_parallel: int
    utilization: float
    weight_bytes: float | None  # None: no model configuration was given
    kv_bytes_per_token: float
    kv_tokens: int  # every layer keeps every token
    kv_tokens_beyond_window: int  # an upper bound for models with sliding windows: only full layers keep them
    memory_bytes: float
    source: str


def kv_bytes_per_token(config: Config, dtype_bytes: float | None = None) -> KvBytes:
    """2 * layers * KV heads * head size * bytes of an element (K and V).

    MHA has as many KV heads as heads, MQA one (Shazeer 2019), GQA some between (Ainslie and others 2023:
    `num_key_value_heads`). MLA keeps one latent and one rotary key a layer and token, not two per head:
    (kv_lora_rank + qk_rope_head_dim) * layers * bytes (DeepSeek-V2 2024, section 2.1.4). Layers with a sliding window
    (`layer_types`, `sliding_window`) need the last window only; linear-attention and state-space layers keep a state of
    fixed size, which is not counted. `dtype_bytes` None: 2, or 1 if the checkpoint sets an 8-bit `kv_cache_scheme`.
    """
    shape = _Shape.of(config)
    kinds = layer_kinds(config)
    full, window = kinds.count("full"), kinds.count("window")
    element = dtype_bytes or _kv_element_bytes(shape.config)
    a_layer = shape.kv_width * element
    return KvBytes(
        per_token=(full + window) * a_layer,
        per_token_beyond_window=full * a_layer,
        window_tokens=_window(shape.config) if window else None,
        attention=shape.attention,
        full_layers=full,
        window_layers=window,
    )


def _kv_element_bytes(config: Config) -> float:
    scheme = (config.get("quantization_config") or {}).get("kv_cache_scheme") or {}
    return float(scheme.get("num_bits", 16)) / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    config: Config  # of the text model
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    latent: int | None  # MLA: elements per token and layer

    @classmethod
    def of(cls, config: Config) -> "_Shape":
        text = text_config(config)
        hidden = _integer(text, "hidden_size", "n_embd", "d_model")
        heads = _integer(text, "num_attention_heads", "n_head", "n_heads")
        kv_heads = text.get("num_key_value_heads") or text.get("num_kv_heads") or _kv_heads_elsewhere(text) or heads
        latent = text.get("kv_lora_rank")
        return cls(
            config=text,
            layers=_integer(text, "num_hidden_layers", "n_layer", "n_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=int(kv_heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            latent=int(latent) + int(text.get("qk_rope_head_dim") or 0) if latent else None,
        )

    @property
    def kv_width(self) -> int:
        """Elements of KV per token and layer."""
        return self.latent if self.latent is not None else 2 * self.kv_heads * self.head_dim

    @property
    def attention(self) -> Literal["MHA", "MQA", "GQA", "MLA"]:
        if self.latent is not None:
            return "MLA"
        return "MHA" if self.kv_heads == self.heads else "MQA" if self.kv_heads == 1 else "GQA"


def text_config(config: Config) -> Config:
    """The language model's part of a multimodal configuration; what only the outer part says is kept."""
    inner = config.get("text_config") or config.get("llm_config") or config.get("language_config")
    if not isinstance(inner, Mapping):
        return config
    outer = {name: config[name] for name in ("quantization_config", "tie_word_embeddings") if name in config}
    return {**outer, **inner}


def _kv_heads_elsewhere(config: Config) -> int | None:
    """Falcon: `multi_query`; MPT: `attn_config.kv_n_heads`."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    found = (config.get("attn_config") or {}).get("kv_n_heads")
    return int(found) if found else None


def _integer(config: Config, *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise TraceError(
        "this is no model configuration",
        seen=", ".join(sorted(map(str, config))[:8]) or "nothing",
        wanted=names[0],
        next_step="Give the config.json of a language model from its Hugging Face folder",
    )


_WINDOW_TYPES = {"sliding_attention", "chunked_attention", "local_attention", "sliding"}
_STATE_TYPES = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "moe", "mlp", "-"}  # no KV of their own


def layer_kinds(config: Config) -> list[LayerKind]:
    """What each layer keeps of old tokens.

    `layer_types` says it in newer files; older ones by a rule: Gemma 3 every `sliding_window_pattern`-th layer is full,
    Gemma 2 every second one, Qwen 2 the first `max_window_layers`, if `use_sliding_window`; Mistral 7B none is.
    """
    text = text_config(config)
    layers = _integer(text, "num_hidden_layers", "n_layer", "n_layers")
    types = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(types, list):
        return [_kind(str(one)) for one in types[:layers]]
    if (every := text.get("full_attention_interval")) or (every := text.get("attn_layer_period")):  # Qwen3-Next; Jamba
        offset = int(text.get("attn_layer_offset", int(every) - 1))
        return ["full" if k % int(every) == offset else "none" for k in range(layers)]
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return ["full"] * layers
    if text.get("use_sliding_window"):
        first = int(text.get("max_window_layers", 0))
        return ["full" if k < first else "window" for k in range(layers)]
    model = str(text.get("model_type", ""))
    pattern = text.get("sliding_window_pattern") or (6 if model.startswith("gemma3") else 2 if model == "gemma2" else None)
    if pattern is None:
        return ["window"] * layers
    return ["window" if (k + 1) % int(pattern) else "full" for k in range(layers)]


def _kind(name: str) -> LayerKind:
    return "window" if name in _WINDOW_TYPES else "none" if name in _STATE_TYPES else "full"


def _window(config: Config) -> int | None:
    found = config.get("sliding_window") or config.get("attention_chunk_size")
    return int(found) if found else None


def weight_bytes(config: Config) -> float:
    """An estimate from the shapes, within a few percent for plain transformers; norms and biases are left out.

    A layer: hidden * (2 * heads + 2 * KV heads) * head size for attention, and matrices * hidden * inner size for each
    MLP or expert, 3 matrices with a gate (Shazeer 2020), else 2. Embeddings: vocabulary * hidden, twice unless tied.
    Quantized checkpoints: `bits` of the layers' elements (mxfp4: 4.25, of experts only); embeddings stay at 16 bits.
    """
    found = elements(config)
    method, bits = _quantized_bits(_Shape.of(config).config)
    if method == "mxfp4":
        return found.experts * bits / 8 + 2 * (found.dense + found.embeddings)
    return (found.experts + found.dense) * bits / 8 + 2 * found.embeddings


class Elements(msgspec.Struct, frozen=True, kw_only=True):
    """Of a model's matrices. A token goes through `experts_per_token` of the `expert_count` experts of each sparse layer."""

    dense: int  # attention, MLPs that every token goes through, routers
    experts: int
    expert_count: int  # 0: no experts
    experts_per_token: int
    output: int  # the output projection, tied or not
    embeddings: int  # output projection and input table; one table where they are tied


def elements(config: Config) -> Elements:
    shape = _Shape.of(config)
    text = shape.config
    experts, dense = _mlp_elements(shape)
    ties = text.get("tie_word_embeddings", str(text.get("model_type", "")).startswith(("gemma", "gpt2")))
    output = int(text.get("vocab_size", 0)) * shape.hidden
    return Elements(
        dense=dense + shape.layers * _attention_elements(shape),
        experts=experts,
        expert_count=int(text.get("num_experts") or text.get("n_routed_experts") or text.get("num_local_experts") or 0),
        experts_per_token=int(text.get("num_experts_per_tok") or text.get("num_experts_per_token") or 1),
        output=output,
        embeddings=output * (1 if ties else 2),
    )


def layer_bits(config: Config) -> float:
    """Bits of an element of the layers' matrices, as the checkpoint stores it."""
    return _quantized_bits(text_config(config))[1]


def attention_width(config: Config) -> tuple[int, int, int]:
    """(layers with full attention, query-key and value channels over all heads of one layer together / 2, hidden size)."""
    shape = _Shape.of(config)
    full = layer_kinds(config).count("full")
    if shape.latent is None:
        return full, shape.heads * shape.head_dim, shape.hidden
    text = shape.config
    nope, rope = int(text.get("qk_nope_head_dim", 128)), int(text.get("qk_rope_head_dim", 64))
    return full, shape.heads * (nope + rope + int(text.get("v_head_dim", 128))) // 2, shape.hidden


def _attention_elements(shape: _Shape) -> int:
    """Linear-attention layers are counted like full ones, which they are close to."""
    text, hidden, heads = shape.config, shape.hidden, shape.heads
    if shape.latent is None:
        return hidden * (2 * heads + 2 * shape.kv_heads) * shape.head_dim
    nope, rope = int(text.get("qk_nope_head_dim", 128)), int(text.get("qk_rope_head_dim", 64))
    value, rank = int(text.get("v_head_dim", 128)), int(text["kv_lora_rank"])
    query_rank = text.get("q_lora_rank")
    query = int(query_rank) * (hidden + heads * (nope + rope)) if query_rank else hidden * heads * (nope + rope)
    return query + hidden * shape.latent + rank * heads * (nope + value) + heads * value * hidden


def _mlp_elements(shape: _Shape) -> tuple[int, int]:
    """Elements of routed experts, and of everything else between the attention layers."""
    text, hidden = shape.config, shape.hidden
    inner = text.get("intermediate_size") or text.get("n_inner") or text.get("ffn_dim") or 4 * hidden
    matrices = 2 if str(text.get("model_type", "")) in _WITHOUT_GATE else 3
    routed = text.get("num_experts") or text.get("n_routed_experts") or text.get("num_local_experts") or 0
    if not routed:
        return 0, shape.layers * matrices * hidden * int(inner)
    expert_inner = int(text.get("moe_intermediate_size") or inner)
    sparse = _sparse_layers(text, shape.layers)
    shared = int(text.get("shared_expert_intermediate_size") or 0) + int(text.get("n_shared_experts") or 0) * expert_inner
    if text.get("model_type") == "llama4_text":
        shared, inner = int(inner), text.get("intermediate_size_mlp", inner)
    of_experts = sparse * int(routed) * matrices * hidden * expert_inner
    rest = (shape.layers - sparse) * matrices * hidden * int(inner) + sparse * hidden * (matrices * shared + int(routed))
    return of_experts, rest


_WITHOUT_GATE = {"gpt2", "gptj", "gpt_neox", "gpt_bigcode", "mpt", "opt", "falcon", "phi", "bloom", "starcoder2", "nemotron"}


def _sparse_layers(config: Config, layers: int) -> int:
    """DeepSeek: all but the first `first_k_dense_replace`; Qwen: every `decoder_sparse_step`-th; Llama 4: every
    `interleave_moe_layer_step`-th; else all."""
    if "first_k_dense_replace" in config:
        return layers - int(config["first_k_dense_replace"])
    step = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1
    return layers // int(step)


def _quantized_bits(config: Config) -> tuple[str, float]:
    """Method and bits per element; float32 checkpoints are served at 16 bits."""
    found = config.get("quantization_config") or {}
    method = str(found.get("quant_method", ""))
    if method == "mxfp4":
        return method, 4.25  # 4 bits, and one 8-bit scale for 32 of them (OCP MX specification 1.0)
    if method in ("fp8", "fbgemm_fp8"):
        return method, 8.0
    if found.get("load_in_4bit"):
        return method, 4.5
    groups = found.get("config_groups")
    if isinstance(groups, Mapping) and groups:  # compressed-tensors
        weights = (next(iter(groups.values())) or {}).get("weights") or {}
        return method, float(weights.get("num_bits") or 16)
    return method, float(found.get("bits") or found.get("w_bit") or 16)


def gpu_named(name: str) -> Gpu:
    if name not in GPUS:
        raise TraceError("no such GPU", seen=repr(name), wanted=" | ".join(GPUS))
    return GPUS[name]


def budget(gpu: Gpu, tp: int, config: Config, utilization: float = 0.9, dtype_bytes: float | None = None) -> Budget:
    """KV tokens that `tp` GPUs with one copy of the model hold: (memory * utilization - weights / tp) / KV of one GPU.

    Each GPU keeps 1 / tp of the KV heads, but at least one; MLA's latent has no heads, so every GPU keeps all of it
    (vLLM documentation, "Parallelism and scaling"). `utilization` as vLLM's gpu_memory_utilization.
    """
    _require_tp(tp)
    shape, kv, weights = _Shape.of(config), kv_bytes_per_token(config, dtype_bytes), weight_bytes(config)
    shared_out = 1.0 if shape.latent is not None else math.ceil(shape.kv_heads / tp) / shape.kv_heads
    left = gpu.memory_bytes * utilization - weights / tp
    if left <= 0:
        raise TraceError(
            "the model does not fit",
            seen=f"weights of {weights / 1e9:.0f} GB over {tp} x {gpu.name}",
            wanted=f"less than {gpu.memory_bytes * utilization * tp / 1e9:.0f} GB",
            next_step="Raise --tp or take a larger --gpu",
        )
    beyond = kv.per_token_beyond_window or kv.per_token
    return Budget(
        gpu=gpu.name,
        tensor_parallel=tp,
        utilization=utilization,
        weight_bytes=weights,
        kv_bytes_per_token=kv.per_token,
        kv_tokens=int(left / (kv.per_token * shared_out)),
        kv_tokens_beyond_window=int(left / (beyond * shared_out)),
        memory_bytes=gpu.memory_bytes,
        source=gpu.source,
    )


def budget_without_model(gpu: Gpu, tp: int, bytes_per_token: float, utilization: float = 0.9) -> Budget:
    """As if weights took nothing: an upper bound."""
    _require_tp(tp)
    tokens = int(gpu.memory_bytes * utilization * tp / bytes_per_token)
    return Budget(
        gpu=gpu.name,
        tensor_parallel=tp,
        utilization=utilization,
        weight_bytes=None,
        kv_bytes_per_token=bytes_per_token,
        kv_tokens=tokens,
        kv_tokens_beyond_window=tokens,
        memory_bytes=gpu.memory_bytes,
        source=gpu.source,
    )


def _require_tp(tp: int) -> None:
    if tp < 1:
        raise TraceError("no such tensor parallelism", seen=f"--tp {tp}", wanted="1 or more")


def replicas_for(tokens: int, one: Budget) -> int:
    """Copies of the model whose KV together holds so many tokens, if the router keeps every prefix in one place."""
    return max(1, math.ceil(tokens / one.kv_tokens)) if one.kv_tokens else 0


class KvFit(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's KV memory against what the trace asks for; answers and prompts of running requests share it."""

    kv: KvBytes | None  # None: the bytes per token were given
    budget: Budget
    hit_rate: float  # of an LRU cache as large as all of the replica's KV
    share_of_possible_hits: float
    gain_of_ten_gb: float  # of hit rate
    tokens_for_90_percent: int
    replicas_for_90_percent: int  # at least: if the router keeps each prefix on one replica


def fit(curve: HitCurve, one: Budget, kv: KvBytes | None = None) -> KvFit:
    units = one.kv_tokens // curve.unit_tokens
    needed = curve.capacity_for(0.9) * curve.unit_tokens
    return KvFit(
        kv=kv,
        budget=one,
        hit_rate=curve.hit_rate_at(units),
        share_of_possible_hits=curve.hits_at(units) / curve.hits_infinite if curve.hits_infinite else 0.0,
        gain_of_ten_gb=ten_gb_more(curve, units, one.kv_bytes_per_token),
        tokens_for_90_percent=needed,
        replicas_for_90_percent=replicas_for(needed, one),
    )
