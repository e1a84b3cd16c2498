"""A block of host memory for one offloaded storage: where it lies in its arena's slabs, and who uses it.

The notes cited here are in `host_arena.py`.
"""

import dataclasses
import weakref
from collections.abc import Sequence

import torch

from fgoffload.engine.device import Event, as_normal_tensors
from fgoffload.engine.geometry import get_bytes
from fgoffload.errors import InternalError

MAX_LOOKS = 8
"""Cached views of one block. Tensors of one size in bytes have two or three types and shapes in a training."""


@dataclasses.dataclass(slots=True)
class FreeRange:
    """A stretch of a slab that no block has."""

    slab: int
    start: int
    end: int
    reads: Sequence[Event]  # copies to the device that may still read a part of the range

    @property
    def size_bytes(self) -> int:
        """The length of the stretch."""
        return self.end - self.start


class BlockPlace:
    """The location of a block."""

    __slots__ = ("last_read", "looks", "parts", "ranges", "size_bytes", "used_bytes")

    def __init__(self, size_bytes: int, ranges: Sequence[FreeRange], parts: Sequence[torch.Tensor]) -> None:
        self.last_read: Event | None = None
        """The event after the last copy to the device that reads this block."""
        self.size_bytes = size_bytes
        self.used_bytes = sum(taken.size_bytes for taken in ranges)
        """Alignment included."""
        self.ranges = ranges
        self.parts = tuple(parts)
        self.looks: dict[tuple[torch.dtype, torch.Size], torch.Tensor] = {}
        """Contiguous tensors over the only part, by type and size. See [Note: Returned blocks]."""

    def look(self, dtype: torch.dtype, size: torch.Size) -> torch.Tensor:
        """Return a new one of `looks`."""
        if len(self.looks) >= MAX_LOOKS:
            self.looks.clear()
        with as_normal_tensors():
            look = self.looks[dtype, size] = self.parts[0].view(dtype).view(size)
        return look


class HostBlock:
    """Host memory of one offloaded storage. It returns to the arena with its last reference."""

    __slots__ = ("__weakref__", "_place", "reads_to_wait_for")

    def __init__(self, place: BlockPlace, reads: Sequence[Event]) -> None:
        self._place = place
        place.last_read = None
        self.reads_to_wait_for = tuple(reads)
        """Events after which the block may be written. See [Note: A host block that is still read]."""

    @property
    def last_read(self) -> Event | None:
        """The event after the last copy to the device that reads this block."""
        return self._place.last_read

    @last_read.setter
    def last_read(self, event: Event) -> None:
        self._place.last_read = event

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """uint8 `[n]` each, on the host; in order they form the block. See [Note: A block of several parts]."""
        return self._place.parts

    @property
    def buffer(self) -> torch.Tensor:
        """uint8 `[size_bytes]`, on the host: the block, if it has one part.

        Raises:
            InternalError: It has several parts.
        """
        if len(self.parts) > 1:
            raise InternalError(f"A host block of {len(self.parts)} parts was used as one tensor.")
        return self.parts[0]

    def pair(self, tensor: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Return each part, and the stretch of `tensor` that goes there or comes from there, of one type and size.

        Args:
            tensor: Contiguous, of `size_bytes`, anywhere.
        """
        place = self._place
        if len(place.parts) == 1:
            dtype, size = tensor.dtype, tensor.size()
            look = place.looks.get((dtype, size))
            return ((place.look(dtype, size) if look is None else look, tensor),)
        stretches = torch.split(get_bytes(tensor), [part.numel() for part in place.parts])
        return tuple(zip(place.parts, stretches, strict=True))


class LentBlock(weakref.ref[HostBlock]):
    """A block that is in use. When its last reference dies this is appended to the arena's queue.

    On any thread, in the middle of anything, the arena's own code included. See [Note: Interrupted arenas].
    """

    __slots__ = ("place", "reads")

    place: BlockPlace
    reads: Sequence[Event]
    """Reads of the block's earlier use. They still count: nobody has waited for them if the block was never written."""

    def list_reads(self) -> Sequence[Event]:
        """Return the events of the copies that may still read there."""
        return self.reads if self.place.last_read is None else (*self.reads, self.place.last_read)
