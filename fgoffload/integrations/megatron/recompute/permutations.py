"""Recomputes the token permutation for experts in backward, so that the experts' first linear need not save its input.

    forward     router  ->  permutation, which copies each token for each of its experts  ->  first linear
    backward    recomputed permutation of the router's input  ->  first linear

Without the recompute, the first linear saves its input, a copy of each token for each of the token's experts. The
recompute needs the routing and the router's input, which the router saves anyway. A permutation only copies data, so results
are bitwise identical. Unlike in other units, the output is not emptied. The first linear does not save it
(`detached_outputs.py`), so it is freed when Megatron's `MoELayer` returns.

[Note: Supported layers]
If ranks exchanged tokens, a recompute would have to repeat the exchange. So the unit exists only if each rank has all experts,
unsharded. Then ranks exchange no tokens, and the sort by expert after the exchange does not change the order.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from fgoffload.engine import is_inert
from fgoffload.integrations.megatron.adapter.dispatchers import DISPATCHERS
from fgoffload.integrations.megatron.adapter.layer_numbers import get_number
from fgoffload.integrations.megatron.adapter.sites import has_op_fuser, is_quantized, save_whole_input
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.methods import wrap_method
from fgoffload.integrations.megatron.patching.patches import Patches
from fgoffload.integrations.megatron.recompute.reruns import OpenReruns, Rerun

UNIT = "dispatch"

_BETWEEN = ("moe_latent_size", "moe_input_jitter_eps", "moe_apply_probs_on_input")
"""Config fields that add an op between the router and the experts' first linear."""


def can_recompute_permutation(layer: Any) -> bool:
    """Return whether the token permutation of a Megatron layer can be recomputed on its own. See [Note: Supported layers]."""
    experts: Any = getattr(layer.mlp, "experts", None)
    dispatcher: Any = getattr(layer.mlp, "token_dispatcher", None)
    grouped = load_module("megatron.core.transformer.moe.experts").TEGroupedMLP
    if type(experts) is not grouped or type(dispatcher) is not load_module(DISPATCHERS).MoEAlltoAllTokenDispatcher:
        return False
    # Quantized linears save a quantized copy of their input.
    if is_quantized(layer.config) or has_op_fuser(experts) or any(getattr(layer.config, name, None) for name in _BETWEEN):
        return False
    return bool(dispatcher.ep_size == dispatcher.tp_size == 1 and not dispatcher.drop_and_pad)


def recompute_permutation(patches: Patches, layer: Any, get_open_reruns: Callable[[], OpenReruns]) -> None:
    """Recompute the token permutation of `layer` in backward, until `patches` are removed."""
    forward = _PermutedForward(f"the permutation of layer {get_number(layer)}", get_open_reruns)
    dispatcher = layer.mlp.token_dispatcher
    wrap_method(patches, dispatcher, "dispatch_preprocess", forward.run_permutation)
    wrap_method(patches, dispatcher, "dispatch_postprocess", forward.run_end)
    linear = layer.mlp.experts.linear_fc1
    wrap_method(patches, linear, "forward", forward.run_linear)
    save_whole_input(patches, linear)  # one placeholder, not one per expert


class _PermutedForward:
    """State of a layer's forward from the permutation to the experts' first linear. Only one forward runs at a time."""

    def __init__(self, name: str, get_open_reruns: Callable[[], OpenReruns]) -> None:
        self._name = name
        self._get_open_reruns = get_open_reruns
        self._rerun: Rerun | None = None

    def run_permutation(self, original: Any, dispatcher: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        outputs = original(dispatcher, hidden_states, *args, **kwargs)
        self._rerun = None
        if not is_inert():
            permute, known = _find_permutation(dispatcher), self._get_open_reruns().find_outputs()
            self._rerun = Rerun(permute, [hidden_states], name=self._name, random_use=None, known_outputs=known)
        return outputs

    def run_end(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        if self._rerun is not None:
            self._rerun.record_freed_output(outputs[0])
        return outputs

    def run_linear(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        rerun, self._rerun = self._rerun, None
        with contextlib.nullcontext() if rerun is None else rerun.detached_outputs():
            return original(*args, **kwargs)


def _find_permutation(dispatcher: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that permutes hidden states for the experts as the last forward did."""
    if dispatcher.config.moe_permute_fusion:
        permute = functools.partial(
            load_module(DISPATCHERS).permute,
            routing_map=dispatcher.routing_map,
            num_out_tokens=dispatcher.num_out_tokens,
            fused=True,
        )
        return torch.no_grad()(lambda hidden: permute(hidden.view(-1, hidden.size(-1)))[0])
    # The mapping holds the source row of each output row. To recompute it, the host would have to wait for the token counts.
    indices = dispatcher.reversed_local_input_permutation_mapping
    return torch.no_grad()(lambda hidden: hidden.view(-1, hidden.size(-1)).index_select(0, indices))
