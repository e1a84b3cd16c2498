"""What the grouped linears of experts keep for backward: their whole input as one tensor, or a part for each expert.

Source: `TEGroupedMLP.__init__`, megatron-core 0.16.1; `GroupedLinear`, Transformer Engine 2.20.
"""

from collections.abc import Sequence
from typing import Any

from fgoffload.integrations.megatron.patching.methods import set_attribute
from fgoffload.integrations.megatron.patching.patches import Patches

_EXPERT_TAGS = frozenset(("expert_fc1", "moe_act", "expert_fc2"))
_ATTRIBUTE = "save_original_input"
"""Of Transformer Engine's linears. Without it they save what they multiply: a view for each expert, or what FP8 made of it."""


def is_quantized(config: Any) -> bool:
    """Return whether the linears of a model with this config work in FP8 or FP4."""
    return bool(getattr(config, "fp8", None) or getattr(config, "fp4", None))


def choose_saved_inputs(patches: Patches, experts: Any, offloaded: Sequence[str]) -> None:
    """Have the linears of `experts` save the least, and in as few tensors as that allows.

    In bf16 both ways save the same bytes. The views of 16 experts are 16 calls of Python each way, 2 ms a layer and microbatch
    where the host has just waited for the routing and the device waits for the host. So where something of the experts leaves,
    the whole input is saved. Quantized linears go on as without offload: the parts leave at half the size, and delayed scaling,
    which refuses the attribute, works. Megatron sets it in all cases, for its own engine.

    Args:
        patches: Take it back later.
        experts: A Megatron module; experts without grouped linears stay as they are.
        offloaded: The tags of this layer that leave.
    """
    if is_quantized(getattr(experts, "config", None)):
        if getattr(experts, "offload_expert_fc1", False):
            # Not through `patches`: Megatron set it for offload alone, and without offload it is off.
            setattr(experts.linear_fc1, _ATTRIBUTE, False)
        return
    if _EXPERT_TAGS.isdisjoint(offloaded):
        return
    for linear in (getattr(experts, "linear_fc1", None), getattr(experts, "linear_fc2", None)):
        save_whole_input(patches, linear)


def save_whole_input(patches: Patches, linear: Any) -> None:
    """Have a grouped linear that is not quantized save its input as one tensor; any other stays as it is."""
    if hasattr(linear, _ATTRIBUTE):
        set_attribute(patches, linear, _ATTRIBUTE, True)  # noqa: FBT003 - the value of Transformer Engine's attribute
