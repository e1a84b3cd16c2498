"""Host memory for what has been offloaded: slabs, cut by offset, under a budget in bytes.

[Note: A host block that is still read]
A block goes back to the arena when the last handle that needs it dies, which can be while the copy to the device that reads
it is only queued. So a returned range remembers that copy's event, and whoever writes the range next gets the event to wait
for. A copy to the host that is still writing the range needs no event: all those copies run in order on one stream.
"""

import bisect
import collections
import dataclasses

import torch

from fgoffload.engine.device import Device, Event, HostSlab
from fgoffload.engine.geometry import ALIGNMENT_BYTES, round_up
from fgoffload.errors import InternalError
from fgoffload.units import MIB

DEFAULT_SLAB_BYTES = 256 * MIB
"""Bytes. Locking memory costs 0.67 s a GiB (measured, H100 host), so slabs come in pieces that a step can bear."""


@dataclasses.dataclass(slots=True)
class _FreeRange:
    slab: int
    start: int
    end: int
    reads: list[Event]  # copies to the device that may still read a part of the range

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


class HostBlock:
    """A part of a slab, for one offloaded storage. It goes back to the arena when the last reference to it dies."""

    __slots__ = ("_arena", "_end", "_slab", "_start", "buffer", "last_read", "reads_to_wait_for")

    def __init__(self, arena: "HostArena", free: _FreeRange, size_bytes: int) -> None:
        self._arena = arena
        self._slab, self._start, self._end = free.slab, free.start, free.start + round_up(max(1, size_bytes))
        self.buffer = arena.get_bytes(free.slab, free.start, size_bytes)
        """uint8 `[size_bytes]`, on the host."""
        self.reads_to_wait_for: tuple[Event, ...] = tuple(free.reads)
        """Events after which the block may be written. See [Note: A host block that is still read]."""
        self.last_read: Event | None = None
        """The event after the last copy to the device that reads this block."""

    def __del__(self) -> None:
        # Any thread may get here, in the middle of anything, the arena's own code included: so only an atomic append.
        reads = list(self.reads_to_wait_for)  # it may never have been written, and then nobody has waited for them
        if self.last_read is not None:
            reads.append(self.last_read)
        self._arena.returned.append(_FreeRange(self._slab, self._start, self._end, reads))


class HostArena:
    """Hands out host blocks, best fit first, and joins what comes back with its neighbours.

    Not thread-safe but for the return of blocks; the engine calls it under its lock.
    """

    def __init__(self, device: Device, *, budget_bytes: int, slab_bytes: int = DEFAULT_SLAB_BYTES) -> None:
        self._device = device
        self._budget_bytes = budget_bytes
        self._slab_bytes = slab_bytes
        self._slabs: list[HostSlab] = []
        self.returned: collections.deque[_FreeRange] = collections.deque()
        """Ranges that came back and are not yet joined to the free ones."""
        # The free ranges three times: by size for the best fit, by either end to find neighbours.
        self._by_size: list[tuple[int, int, int]] = []  # (size, slab, start), sorted
        self._by_start: dict[tuple[int, int], _FreeRange] = {}
        self._by_end: dict[tuple[int, int], _FreeRange] = {}
        self._used_bytes = 0
        self.peak_bytes = 0
        """The most bytes in use at any time, alignment included."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.buffer.numel() for slab in self._slabs)

    @property
    def used_bytes(self) -> int:
        """Bytes in use now, alignment included."""
        self._collect()
        return self._used_bytes

    def find_block(self, size_bytes: int) -> HostBlock | None:
        """Return a block of `size_bytes`, or None where the budget does not allow it.

        Lifetime:
            The block is the caller's until its last reference dies.
        """
        self._collect()
        needed_bytes = round_up(max(1, size_bytes))
        index = bisect.bisect_left(self._by_size, (needed_bytes, -1, -1))
        if index == len(self._by_size):
            if not self._grow(needed_bytes):
                return None
            index = bisect.bisect_left(self._by_size, (needed_bytes, -1, -1))
        _, slab, start = self._by_size[index]
        free = self._by_start[slab, start]
        self._remove(free)
        free.reads = [event for event in free.reads if not self._device.is_done(event)]
        block = HostBlock(self, free, size_bytes)
        if free.size_bytes > needed_bytes:
            self._add(_FreeRange(slab, start + needed_bytes, free.end, list(free.reads)))
        self._used_bytes += needed_bytes
        self.peak_bytes = max(self.peak_bytes, self._used_bytes)
        return block

    def get_bytes(self, slab: int, start: int, size_bytes: int) -> torch.Tensor:
        """Return uint8 `[size_bytes]` of slab number `slab` from offset `start`."""
        return self._slabs[slab].buffer[start : start + size_bytes]

    def close(self) -> None:
        """Give all slabs back to the system. No block may be in use and no copy under way.

        Raises:
            InternalError: A block is still in use.
        """
        if self.used_bytes:
            raise InternalError(f"The host arena was closed with {self._used_bytes} bytes in use.")
        for free in self._by_start.values():
            for event in free.reads:
                # The pages go back to the system next: a copy that still reads them would read what is mapped there then.
                self._device.synchronize(event)
        for slab in self._slabs:
            slab.close()
        self._slabs.clear()
        self._by_size.clear()
        self._by_start.clear()
        self._by_end.clear()

    def _grow(self, needed_bytes: int) -> bool:
        left_bytes = (self._budget_bytes - self.reserved_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if needed_bytes > left_bytes:
            return False
        size_bytes = min(max(needed_bytes, self._slab_bytes), left_bytes)
        self._slabs.append(self._device.allocate_host(size_bytes))
        self._add(_FreeRange(len(self._slabs) - 1, 0, size_bytes, []))
        return True

    def _collect(self) -> None:
        while self.returned:
            free = self.returned.popleft()
            self._used_bytes -= free.size_bytes
            before = self._by_end.get((free.slab, free.start))
            if before is not None:
                self._remove(before)
                free.start = before.start
                free.reads += before.reads
            after = self._by_start.get((free.slab, free.end))
            if after is not None:
                self._remove(after)
                free.end = after.end
                free.reads += after.reads
            free.reads = [event for event in free.reads if not self._device.is_done(event)]
            self._add(free)

    def _add(self, free: _FreeRange) -> None:
        bisect.insort(self._by_size, (free.size_bytes, free.slab, free.start))
        self._by_start[free.slab, free.start] = free
        self._by_end[free.slab, free.end] = free

    def _remove(self, free: _FreeRange) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, (free.size_bytes, free.slab, free.start))]
        del self._by_start[free.slab, free.start]
        del self._by_end[free.slab, free.end]
