"""Offload in verl, without a change to it: import this module, as verl does by `model.external_lib`.

    actor_rollout_ref.model.external_lib=fgoffload.integrations.verl
    actor_rollout_ref.model.enable_activation_offload=True

verl's switches keep their names and meaning: `enable_activation_offload`, with `enable_gradient_checkpointing` or without.
"""

from fgoffload.integrations.entry_points import replace_function
from fgoffload.integrations.fsdp import enable_activation_offloading

replace_function(
    "verl.utils.activation_offload.enable_activation_offloading", enable_activation_offloading, versions="0.4 to 0.9"
)
