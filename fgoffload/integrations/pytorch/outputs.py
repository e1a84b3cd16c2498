"""Which tensor of what a module was given, or gave back, tells where backward is."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def list_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in `value`, in order: a tensor, or tuples, lists, mappings and dataclasses of them, nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from list_tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from list_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from list_tensors(getattr(value, field.name, None))


def find_tensor(value: Any) -> torch.Tensor | None:
    """Return the first tensor in `value` that has a gradient, or None: there is nothing that a mark could be put on."""
    return next((tensor for tensor in list_tensors(value) if tensor.requires_grad), None)
