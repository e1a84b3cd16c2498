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

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from fgoffload.engine import is_inert
from fgoffload.engine.identity import get_key
from fgoffload.engine.place import Place
from fgoffload.integrations.megatron.adapter.dispatchers import DISPATCHERS
from fgoffload.integrations.megatron.adapter.grouped_linears import is_quantized, save_whole_input
from fgoffload.integrations.megatron.adapter.layer_numbers import get_number
from fgoffload.integrations.megatron.adapter.sites import has_op_fuser
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.methods import wrap_method
from fgoffload.integrations.megatron.patching.patches import Patches
from fgoffload.integrations.megatron.recompute.detached_outputs import DetachedOutputs, Made, OpenReruns, StandIn, save_input

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

    Args:
        patches: Patches that undo it.
        layer: A Megatron layer.
        get_open_reruns: Function that returns the recomputes in use, which may include the norm whose output is permuted.
    """
    runs = _Runs(Place(None, f"the permutation of layer {get_number(layer)}"), get_open_reruns)
    dispatcher = layer.mlp.token_dispatcher
    wrap_method(patches, dispatcher, "dispatch_preprocess", runs.wrap_permutation)
    wrap_method(patches, dispatcher, "dispatch_postprocess", runs.wrap_end)
    linear = layer.mlp.experts.linear_fc1
    wrap_method(patches, linear, "forward", runs.wrap_linear)
    save_whole_input(patches, linear)  # one stand-in instead of one per expert


class _Runs:
    """Forwards of one layer. At most one of them is between its permutation and its first linear."""

    def __init__(self, place: Place, get_open_reruns: Callable[[], OpenReruns]) -> None:
        self._place = place
        self._get_open_reruns = get_open_reruns
        self._permutation: _Permutation | None = None
        self._made: _Tokens | None = None
        """Output of the dispatcher, while it exists."""

    def wrap_permutation(self, original: Any) -> Any:
        """Wrap the method that permutes the tokens."""

        def dispatch_preprocess(dispatcher: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            outputs = original(dispatcher, hidden_states, *args, **kwargs)
            # Begins after frozen layers too, since the first linear saves its input for its own weights.
            self._permutation = None if is_inert() else self._begin(hidden_states, dispatcher)
            return outputs

        return dispatch_preprocess

    def _begin(self, hidden: torch.Tensor, dispatcher: Any) -> "_Permutation":
        found = self._get_open_reruns().find_made()
        return _Permutation(hidden, _find_permutation(dispatcher), self._place, found)

    def wrap_end(self, original: Any) -> Any:
        """Wrap the method that returns the tokens for the experts."""

        def dispatch_postprocess(dispatcher: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = original(dispatcher, *args, **kwargs)
            permutation, self._permutation = self._permutation, None
            self._made = None if permutation is None else _Tokens(outputs[0], permutation)
            return outputs

        return dispatch_postprocess

    def wrap_linear(self, original: Any) -> Any:
        """Wrap the forward of the experts' first linear."""

        def forward(linear: Any, *args: Any, **kwargs: Any) -> Any:
            made, self._made = self._made, None
            if made is None:
                return original(linear, *args, **kwargs)
            with DetachedOutputs({made.key: made}, self._place):
                return original(linear, *args, **kwargs)

        return forward


def _find_permutation(dispatcher: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that permutes tokens `[tokens, hidden]` for the experts, as in the latest forward."""
    if not dispatcher.config.moe_permute_fusion:
        # The mapping has the source of each row. Recomputing it would make the host wait for the number of tokens.
        indices = dispatcher.reversed_local_input_permutation_mapping
        return lambda tokens: tokens.index_select(0, indices)
    permute = functools.partial(
        load_module(DISPATCHERS).permute,
        routing_map=dispatcher.routing_map,
        num_out_tokens=dispatcher.num_out_tokens,
        fused=True,
    )
    return lambda tokens: permute(tokens)[0]


class _Permutation:
    """One permutation, which is recomputed when backward needs its result.

    Args:
        hidden: Input of the permutation, saved here as autograd would save it.
        permute: Function that permutes it, as `[tokens, hidden]`, for the experts.
        place: Place that errors name.
        found: Outputs of other recomputes. The input is not saved if it is one of them.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        permute: Callable[[torch.Tensor], torch.Tensor],
        place: Place,
        found: Mapping[int, Made] = MappingProxyType({}),
    ) -> None:
        self._hidden = save_input(hidden, place, found)
        self._permute = permute
        self._packed = self._taken = 0
        self._again: torch.Tensor | None = None
        """Result of the recompute, until every saved part of it is unpacked."""

    def pack(self, tensor: torch.Tensor) -> "_Part":
        """Return a stand-in for a view of the permutation's result."""
        self._packed += 1
        return _Part(self, tensor)

    def take(self) -> torch.Tensor:
        """Return the permutation's result, bitwise identical to forward's."""
        if self._again is None:
            with torch.no_grad():
                hidden = self._hidden.unpack()
                self._again = self._permute(hidden.view(-1, hidden.size(-1)))
        again = self._again
        self._taken = (self._taken + 1) % self._packed
        if not self._taken:
            self._again = None
        return again


class _Part(StandIn):
    """Stand-in in the graph for a view of the permutation's result."""

    __slots__ = ("_permutation",)

    def __init__(self, permutation: _Permutation, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self._permutation = permutation

    def take(self) -> torch.Tensor:
        """Return the view of the recomputed result."""
        return self.look_at(self._permutation.take())


class _Tokens(Made):
    """Result of the permutation, as the dispatcher returned it."""

    __slots__ = ("_permutation",)

    def __init__(self, tensor: torch.Tensor, permutation: _Permutation) -> None:
        super().__init__(tensor, get_key(tensor))
        self._permutation = permutation

    def make_stand_in(self, tensor: torch.Tensor) -> StandIn:
        """Return a stand-in for `tensor`."""
        return self._permutation.pack(tensor)
