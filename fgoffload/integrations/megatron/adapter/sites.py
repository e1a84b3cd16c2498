"""Finds the tags that have a site in a Megatron layer, and adds the sites that Megatron lacks. See docs/reference/tags.md."""

import weakref
from collections.abc import Sequence
from typing import Any

from fgoffload.integrations.megatron.adapter.regions import GetOffload, LinearTags, add_linear_sites, add_region
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.methods import set_attribute
from fgoffload.integrations.megatron.patching.patches import Patches

DENSE_TAGS = LinearTags("mlp_fc1", "mlp_act", "mlp_fc2")
EXPERT_TAGS = LinearTags("expert_fc1", "moe_act", "expert_fc2")
GROUPED_TAGS = LinearTags(fc2="expert_fc2")
OVERLAPPED_METHODS = (
    "pre_forward_comm",
    "linear_fc1_forward_and_act",
    "linear_fc2_forward",
    "post_forward_comm",
    "get_output",
)
COMBINE_METHODS = ("combine_preprocess", "token_combine", "combine_postprocess")
_ATTRIBUTE = "save_original_input"
"""Attribute of Transformer Engine's linears. If it is off, they save the GEMM operand: a view per expert, or its FP8 form."""


def find_tags(layer: Any, selected: Sequence[str]) -> tuple[str, ...]:
    """Return the `selected` tags that have a site in a Megatron layer, in the order of forward.

    Attributes of Megatron's layers show which of Megatron's own sites are on. Our sites depend on the layer's modules.
    Omits `layer_input`, which depends on recompute.
    """
    attention, mlp = layer.self_attention, layer.mlp
    experts = getattr(mlp, "experts", None)
    in_turn, has_pair = is_sequential(experts), _is_pair(mlp)
    has_site = {
        "attn_norm": getattr(layer, "offload_attn_norm", False),
        "qkv_linear": getattr(attention, "offload_qkv_linear", False),
        "gdp_qkv": getattr(attention, "offload_gdp_qkv", False),
        "core_attn": getattr(attention, "offload_core_attention", False),
        "attn_proj": getattr(attention, "offload_attn_proj", False),
        "mlp_norm": getattr(layer, "offload_mlp_norm", False),
        "mlp_fc1": has_pair,
        "mlp_act": has_pair,
        "mlp_fc2": has_pair,
        "shared_expert": getattr(mlp, "shared_experts", None) is not None,
        "router": getattr(mlp, "router", None) is not None,
        "expert_fc1": in_turn or getattr(experts, "offload_expert_fc1", False),
        "moe_act": in_turn or getattr(experts, "offload_moe_act", False),
        "expert_fc2": in_turn or _is_pair(experts),
        "fused_group_mlp": getattr(experts, "offload_fused_group_mlp", False),
        "moe_combine": getattr(mlp, "token_dispatcher", None) is not None,
    }
    return tuple(tag for tag, is_there in has_site.items() if is_there and tag in selected)


def shares_router_input(layer: Any) -> bool:
    """Return whether another module of a Megatron layer saves the router's input too."""
    return any(getattr(layer.mlp, name, None) is not None for name in ("shared_experts", "fc1_latent_proj"))


def find_fused_tags(layer: Any, selected: Sequence[str]) -> tuple[str, ...]:
    """Return the `selected` tags of norms that are fused into the next linear, and so have no module of their own."""
    identity = load_module("megatron.core.transformer.identity_op").IdentityOp
    norms = {"attn_norm": layer.input_layernorm, "mlp_norm": layer.pre_mlp_layernorm}
    return tuple(tag for tag, norm in norms.items() if tag in selected and isinstance(norm, identity))


