"""Reads the `config.json` fields specific to each `model_type`. Also lists default values and unmodelled parts of layers."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fgoffload.errors import ConfigError
from fgoffload.planner.model.config_fields import (
    find_count,
    find_flag,
    find_layers,
    find_number,
    find_window_layers,
    get_count,
    make_experts,
    make_local_experts,
    make_router,
    make_window,
)
from fgoffload.planner.model.layer_shape import RouterShape
from fgoffload.planner.model.model_shape import LatentAttention

_LINEAR_CHUNK_TOKENS = 64
"""Tokens that linear attention processes at once. Source: chunk_gated_delta_rule of flash-linear-attention."""


_BIASED_ROUTER = RouterShape(score_function="sigmoid", has_expert_bias=True)


def _read_gemma3(document: Mapping[str, Any]) -> dict[str, Any]:
    layers, every = get_count(document, "num_hidden_layers"), get_count(document, "sliding_window_pattern")
    windows = find_window_layers(document) or [number % every != 0 for number in range(1, layers + 1)]
    has_bias = find_flag(document, "attention_bias")
    return {"has_qk_norm": True, "has_qkv_bias": has_bias, **make_window(document, windows)}


def _read_llama4(document: Mapping[str, Any]) -> dict[str, Any]:
    layers, step = range(get_count(document, "num_hidden_layers")), get_count(document, "interleave_moe_layer_step")
    channels = get_count(document, "intermediate_size")
    named = None if document.get("moe_layers") is None else find_layers(document, "moe_layers", layers)
    chunk = find_count(document, "attention_chunk_size", least=2)
    every = find_count(document, "no_rope_layer_interval", least=1) or 4
    full = [number % every == 0 for number in range(1, len(layers) + 1)]
    return {
        "ffn_hidden_size": get_count(document, "intermediate_size_mlp"),
        # Norms of queries and keys have no weights here, and save the same tensors as other norms.
        "has_qk_norm": find_flag(document, "use_qk_norm", default=True),
        "has_qkv_bias": find_flag(document, "attention_bias"),
        "experts": make_experts(
            document, "num_local_experts", channels=channels, shared=channels, router=RouterShape(score_function="sigmoid")
        ),
        "moe_layers": tuple(number in named if named is not None else (number + 1) % step == 0 for number in layers),
        # On average, a query sees half as many earlier tokens in a chunk as in a window of the same size.
        **({} if chunk is None else {"window_tokens": chunk // 2, "window_layers": tuple(not one for one in full)}),
    }


def _read_qwen3_next(document: Mapping[str, Any]) -> dict[str, Any]:
    layers, every = get_count(document, "num_hidden_layers"), get_count(document, "full_attention_interval")
    linear = find_window_layers(document) or [number % every != 0 for number in range(1, layers + 1)]
    fields = _read_qwen3_moe({**document, "layer_types": None})
    shared = get_count(document, "shared_expert_intermediate_size")
    experts = dataclasses.replace(fields["experts"], shared_ffn_hidden_size=shared)
    return {
        **fields,
        "experts": experts,
        "rotary_percent": 0.25,
        "window_tokens": _LINEAR_CHUNK_TOKENS,
        "window_layers": tuple(linear),
    }


def _read_glm4_moe(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_read_deepseek_experts(document, _BIASED_ROUTER),
        "has_qk_norm": find_flag(document, "use_qk_norm"),
        "has_qkv_bias": find_flag(document, "attention_bias"),
        "rotary_percent": 0.5,
        "mtp_num_layers": find_number(document, "num_nextn_predict_layers"),
    }


def _read_minimax_m2(document: Mapping[str, Any]) -> dict[str, Any]:
    channels = get_count(document, "intermediate_size")
    rotary = get_count(document, "rotary_dim") / get_count(document, "head_dim")
    return {
        "has_qk_norm": True,
        "rotary_percent": rotary,
        "experts": make_experts(document, "num_local_experts", channels=channels, router=_BIASED_ROUTER),
    }


def _read_deepseek_v4(document: Mapping[str, Any]) -> dict[str, Any]:
    channels = get_count(document, "moe_intermediate_size")
    shared = channels * find_number(document, "n_shared_experts")
    return {
        "ffn_hidden_size": 0,
        "has_qk_norm": True,
        "experts": make_experts(document, "n_routed_experts", channels=channels, shared=shared, router=_BIASED_ROUTER),
        "mtp_num_layers": find_number(document, "num_nextn_predict_layers"),
        "window_tokens": get_count(document, "sliding_window") + get_count(document, "index_topk"),
    }


def _read_llama(document: Mapping[str, Any]) -> dict[str, Any]:
    # Models with biases in attention only are rare. We count their biases as query, key and value biases.
    has_bias, has_mlp_bias = (find_flag(document, name) for name in ("attention_bias", "mlp_bias"))
    if has_mlp_bias and not has_bias:
        raise ConfigError("mlp_bias True with attention_bias False is not supported. Set both, or set mlp_bias to false.")
    return {"has_linear_bias": has_mlp_bias, "has_qkv_bias": has_bias}


def _read_qwen2(document: Mapping[str, Any]) -> dict[str, Any]:
    return {"has_qkv_bias": True, **_find_upper_window(document)}


def _read_qwen3(document: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = find_flag(document, "attention_bias")
    return {"has_qk_norm": True, "has_qkv_bias": has_bias, **_find_upper_window(document)}


def _read_qwen3_moe(document: Mapping[str, Any]) -> dict[str, Any]:
    step, layers = get_count(document, "decoder_sparse_step"), range(get_count(document, "num_hidden_layers"))
    dense = find_layers(document, "mlp_only_layers", layers)
    return {
        **_read_qwen3(document),
        "experts": make_experts(
            document, "num_experts", channels=get_count(document, "moe_intermediate_size"), router=make_router(document)
        ),
        "moe_layers": tuple(number not in dense and (number + 1) % step == 0 for number in layers),
    }


def _read_mixtral(document: Mapping[str, Any]) -> dict[str, Any]:
    layers = get_count(document, "num_hidden_layers")
    return {"experts": make_local_experts(document), **make_window(document, [True] * layers)}


def _read_deepseek_v2(document: Mapping[str, Any]) -> dict[str, Any]:
    return {**_read_latent(document), **_read_deepseek_experts(document, make_router(document))}


def _read_deepseek_v3(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_read_latent(document),
        **_read_deepseek_experts(document, _BIASED_ROUTER),
        "mtp_num_layers": find_number(document, "num_nextn_predict_layers"),
    }


def _read_latent(document: Mapping[str, Any]) -> dict[str, Any]:
    latent = LatentAttention(
        q_lora_rank=find_count(document, "q_lora_rank", least=1),
        kv_lora_rank=get_count(document, "kv_lora_rank"),
        qk_head_dim=get_count(document, "qk_nope_head_dim"),
        qk_pos_emb_head_dim=get_count(document, "qk_rope_head_dim"),
        v_head_dim=get_count(document, "v_head_dim"),
    )
    heads = get_count(document, "num_attention_heads")
    if (groups := find_count(document, "num_key_value_heads", least=1)) not in (None, heads):
        raise ConfigError(
            f"num_key_value_heads {groups} differs from num_attention_heads {heads}, but latent attention has no groups. "
            f"Use {heads}."
        )
    return {"latent": latent, "kv_channels": 0, "num_query_groups": heads, "has_qk_norm": True}


def _read_deepseek_experts(document: Mapping[str, Any], router: RouterShape) -> dict[str, Any]:
    channels, shared = get_count(document, "moe_intermediate_size"), find_number(document, "n_shared_experts")
    first, step = find_number(document, "first_k_dense_replace"), get_count(document, "moe_layer_freq")
    layers = range(get_count(document, "num_hidden_layers"))
    if first > len(layers):
        raise ConfigError(f"first_k_dense_replace {first} is above num_hidden_layers {len(layers)}. Use {len(layers)} or less.")
    experts = make_experts(document, "n_routed_experts", channels=channels, shared=shared * channels, router=router)
    return {"experts": experts, "moe_layers": tuple(number >= first and number % step == 0 for number in layers)}


def _read_gpt_oss(document: Mapping[str, Any]) -> dict[str, Any]:
    layers = get_count(document, "num_hidden_layers")
    return {
        "has_linear_bias": True,
        "has_quick_gate": True,
        "has_attention_sinks": True,
        "has_fused_rotary": False,  # Megatron's fused kernel does not support the scale factor of YaRN
        "experts": make_local_experts(document),
        **make_window(document, find_window_layers(document) or [number % 2 == 0 for number in range(layers)]),
    }


def _find_upper_window(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sliding window of Qwen models, which starts at layer `max_window_layers`."""
    if not find_flag(document, "use_sliding_window"):
        return {}
    layers, first = get_count(document, "num_hidden_layers"), find_number(document, "max_window_layers")
    return make_window(document, find_window_layers(document) or [number >= first for number in range(layers)])


