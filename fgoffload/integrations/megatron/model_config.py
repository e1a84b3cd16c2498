"""Megatron's own offload flags in the configs of the models that are built from now on.

Megatron's config refuses tags that it does not know, and an empty list. So it is given those of ours that it accepts, or its
flag is switched off; the others need no flag of Megatron's.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from fgoffload.integrations.megatron.imports import ignore_expected_warnings, load_module
from fgoffload.integrations.megatron.methods import wrap_symbol
from fgoffload.integrations.megatron.patches import Patches

CONFIG_MODULE = "megatron.core.transformer.transformer_config"


def set_flags(patches: Patches, selected: Sequence[str]) -> None:
    """Let every config that is made from now on have the flags for the tags `selected`, whatever it was given.

    Args:
        patches: Put Megatron's own checks back later.
        selected: The tags that may leave.

    Raises:
        IntegrationError: Megatron-Core has no such config.
    """
    accepted = list_accepted(selected)

    def wrap(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def check(self: Any) -> None:
            self.fine_grained_activation_offloading = bool(accepted)
            self.offload_modules = list(accepted)
            original(self)

        return check

    wrap_symbol(patches, f"{CONFIG_MODULE}:TransformerConfig", "__post_init__", wrap)


def list_accepted(tags: Sequence[str]) -> list[str]:
    """Return those of `tags` that Megatron's config accepts."""
    return [tag for tag in tags if _is_accepted(tag)]


@functools.cache
def _is_accepted(tag: str) -> bool:
    """Return whether Megatron's config accepts `tag`. It says so nowhere but in its refusal, so a tiny config is tried."""
    config_class = load_module(CONFIG_MODULE).TransformerConfig
    check = inspect.unwrap(config_class.__post_init__)  # Megatron's own, also where `set_flags` has replaced it
    probe = type("Probe", (config_class,), {"__post_init__": check})
    fields = {
        "num_layers": 1,
        "hidden_size": 1,
        "num_attention_heads": 1,
        "fine_grained_activation_offloading": True,
        # attn_proj is refused without core_attn, which every version accepts.
        "offload_modules": ["core_attn", tag],
    }
    try:
        with ignore_expected_warnings():
            probe(**fields)
    except (AssertionError, ValueError):
        return False
    return True
