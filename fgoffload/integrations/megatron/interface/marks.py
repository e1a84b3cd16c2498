"""Tensors that somebody else has marked to stay on the device."""

import torch


def is_marked_to_stay(tensor: torch.Tensor) -> bool:
    """Return whether Transformer Engine has marked `tensor`: weights in another format, and what it keeps for FP8.

    It marks tensors that live on after backward. Source: `mark_not_offload` in Transformer Engine's `cpu_offload`, which
    Megatron-Core's own engine heeds since 0.19 (`_te_do_not_offload`). Autograd hands over the very tensor that was marked
    where it has no history, as these have not.
    """
    return getattr(tensor, "_TE_do_not_offload", False) is True
