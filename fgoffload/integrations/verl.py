"""Replaces verl's activation offload. verl imports this module through `model.external_lib`.

    actor_rollout_ref.model.external_lib=fgoffload.integrations.verl
    actor_rollout_ref.model.enable_activation_offload=True

verl's switches keep their meaning: `enable_activation_offload`, with or without `enable_gradient_checkpointing`.
"""

from fgoffload.integrations.entry_points import replace_function
from fgoffload.integrations.fsdp import enable_activation_offloading

replace_function(
    "verl.utils.activation_offload.enable_activation_offloading", enable_activation_offloading, versions="0.4 to 0.9"
)
