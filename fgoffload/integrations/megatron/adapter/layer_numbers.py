"""Numbers the layers of the whole model from 0. Layers of multi-token prediction follow the decoder's layers.

Megatron-Core 0.16 does this itself. Since 0.17, layers of multi-token prediction start at 1 again and have `is_mtp_layer`. In
hybrid models, each depth has a stack of layers, which also starts at 1. Only its attention layers have the flag.
"""

from collections.abc import Iterable, Iterator
from typing import Any

_OFFSET = "_fgoffload_number_offset"
"""Attribute of a layer in the stack of a depth: difference between its number in the model and in the stack."""


def list_layers(block: Any) -> Iterator[tuple[Any, int, Any]]:
    """Yield stack, index in the stack, and layer, for each transformer layer of `block`. Also number the layers of depths.

    A block of multi-token prediction is itself the stack for depths of one layer.
    """
    for index, module in enumerate(block.layers):
        inner = _find_inner(module)
        if not hasattr(inner, "layers"):
            yield from _list_attending(block, [(index, module if inner is None else inner)])
            continue
        for layer in inner.layers:
            setattr(layer, _OFFSET, block.config.num_layers + index * len(inner.layers))
        yield from _list_attending(inner, enumerate(inner.layers))


def find_first(module: Any) -> Any:
    """Return the first layer inside a layer of multi-token prediction."""
    inner = _find_inner(module)
    return inner.layers[0] if hasattr(inner, "layers") else inner


def get_number(layer: Any) -> int:
    """Return the number of a layer in the whole model, from 0."""
    offset: int | None = getattr(layer, _OFFSET, None)
    if offset is None:
        offset = layer.config.num_layers if getattr(layer, "is_mtp_layer", False) else 0
    return int(layer.layer_number) - 1 + offset


def _find_inner(module: Any) -> Any:
    """Return the layer or stack inside a layer of multi-token prediction, or None for any other layer."""
    return getattr(module, "transformer_layer", None) or getattr(module, "mtp_model_layer", None)


def _list_attending(stack: Any, layers: Iterable[tuple[int, Any]]) -> Iterator[tuple[Any, int, Any]]:
    return ((stack, index, layer) for index, layer in layers if hasattr(layer, "self_attention"))
