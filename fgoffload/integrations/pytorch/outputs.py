"""Finds the tensors in a module's inputs and outputs.

[Note: Search of user values]
The search must not raise in a forward that works without offload, so it runs no user code. It reads dicts, lists and tuples
through the methods of the builtin classes, and dataclasses through their stored fields. Other objects, such as mappings that
compute their values, are skipped. Each container is read once, since a container may contain itself.
"""

import dataclasses
import inspect
import itertools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

MAX_VALUES = 1000
"""Maximum number of values to search, since a list may hold a million numbers."""


def list_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in `value`, in order. `value` may be a tensor, or nested tuples, lists, dicts and dataclasses.

    See [Note: Search of user values].
    """
    waiting = [value]
    seen: set[int] = set()
    for _ in range(MAX_VALUES):
        if not waiting:
            return
        found = waiting.pop()
        if issubclass(type(found), torch.Tensor):  # `isinstance` would run a proxy's `__class__`
            yield found
        elif id(found) not in seen:
            parts = tuple(itertools.islice(_list_parts(found), MAX_VALUES))
            if parts:
                seen.add(id(found))
                waiting.extend(reversed(parts))


def find_tensor(value: Any) -> torch.Tensor | None:
    """Return the first tensor in `value` that requires a gradient, so that a hook can be registered, or None."""
    return next((tensor for tensor in list_tensors(value) if tensor.requires_grad), None)


def _list_parts(value: Any) -> Iterable[Any]:
    kind = type(value)
    if issubclass(kind, dict):
        return dict.values(value)
    if issubclass(kind, list):
        return list.__iter__(value)
    if issubclass(kind, tuple):
        return tuple.__iter__(value)
    if dataclasses.is_dataclass(kind):
        return [_read_field(value, field.name) for field in dataclasses.fields(kind)]
    return ()


def _read_field(value: Any, name: str) -> Any:
    """Return the stored value of a field, or None, without calling a property."""
    stored = inspect.getattr_static(value, name, None)
    if isinstance(stored, types.MemberDescriptorType):  # a class with slots
        try:
            return stored.__get__(value)
        except AttributeError:
            return None
    return stored
