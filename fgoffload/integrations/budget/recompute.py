"""Recomputes a layer or a part of it in backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recompute(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run `forward` in a checkpoint that saves all arguments that require gradients, including keyword arguments.

    A tensor that is passed twice, such as query and key of `MultiheadAttention`, is one tensor in the recompute too.
    """
    values, count, names = [*args, *kwargs.values()], len(args), list(kwargs)
    saved: dict[int, torch.Tensor] = {}
    for n, one in enumerate(values):
        if isinstance(one, torch.Tensor) and (n < count or one.requires_grad):
            saved[id(one)] = one
    index = {key: n for n, key in enumerate(saved)}
    places = [index.get(id(one)) for one in values]
    values = [one if place is None else None for one, place in zip(values, places, strict=True)]

    def run(*tensors: Any) -> Any:
        found = [one if place is None else tensors[place] for one, place in zip(values, places, strict=True)]
        return forward(*found[:count], **dict(zip(names, found[count:], strict=True)))

    return checkpoint(run, *saved.values(), use_reentrant=False)
