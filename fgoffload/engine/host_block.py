"""Block of host memory for one offloaded storage: its location in the arena's slabs, and the copies that use it.

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
"""Maximum number of cached views of one block. Tensors of one byte size have two or three types and shapes in a training."""


@dataclasses.dataclass(slots=True)
class FreeRange:
    """Range of a slab that no block uses."""

    slab: int
    start: int
    end: int
    reads: Sequence[Event]  # copies to the device that may still read a part of the range

    @property
    def size_bytes(self) -> int:
        """Length in bytes."""
        return self.end - self.start


class BlockPlace:
    """Location of a block in the slabs."""

    __slots__ = ("last_read", "looks", "parts", "ranges", "size_bytes", "used_bytes")

    def __init__(self, size_bytes: int, ranges: Sequence[FreeRange], parts: Sequence[torch.Tensor]) -> None:
        self.last_read: Event | None = None
        """Event after the last copy to the device that reads this block."""
        self.size_bytes = size_bytes
        self.used_bytes = sum(taken.size_bytes for taken in ranges)
        """Bytes taken from the slabs, alignment included."""
        self.ranges = ranges
        self.parts = tuple(parts)
        self.looks: dict[tuple[torch.dtype, torch.Size], torch.Tensor] = {}
        """Contiguous tensors over the block's only part, by type and size. See [Note: Returned blocks]."""

    def look(self, dtype: torch.dtype, size: torch.Size) -> torch.Tensor:
        """Return a new tensor over the block's only part, and cache it in `looks`."""
        if len(self.looks) >= MAX_LOOKS:
            self.looks.clear()
        with as_normal_tensors():
            look = self.looks[dtype, size] = self.parts[0].view(dtype).view(size)
        return look


class HostBlock:
    """Host memory of one offloaded storage. It returns to the arena when its last reference dies."""

    __slots__ = ("__weakref__", "_place", "reads_to_wait_for")

    def __init__(self, place: BlockPlace, reads: Sequence[Event]) -> None:
        self._place = place
        place.last_read = None
        self.reads_to_wait_for = tuple(reads)
        """Events after which the block may be written. See [Note: A host block that is still read]."""

    @property
    def last_read(self) -> Event | None:
        """Event after the last copy to the device that reads this block."""
        return self._place.last_read

    @last_read.setter
    def last_read(self, event: Event) -> None:
        self._place.last_read = event

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """Parts of the block in order, each uint8 `[n]` on the host. See [Note: A block of several parts]."""
        return self._place.parts

    @property
    def buffer(self) -> torch.Tensor:
        """Whole block as uint8 `[size_bytes]` on the host, if it has one part.

        Raises:
            InternalError: The block has several parts.
        """
        if len(self.parts) > 1:
            raise InternalError(f"A host block of {len(self.parts)} parts was used as one tensor.")
        return self.parts[0]

    def pair(self, tensor: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Return each part of the block with the range of `tensor` to copy to or from it, both of one type and size.

        Args:
            tensor: Contiguous tensor of `size_bytes`, on any device.
        """
        place = self._place
        if len(place.parts) == 1:
            dtype, size = tensor.dtype, tensor.size()
            look = place.looks.get((dtype, size))
            return ((place.look(dtype, size) if look is None else look, tensor),)
        stretches = torch.split(get_bytes(tensor), [part.numel() for part in place.parts])
        return tuple(zip(place.parts, stretches, strict=True))


class LentBlock(weakref.ref[HostBlock]):
    """Weak reference to a block in use. When the block's last reference dies, this is appended to the arena's queue.

    That may occur on any thread at any time, even inside the arena's own code. See [Note: Interrupted arenas].
    """

    __slots__ = ("place", "reads")

    place: BlockPlace
    reads: Sequence[Event]
    """Events of reads before this use. They still count: nothing has waited for them if the block was never written."""

    def list_reads(self) -> Sequence[Event]:
        """Return the events of the copies that may still read the block."""
        return self.reads if self.place.last_read is None else (*self.reads, self.place.last_read)
