"""Models as Hugging Face describes them: the `config.json` beside their weights.

    model = read_huggingface_config(Path("Qwen3-30B-A3B/config.json"))

A `config.json` says what a model is, not how it is trained: sequences are of `seq_length` tokens, activations in bf16, without
dropout, and no loss balances the experts. How a checkpoint is quantized does not matter.

The sizes of a model have to be there. Where a file leaves another field out, the default of the transformers library stands
(`_DEFAULTS`).

Source: the configuration classes of the transformers library, main branch of 2026; for Kimi K2, which it does not have, and for
`moe_layer_freq` and `num_nextn_predict_layers`, which its classes do not have, configuration_deepseek.py beside the models.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import LARGEST_SIZE, check_count
from fgoffload.planner.model.layer_shape import DEFAULT_IMBALANCE, ExpertsShape, RouterShape
from fgoffload.planner.model.model_shape import MOST_LAYERS, LatentAttention, ModelShape, check_head_channels
from fgoffload.text_files import parse_json, read_text_file

DEFAULT_SEQ_LENGTH = 4096
"""Tokens. What most pre-training uses; `max_position_embeddings`, which is for inference, is often far more."""

_FIELD_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "num_layers": "num_hidden_layers",
        "ffn_hidden_size": "intermediate_size",
        "num_query_groups": "num_key_value_heads",
        "kv_channels": "head_dim",
        "mtp_num_layers": "num_nextn_predict_layers",
    }
)
"""By field of a ModelShape, what a `config.json` calls it, where that is another name and the same in all kinds of models."""

_LAYER_COUNTS = ("num_hidden_layers", "num_nextn_predict_layers")
"""Fields that count layers, of which lists are made."""

_ACTIVATIONS = ("silu", "swish")
"""What `hidden_act` may be: two names of what all these models multiply a half of the first linear's output with."""


def read_huggingface_config(path: Path, *, seq_length: int = DEFAULT_SEQ_LENGTH) -> ModelShape:
    """Return the model that the file at `path` describes.

    Args:
        path: A `config.json`, or the folder that it is in.
        seq_length: Tokens of a sequence in training.

    Raises:
        ConfigError: The file cannot be read, lacks a field, or is of a kind of model that is not known here.
    """
    if path.is_dir():
        path /= "config.json"
    document = _load(path)
    kind = document.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        raise ConfigError(f"{path}: {_describe_kind(kind)}")
    name = path.absolute().parent.name if path.name == "config.json" else path.stem
    document = {**_DEFAULTS[kind], **document}
    try:
        fields = {**_read_common(document), **_READERS[kind](document)}
        _check_layer_types(document, kind)
        _check_activation(document)
        model = ModelShape(name=name, seq_length=seq_length, **fields)
        check_head_channels(model)
    except ConfigError as error:
        raise ConfigError(f"{path}: {name_config_fields(str(error))}") from error
    return model


def name_config_fields(message: str) -> str:
    """Return `message` with the name that a `config.json` has in place of each field of a ModelShape."""
    return re.sub(rf"\b({'|'.join(_FIELD_NAMES)})\b", lambda match: _FIELD_NAMES[match[0]], message)


def _load(path: Path) -> dict[str, Any]:
    text = read_text_file(path, name=str(path), fix="Give the config.json of a model.")
    document = parse_json(text, name=str(path), fix="Give the config.json of a model.")
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds no JSON object. Give the config.json of a model.")
    return document


def _describe_kind(kind: object) -> str:
    known = f"Give one of: {', '.join(_READERS)}."
    if not isinstance(kind, str):
        return f"model_type is {'missing' if kind is None else repr(kind)}. {known}"
    nearest = difflib.get_close_matches(kind, _READERS, n=1, cutoff=0.75)
    hint = f"Did you mean {nearest[0]!r}? " if nearest else ""
    return f"model_type {kind!r} is not known here. {hint}{known}"


