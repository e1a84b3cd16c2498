"""Applies offload to an unmodified training script of Megatron-LM.

The caller runs the script between `apply_to_script` and `remove`:
    own = take_own_flags(words)  # separates our flags from the script's arguments
    if own.offload is not None:
        offload = apply_to_script(own.offload, own.script_words)
        ...  # run the script with own.script_words
        offload.remove()
"""

from fgoffload.integrations.megatron.launch.script import OwnFlags, apply_to_script, describe_megatron, take_own_flags

__all__ = ["OwnFlags", "apply_to_script", "describe_megatron", "take_own_flags"]
