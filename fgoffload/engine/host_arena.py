"""Allocates host memory for offloaded storages, from slabs within a budget.

[Note: A host block that is still being read]
A block returns to the arena when its last reference is gone, but a queued copy to the device may still read it. So the free
range keeps the event of that copy, and the next writer waits for it. A copy to the host that still writes the range needs no
event, because these copies run in order on one stream.

[Note: A block of several parts]
The arena pins memory in slabs, because pinning all of it at once would stall a step. With contiguous blocks, which cannot span
two slabs, the varying shapes of MoE routing would leave 20 to 50% of the reserved memory unused (simulated). So if no free
range is large enough, the arena splits a block over several ranges, the largest first. Each part needs its own copy.

[Note: Returned blocks]
Most steps request the same sizes in the same order, and a search takes several times the CPU time of queuing a copy. So the
arena caches a returned block for the next request of its size. If no cached block has the requested size, the arena merges all
cached blocks into the free ranges and searches these.

[Note: Interrupted arenas]
Ctrl-C may interrupt Python code between any two lines. So each block is returned by a weak reference, which appends itself to a
queue without running Python code. After an exception, the arena rebuilds its free ranges from the memory not in use.
"""

import bisect
import collections
import weakref
from collections.abc import Iterable, Sequence

from fgoffload.engine.device import Device, Event, HostSlab, as_normal_tensors
from fgoffload.engine.geometry import ALIGNMENT_BYTES, round_up
from fgoffload.engine.host_block import BlockPlace, BlockReference, FreeRange, HostBlock
from fgoffload.errors import InternalError
from fgoffload.units import MIB

MAX_SLAB_BYTES = 256 * MIB
"""Maximum size of a slab. A step waits for the pinning: 0.34 s per GiB with huge pages and 0.67 s without (H100 hosts)."""

MIN_SLAB_BYTES = 4 * MIB
"""Minimum size of a slab. A smaller slab is not worth a CUDA call."""

GROWTH_FRACTION = 1 / 16
"""Size of a new slab as a fraction of the reserved memory, within the limits above. A slab is larger if a block needs more.
Less than 1/17 of the memory is therefore unused."""

MIN_PART_BYTES = 4 * MIB
"""Minimum size of a block's part. At 50 GB/s, a copy of this size takes 84 us, several times the CPU time of queuing it."""


class HostBudget:
    """Limit on host memory that arenas share."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.arenas: weakref.WeakSet[HostArena] = weakref.WeakSet()

    @property
    def left_bytes(self) -> int:
        """Bytes that no arena has reserved."""
        return self.total_bytes - sum(arena.reserved_bytes for arena in self.arenas)

    @property
    def part_bytes(self) -> int:
        """Each arena's equal share in bytes."""
        return self.total_bytes // max(1, len(self.arenas))


