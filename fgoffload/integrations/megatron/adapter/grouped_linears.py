"""Chooses how grouped linears of experts save their input: as one tensor, or as one part for each expert.

Source: `TEGroupedMLP.__init__`, megatron-core 0.16.1; `GroupedLinear`, Transformer Engine 2.20.
"""

from collections.abc import Sequence
from typing import Any

from fgoffload.integrations.megatron.patching.methods import set_attribute
from fgoffload.integrations.megatron.patching.patches import Patches

_EXPERT_TAGS = frozenset(("expert_fc1", "moe_act", "expert_fc2"))
_ATTRIBUTE = "save_original_input"
"""Attribute of Transformer Engine's linears. If it is off, they save the factor: a view per expert, or its FP8 form."""


def is_quantized(config: Any) -> bool:
    """Return whether the linears of a model with this config work in FP8 or FP4."""
    return bool(getattr(config, "fp8", None) or getattr(config, "fp4", None))


def choose_saved_inputs(patches: Patches, experts: Any, offloaded: Sequence[str]) -> None:
    """Make the linears of `experts` save as few bytes as possible, in as few tensors as that allows.

    In bf16, whole inputs and views have the same bytes. But the views of 16 experts are 16 Python calls in forward and again in
    backward: 2 ms per layer and microbatch, at a point where the host is late because it has just waited for the routing. So if
    a tag of the experts is offloaded, the whole input is saved. Quantized linears are left as without offload. Their parts have
    half the size, and delayed scaling, which rejects the attribute, works. Megatron always sets it, for its own engine.

    Args:
        patches: Undo the change later.
        experts: A Megatron module. Experts without grouped linears are not changed.
        offloaded: Tags of this layer that are offloaded.
    """
    if is_quantized(getattr(experts, "config", None)):
        if getattr(experts, "offload_expert_fc1", False):
            # Not through `patches`: Megatron set it only for offload, and without offload it is off.
            setattr(experts.linear_fc1, _ATTRIBUTE, False)
        return
    if _EXPERT_TAGS.isdisjoint(offloaded):
        return
    for linear in (getattr(experts, "linear_fc1", None), getattr(experts, "linear_fc2", None)):
        save_whole_input(patches, linear)


def save_whole_input(patches: Patches, linear: Any) -> None:
    """Make a grouped linear that is not quantized save its input as one tensor. Other linears are not changed."""
    if hasattr(linear, _ATTRIBUTE):
        set_attribute(patches, linear, _ATTRIBUTE, True)  # noqa: FBT003 - the value of Transformer Engine's attribute
