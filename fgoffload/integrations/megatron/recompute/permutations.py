"""Permuting tokens for their experts again in backward, so that the experts' first linear keeps nothing of its own.

    forward     router  ->  permutation, which copies each token for each of its experts  ->  first linear
    backward    permutation again, of what the router was given  ->  first linear

Without it the first linear saves what it is given, as many times the router's input as a token has experts, and the router
saves that input anyway. A copy is cheap: nothing is computed, and the bits are the same.

[Note: Where it can]
Tokens from other ranks would have to be sent again. So the unit is there where a rank has all experts, and all of each: then
nothing is exchanged, and the sort by expert that comes behind the exchange finds the order that there is. What the dispatcher
returns is what the permutation made, in another storage. The counts are known from forward, and the host waits for nothing.

[Note: Nothing is emptied]
What other units return is emptied behind its last use (`reruns.py`). Here the first linear saves nothing of it, as
`detached_outputs.py` has it, and it goes with the frames of forward, Megatron's `MoELayer` among them.
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
"""Of `fgoffload.tags.RECOMPUTE_UNITS`."""

_BETWEEN = ("moe_latent_size", "moe_input_jitter_eps", "moe_apply_probs_on_input")
"""Of a config: what makes something else of the hidden states before the router or the dispatcher gets them, or of the tokens
before the first linear does. Then the router saves other bytes than are permuted, or the linear others than come of it."""


def can_permute_again(layer: Any) -> bool:
    """Return whether the tokens of a Megatron layer can be permuted again by themselves. See [Note: Where it can]."""
    experts: Any = getattr(layer.mlp, "experts", None)
    dispatcher: Any = getattr(layer.mlp, "token_dispatcher", None)
    grouped = load_module("megatron.core.transformer.moe.experts").TEGroupedMLP
    if type(experts) is not grouped or type(dispatcher) is not load_module(DISPATCHERS).MoEAlltoAllTokenDispatcher:
        return False
    # Quantized linears save what they made of their input.
    if is_quantized(layer.config) or has_op_fuser(experts) or any(getattr(layer.config, name, None) for name in _BETWEEN):
        return False
    return bool(dispatcher.ep_size == dispatcher.tp_size == 1 and not dispatcher.drop_and_pad)


def permute_again(patches: Patches, layer: Any, get_open_reruns: Callable[[], OpenReruns]) -> None:
    """Let the tokens of `layer` be permuted again in backward, until `patches` are removed.

    Args:
        patches: Undo it.
        layer: A Megatron layer.
        get_open_reruns: Returns what else runs again: the norm whose output is permuted may be among it.
    """
    runs = _Runs(Place(None, f"the permutation of layer {get_number(layer)}"), get_open_reruns)
    dispatcher = layer.mlp.token_dispatcher
    wrap_method(patches, dispatcher, "dispatch_preprocess", runs.wrap_permutation)
    wrap_method(patches, dispatcher, "dispatch_postprocess", runs.wrap_end)
    linear = layer.mlp.experts.linear_fc1
    wrap_method(patches, linear, "forward", runs.wrap_linear)
    save_whole_input(patches, linear)  # one part to stand for, and not one for each expert


class _Runs:
    """The forwards of one layer. At most one of them is between its permutation and its first linear."""

    def __init__(self, place: Place, get_open_reruns: Callable[[], OpenReruns]) -> None:
        self._place = place
        self._get_open_reruns = get_open_reruns
        self._permutation: _Permutation | None = None
        self._made: _Tokens | None = None
        """What the dispatcher returned, while that is there."""

    def wrap_permutation(self, original: Any) -> Any:
        """Wrap what permutes the tokens."""

        def dispatch_preprocess(dispatcher: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            outputs = original(dispatcher, hidden_states, *args, **kwargs)
            # Behind frozen layers too: the first linear saves what it is given for its own weights.
            self._permutation = None if is_inert() else self._begin(hidden_states, dispatcher)
            return outputs

        return dispatch_preprocess

    def _begin(self, hidden: torch.Tensor, dispatcher: Any) -> "_Permutation":
        found = self._get_open_reruns().find_made()
        return _Permutation(hidden, _find_permutation(dispatcher), self._place, found)

    def wrap_end(self, original: Any) -> Any:
        """Wrap what returns the tokens for the experts."""

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
    """Return what makes of tokens, `[tokens, hidden]`, those for the experts, as the forward that was here last did."""
    if not dispatcher.config.moe_permute_fusion:
        # The mapping says where each comes from. To find it again, the host would wait for the number of tokens.
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
    """One permutation, which is recomputed when backward asks for what it made.

    Args:
        hidden: What it permutes; saved here as autograd would save it.
        permute: Makes of it, as `[tokens, hidden]`, the tokens for the experts.
        place: For errors.
        found: What else runs again: what it permutes is not saved where it is of that.
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
        """What the second run made, until all who saved a part of it have theirs."""

    def pack(self, tensor: torch.Tensor) -> "_Part":
        """Return what stands for a tensor that looks at what the permutation made."""
        self._packed += 1
        return _Part(self, tensor)

    def take(self) -> torch.Tensor:
        """Return what the permutation makes, of the same bits."""
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
    """What stands in the graph for a tensor that looks at what the permutation made."""

    __slots__ = ("_permutation",)

    def __init__(self, permutation: _Permutation, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self._permutation = permutation

    def take(self) -> torch.Tensor:
        """Return the tensor."""
        return self.look_at(self._permutation.take())


class _Tokens(Made):
    """What the permutation made, as the dispatcher returned it."""

    __slots__ = ("_permutation",)

    def __init__(self, tensor: torch.Tensor, permutation: _Permutation) -> None:
        super().__init__(tensor, get_key(tensor))
        self._permutation = permutation

    def make_stand_in(self, tensor: torch.Tensor) -> StandIn:
        """Return what stands for `tensor`."""
        return self._permutation.pack(tensor)
