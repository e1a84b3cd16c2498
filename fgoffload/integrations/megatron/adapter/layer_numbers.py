"""Numbers the layers of the whole model from 0. Layers of multi-token prediction (MTP) follow the decoder's layers.

Megatron-Core 0.16 uses the same order. Since 0.17, the numbers of MTP layers restart at 1, and the layers have `is_mtp_layer`.
In hybrid models, each MTP depth has a stack of layers numbered from 1. Only its attention layers have `is_mtp_layer`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

_OFFSET = "_fgoffload_number_offset"
"""Attribute of a layer in an MTP stack: the number of layers in the model before this stack."""


def list_layers(block: Any) -> Iterator[tuple[Any, int, Any]]:
    """Yield each attention layer of `block`, with its stack and its index in the stack. Also store the offsets of MTP stacks.

    If an MTP depth has one layer, the block itself is the stack.
    """
    for index, module in enumerate(block.layers):
        inner = _find_inner(module)
        if not hasattr(inner, "layers"):
            yield from _list_attention_layers(block, [(index, module if inner is None else inner)])
            continue
        for layer in inner.layers:
            setattr(layer, _OFFSET, block.config.num_layers + index * len(inner.layers))
        yield from _list_attention_layers(inner, enumerate(inner.layers))


def find_first_layer(module: Any) -> Any:
    """Return the first transformer layer of an MTP depth."""
    inner = _find_inner(module)
    return inner.layers[0] if hasattr(inner, "layers") else inner


def get_number(layer: Any) -> int:
    """Return the number of `layer` in the whole model, from 0."""
    offset: int | None = getattr(layer, _OFFSET, None)
    if offset is None:
        offset = layer.config.num_layers if getattr(layer, "is_mtp_layer", False) else 0
    return int(layer.layer_number) - 1 + offset


def _find_inner(module: Any) -> Any:
    """Return the layer or stack of an MTP depth, or None if `module` is an ordinary layer."""
    return getattr(module, "transformer_layer", None) or getattr(module, "mtp_model_layer", None)


def _list_attention_layers(stack: Any, layers: Iterable[tuple[int, Any]]) -> Iterator[tuple[Any, int, Any]]:
    return ((stack, index, layer) for index, layer in layers if hasattr(layer, "self_attention"))