class HostArena:
    """Best-fit allocator of host blocks. It merges returned ranges with adjacent free ranges.

    Blocks may be returned on any thread. The engine calls all methods under its lock.

    Args:
        device: Device that allocates the slabs.
        budget: Limit on the bytes of all slabs. An int creates a budget for this arena alone.
        slab_bytes: Maximum size of a slab, unless one block needs more.
        min_part_bytes: Minimum size of each part of a block except the last.
    """

    def __init__(
        self,
        device: Device,
        *,
        budget: HostBudget | int,
        slab_bytes: int = MAX_SLAB_BYTES,
        min_part_bytes: int = MIN_PART_BYTES,
    ) -> None:
        self._device = device
        self._budget = HostBudget(budget) if isinstance(budget, int) else budget
        self._budget.arenas.add(self)
        self._slab_bytes = slab_bytes
        self._min_part_bytes = min_part_bytes
        self._slabs: list[HostSlab] = []
        self._in_use: dict[int, BlockReference] = {}
        """References to blocks in use, including those in `_returned`, keyed by id."""
        self._returned: collections.deque[BlockReference] = collections.deque()
        """References to returned blocks that are not cached yet."""
        self._cached: dict[int, list[tuple[BlockPlace, Sequence[Event]]]] = {}
        """Cached blocks, keyed by size. See [Note: Returned blocks]."""
        # Each index contains all free ranges: by size for the best fit, and by start and end to find adjacent ranges.
        self._by_size: list[tuple[int, int, int]] = []  # (size, slab, start), sorted
        self._by_start: dict[tuple[int, int], FreeRange] = {}
        self._by_end: dict[tuple[int, int], FreeRange] = {}
        self._used_bytes = 0
        self.peak_bytes = 0
        """Peak bytes in use, including alignment."""

    @property
    def budget_bytes(self) -> int:
        """This arena's equal share of the budget. The arena may use more while other arenas use less."""
        return self._budget.part_bytes

    @property
    def reserved_bytes(self) -> int:
        """Total bytes of the slabs."""
        return sum(slab.buffer.numel() for slab in self._slabs)

    @property
    def used_bytes(self) -> int:
        """Bytes in use, including alignment."""
        try:
            self._cache_returned()
        except BaseException:
            self._rebuild()
            raise
        return self._used_bytes

    def find_block(self, size_bytes: int) -> HostBlock | None:
        """Allocate a block of `size_bytes`, in use until its last reference is gone. Return None if the budget is used up."""
        try:
            self._cache_returned()
            found = self._find_cached(size_bytes) or self._find_free(size_bytes)
            return None if found is None else self._start_use(*found)
        except BaseException:
            self._rebuild()
            raise

    def _find_cached(self, size_bytes: int) -> tuple[BlockPlace, Sequence[Event]] | None:
        cached = self._cached.get(size_bytes)
        if not cached:
            return None
        place, reads = cached.pop()
        return place, self._list_unfinished(reads)

    def _find_free(self, size_bytes: int) -> tuple[BlockPlace, Sequence[Event]] | None:
        self._join_cached()
        needed_bytes = round_up(max(1, size_bytes))
        chosen, missing_bytes = self._choose(needed_bytes)
        if missing_bytes:
            if not self._grow(missing_bytes):
                return None
            chosen, _ = self._choose(needed_bytes)
        taken = self._take(chosen, needed_bytes)
        used_bytes = sum(part.size_bytes for part in taken)
        parts, left_bytes = [], size_bytes
        for part in taken:
            parts.append(self._slabs[part.slab].buffer[part.start : min(part.end, part.start + left_bytes)])
            left_bytes -= parts[-1].numel()
        place = BlockPlace(size_bytes, used_bytes, taken, tuple(parts))
        return place, _merge(part.reads for part in taken)

    def _start_use(self, place: BlockPlace, reads: Sequence[Event]) -> HostBlock:
        block = HostBlock(place, reads)
        reference = BlockReference(block, self._returned.append)
        reference.place, reference.reads = place, block.reads_to_wait_for
        self._in_use[id(reference)] = reference
        self._used_bytes += place.used_bytes
        if self._used_bytes > self.peak_bytes:
            self.peak_bytes = self._used_bytes
        return block

    def _rebuild(self) -> None:
        """Rebuild the free ranges after an exception interrupted a change. See [Note: Interrupted arenas]."""
        reads = [self._device.record_event(self._device.h2d_stream)]  # completes after every earlier read
        for index in (self._cached, self._by_size, self._by_start, self._by_end):
            index.clear()
        places = [reference.place for reference in self._in_use.values()]
        taken = sorted((part.slab, part.start, part.end) for place in places for part in place.ranges)
        for slab, memory in enumerate(self._slabs):
            start, end = 0, memory.buffer.numel()
            for _, taken_start, taken_end in [*(part for part in taken if part[0] == slab), (slab, end, end)]:
                if start < taken_start:
                    self._add(FreeRange(slab, start, taken_start, reads))
                start = taken_end
        self._used_bytes = sum(place.used_bytes for place in places)

    def forget_reads(self) -> None:
        """Drop the events of all reads, so that no writer waits for them. All reads must be done or captured in a graph."""
        self._cache_returned()
        for free in self._by_start.values():
            free.reads = []
        for cached in self._cached.values():
            cached[:] = [(place, ()) for place, _ in cached]

    def close(self) -> None:
        """Release all slabs. No block may be in use, and no copy to the host may be in flight."""
        if self.used_bytes:
            raise InternalError(f"The host arena was closed with {self._used_bytes} bytes in use.")
        self._join_cached()
        for free in self._by_start.values():
            for event in free.reads:
                # The pages are unmapped next, and a copy may still read them.
                self._device.synchronize(event)
        for slab in self._slabs:
            slab.close()
        for index in (self._slabs, self._by_size, self._by_start, self._by_end):
            index.clear()

    def _choose(self, needed_bytes: int) -> tuple[list[FreeRange], int]:
        """Choose free ranges for a block. Return them and the number of bytes that do not fit.

        The smallest range with enough space is best. If none has enough, take the largest and repeat for the remaining bytes.
        """
        chosen: list[FreeRange] = []
        end = len(self._by_size)
        while True:
            index = bisect.bisect_left(self._by_size, (needed_bytes, -1, -1), hi=end)
            is_last = index < end
            if not is_last:
                index = end = end - 1
                if index < 0 or self._by_size[index][0] < self._min_part_bytes:
                    return chosen, needed_bytes
            size_bytes, slab, start = self._by_size[index]
            chosen.append(self._by_start[slab, start])
            if is_last:
                return chosen, 0
            needed_bytes -= size_bytes

    def _take(self, chosen: list[FreeRange], needed_bytes: int) -> list[FreeRange]:
        """Remove the first `needed_bytes` of `chosen` from the free ranges, and return them."""
        taken = []
        for free in chosen:
            self._remove(free)
            end, reads = min(free.end, free.start + needed_bytes), self._list_unfinished(free.reads)
            taken.append(FreeRange(free.slab, free.start, end, reads))
            if end < free.end:
                self._add(FreeRange(free.slab, end, free.end, reads))
            needed_bytes -= end - free.start
        return taken

    def _grow(self, missing_bytes: int) -> bool:
        if self._device.is_capturing():
            return False  # CUDA cannot pin memory during a capture
        left_bytes = self._budget.left_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if missing_bytes > left_bytes:
            return False
        step_bytes = min(self._slab_bytes, max(MIN_SLAB_BYTES, round_up(int(self.reserved_bytes * GROWTH_FRACTION))))
        size_bytes = min(max(missing_bytes, step_bytes), left_bytes)
        with as_normal_tensors():
            self._slabs.append(self._device.allocate_host(size_bytes))
        self._add(FreeRange(len(self._slabs) - 1, 0, size_bytes, []))
        return True

    def _cache_returned(self) -> None:
        while self._returned:
            reference = self._returned[0]
            if id(reference) in self._in_use:  # false if an exception interrupted this loop after the block was cached
                place = reference.place
                reads = reference.reads if place.last_read is None else (*reference.reads, place.last_read)
                self._cached.setdefault(place.size_bytes, []).append((place, reads))
                self._used_bytes -= place.used_bytes
                del self._in_use[id(reference)]
            self._returned.popleft()

    def _join_cached(self) -> None:
        for free in self._by_start.values():
            free.reads = self._list_unfinished(free.reads)
        for cached in self._cached.values():
            for place, reads in cached:
                unfinished = self._list_unfinished(reads)
                for taken in place.ranges:
                    self._join(FreeRange(taken.slab, taken.start, taken.end, unfinished))
        self._cached.clear()

    def _join(self, free: FreeRange) -> None:
        neighbours = (self._by_end.get((free.slab, free.start)), self._by_start.get((free.slab, free.end)))
        joined = [free, *(neighbour for neighbour in neighbours if neighbour is not None)]
        for neighbour in joined[1:]:
            self._remove(neighbour)
        start, end = min(part.start for part in joined), max(part.end for part in joined)
        self._add(FreeRange(free.slab, start, end, _merge(part.reads for part in joined)))

    def _list_unfinished(self, reads: Sequence[Event]) -> Sequence[Event]:
        return [event for event in reads if not self._device.is_done(event)]

    def _add(self, free: FreeRange) -> None:
        bisect.insort(self._by_size, (free.size_bytes, free.slab, free.start))
        self._by_start[free.slab, free.start] = free
        self._by_end[free.slab, free.end] = free

    def _remove(self, free: FreeRange) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, (free.size_bytes, free.slab, free.start))]
        del self._by_start[free.slab, free.start]
        del self._by_end[free.slab, free.end]


def _merge(reads: Iterable[Sequence[Event]]) -> Sequence[Event]:
    """Return the distinct events of `reads`."""
    return list({id(event): event for events in reads for event in events}.values())
