"""Applies offload to an unmodified training script of Megatron-LM.

    own = take_own_flags(words)  # the script's words without our flags, and the settings from our flags
    if own.offload is not None:
        script = apply_to_script(own.offload, own.script_words)
        ...  # run it with script.words
        script.offload.remove()

Megatron-LM's parser knows some of our flags in some versions. It rejects the others, unknown tags, and certain settings in its
checks. So `call_sites.py` queries the parser, and decides whether the script gets the flags.
"""

from fgoffload.integrations.megatron.launch.script import OwnFlags, ScriptOffload, apply_to_script, take_own_flags

__all__ = ["OwnFlags", "ScriptOffload", "apply_to_script", "take_own_flags"]
