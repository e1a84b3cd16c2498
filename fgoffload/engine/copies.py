"""Copies tensors to the host and back, and orders the streams that use them. `hazards.py` explains the waits."""

import collections
import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import torch

from fgoffload.engine.device import NO_CONTEXT, Device, Event, Stream, as_normal_tensors
from fgoffload.engine.geometry import View, gather, rebuild, scatter
from fgoffload.engine.hazards import Hazard
from fgoffload.engine.host_arena import HostArena
from fgoffload.engine.host_block import HostBlock
from fgoffload.engine.identity import StorageRef, get_version
from fgoffload.engine.ledger import ActivationLedger
from fgoffload.engine.place import Place
from fgoffload.engine.saved import Reload, SavedStorage
from fgoffload.engine.stats import TagStats, TimeKind
from fgoffload.engine.torch_internals import is_profiled
from fgoffload.errors import InternalError, StateError
from fgoffload.memory_tiers import SavedState


class _InFlight(NamedTuple):
    """Copies of one group to the host, the source tensors to keep alive, and the streams that use these tensors."""

    saved: Sequence["weakref.ref[SavedStorage]"]
    sources: Sequence[torch.Tensor]
    streams: set[Stream]
    d2h_done: Event
    size_bytes: int
    stats: TagStats


class StopWatch:
    """Times work on streams with device events."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._spans: collections.deque[tuple[Event, Event, TagStats, TimeKind]] = collections.deque()

    @contextlib.contextmanager
    def measure(self, stream: Stream, stats: TagStats, kind: TimeKind) -> Iterator[None]:
        """Time the work that the `with` body queues on `stream`."""
        start = self._device.record_event(stream, is_timed=True)
        yield
        self._spans.append((start, self._device.record_event(stream, is_timed=True), stats, kind))

    def collect(self) -> None:
        """Add the times measured so far to the statistics. The host blocks until the timed work is done."""
        while self._spans:
            start, end, stats, kind = self._spans.popleft()
            self._device.synchronize(end)
            stats.seconds[kind] = stats.seconds.get(kind, 0.0) + self._device.measure_seconds(start, end)


class Transfers:
    """Queues copies in both directions on one device. The ledgers in `observers` count buffers that this class allocates."""

    def __init__(
        self, device: Device, arena: HostArena, *, observers: Sequence[ActivationLedger], watch: StopWatch | None
    ) -> None:
        self._device = device
        self._arena = arena
        self._observers = observers
        self._watch = watch
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self.abandoned: collections.deque[Reload] = collections.deque()
        """Device buffers that autograd has released but that other streams may still use."""
        self.dropped: collections.deque[tuple[StorageRef, bool]] = collections.deque()
        """Storages that autograd released, and whether each had been offloaded."""
        self._used: set[Stream] = set()
        """Streams on which copies were queued since the last `join` or `close`."""
        self._filling: list[torch.Tensor] = []
        """Buffers whose copy may be queued but has no event yet. After an exception, they are kept until `close`."""

    @property
    def in_flight_bytes(self) -> int:
        """Bytes in flight to the host, summed on each call, because an interrupt could corrupt a separate counter."""
        return sum(entry.size_bytes for entry in self._in_flight)

    def offload(self, storages: Sequence[tuple[SavedStorage, HostBlock]], *, place: Place, stats: TagStats) -> int:
        """Queue the copies of one group's storages to their host blocks, and return the number of bytes.

        Streams:
            The device-to-host stream runs the copies after all work queued so far on the streams that saved the storages (see
            [Note: Ordering of a copy to the host]). The host does not block.

        Lifetime:
            The sources stay alive until `poll`, `release_oldest`, `join` or `close` releases them.
        """
        device, d2h = self._device, self._device.d2h_stream
        streams = {device.current_stream()}.union(*(saved.streams for saved, _ in storages))
        gathers = any(saved.gathered for saved, _ in storages)
        if gathers:
            self._join(streams, Hazard.GATHER_UNWRITTEN)
        sources = [self._gather(saved) if saved.gathered else saved.get_byte_range() for saved, _ in storages]
        if gathers:
            # A gathered storage is freed before the copy is done, and another stream may own its memory.
            self._join(streams, Hazard.SOURCE_STILL_USED)
        for stream in streams:
            device.wait_stream(d2h, stream, Hazard.SOURCE_UNWRITTEN)
        for _, block in storages:
            for event in block.reads_to_wait_for:
                device.wait_event(d2h, event, Hazard.BLOCK_STILL_READ)
        with self._measure(d2h, stats, TimeKind.D2H), _name_range("offload", place), device.copying_on(d2h):
            for (_, block), source in zip(storages, sources, strict=True):
                for part, byte_range in block.pair(source):
                    device.copy_bytes(destination=part, source=byte_range, stream=d2h)
        d2h_done = device.record_event(d2h)
        self._used.add(d2h)
        size_bytes = sum(saved.moved_bytes for saved, _ in storages)
        references = [weakref.ref(saved) for saved, _ in storages]
        # Append the entry first: after an interrupt here, storages may still count as resident, but every copy has an entry.
        self._in_flight.append(_InFlight(references, sources, streams, d2h_done, size_bytes, stats))
        for saved, block in storages:
            saved.start_offload(block, d2h_done)
        return size_bytes

    def poll(self) -> None:
        """Release memory that copies no longer use. The host does not block."""
        while self._in_flight and self._device.is_done(self._in_flight[0].d2h_done):
            self._release(self._in_flight[0], is_done=True)
        while self.abandoned:
            self._order(self.abandoned[0])
            self.abandoned.popleft()  # after `_order`, because an exception there must not free a buffer in use

    def count_in_flight(self, stats: TagStats) -> int:
        """Return how many groups of the tag with these `stats` are in flight to the host."""
        return sum(entry.stats is stats for entry in self._in_flight)

    def release_oldest(self) -> None:
        """Release the sources of the oldest group in flight, even if its copies are not done.

        Streams:
            The compute streams wait for these copies. The host does not block.
        """
        entry = self._in_flight[0]
        current = self._device.current_stream()
        with self._measure(current, entry.stats, TimeKind.WAIT):
            # The current stream also waits, so that compute does not run further ahead of the copies.
            for stream in {current} | _collect_streams(entry, _list_living(entry)):
                self._device.wait_event(stream, entry.d2h_done, Hazard.SOURCE_STILL_COPIED)
        self._release(entry, is_done=False)

    def reload(self, storages: Mapping[SavedStorage, Place]) -> None:
        """Queue copies of `storages` to the device, in order. All are on the host only. Profiler ranges show the places.

        Streams:
            The copies run on the host-to-device stream (see [Note: Ordering of a copy to the device]). The host does not block.

        Lifetime:
            The device buffers stay alive as long as autograd needs them, or until `drop_reloaded`.
        """
        device, h2d = self._device, self._device.h2d_stream
        current = device.current_stream()
        buffers = [self._allocate_for(saved, current) for saved in storages]
        for owner in {saved.owner for saved in storages}:
            device.wait_stream(h2d, owner, Hazard.BUFFER_STILL_USED)
        self._used.add(h2d)
        with device.copying_on(h2d):
            for (saved, place), buffer in zip(storages.items(), buffers, strict=True):
                with _name_range("reload", place):
                    self._fill(saved, buffer)

    def take(self, saved: SavedStorage, view: View) -> torch.Tensor:
        """Return the tensor that was saved as `view`, from the device buffer of the reloaded `saved`.

        Streams:
            The current stream waits for the copy to the device. The host does not block.

        Raises:
            StateError: An op that used the buffer earlier changed it in place.
        """
        reload = saved.reload
        if reload is None:
            raise InternalError(f"A tensor that {saved.place} saved was unpacked without a device buffer.")
        stream = self._device.current_stream()
        if stream not in reload.taken_on:
            with self._measure(stream, saved.stats, TimeKind.WAIT):
                self._device.wait_event(stream, reload.filled, Hazard.BUFFER_UNFILLED)
            reload.taken_on.add(stream)
        if reload.is_dense:
            reload = saved.reload = self._scatter(saved, reload, stream)
        version = get_version(reload.buffer)
        if reload.version is None:
            reload.version = version
        elif reload.version != version:
            raise StateError(_describe_change(saved))
        if view is saved.whole or view == saved.whole:
            return reload.buffer
        tensor = reload.views.get(view)
        if tensor is None:
            tensor = reload.views[view] = rebuild(view, reload.buffer, buffer_start=saved.start)
        return tensor

    def drop_reloaded(self, saved: SavedStorage) -> None:
        """Release the device buffer of `saved`. The host block still contains the bytes.

        Streams:
            The buffer's own stream waits for all streams that use the buffer. The host does not block.
        """
        reload, saved.reload = saved.reload, None
        if reload is not None:
            saved.state = SavedState.OFFLOADED
            if reload.version is not None and reload.version != get_version(reload.buffer):
                saved.fault = _describe_change(saved)  # the host block has the old bytes; plain torch also raises an error
            self._order(reload)

    def join(self) -> None:
        """Join the copy streams of a captured graph to the current stream, and release the copies' memory.

        Streams:
            The current stream waits for all copies queued since the last `join` or `close`. The host does not block.
        """
        current = self._device.current_stream()
        for stream in self._used:
            self._device.wait_stream(current, stream, Hazard.GRAPH_UNJOINED)
        self._used.clear()
        while self._in_flight:
            self._release(self._in_flight[0], is_done=True)
        self.poll()

    def close(self) -> None:
        """Finish all copies. The host blocks until they are done."""
        while self._in_flight:
            self._device.synchronize(self._in_flight[0].d2h_done)
            self._release(self._in_flight[0], is_done=True)
        self.poll()
        self._used.clear()
        if self._filling:
            self._device.synchronize(self._device.record_event(self._device.h2d_stream))
            self._filling.clear()

    def _release(self, entry: _InFlight, *, is_done: bool) -> None:
        """Release the sources of `entry`, the oldest entry.

        `is_done` means that its copies are done. Otherwise, the compute streams must already wait for the copies.
        """
        living = _list_living(entry)
        self._join(_collect_streams(entry, living), Hazard.SOURCE_STILL_USED)
        self._in_flight.popleft()  # after the waits, which may raise: the entry may hold the last reference to a source
        for saved in living:
            if saved.d2h_done is not entry.d2h_done:
                continue  # its offload was cancelled, and it may have been offloaded again
            if saved.state is SavedState.OFFLOADING:
                saved.fault = saved.find_change("its copy to the host was finished")
                saved.drop_aliases()
                saved.state = SavedState.OFFLOADED
            if is_done:
                saved.d2h_done = None

    def _fill(self, saved: SavedStorage, buffer: torch.Tensor) -> None:
        """Queue the copy of `saved` into `buffer`. Call this within `copying_on` for the host-to-device stream."""
        device, h2d = self._device, self._device.h2d_stream
        if saved.block is None:
            raise InternalError(f"A tensor that {saved.place} saved is on the host but has no host block.")
        if saved.d2h_done is not None:
            device.wait_event(h2d, saved.d2h_done, Hazard.BLOCK_UNWRITTEN)
        self._filling.append(buffer)
        with self._measure(h2d, saved.stats, TimeKind.H2D):
            for part, byte_range in saved.block.pair(buffer):
                device.copy_bytes(destination=byte_range, source=part, stream=h2d)
        h2d_done = device.record_event(h2d)
        saved.block.place.last_read = h2d_done
        saved.reload = Reload(buffer, h2d_done, saved.owner, is_dense=bool(saved.gathered))
        saved.state = SavedState.RELOADED
        self._filling.pop()

    def _measure(self, stream: Stream, stats: TagStats, kind: TimeKind) -> contextlib.AbstractContextManager[object]:
        return NO_CONTEXT if self._watch is None else self._watch.measure(stream, stats, kind)

    def _gather(self, saved: SavedStorage) -> torch.Tensor:
        dense = self._allocate(saved.moved_bytes)
        gather(saved.gathered, saved.get_any_alias(), dense)
        return dense

    def _scatter(self, saved: SavedStorage, dense: Reload, stream: Stream) -> Reload:
        """Unpack the gathered views into a new buffer, at their offsets in the saved storage."""
        byte_range = self._allocate(saved.size_bytes)
        scatter(saved.gathered, dense.buffer, byte_range, target_start=saved.start)
        unpacked = Reload(byte_range, self._device.record_event(stream), stream, is_dense=False)
        unpacked.taken_on.add(stream)
        self._order(dense)
        return unpacked

    def _allocate_for(self, saved: SavedStorage, current: Stream) -> torch.Tensor:
        """Allocate a buffer for `saved` on the stream of its first save, on which autograd also runs backward.

        Autograd may return the unpacked tensor as a gradient, which the engine cannot track. If another stream owned the
        buffer, the allocator could reuse the memory before the kernels that read the gradient are done.
        """
        if saved.owner == current:
            return self._allocate(saved.moved_bytes, saved.whole)
        with self._device.on(saved.owner):
            return self._allocate(saved.moved_bytes, saved.whole)

    def _allocate(self, size_bytes: int, whole: View | None = None) -> torch.Tensor:
        """Allocate a device buffer with the layout of `whole`, or uint8 `[size_bytes]` if `whole` is None."""
        with as_normal_tensors():
            buffer = self._device.allocate_device(size_bytes) if whole is None else self._device.allocate_like(whole)
        for ledger in self._observers:
            ledger.observe(buffer)
        return buffer

    def _join(self, streams: Set[Stream], hazard: Hazard) -> None:
        if len(streams) > 1:
            events = {stream: self._device.record_event(stream) for stream in streams}
            for stream in streams:
                for other in streams - {stream}:
                    self._device.wait_event(stream, events[other], hazard)

    def _order(self, reload: Reload) -> None:
        """Make a buffer's own stream wait for all streams that use the buffer. Call this before the buffer is freed."""
        device = self._device
        if not reload.taken_on:
            device.wait_event(reload.owner, reload.filled, Hazard.BUFFER_STILL_FILLED)
        for stream in reload.taken_on - {reload.owner}:
            device.wait_stream(reload.owner, stream, Hazard.BUFFER_STILL_READ)


def _list_living(entry: _InFlight) -> list[SavedStorage]:
    return [saved for reference in entry.saved if (saved := reference()) is not None]


def _collect_streams(entry: _InFlight, living: Sequence[SavedStorage]) -> Set[Stream]:
    """Return all compute streams that have used the sources of `entry`, before or after the copies were queued."""
    streams = entry.streams
    for saved in living:
        if saved.streams != streams:
            streams = streams | saved.streams
    return streams


def _describe_change(saved: SavedStorage) -> str:
    return (
        f"A tensor that {saved.place} saved for backward was changed in place during backward. "
        "Change a clone of the tensor instead."
    )


def _name_range(action: str, place: Place) -> contextlib.AbstractContextManager[object]:
    """Return a profiler range named after the action and the place, or a no-op context manager if no profiler is running."""
    return torch.profiler.record_function(f"fgoffload::{action} ({place})") if is_profiled() else NO_CONTEXT
