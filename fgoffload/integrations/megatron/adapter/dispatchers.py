"""Frees the graph that token dispatchers hold between microbatches, and detects how they permute.

A dispatcher keeps the routing probabilities of its last forward as an attribute, and they keep their graph. If a checkpoint
recomputed that forward, the graph begins in a leaf of the checkpoint: a copy of the layer's input, with its gradient. Both stay
on the GPU until the layer's next forward: 2sbh elements per recomputed layer of experts.

Source: `dispatch_preprocess` of megatron-core 0.16.1, and the memory of an H200 between two steps (docs/decisions.md).
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
"""Last method of a forward that reads a dispatcher's attributes."""


@functools.cache
def permutes_by_mask() -> bool:
    """Return whether the unfused permutation selects by a mask, so that the host waits. Since 0.17 it sorts instead."""
    permute = inspect.unwrap(load_module("megatron.core.transformer.moe.moe_utils").permute)
    return "masked_select" in permute.__code__.co_names


def free_inputs_of_recompute(patches: Patches) -> None:
    """Make dispatchers release the graph of a recompute at the end of their last method."""
    module = load_module(DISPATCHERS)
    for name, value in tuple(vars(module).items()):
        if isinstance(value, type) and issubclass(value, module.MoETokenDispatcher) and _LAST_METHOD in vars(value):
            wrap_symbol(patches, f"{DISPATCHERS}:{name}", _LAST_METHOD, _run_last_method)


def detach_routing(dispatcher: Any) -> None:
    """Release every graph that `dispatcher` references, but keep the values of its tensors."""
    for holder in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
        for name, value in tuple(vars(holder).items()) if holder is not None else ():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                setattr(holder, name, value.detach())


def _run_last_method(original: Any, dispatcher: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = original(dispatcher, *args, **kwargs)
    # Only in a recompute: otherwise the graph begins in parameters, which stay in memory anyway.
    if is_in_backward():
        detach_routing(dispatcher)
    return outputs
