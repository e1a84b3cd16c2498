"""Which tensor of what a module was given, or gave back, tells where backward is.

[Note: Looking into somebody's values]
A mark is worth a little time of backward, and never an exception in a forward that was right without offload. So only plain
containers are looked into, by the methods of their base classes and the fields as they are stored: no code of the user's runs,
and a mapping that computes its values when they are asked for is left alone. A container is looked into once, since it may hold
itself, and the search ends after `MAX_VALUES`.
"""

import dataclasses
import inspect
import itertools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import Node

MAX_VALUES = 1000
"""Values looked at. The tensor that a mark goes on is among the first few; a list of a million numbers holds none."""


def list_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in `value`, in order: a tensor, or tuples, lists, dicts and dataclasses of them, nested.

    See [Note: Looking into somebody's values].
    """
    waiting = [value]
    seen: set[int] = set()
    for _ in range(MAX_VALUES):
        if not waiting:
            return
        found = waiting.pop()
        if issubclass(type(found), torch.Tensor):  # `isinstance` would ask a proxy for its class
            yield found
        elif id(found) not in seen:
            parts = tuple(itertools.islice(_list_parts(found), MAX_VALUES))
            if parts:
                seen.add(id(found))
                waiting.extend(reversed(parts))


def find_tensor(value: Any) -> torch.Tensor | None:
    """Return the first tensor in `value` that has a gradient, or None: there is nothing that a mark could be put on."""
    return next((tensor for tensor in list_tensors(value) if tensor.requires_grad), None)


def saves_something(output: torch.Tensor | None, *, start: Node | None) -> bool:
    """Return whether a node of the graph between `start` and `output` holds saved tensors, among the `MAX_VALUES` last ones.

    No saved tensor is asked for: that would call the hooks that packed it.
    """
    seen = {start}
    waiting = [None if output is None else output.grad_fn]
    while waiting and len(seen) < MAX_VALUES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(name.startswith("_raw_saved_") for name in dir(node)):
            return True
        waiting.extend(following for following, _ in node.next_functions)
    return False


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
    """Return what is stored for a field, or None where nothing is; a property in its place is not asked."""
    stored = inspect.getattr_static(value, name, None)
    if isinstance(stored, types.MemberDescriptorType):  # of a class with slots
        try:
            return stored.__get__(value)
        except AttributeError:
            return None
    return stored
