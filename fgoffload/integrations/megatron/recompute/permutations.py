"""Recomputes the token permutation for experts in backward, so that the experts' first linear saves no extra tensor.

    forward     router  ->  permutation, which copies each token for each of its experts  ->  first linear
    backward    recomputed permutation of the router's input  ->  first linear

Without the recompute, the first linear saves its input: one copy of the router's input for each expert of a token. The router
saves its own input anyway. The recompute is cheap, since it only copies, and results are bitwise identical.

[Note: Supported layers]
A recompute would have to send tokens from other ranks again. So the unit exists only if a rank has all experts, unsharded.
Then ranks exchange nothing, and the sort by expert after the exchange does not change the order. The dispatcher returns the
result of the permutation in another storage. The counts are known from forward, so the host does not wait.

[Note: Nothing is emptied]
Outputs of other units are emptied after their last use (`reruns.py`). Here, `detached_outputs.py` keeps the first linear from
saving the output, which is freed when the frames of forward return, such as that of Megatron's `MoELayer`.
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
from fgoffload.integrations.megatron.recompute.reruns import OpenReruns, RandomUse, Rerun

UNIT = "dispatch"
"""Name of the unit in `fgoffload.tags.RECOMPUTE_UNITS`."""

_BETWEEN = ("moe_latent_size", "moe_input_jitter_eps", "moe_apply_probs_on_input")
"""Config fields that change the hidden states before the router or the dispatcher gets them, or the tokens before the first
linear gets them. Then the router does not save the permuted bytes, or the linear does not get the permutation's result."""


def can_permute_again(layer: Any) -> bool:
    """Return whether the token permutation of a Megatron layer can be recomputed alone. See [Note: Supported layers]."""
    experts: Any = getattr(layer.mlp, "experts", None)
    dispatcher: Any = getattr(layer.mlp, "token_dispatcher", None)
    grouped = load_module("megatron.core.transformer.moe.experts").TEGroupedMLP
    if type(experts) is not grouped or type(dispatcher) is not load_module(DISPATCHERS).MoEAlltoAllTokenDispatcher:
        return False
    # Quantized linears save a quantized form of their input.
    if is_quantized(layer.config) or has_op_fuser(experts) or any(getattr(layer.config, name, None) for name in _BETWEEN):
        return False
    return bool(dispatcher.ep_size == dispatcher.tp_size == 1 and not dispatcher.drop_and_pad)


def permute_again(patches: Patches, layer: Any, get_open_reruns: Callable[[], OpenReruns]) -> None:
    """Recompute the token permutation of `layer` in backward, until `patches` are removed.

    `get_open_reruns` returns the recomputes in use, which may include the norm whose output is permuted.
    """
    runs = _Runs(f"the permutation of layer {get_number(layer)}", get_open_reruns)
    dispatcher = layer.mlp.token_dispatcher
    wrap_method(patches, dispatcher, "dispatch_preprocess", runs.run_permutation)
    wrap_method(patches, dispatcher, "dispatch_postprocess", runs.run_end)
    linear = layer.mlp.experts.linear_fc1
    wrap_method(patches, linear, "forward", runs.run_linear)
    save_whole_input(patches, linear)  # one stand-in instead of one per expert


_DRAWS_NOTHING = RandomUse(default=False)


class _Runs:
    """Forwards of one layer. At most one of them is between its permutation and its first linear."""

    def __init__(self, name: str, get_open_reruns: Callable[[], OpenReruns]) -> None:
        self._name = name
        self._get_open_reruns = get_open_reruns
        self._rerun: Rerun | None = None

    def run_permutation(self, original: Any, dispatcher: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        outputs = original(dispatcher, hidden_states, *args, **kwargs)
        # Begins after frozen layers too, since the first linear saves its input for its own weights.
        self._rerun = None if is_inert() else self._begin(hidden_states, dispatcher)
        return outputs

    def _begin(self, hidden: torch.Tensor, dispatcher: Any) -> Rerun:
        permute, found = _find_permutation(dispatcher), self._get_open_reruns().find_made()
        return Rerun(permute, [hidden], name=self._name, random_use=_DRAWS_NOTHING, found=found)

    def run_end(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the method that returns the tokens for the experts."""
        outputs = original(*args, **kwargs)
        if self._rerun is not None:
            self._rerun.note_freed_output(outputs[0])
        return outputs

    def run_linear(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        rerun, self._rerun = self._rerun, None
        with contextlib.nullcontext() if rerun is None else rerun.detached_outputs():
            return original(*args, **kwargs)


def _find_permutation(dispatcher: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that permutes hidden states for the experts, as in the latest forward."""
    if dispatcher.config.moe_permute_fusion:
        permute = functools.partial(
            load_module(DISPATCHERS).permute,
            routing_map=dispatcher.routing_map,
            num_out_tokens=dispatcher.num_out_tokens,
            fused=True,
        )
        return torch.no_grad()(lambda hidden: permute(hidden.view(-1, hidden.size(-1)))[0])
    # The mapping has the source of each row. Recomputing it would make the host wait for the number of tokens.
    indices = dispatcher.reversed_local_input_permutation_mapping
    return torch.no_grad()(lambda hidden: hidden.view(-1, hidden.size(-1)).index_select(0, indices))
