"""Chooses how grouped linears of experts save their input: as one tensor, or as one part per expert.

Source: `TEGroupedMLP.__init__`, megatron-core 0.16.1; `GroupedLinear`, Transformer Engine 2.20.
"""

from collections.abc import Sequence
from typing import Any

from fgoffload.integrations.megatron.patching.methods import set_attribute
from fgoffload.integrations.megatron.patching.patches import Patches

_EXPERT_TAGS = frozenset(("expert_fc1", "moe_act", "expert_fc2"))
_ATTRIBUTE = "save_original_input"
"""Attribute of Transformer Engine's linears. If it is off, they save the GEMM operand: a view per expert, or its FP8 form."""


def is_quantized(config: Any) -> bool:
    """Return whether the linears of a model with this config compute in FP8 or FP4."""
    return bool(getattr(config, "fp8", None) or getattr(config, "fp4", None))


def choose_saved_inputs(patches: Patches, experts: Any, offloaded: Sequence[str]) -> None:
    """Make the linears of `experts` save as few bytes as possible, in as few tensors as that allows.

    In bf16, whole inputs and views have the same bytes. But the views of 16 experts cost 16 Python calls in forward and again
    in backward: 2 ms per layer and microbatch, at a point that is launch-bound because the host has just waited for the
    routing. So if a tag of the experts is offloaded, the whole input is saved. Quantized linears save the same as without
    offload: parts of half the size. This also supports delayed scaling, which rejects the attribute. Megatron always sets it,
    for its own engine.

    Args:
        patches: Patches that undo the change later.
        experts: A Megatron module. Experts without grouped linears are not changed.
        offloaded: Offloaded tags of this layer.
    """
    if is_quantized(getattr(experts, "config", None)):
        if getattr(experts, "offload_expert_fc1", False):
            # Not through `patches`: Megatron sets it only for offload, so it is off without offload.
            setattr(experts.linear_fc1, _ATTRIBUTE, False)
        return
    if _EXPERT_TAGS.isdisjoint(offloaded):
        return
    for linear in (getattr(experts, "linear_fc1", None), getattr(experts, "linear_fc2", None)):
        save_whole_input(patches, linear)


def save_whole_input(patches: Patches, linear: Any) -> None:
    """Make an unquantized grouped linear save its input as one tensor. Other linears are not changed."""
    if hasattr(linear, _ATTRIBUTE):
        set_attribute(patches, linear, _ATTRIBUTE, True)  # noqa: FBT003 - the value of Transformer Engine's attribute