def add_own_sites(patches: Patches, get_offload: GetOffload, layer: Any, offloaded: Sequence[str]) -> None:
    """Add our sites of the `offloaded` tags to one layer."""
    mlp = layer.mlp
    experts = getattr(mlp, "experts", None)
    if experts is None:
        if _is_pair(mlp):
            add_linear_sites(patches, get_offload, mlp, [mlp], DENSE_TAGS.select(offloaded))
        return
    choose_saved_inputs(patches, experts, offloaded)
    if "shared_expert" in offloaded:
        methods = OVERLAPPED_METHODS if getattr(mlp, "shared_expert_overlap", False) else ("forward",)
        add_region(patches, get_offload, mlp.shared_experts, methods, "shared_expert")
    if "router" in offloaded:
        add_region(patches, get_offload, mlp.router, ("forward",), "router")
    if is_sequential(experts):
        add_linear_sites(patches, get_offload, experts, list(experts.local_experts), EXPERT_TAGS.select(offloaded))
    elif _is_pair(experts):
        add_linear_sites(patches, get_offload, experts, [experts], GROUPED_TAGS.select(offloaded))
    if "moe_combine" in offloaded:
        add_region(patches, get_offload, mlp.token_dispatcher, COMBINE_METHODS, "moe_combine")


def switch_off_later(patches: Patches, layer: Any) -> None:
    """Turn off Megatron's call sites in `layer` when `patches` are removed. Otherwise they would call Megatron's engine."""
    for module in (layer, layer.self_attention, getattr(layer.mlp, "experts", None)):
        if module is not None:
            patches.callback(_switch_off, weakref.ref(module))


def _switch_off(reference: "weakref.ref[Any]") -> None:
    module = reference()
    for name, value in () if module is None else tuple(vars(module).items()):
        if name.startswith("offload_") and value is True:
            setattr(module, name, False)


def is_sequential(experts: Any) -> bool:
    """Return whether `experts` are Megatron's `SequentialMLP`."""
    return isinstance(experts, load_module("megatron.core.transformer.moe.experts").SequentialMLP)


def _is_pair(module: Any) -> bool:
    """Return whether `module` calls two linears of its own in sequence."""
    return not has_op_fuser(module) and all(callable(getattr(module, name, None)) for name in ("linear_fc1", "linear_fc2"))


def has_op_fuser(module: Any) -> bool:
    """Return whether `module` runs ops of Transformer Engine's op fuser, which does not call its linears.

    A dense MLP built for the op fuser has `_make_fused_impl`. Experts that can use it (0.20) have `_fused_forward`.
    """
    config = getattr(module, "config", None)
    can_fuse = hasattr(module, "_fused_forward") and getattr(config, "use_transformer_engine_op_fuser", False)
    return can_fuse or hasattr(module, "_make_fused_impl")


def is_quantized(config: Any) -> bool:
    """Return whether the linears of a model with this config compute in FP8 or FP4."""
    return bool(getattr(config, "fp8", None) or getattr(config, "fp4", None))


def choose_saved_inputs(patches: Patches, experts: Any, offloaded: Sequence[str]) -> None:
    """Make the grouped linears of `experts` save their whole input if that is not larger, and otherwise a part per expert.

    In bf16, the views of 16 experts have the same bytes as the whole input, but cost the host 2 ms more per layer and
    microbatch, while the device is idle because the host has just waited for the routing. In FP8, the parts are half the size,
    and delayed scaling rejects whole inputs. Megatron always requests them, for its own engine.

    Source: `TEGroupedMLP.__init__`, megatron-core 0.16.1; `GroupedLinear`, Transformer Engine 2.20.
    """
    if is_quantized(getattr(experts, "config", None)):
        if getattr(experts, "offload_expert_fc1", False):
            # Not through `patches`: Megatron turns it on only for offload, so it stays off afterwards.
            setattr(experts.linear_fc1, _ATTRIBUTE, False)
        return
    if not set(EXPERT_TAGS) & set(offloaded):
        return
    for linear in (getattr(experts, "linear_fc1", None), getattr(experts, "linear_fc2", None)):
        save_whole_input(patches, linear)


def save_whole_input(patches: Patches, linear: Any) -> None:
    """Make an unquantized grouped linear save its input as one tensor. Does not change other linears."""
    if hasattr(linear, _ATTRIBUTE):
        set_attribute(patches, linear, _ATTRIBUTE, True)  # noqa: FBT003 - the value of Transformer Engine's attribute
