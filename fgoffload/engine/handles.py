"""Handles: what autograd holds in place of the tensors that it saved, and gets them back through."""

from typing import TYPE_CHECKING

import torch

from fgoffload.engine.geometry import View
from fgoffload.engine.identity import get_version, has_bytes, is_of_leaf
from fgoffload.engine.place import Place
from fgoffload.engine.saved import SavedStorage, find_change
from fgoffload.errors import StateError

if TYPE_CHECKING:
    from fgoffload.engine.engine import OffloadEngine
    from fgoffload.engine.group import Group, Lane


class Handle:
    """What a saved tensor is packed into, where its storage may move."""

    __slots__ = ("_engine", "_group", "_lane", "_saved", "_view")

    @property
    def place(self) -> Place:
        """Where the tensor was saved."""
        return self._lane.place if self._group is None else self._group.place

    def __init__(
        self, engine: "OffloadEngine", saved: SavedStorage, view: View, *, lane: "Lane", group: "Group | None"
    ) -> None:
        self._engine = engine
        self._saved = saved
        self._view = view
        self._lane = lane
        self._group = group

    def take(self) -> torch.Tensor:
        """Return the tensor for autograd, its bytes as they were saved."""
        return self._engine.take(self._saved, self._view, self._lane, self._group)


class KeptHandle:
    """What a saved tensor is packed into, where it stays on the device.

    Args:
        tensor: What autograd gets back, without a graph of its own.
        version: Of the tensor.
        nbytes: Of its storage, which must be as large then; None where the tensor has none, or may get another one.
        place: Where it was saved.
    """

    __slots__ = ("_nbytes", "_tensor", "_version", "place")

    def __init__(self, tensor: torch.Tensor, version: int, nbytes: int | None, place: Place) -> None:
        self._tensor = tensor
        self._version = version
        self._nbytes = nbytes
        self.place = place
        """Where the tensor was saved."""

    def take(self) -> torch.Tensor:
        """Return the tensor for autograd.

        Raises:
            StateError: It was changed in place, or its storage is not as large as it was.
        """
        tensor, nbytes = self._tensor, self._nbytes
        # The same question twice: here for every weight of every step, and there for a sentence.
        if get_version(tensor) != self._version or (nbytes is not None and tensor.untyped_storage().nbytes() != nbytes):
            raise StateError(
                find_change(tensor, version=self._version, nbytes=nbytes, place=self.place, act="backward took it")
            )
        return tensor


class FollowedHandle:
    """What a saved tensor is packed into, where it stays and tells how far backward has come.

    Args:
        engine: Is told when backward takes it.
        kept: Holds the tensor.
        size_bytes: Of its storage, which no other such handle has.
        lane: Where it was saved.
    """

    __slots__ = ("_engine", "_kept", "_lane", "_size_bytes")

    def __init__(self, engine: "OffloadEngine", kept: KeptHandle, size_bytes: int, *, lane: "Lane") -> None:
        self._engine = engine
        self._kept = kept
        self._size_bytes = size_bytes
        self._lane = lane

    @property
    def place(self) -> Place:
        """Where the tensor was saved."""
        return self._kept.place

    def take(self) -> torch.Tensor:
        """Return the tensor for autograd.

        Raises:
            StateError: It was changed in place, or its storage is not as large as it was.
        """
        size_bytes, self._size_bytes = self._size_bytes, 0  # another backward of a graph that is kept lets go of nothing more
        self._engine.follow_backward(self._lane, size_bytes)
        return self._kept.take()


Packed = Handle | KeptHandle | FollowedHandle
"""What pack hooks return."""


def hold(tensor: torch.Tensor, place: Place) -> KeptHandle:
    """Return a handle for a tensor of any kind that was saved at `place` and stays on the device."""
    version = get_version(tensor)
    if is_of_leaf(tensor):
        return KeptHandle(tensor, version, None, place)  # as torch does: a leaf has no graph, and may be given other data
    if type(tensor) is not torch.Tensor or not has_bytes(tensor):
        return KeptHandle(tensor.detach(), version, None, place)
    nbytes = tensor.untyped_storage().nbytes()
    if nbytes and tensor.numel() == 0:
        # An expert that gets no tokens saves an empty slice of the storage that all experts' tokens lie in, and would hold it.
        empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return KeptHandle(empty, get_version(empty), None, place)
    return KeptHandle(tensor.detach(), version, nbytes, place)
