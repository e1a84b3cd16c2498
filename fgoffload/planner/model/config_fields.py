"""Reads and validates the fields of a `config.json`."""

from collections.abc import Mapping
from typing import Any

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import LARGEST_SIZE, check_count
from fgoffload.planner.model.layer_shape import DEFAULT_IMBALANCE, ExpertsShape, RouterShape
from fgoffload.planner.model.model_shape import MOST_LAYERS

_LAYER_COUNTS = ("num_hidden_layers", "num_nextn_predict_layers")
"""Fields that count layers. Their limit is lower, because the code builds a list of this length."""

_ATTENTION_KINDS = ("sliding_attention", "full_attention", "chunked_attention", "linear_attention")
"""Values allowed in `layer_types`."""


def make_local_experts(document: Mapping[str, Any]) -> ExpertsShape:
    """Return the experts of a model without dense MLPs, whose `intermediate_size` is the width of an expert."""
    return make_experts(document, "num_local_experts", channels=get_count(document, "intermediate_size"), router=RouterShape())


def make_experts(
    document: Mapping[str, Any], experts: str, *, channels: int, router: RouterShape, shared: int = 0
) -> ExpertsShape:
    """Return the experts of a layer. `experts` names the field with the number of experts."""
    topk, most = get_count(document, "num_experts_per_tok"), get_count(document, experts)
    if topk > most:
        raise ConfigError(f"num_experts_per_tok {topk} is above {experts} {most}. Use {most} or less.")
    return ExpertsShape(
        num_experts=most,
        topk=topk,
        ffn_hidden_size=channels,
        shared_ffn_hidden_size=shared,
        imbalance=DEFAULT_IMBALANCE,
        router=router,
    )


def make_router(document: Mapping[str, Any]) -> RouterShape:
    """Return a softmax router. With `norm_topk_prob`, softmax over only the chosen experts gives the same probabilities."""
    return RouterShape(has_pre_softmax=not find_flag(document, "norm_topk_prob"))


def find_window_layers(document: Mapping[str, Any]) -> list[bool] | None:
    """Return whether each layer has a window, or None if the file has no `layer_types`."""
    kinds = document.get("layer_types")
    if kinds is None:
        return None
    layers = get_count(document, "num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _ATTENTION_KINDS for kind in kinds):
        raise ConfigError(f"layer_types {kinds!r} must have {layers} entries, each one of {', '.join(_ATTENTION_KINDS)}.")
    return [kind != "full_attention" for kind in kinds]


def make_window(document: Mapping[str, Any], layers: list[bool]) -> dict[str, Any]:
    """Return the ModelShape fields of a window of `sliding_window` tokens, or no fields if the file sets no window."""
    # Megatron does not support a window of one token.
    tokens = find_count(document, "sliding_window", least=2)
    # `sliding_window` counts the query itself; `window_tokens` counts only the tokens before it.
    return {} if tokens is None else {"window_tokens": tokens - 1, "window_layers": tuple(layers)}


def get_count(document: Mapping[str, Any], name: str) -> int:
    """Return the number in the required field `name`."""
    count = find_count(document, name, least=1)
    if count is None:
        raise ConfigError(f"{name} is missing. Add it.")
    return count


def find_count(document: Mapping[str, Any], name: str, *, least: int) -> int | None:
    """Return the number in the field `name`, or None if the field is missing or null."""
    count = document.get(name)
    if count is None:
        return None
    # `isinstance` would accept JSON's true, because a bool is an int in Python.
    if type(count) is not int:
        raise ConfigError(f"{name} {count!r} is not a whole number. Use {least} or more.")
    # ModelShape also checks these limits, but an error raised here can name the field in the file.
    check_count(name, count, least=least, most=MOST_LAYERS if name in _LAYER_COUNTS else LARGEST_SIZE)
    return count


def find_number(document: Mapping[str, Any], name: str) -> int:
    """Return the number in the field `name`, or 0 if the field is missing or null."""
    return find_count(document, name, least=0) or 0


def find_layers(document: Mapping[str, Any], name: str, layers: range) -> frozenset[int]:
    """Return the layers in the list `name`, or no layers if the list is missing or null."""
    numbers = document.get(name)
    if numbers is None:
        return frozenset()
    if not isinstance(numbers, list) or any(type(number) is not int or number not in layers for number in numbers):
        raise ConfigError(f"{name} {numbers!r} must be a list of layers from 0 to {len(layers) - 1}, for example [0, 1].")
    return frozenset(numbers)


def find_flag(document: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return the boolean in the field `name`, or `default` if the field is missing."""
    flag = document.get(name, default)
    if not isinstance(flag, bool):
        raise ConfigError(f"{name} {flag!r} must be true or false.")
    return flag