NOT_MODELLED: Mapping[str, str] = {
    "gemma3": "the norms after attention and MLP are not modelled; a layer saves two more hidden states than predicted.",
    "llama4": "chunked attention is modelled as a window of half a chunk, so times are too low for sequences up to a chunk.",
    "qwen3_next": "linear attention is modelled as attention in a window of 64 tokens, without its convolution, wider "
    "projections and output gate; predicted weights, saved bytes and attention times are too low.",
    "deepseek_v32": "the sparse attention indexer is not modelled: attention times are too high beyond "
    "index_topk tokens, and predicted memory is slightly too low.",
    "deepseek_v4": "low-rank projections of query and output are modelled as full ones, so predicted attention times and "
    "weights are too high; hyper-connections, compressor and indexer are left out, so predicted saved bytes are too low.",
}
"""Unmodelled parts of layers by `model_type`, and the direction of the error."""

_ANY: Mapping[str, Any] = {"tie_word_embeddings": False, "head_dim": None, "layer_types": None, "hidden_act": "silu"}

_QWEN: Mapping[str, Any] = {**_ANY, "use_sliding_window": False, "sliding_window": 4096, "attention_bias": False}

_DEEPSEEK: Mapping[str, Any] = {
    **_ANY,
    "head_dim": 64,  # unused: latent attention has its own sizes
    "num_key_value_heads": None,
    "q_lora_rank": 1536,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
}

