"""Reads Hugging Face models: the `config.json` beside their weights.

    model = read_huggingface_config(Path("Qwen3-30B-A3B/config.json"))

A `config.json` describes a model, not its training. We assume sequences of `seq_length` tokens, activations in bf16, no
dropout and no load-balancing loss of experts. The quantization of a checkpoint does not matter. For a model with images, we
read the language model.

The sizes of a model are required. Other missing fields get the default of the transformers library (`KINDS`). If layers have
parts that are not modelled, one warning names them and the direction of the error (`NOT_MODELLED`).

Source: the configuration classes of transformers 5.24; configuration_deepseek.py beside the models for Kimi K2, which
transformers lacks, and for `moe_layer_freq` and `num_nextn_predict_layers`, which its classes lack.
"""

import difflib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fgoffload.errors import ConfigError
from fgoffload.planner.model.config_fields import find_count, find_flag, find_window_layers, get_count
from fgoffload.planner.model.config_kinds import KINDS, NOT_MODELLED
from fgoffload.planner.model.model_shape import ModelShape, check_head_channels
from fgoffload.text_files import parse_json, read_text_file

logger = logging.getLogger(__name__)

DEFAULT_SEQ_LENGTH = 4096
"""Tokens of a sequence in most pre-training. `max_position_embeddings`, which is for inference, is often far larger."""

_FIELD_NAMES: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "mtp_num_layers": "num_nextn_predict_layers",
}
"""ModelShape fields to their `config.json` names, if these differ and all kinds of models share them."""

_ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh")
"""Supported `hidden_act` values. All these models multiply the activation with half of the first linear's output. Either gate
is one kernel, and both save the same tensors."""

_KINDS_WITHOUT_WINDOWS = frozenset({"llama", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe"})
"""Models whose `layer_types` may only have full attention."""

_FLAGS: Mapping[str, str] = {
    "num_hidden_layers": "--num-layers",
    "n_layer": "--num-layers",
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "n_embd": "--hidden-size",
    "d_model": "--hidden-size",
    "intermediate_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "n_head": "--num-attention-heads",
    "num_key_value_heads": "--group-query-attention --num-query-groups",
    "head_dim": "--kv-channels",
    "vocab_size": "--vocab-size",
    "num_experts": "--num-experts",
    "n_routed_experts": "--num-experts",
    "num_local_experts": "--num-experts",
    "num_experts_per_tok": "--moe-router-topk",
    "moe_intermediate_size": "--moe-ffn-hidden-size",
}
"""Megatron's flags for fields that many kinds of models have."""

_NEEDED_FLAGS = ("--num-layers", "--hidden-size", "--num-attention-heads", "--vocab-size")


def read_huggingface_config(path: Path, *, seq_length: int = DEFAULT_SEQ_LENGTH) -> ModelShape:
    """Return the model that a `config.json`, or the one in the folder `path`, describes, trained on sequences of `seq_length`.

    Raises:
        ConfigError: The file cannot be read, lacks a field, or has an unknown kind of model.
    """
    if path.is_dir():
        path /= "config.json"
    document = _load(path)
    if isinstance(text := document.get("text_config"), dict):  # the language model of a model with images
        document = {"model_type": f"{document.get('model_type')}_text", **text}
    kind = str(document.get("model_type", "")).removesuffix("_text")
    if kind not in KINDS:
        raise ConfigError(f"{path}: {_describe_kind(document)}")
    name = path.absolute().parent.name if path.name == "config.json" else path.stem
    read_kind, defaults = KINDS[kind]
    document = {**defaults, **document}
    try:
        fields = {**_read_common(document), **read_kind(document)}
        _check_layer_types(document, kind)
        _check_activation(document)
        model = ModelShape(name=name, seq_length=seq_length, **fields)
        check_head_channels(model)
    except ConfigError as error:
        raise ConfigError(f"{path}: {name_config_fields(str(error))}") from error
    if kind in NOT_MODELLED:
        logger.warning("%s: not modelled: %s", path, NOT_MODELLED[kind])
    return model


def name_config_fields(message: str) -> str:
    """Return `message` with ModelShape fields replaced by their `config.json` names."""
    return re.sub(rf"\b({'|'.join(_FIELD_NAMES)})\b", lambda match: _FIELD_NAMES[match[0]], message)


def _load(path: Path) -> dict[str, Any]:
    text = read_text_file(path, name=str(path), fix="Give the config.json of a model.")
    document = parse_json(text, name=str(path), fix="Give the config.json of a model.")
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds no JSON object. Give the config.json of a model.")
    return document


def _describe_kind(document: Mapping[str, Any]) -> str:
    """Return why the kind of model is unknown, and an equivalent argument file."""
    kind = document.get("model_type")
    problem = "model_type is missing" if kind is None else f"model_type {kind!r} is not known here"
    nearest = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.75) if isinstance(kind, str) else []
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    flags: dict[str, int] = {}
    for name, flag in _FLAGS.items():
        if type(document.get(name)) is int:
            flags.setdefault(flag, document[name])
    understood = " ".join(f"{flag} {value}" for flag, value in flags.items())
    lacking = [flag for flag in _NEEDED_FLAGS if flag not in flags]
    return (
        f"{problem}.{hint} Known: {', '.join(KINDS)}. For any other model write an argument file, as in arguments/, and give "
        f"that. What this file says is MODEL_ARGS=( {understood} --seq-length 4096 --micro-batch-size 1 ); add "
        f"{', '.join([*lacking, 'the flags of its other parts'])}."
    )


def _read_common(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ModelShape fields that all kinds of models share."""
    heads = get_count(document, "num_attention_heads")
    return {
        "num_layers": get_count(document, "num_hidden_layers"),
        "hidden_size": get_count(document, "hidden_size"),
        "ffn_hidden_size": get_count(document, "intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": find_count(document, "num_key_value_heads", least=1) or heads,
        "kv_channels": find_count(document, "head_dim", least=1) or _divide_hidden_size(document),
        "vocab_size": get_count(document, "vocab_size"),
        "has_tied_embeddings": find_flag(document, "tie_word_embeddings"),
    }


def _divide_hidden_size(document: Mapping[str, Any]) -> int:
    hidden, heads = get_count(document, "hidden_size"), get_count(document, "num_attention_heads")
    if hidden % heads:
        raise ConfigError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is missing. Add it."
        )
    return hidden // heads


def _check_layer_types(document: Mapping[str, Any], kind: str) -> None:
    """Reject windows in `layer_types` of kinds of models that have none."""
    if kind in _KINDS_WITHOUT_WINDOWS and any(find_window_layers(document) or ()):
        raise ConfigError(f"layer_types has more than full_attention, which is not known of {kind}. Give full_attention alone.")


def _check_activation(document: Mapping[str, Any]) -> None:
    if (activation := document.get("hidden_activation", document["hidden_act"])) not in _ACTIVATIONS:
        raise ConfigError(
            f"hidden_act {activation!r} is not supported: bytes and times assume a gated silu. "
            "Give silu, or plan from an argument file, whose flags say the activation."
        )
