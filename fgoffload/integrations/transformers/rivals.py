"""Detects other switches that offload activations."""

import logging
from collections.abc import Iterator
from typing import Any

import torch

logger = logging.getLogger(__name__)


def warn_of_rivals(args: Any, model: torch.nn.Module) -> None:
    """Warn once about other switches, in `args` or in wrappers of `model`, that offload activations."""
    rivals = list(find_rivals(args, model))
    if rivals:
        logger.warning(
            "%s %s on too. Only one of them offloads: the innermost saved-tensor hooks take every tensor. Switch the "
            "others off. Results stay bitwise identical.",
            " and ".join(rivals),
            "are" if len(rivals) > 1 else "is",
        )


def find_rivals(args: Any, model: torch.nn.Module) -> Iterator[str]:
    """Yield each switch that offloads activations, as the user types it.

    Args:
        args: `TrainingArguments` of any version, TRL's included.
        model: The trainer's model.
    """
    names = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")  # if both exist, they are equal
    found = next((name for name in names if (getattr(args, name, None) or {}).get("offload")), None)
    if found:
        yield f"transformers' {found}={{'offload': True}}"
    if any(type(module).__name__ == "OffloadWrapper" for module in model.modules()):
        yield "accelerate's fsdp_activation_checkpointing_offload"
    if getattr(args, "activation_offloading", False):
        yield "TRL's activation_offloading"
