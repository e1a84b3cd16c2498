"""Block of host memory for one offloaded storage. The notes cited here are in `host_arena.py`."""

import dataclasses
import weakref
from collections.abc import Sequence

import torch

from fgoffload.engine.device import Event
from fgoffload.engine.geometry import get_bytes


@dataclasses.dataclass(slots=True)
class FreeRange:
    """Range of a slab. It is free, or taken by a block."""

    slab: int
    start: int
    end: int
    reads: Sequence[Event]  # events of copies to the device that may still read a part of the range

    @property
    def size_bytes(self) -> int:
        """Length in bytes."""
        return self.end - self.start


@dataclasses.dataclass(slots=True, eq=False)
class BlockPlace:
    """Location of a block in the slabs."""

    size_bytes: int
    used_bytes: int
    """Bytes that the block occupies in the slabs, including alignment."""
    ranges: Sequence[FreeRange]
    parts: tuple[torch.Tensor, ...]
    last_read: Event | None = None
    """Event recorded after the last copy from this block to the device."""


class HostBlock:
    """Host memory of one offloaded storage. It returns to the arena when its last reference is gone."""

    __slots__ = ("__weakref__", "parts", "place", "reads_to_wait_for")

    def __init__(self, place: BlockPlace, reads: Sequence[Event]) -> None:
        self.place = place
        place.last_read = None
        self.parts = place.parts
        """Parts of the block in order, each uint8 `[n]`. See [Note: A block of several parts]."""
        self.reads_to_wait_for = tuple(reads)
        """Events that must complete before the block is written. See [Note: A host block that is still being read]."""

    def pair(self, tensor: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Pair each part of the block with the range of the contiguous `tensor` that it stores. Both have the same type."""
        if len(self.parts) == 1:
            return ((self.parts[0].view(tensor.dtype).view(tensor.size()), tensor),)
        ranges = torch.split(get_bytes(tensor), [part.numel() for part in self.parts])
        return tuple(zip(self.parts, ranges, strict=True))


class BlockReference(weakref.ref[HostBlock]):
    """Weak reference to a block in use. When the block is freed, on any thread, the reference joins the arena's queue.

    See [Note: Interrupted arenas].
    """

    __slots__ = ("place", "reads")

    place: BlockPlace
    reads: Sequence[Event]
    """Events of earlier reads of this memory. If the block was never written, nothing has waited for them."""
