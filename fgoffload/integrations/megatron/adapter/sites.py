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
OVERLAPPED_METHODS = ("pre_forward_comm", "linear_fc1_forward_and_act", "linear_fc2_forward", "post_forward_comm", "get_output")
COMBINE_METHODS = ("combine_preprocess", "token_combine", "combine_postprocess")
_SAVE_ORIGINAL_INPUT = "save_original_input"
"""Attribute of Transformer Engine's linears. If it is off, they save the GEMM operands: a view or FP8 copy for each expert."""


def find_tags(layer: Any, selected: Sequence[str]) -> tuple[str, ...]:
    """Return the `selected` tags that have a site in a Megatron layer, in forward order.

    The layer's attributes show which of Megatron's own sites are on. Our own sites depend on the layer's modules. The result
    excludes `layer_input`, which depends on recompute.
    """
    attention, mlp = layer.self_attention, layer.mlp
    experts = getattr(mlp, "experts", None)
    sequential, has_linears = is_sequential(experts), _has_linears(mlp)
    has_site = {
        "attn_norm": getattr(layer, "offload_attn_norm", False),
        "qkv_linear": getattr(attention, "offload_qkv_linear", False),
        "gdp_qkv": getattr(attention, "offload_gdp_qkv", False),
        "core_attn": getattr(attention, "offload_core_attention", False),
        "attn_proj": getattr(attention, "offload_attn_proj", False),
        "mlp_norm": getattr(layer, "offload_mlp_norm", False),
        "mlp_fc1": has_linears,
        "mlp_act": has_linears,
        "mlp_fc2": has_linears,
        "shared_expert": getattr(mlp, "shared_experts", None) is not None,
        "router": getattr(mlp, "router", None) is not None,
        "expert_fc1": sequential or getattr(experts, "offload_expert_fc1", False),
        "moe_act": sequential or getattr(experts, "offload_moe_act", False),
        "expert_fc2": sequential or _has_linears(experts),
        "fused_group_mlp": getattr(experts, "offload_fused_group_mlp", False),
        "moe_combine": getattr(mlp, "token_dispatcher", None) is not None,
    }
    return tuple(tag for tag, exists in has_site.items() if exists and tag in selected)


def shares_router_input(layer: Any) -> bool:
    """Return whether another module of a Megatron layer also saves the router's input."""
    return any(getattr(layer.mlp, name, None) is not None for name in ("shared_experts", "fc1_latent_proj"))


def find_fused_tags(layer: Any, selected: Sequence[str]) -> tuple[str, ...]:
    """Return the `selected` tags of norms that are fused into the next linear and have no module of their own."""
    identity = load_module("megatron.core.transformer.identity_op").IdentityOp
    norms = {"attn_norm": layer.input_layernorm, "mlp_norm": layer.pre_mlp_layernorm}
    return tuple(tag for tag, norm in norms.items() if tag in selected and isinstance(norm, identity))


def add_own_sites(patches: Patches, get_offload: GetOffload, layer: Any, offloaded: Sequence[str]) -> None:
    """Add our own sites to `layer`, for the `offloaded` tags."""
    mlp = layer.mlp
    experts = getattr(mlp, "experts", None)
    if experts is None:
        if _has_linears(mlp):
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
    elif _has_linears(experts):
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


def _has_linears(module: Any) -> bool:
    """Return whether the forward of `module` calls its own `linear_fc1` and `linear_fc2`."""
    return not has_op_fuser(module) and all(callable(getattr(module, name, None)) for name in ("linear_fc1", "linear_fc2"))


def has_op_fuser(module: Any) -> bool:
    """Return whether `module` uses Transformer Engine's op fuser, which does not call the module's linears.

    A dense MLP built for the op fuser has `_make_fused_impl`. Experts that support the fuser (0.20) have `_fused_forward`.
    """
    config = getattr(module, "config", None)
    can_fuse = hasattr(module, "_fused_forward") and getattr(config, "use_transformer_engine_op_fuser", False)
    return can_fuse or hasattr(module, "_make_fused_impl")


def is_quantized(config: Any) -> bool:
    """Return whether the model's linears compute in FP8 or FP4."""
    return bool(getattr(config, "fp8", None) or getattr(config, "fp4", None))


def choose_saved_inputs(patches: Patches, experts: Any, offloaded: Sequence[str]) -> None:
    """Choose whether each grouped linear of `experts` saves its input as one tensor or as one tensor per expert.

    With bf16, each linear saves one tensor. Views for 16 experts use as much memory, and add 2 ms of host time per layer and
    microbatch while the device is idle, because the host has just waited for the routing. With FP8, each linear saves a copy
    per expert, which takes half the memory. Delayed scaling also rejects whole inputs, which Megatron's own engine requests.

    Source: `TEGroupedMLP.__init__`, megatron-core 0.16.1; `GroupedLinear`, Transformer Engine 2.20.
    """
    if is_quantized(getattr(experts, "config", None)):
        if getattr(experts, "offload_expert_fc1", False):
            # Not restored by `patches`: Megatron turns the attribute on only for offload, so it stays off after `remove`.
            setattr(experts.linear_fc1, _SAVE_ORIGINAL_INPUT, False)
        return
    if not set(EXPERT_TAGS) & set(offloaded):
        return
    for linear in (getattr(experts, "linear_fc1", None), getattr(experts, "linear_fc2", None)):
        save_whole_input(patches, linear)


def save_whole_input(patches: Patches, linear: Any) -> None:
    """Make an unquantized linear save its whole input, if it has Transformer Engine's attribute for that."""
    if hasattr(linear, _SAVE_ORIGINAL_INPUT):
        set_attribute(patches, linear, _SAVE_ORIGINAL_INPUT, True)  # noqa: FBT003 - Transformer Engine's value
