"""Applies offload to an unmodified training script of Megatron-LM.

own = take_own_flags(words)  # the script's words without our flags, and the settings from our flags
if own.offload is not None:
    offload = apply_to_script(own.offload, own.script_words)
    ...  # run it with own.script_words
    offload.remove()
"""

from fgoffload.integrations.megatron.launch.script import OwnFlags, apply_to_script, describe_megatron, take_own_flags

__all__ = ["OwnFlags", "apply_to_script", "describe_megatron", "take_own_flags"]
