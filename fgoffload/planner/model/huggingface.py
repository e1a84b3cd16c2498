"""Reads model shapes from Hugging Face's `config.json`.

    model = read_huggingface_config(Path("Qwen3-30B-A3B/config.json"))

A `config.json` describes a model, not its training. We assume sequences of `seq_length` tokens, bf16 activations, no dropout
and no load-balancing loss. We ignore the quantization of a checkpoint, and read only the language model of a multimodal model.

Size fields are required. Other missing fields get the defaults of the transformers library (`KINDS`). If layers have unmodelled
parts, a warning lists them and the direction of the error (`NOT_MODELLED`).

Source: the configuration classes of transformers 5.24. They lack Kimi K2's `moe_layer_freq` and `num_nextn_predict_layers`,
which are defined in configuration_deepseek.py in the Hugging Face repositories of Kimi K2.
"""

import difflib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fgoffload.errors import ConfigError
from fgoffload.planner.model.config_fields import find_count, find_flag, get_count
from fgoffload.planner.model.config_kinds import KINDS, NOT_MODELLED
from fgoffload.planner.model.model_shape import ModelShape, check_head_channels
from fgoffload.text_files import parse_json, read_text_file

logger = logging.getLogger(__name__)

DEFAULT_SEQ_LENGTH = 4096
"""Sequence length in most pre-training runs. `max_position_embeddings` is for inference and often far larger."""

_FIELD_NAMES: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "mtp_num_layers": "num_nextn_predict_layers",
}
"""Maps ModelShape fields to their usual names in `config.json`, where these names differ."""

_ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh")
"""Supported `hidden_act` values: gated activations that run as one kernel and save the same tensors."""


def read_huggingface_config(path: Path, *, seq_length: int = DEFAULT_SEQ_LENGTH) -> ModelShape:
    """Return the model of the `config.json` at `path` or in the folder `path`.

    Raises:
        ConfigError: The file cannot be read, lacks a field, or has an unsupported value.
    """
    if path.is_dir():
        path /= "config.json"
    document = _load(path)
    if isinstance(text := document.get("text_config"), dict):  # the language model of a multimodal model
        document = {"model_type": f"{document.get('model_type')}_text", **text}
    kind = str(document.get("model_type", "")).removesuffix("_text")
    if kind not in KINDS:
        if "sites" in document:
            raise ConfigError(f"{path} is a plan, not a model. Use it with `fgoffload run SCRIPT.py --offload-plan {path}`.")
        nearest = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.75)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        names = {**_FIELD_NAMES, **dict.fromkeys(("hidden_size", "num_attention_heads", "vocab_size"))}
        sizes = {field.replace("_", "-"): document.get(name or field) for field, name in names.items()}
        flags = " ".join(f"--{flag} {size}" for flag, size in sizes.items() if type(size) is int)
        raise ConfigError(
            f"{path}: model_type {document.get('model_type')!r} is not supported.{hint} Supported: {', '.join(KINDS)}. For any "
            f"other model, write an argument file such as arguments/llama3_8b.sh{flags and f'. This config sets {flags}'}."
        )
    name = path.absolute().parent.name if path.name == "config.json" else path.stem
    read_kind, defaults = KINDS[kind]
    document = {**defaults, **document}
    try:
        fields = {**_read_common(document), **read_kind(document)}
        _check_activation(document)
        model = ModelShape(name=name, seq_length=seq_length, **fields)
        check_head_channels(model)
    except ConfigError as error:
        raise ConfigError(f"{path}: {name_config_fields(str(error))}") from error
    if kind in NOT_MODELLED:
        logger.warning("%s: %s", path, NOT_MODELLED[kind])
    return model


def name_config_fields(message: str) -> str:
    """Return `message` with names of ModelShape fields replaced by those of `config.json`."""
    return re.sub(rf"\b({'|'.join(_FIELD_NAMES)})\b", lambda match: _FIELD_NAMES[match[0]], message)


def _load(path: Path) -> dict[str, Any]:
    text = read_text_file(path, name=str(path), fix="Use the config.json of a model.")
    document = parse_json(text, name=str(path), fix="Use the config.json of a model.")
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is not a JSON object. Use the config.json of a model.")
    return document


def _read_common(document: Mapping[str, Any]) -> dict[str, Any]:
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
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is missing. Add head_dim."
        )
    return hidden // heads


def _check_activation(document: Mapping[str, Any]) -> None:
    if (activation := document.get("hidden_activation", document["hidden_act"])) not in _ACTIVATIONS:
        raise ConfigError(
            f"hidden_act {activation!r} is not supported: bytes and times assume a gated silu. "
            "Use silu, or plan from an argument file, whose flags set the activation."
        )
