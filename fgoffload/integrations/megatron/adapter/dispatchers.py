"""Token dispatchers: what they hold of a graph between two microbatches, and how they permute.

A dispatcher keeps the routing probabilities of its last forward as an attribute, and through them the graph behind them. What
that graph saved is gone after backward, but where a checkpoint ran the forward again the graph begins in the checkpoint's own
leaf: a copy of the layer's input, and its gradient. Both stay until the layer's next forward, 2sbh elements for each layer of
experts that ran again: 128 MiB on the benchmark's reference workload, of which the last layer of backward has all the others'.

Source: `dispatch_preprocess` of megatron-core 0.16.1, and what an H200 held between two steps
(docs/decisions.md).
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
"""Nothing of a dispatcher is read after it, until the next forward."""


@functools.cache
def permutes_by_mask() -> bool:
    """Return whether the permutation that is not fused selects by a mask, which makes the host wait; since 0.17 it sorts."""
    permute = inspect.unwrap(load_module("megatron.core.transformer.moe.moe_utils").permute)
    return "masked_select" in permute.__code__.co_names


def free_inputs_of_recompute(patches: Patches) -> None:
    """Have dispatchers let go of the graph of a recompute, with the last of what they do in it.

    Raises:
        IntegrationError: Megatron-Core has no such dispatchers.
    """
    module = load_module(DISPATCHERS)
    for name, value in tuple(vars(module).items()):
        if isinstance(value, type) and issubclass(value, module.MoETokenDispatcher) and _LAST_METHOD in vars(value):
            wrap_symbol(patches, f"{DISPATCHERS}:{name}", _LAST_METHOD, _wrap_last_method)


def detach_routing(dispatcher: Any) -> None:
    """Let go of every graph that `dispatcher` holds; the values of its tensors stay."""
    for holder in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
        for name, value in tuple(vars(holder).items()) if holder is not None else ():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                setattr(holder, name, value.detach())


def _wrap_last_method(original: Any) -> Any:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        # In a recompute alone: elsewhere the graph begins in parameters, which live anyway.
        if is_in_backward():
            detach_routing(self)
        return outputs

    return run