_DEEPSEEK_V3: Mapping[str, Any] = {**_DEEPSEEK, "n_shared_experts": 1, "first_k_dense_replace": 3}

_QWEN_MOE: Mapping[str, Any] = {
    **_QWEN,
    "num_key_value_heads": 4,
    "max_window_layers": 0,  # transformers lacks this field: a window applies to all layers
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
}

KINDS: Mapping[str, tuple[Callable[[Mapping[str, Any]], dict[str, Any]], Mapping[str, Any]]] = {
    "llama": (_read_llama, {**_ANY, "num_key_value_heads": None, "attention_bias": False, "mlp_bias": False}),
    "qwen2": (_read_qwen2, {**_QWEN, "num_key_value_heads": 32, "max_window_layers": 28}),
    "qwen3": (_read_qwen3, {**_QWEN, "num_key_value_heads": 32, "max_window_layers": 28, "head_dim": 128}),
    "qwen3_moe": (_read_qwen3_moe, _QWEN_MOE),
    "qwen3_next": (
        _read_qwen3_next,
        {
            **_QWEN_MOE,
            "head_dim": 256,
            "num_key_value_heads": 2,
            "norm_topk_prob": True,
            "full_attention_interval": 4,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "mixtral": (_read_mixtral, {**_ANY, "num_key_value_heads": 8, "sliding_window": None}),
    "deepseek_v2": (
        _read_deepseek_v2,
        {**_DEEPSEEK, "n_shared_experts": 2, "first_k_dense_replace": 0, "norm_topk_prob": False},
    ),
    "deepseek_v3": (_read_deepseek_v3, _DEEPSEEK_V3),
    "kimi_k2": (_read_deepseek_v3, _DEEPSEEK_V3),
    "deepseek_v32": (_read_deepseek_v3, _DEEPSEEK_V3),
    "deepseek_v4": (
        _read_deepseek_v4,
        {
            **_ANY,
            "intermediate_size": 1,  # the model has no dense MLP
            "num_key_value_heads": 1,
            "head_dim": 512,
            "n_shared_experts": 1,
            "num_nextn_predict_layers": 1,
            "sliding_window": 128,
            "index_topk": 512,
        },
    ),
    "glm4_moe": (
        _read_glm4_moe,
        {
            **_ANY,
            "num_key_value_heads": 8,
            "attention_bias": False,
            "use_qk_norm": False,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
        },
    ),
    "minimax_m2": (_read_minimax_m2, {**_ANY, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64}),
    "llama4": (
        _read_llama4,
        {
            **_ANY,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_chunk_size": 8192,
            "interleave_moe_layer_step": 1,
            "num_experts_per_tok": 1,
        },
    ),
    "gemma3": (
        _read_gemma3,
        {
            **_ANY,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
    ),
    "gpt_oss": (_read_gpt_oss, {**_ANY, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}),
}
"""Maps each `model_type` to a reader of its own fields, and defaults for missing fields. None acts like null in a file:
`num_key_value_heads` is then the number of heads, `head_dim` is `hidden_size` / heads, and other fields have no effect."""
