"""Frees the autograd graph that token dispatchers hold between microbatches, and detects how they permute tokens.

A dispatcher keeps the routing probabilities of its last forward in an attribute, and the probabilities keep their graph alive.
If a checkpoint recomputed that forward, the graph starts at a leaf: a copy of the layer's input, with its gradient. Both would
stay on the GPU until the layer's next forward: 2sbh elements per recomputed MoE layer (s: sequence, b: batch, h: hidden).

Source: `dispatch_preprocess` of megatron-core 0.16.1; memory measured on an H200 between two steps (docs/decisions.md).
"""

import functools
import inspect
from typing import Any

import torch

from fgoffload.engine import is_in_backward
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.methods import wrap_symbol
from fgoffload.integrations.megatron.patching.patches import Patches

DISPATCHERS = "megatron.core.transformer.moe.token_dispatcher"
_LAST_METHOD = "combine_postprocess"
"""Dispatcher method that forward calls last. Nothing reads the dispatcher's attributes after that call."""


@functools.cache
def permutes_by_mask() -> bool:
    """Return whether the unfused permutation calls `masked_select`, which blocks the host. Since 0.17, it sorts instead."""
    permute = inspect.unwrap(load_module("megatron.core.transformer.moe.moe_utils").permute)
    return "masked_select" in permute.__code__.co_names


def free_recomputed_graphs(patches: Patches) -> None:
    """Make dispatchers release the graph of a recompute at the end of their last method."""
    module = load_module(DISPATCHERS)
    for name, value in tuple(vars(module).items()):
        if isinstance(value, type) and issubclass(value, module.MoETokenDispatcher) and _LAST_METHOD in vars(value):
            wrap_symbol(patches, f"{DISPATCHERS}:{name}", _LAST_METHOD, _run_last_method)


def detach_routing(dispatcher: Any) -> None:
    """Detach all tensors of `dispatcher` from their graphs. Their values do not change."""
    for holder in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
        for name, value in tuple(vars(holder).items()) if holder is not None else ():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                setattr(holder, name, value.detach())


def _run_last_method(original: Any, dispatcher: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = original(dispatcher, *args, **kwargs)
    # Outside a recompute, the graph starts at parameters, which stay in memory anyway.
    if is_in_backward():
        detach_routing(dispatcher)
    return outputs
