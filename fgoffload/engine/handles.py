"""Handles that autograd stores in place of saved tensors and unpacks later.

[Note: Unpacked tensors]
While the bytes are on the device, the handle of a saved tensor that requires no gradient returns the saved object itself, with
its Python attributes, as plain torch does. The identity of the object matters: autograd may reuse a tensor as a gradient
if nothing else references its object. So all unpacks of one view of a reloaded storage also return the same object. If a saved
tensor requires a gradient, the handle holds a detached tensor, because the graph of the original could close a reference cycle.
Torch wraps such a tensor in a new object anyway (see [Note: A gradient that is a saved tensor]).
"""

import dataclasses
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fgoffload.engine.geometry import View
from fgoffload.engine.identity import get_version, has_bytes, is_of_leaf
from fgoffload.engine.place import Place
from fgoffload.engine.saved import ON_DEVICE, SavedStorage, find_change
from fgoffload.errors import StateError

if TYPE_CHECKING:
    from fgoffload.engine.group import Group, Lane


class Handle:
    """Handle of a saved tensor whose storage may be offloaded."""

    __slots__ = ("_attributes", "_engine", "_group", "_lane", "_origin", "_saved", "_view", "place")

    def __init__(
        self, engine: Any, saved: SavedStorage, view: View, tensor: torch.Tensor, *, lane: "Lane", group: "Group | None"
    ) -> None:
        # See [Note: Unpacked tensors].
        self._origin = None if tensor.requires_grad else weakref.ref(tensor)
        self._attributes = None if tensor.requires_grad else tensor.__dict__ or None
        self._engine = engine
        self._saved = saved
        self._view = view
        self._lane = lane
        self._group = group
        self.place = lane.place if group is None else group.place

    def take(self) -> torch.Tensor:
        """Return the saved tensor."""
        taken: torch.Tensor = self._engine.take(self._saved, self._view, self._lane, self._group)
        if self._origin is not None:
            origin = self._origin()
            if origin is not None and self._saved.state in ON_DEVICE:
                return origin
            if self._attributes and taken is not origin:
                taken = taken.clone()  # other handles return the same object, which must not get the attributes
                taken.__dict__.update(self._attributes)
        return taken


class WrappedHandle:
    """Handle of a saved `DTensor` whose local tensor may be offloaded. `wrap` turns a local tensor into a `DTensor`."""

    __slots__ = ("_inner", "_wrap", "place")

    def __init__(self, inner: "Handle | KeptHandle | WrappedHandle", wrap: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._inner = inner
        self._wrap = wrap
        self.place: Place = inner.place

    def take(self) -> torch.Tensor:
        """Return the saved tensor as a `DTensor`."""
        return self._wrap(self._inner.take())


@dataclasses.dataclass(slots=True, eq=False)
class KeptHandle:
    """Handle of a saved tensor that stays on the device. It unpacks to `tensor`, which has no graph."""

    tensor: torch.Tensor
    version: int
    """Version of the tensor, which must not change."""
    nbytes: int | None
    """Size of its storage, which must not change. None if the tensor has no storage or its storage may be replaced."""
    place: Place

    def take(self) -> torch.Tensor:
        """Return the saved tensor. Raises `StateError` if it was changed in place or its storage was resized."""
        tensor, nbytes = self.tensor, self.nbytes
        # A fast check. `find_change` repeats it to create the message.
        if get_version(tensor) != self.version or (nbytes is not None and tensor.untyped_storage().nbytes() != nbytes):
            raise StateError(find_change(tensor, self.version, nbytes, place=self.place, next_use="backward used it"))
        return tensor


class FollowedHandle:
    """Handle of a saved tensor that stays on the device. It calls `follow_backward` when backward unpacks the tensor.

    `size_bytes` is the size of the tensor's storage, which is counted only by this handle.
    """

    __slots__ = ("_engine", "_kept", "_lane", "_size_bytes", "place")

    def __init__(self, engine: Any, kept: KeptHandle, size_bytes: int, *, lane: "Lane") -> None:
        self._engine = engine
        self._kept = kept
        self._size_bytes = size_bytes
        self._lane = lane
        self.place = kept.place

    def take(self) -> torch.Tensor:
        """Return the saved tensor. Raises the same errors as `KeptHandle.take`."""
        size_bytes, self._size_bytes = self._size_bytes, 0  # a second backward of a retained graph releases nothing
        self._engine.follow_backward(self._lane, size_bytes)
        return self._kept.take()


Packed = Handle | KeptHandle | FollowedHandle | WrappedHandle
"""Result of the engine's pack hooks."""


def keep_tensor(tensor: torch.Tensor, place: Place) -> KeptHandle:
    """Return a handle for a tensor of any kind that stays on the device. See [Note: Unpacked tensors]."""
    version = get_version(tensor)
    if is_of_leaf(tensor):
        return KeptHandle(tensor, version, None, place)  # a leaf has no graph, and its data may be replaced
    kept = tensor.detach() if tensor.requires_grad else tensor
    if type(tensor) is not torch.Tensor or not has_bytes(tensor):
        return KeptHandle(kept, version, None, place)
    nbytes = tensor.untyped_storage().nbytes()
    if nbytes and tensor.numel() == 0:
        # An expert without tokens saves an empty slice of all experts' tokens, which would keep their storage alive.
        kept = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return KeptHandle(kept, get_version(kept), None, place)
    return KeptHandle(kept, version, nbytes, place)


_LOCAL = "_local_tensor"


def find_local_tensor(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the plain tensor inside `tensor` if it is a `DTensor`, otherwise None."""
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None or type(tensor) is not kind or isinstance(tensor, torch.nn.Parameter):
        return None
    local = getattr(tensor, _LOCAL)  # `to_local` would add a node to the graph
    return local if type(local) is torch.Tensor else None


def wrap_like(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that wraps another local tensor in a `DTensor` like `tensor`."""
    kind: Any = type(tensor)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    others = {name: getattr(tensor, name) for name in names if name != _LOCAL}
    size, stride = tensor.size(), tensor.stride()
    return lambda local: kind.__tensor_unflatten__({_LOCAL: local, **others}, context, size, stride)