def _read_common(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all kinds of models write in the same way."""
    heads = _get_count(document, "num_attention_heads")
    return {
        "num_layers": _get_count(document, "num_hidden_layers"),
        "hidden_size": _get_count(document, "hidden_size"),
        "ffn_hidden_size": _get_count(document, "intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": _find_count(document, "num_key_value_heads", least=1) or heads,
        "kv_channels": _find_count(document, "head_dim", least=1) or _divide_hidden_size(document),
        "vocab_size": _get_count(document, "vocab_size"),
        "has_tied_embeddings": _find_flag(document, "tie_word_embeddings", default=False),
    }


def _divide_hidden_size(document: Mapping[str, Any]) -> int:
    hidden, heads = _get_count(document, "hidden_size"), _get_count(document, "num_attention_heads")
    if hidden % heads:
        raise ConfigError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is missing. Add it."
        )
    return hidden // heads


def _read_llama(document: Mapping[str, Any]) -> dict[str, Any]:
    # Biases of attention alone are rare, and counted as those of query, key and value.
    has_bias, has_mlp_bias = (_find_flag(document, name, default=False) for name in ("attention_bias", "mlp_bias"))
    if has_mlp_bias and not has_bias:
        raise ConfigError(
            "mlp_bias True with attention_bias False: biases of MLPs alone are not known here. Give both or none."
        )
    return {"has_linear_bias": has_mlp_bias, "has_qkv_bias": has_bias}


def _read_qwen2(document: Mapping[str, Any]) -> dict[str, Any]:
    return {"has_qkv_bias": True, **_find_upper_window(document)}


def _read_qwen3(document: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = _find_flag(document, "attention_bias", default=False)
    return {"has_qk_norm": True, "has_qkv_bias": has_bias, **_find_upper_window(document)}


def _read_qwen3_moe(document: Mapping[str, Any]) -> dict[str, Any]:
    step, layers = _get_count(document, "decoder_sparse_step"), range(_get_count(document, "num_hidden_layers"))
    dense = _find_layers(document, "mlp_only_layers", layers)
    return {
        **_read_qwen3(document),
        "experts": ExpertsShape(
            num_experts=_get_count(document, "num_experts"),
            topk=_get_topk(document, "num_experts"),
            ffn_hidden_size=_get_count(document, "moe_intermediate_size"),
            imbalance=DEFAULT_IMBALANCE,
            router=_make_router(document),
        ),
        "moe_layers": tuple(number not in dense and (number + 1) % step == 0 for number in layers),
    }


def _read_mixtral(document: Mapping[str, Any]) -> dict[str, Any]:
    layers = _get_count(document, "num_hidden_layers")
    return {"experts": _make_local_experts(document), **_make_window(document, [True] * layers)}


def _read_deepseek_v2(document: Mapping[str, Any]) -> dict[str, Any]:
    return {**_read_latent(document), **_read_deepseek_experts(document, _make_router(document))}


def _read_deepseek_v3(document: Mapping[str, Any]) -> dict[str, Any]:
    router = RouterShape(score_function="sigmoid", has_expert_bias=True)
    return {
        **_read_latent(document),
        **_read_deepseek_experts(document, router),
        "mtp_num_layers": _find_count(document, "num_nextn_predict_layers", least=0) or 0,
    }


def _read_latent(document: Mapping[str, Any]) -> dict[str, Any]:
    latent = LatentAttention(
        q_lora_rank=_find_count(document, "q_lora_rank", least=1),
        kv_lora_rank=_get_count(document, "kv_lora_rank"),
        qk_head_dim=_get_count(document, "qk_nope_head_dim"),
        qk_pos_emb_head_dim=_get_count(document, "qk_rope_head_dim"),
        v_head_dim=_get_count(document, "v_head_dim"),
    )
    heads = _get_count(document, "num_attention_heads")
    if (groups := _find_count(document, "num_key_value_heads", least=1)) not in (None, heads):
        raise ConfigError(
            f"num_key_value_heads {groups} differs from num_attention_heads {heads}, and latent attention has no groups. "
            f"Give {heads}."
        )
    return {"latent": latent, "kv_channels": 0, "num_query_groups": heads, "has_qk_norm": True}


def _read_deepseek_experts(document: Mapping[str, Any], router: RouterShape) -> dict[str, Any]:
    channels, shared = _get_count(document, "moe_intermediate_size"), _find_count(document, "n_shared_experts", least=0) or 0
    first, step = _find_count(document, "first_k_dense_replace", least=0) or 0, _get_count(document, "moe_layer_freq")
    layers = range(_get_count(document, "num_hidden_layers"))
    if first > len(layers):
        raise ConfigError(
            f"first_k_dense_replace {first} is above num_hidden_layers {len(layers)}. Give {len(layers)} or less."
        )
    experts = ExpertsShape(
        num_experts=_get_count(document, "n_routed_experts"),
        topk=_get_topk(document, "n_routed_experts"),
        ffn_hidden_size=channels,
        shared_ffn_hidden_size=shared * channels,
        imbalance=DEFAULT_IMBALANCE,
        router=router,
    )
    return {"experts": experts, "moe_layers": tuple(number >= first and number % step == 0 for number in layers)}


def _read_gpt_oss(document: Mapping[str, Any]) -> dict[str, Any]:
    layers = _get_count(document, "num_hidden_layers")
    return {
        "has_linear_bias": True,
        "has_quick_gate": True,
        "has_attention_sinks": True,
        "experts": _make_local_experts(document),
        **_make_window(document, _find_window_layers(document) or [number % 2 == 0 for number in range(layers)]),
    }


def _make_local_experts(document: Mapping[str, Any]) -> ExpertsShape:
    """Return the experts of models that have no dense MLP, and name theirs as one."""
    return ExpertsShape(
        num_experts=_get_count(document, "num_local_experts"),
        topk=_get_topk(document, "num_local_experts"),
        ffn_hidden_size=_get_count(document, "intermediate_size"),
        imbalance=DEFAULT_IMBALANCE,
    )


def _get_topk(document: Mapping[str, Any], experts: str) -> int:
    """Return the experts of a token, of those that the field called `experts` has."""
    topk, most = _get_count(document, "num_experts_per_tok"), _get_count(document, experts)
    if topk > most:
        raise ConfigError(f"num_experts_per_tok {topk} is above {experts} {most}. Give {most} or less.")
    return topk


def _make_router(document: Mapping[str, Any]) -> RouterShape:
    """Return a router with a softmax over all experts, or over the chosen ones: that is what dividing by their sum comes to."""
    return RouterShape(has_pre_softmax=not _find_flag(document, "norm_topk_prob", default=False))


def _find_upper_window(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window of Qwen's models: in the layers from `max_window_layers` on, where they use it at all."""
    if not _find_flag(document, "use_sliding_window", default=False):
        return {}
    layers, first = _get_count(document, "num_hidden_layers"), _find_count(document, "max_window_layers", least=0) or 0
    return _make_window(document, _find_window_layers(document) or [number >= first for number in range(layers)])


def _find_window_layers(document: Mapping[str, Any]) -> list[bool] | None:
    """Return for each layer whether it has a window, or None where the file does not say it layer by layer."""
    kinds = document.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or not kinds:
        raise ConfigError(
            f"layer_types {kinds!r} is no list. Give the attention of each layer, as in {list(_ATTENTION_KINDS)}."
        )
    for kind in kinds:
        if kind not in _ATTENTION_KINDS:
            raise ConfigError(f"layer_types has {kind!r}, which is not known here. Give one of: {', '.join(_ATTENTION_KINDS)}.")
    if len(kinds) != (layers := _get_count(document, "num_hidden_layers")):
        raise ConfigError(f"layer_types has {len(kinds)} entries for num_hidden_layers {layers}. Give one for each layer.")
    return [kind == _WINDOW for kind in kinds]


def _check_layer_types(document: Mapping[str, Any], kind: str) -> None:
    """Refuse windows in layers of a kind of model that is not read as having any."""
    if kind not in _KINDS_WITH_WINDOWS and any(_find_window_layers(document) or ()):
        raise ConfigError(f"layer_types has {_WINDOW!r}, and a window of {kind} is not known here. Give full_attention alone.")


def _check_activation(document: Mapping[str, Any]) -> None:
    if (activation := document["hidden_act"]) not in _ACTIVATIONS:
        raise ConfigError(
            f"hidden_act {activation!r} is not known here: bytes and times are those of a gated silu. "
            "Give silu, or plan from an argument file, whose flags say the activation."
        )


def _make_window(document: Mapping[str, Any], layers: list[bool]) -> dict[str, Any]:
    # A token alone is no window that Megatron has.
    tokens = _find_count(document, "sliding_window", least=2)
    # A query is one of the tokens that its window counts, and not one of those before it.
    return {} if tokens is None else {"window_tokens": tokens - 1, "window_layers": tuple(layers)}


def _get_count(document: Mapping[str, Any], name: str) -> int:
    count = _find_count(document, name, least=1)
    if count is None:
        raise ConfigError(f"{name} is missing. Add it, as the maker of the model has it.")
    return count


def _find_count(document: Mapping[str, Any], name: str, *, least: int) -> int | None:
    """Return the number called `name`, or None where there is none or it is null."""
    count = document.get(name)
    if count is None:
        return None
    # By type: JSON's true is an int in Python.
    if type(count) is not int:
        raise ConfigError(f"{name} {count!r} is no whole number. Give one from {least} on.")
    # Here too, by the name in the file: several sizes of experts have one name in a ModelShape.
    check_count(name, count, least=least, most=MOST_LAYERS if name in _LAYER_COUNTS else LARGEST_SIZE)
    return count


def _find_layers(document: Mapping[str, Any], name: str, layers: range) -> frozenset[int]:
    numbers = document.get(name)
    if numbers is None:
        return frozenset()
    if not isinstance(numbers, list) or any(type(number) is not int for number in numbers):
        raise ConfigError(f"{name} {numbers!r} is no list of layers. Give one, as in [0, 1].")
    for number in numbers:
        if number not in layers:
            raise ConfigError(f"{name} has {number}, and layers are from 0 to {len(layers) - 1}. Give some of those.")
    return frozenset(numbers)


def _find_flag(document: Mapping[str, Any], name: str, *, default: bool) -> bool:
    flag = document.get(name, default)
    if not isinstance(flag, bool):
        raise ConfigError(f"{name} {flag!r} is neither true nor false. Give one of them.")
    return flag


_WINDOW = "sliding_attention"
_ATTENTION_KINDS = (_WINDOW, "full_attention")
"""Kinds of attention that `layer_types` may name."""

_KINDS_WITH_WINDOWS = frozenset({"qwen2", "qwen3", "gpt_oss"})
"""Models whose windows `layer_types` gives."""

_ANY: Mapping[str, Any] = {"tie_word_embeddings": False, "head_dim": None, "layer_types": None, "hidden_act": "silu"}
_QWEN: Mapping[str, Any] = {**_ANY, "use_sliding_window": False, "sliding_window": 4096, "attention_bias": False}
_DEEPSEEK: Mapping[str, Any] = {
    **_ANY,
    "head_dim": 64,  # of its rotary part, which counts for nothing: latent attention names its own sizes
    "num_key_value_heads": None,
    "q_lora_rank": 1536,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
}
_DEEPSEEK_V3: Mapping[str, Any] = {**_DEEPSEEK, "n_shared_experts": 1, "first_k_dense_replace": 3}

_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {**_ANY, "num_key_value_heads": None, "attention_bias": False, "mlp_bias": False},
        "qwen2": {**_QWEN, "num_key_value_heads": 32, "max_window_layers": 28},
        "qwen3": {**_QWEN, "num_key_value_heads": 32, "max_window_layers": 28, "head_dim": 128},
        "qwen3_moe": {
            **_QWEN,
            "num_key_value_heads": 4,
            "max_window_layers": 0,  # its class has none: where a window is used, all layers have it
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "norm_topk_prob": False,
        },
        "mixtral": {**_ANY, "num_key_value_heads": 8, "sliding_window": None},
        "deepseek_v2": {**_DEEPSEEK, "n_shared_experts": 2, "first_k_dense_replace": 0, "norm_topk_prob": False},
        "deepseek_v3": _DEEPSEEK_V3,
        "kimi_k2": _DEEPSEEK_V3,
        "gpt_oss": {**_ANY, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
    }
)
"""By `model_type`, what a field is that a file leaves out. Of None, as of null in a file: `num_key_value_heads` are as many as
heads, `head_dim` is `hidden_size` over heads, `sliding_window` and `q_lora_rank` are not used, and `layer_types` and
`mlp_only_layers` say nothing."""

_READERS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = MappingProxyType(
    {
        "llama": _read_llama,
        "qwen2": _read_qwen2,
        "qwen3": _read_qwen3,
        "qwen3_moe": _read_qwen3_moe,
        "mixtral": _read_mixtral,
        "deepseek_v2": _read_deepseek_v2,
        "deepseek_v3": _read_deepseek_v3,
        "kimi_k2": _read_deepseek_v3,  # the same layers, and the same names for their sizes
        "gpt_oss": _read_gpt_oss,
    }
)
"""By `model_type`, what reads the fields of such a model that not all kinds have."""
