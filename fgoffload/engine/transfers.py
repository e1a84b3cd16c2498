"""Copies to the host and back, and the stream ordering that they need.

Every wait names the hazard that it prevents; the notes in `hazards.py` explain them.
"""

import collections
import contextlib
import weakref
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import torch

from fgoffload.engine.device import Device, Event, Stream, as_normal_tensors
from fgoffload.engine.geometry import View, gather, rebuild, scatter
from fgoffload.engine.hazards import Hazard
from fgoffload.engine.host_arena import HostArena
from fgoffload.engine.host_block import HostBlock
from fgoffload.engine.identity import StorageRef, get_version
from fgoffload.engine.ledger import ActivationLedger
from fgoffload.engine.place import Place
from fgoffload.engine.saved import Reload, SavedStorage
from fgoffload.engine.stats import TagStats, TimeKind
from fgoffload.engine.timing import StopWatch
from fgoffload.engine.torch_internals import is_profiled
from fgoffload.errors import InternalError, StateError
from fgoffload.transfer_schedule import SavedState


class _InFlight(NamedTuple):
    """The copies to the host of one group, and what must live, and who must wait, until they are done."""

    saved: Sequence["weakref.ref[SavedStorage]"]
    sources: Sequence[torch.Tensor]
    streams: set[Stream]
    d2h_done: Event
    size_bytes: int
    end_bytes: int
    """Bytes of these copies and of earlier ones since the queue was last empty."""
    stats: TagStats
    """Statistics of the group's tag."""


class Transfers:
    """The copies in flight in both directions on one device.

    Args:
        device: Where the tensors live.
        arena: Where they go.
        observers: Are told of each device buffer that is made here.
        watch: Measures copies and waits, or None.
    """

    def __init__(
        self, device: Device, arena: HostArena, *, observers: Sequence[ActivationLedger], watch: StopWatch | None
    ) -> None:
        self._device = device
        self._arena = arena
        self._observers = observers
        self._watch = watch
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self.abandoned: collections.deque[Reload] = collections.deque()
        """Unneeded device buffers that other streams may still use."""
        self.dropped: collections.deque[tuple[StorageRef, bool]] = collections.deque()
        """Storages whose saves autograd no longer wants, and whether they had left."""
        self._used: set[Stream] = set()
        """Streams on which copies were queued since the last `join`."""
        self._filling: list[torch.Tensor] = []
        """Buffers between the start of their copy and its event. What an exception leaves here is kept until `close`."""

    @property
    def in_flight_bytes(self) -> int:
        """Bytes in flight to the host.

        No count of its own: an interrupt between a change of the queue and one of the count would leave a wrong one for good.
        """
        queue = self._in_flight
        return queue[-1].end_bytes - queue[0].end_bytes + queue[0].size_bytes if queue else 0

    def offload(self, leaving: Sequence[tuple[SavedStorage, HostBlock]], *, place: Place, stats: TagStats) -> int:
        """Start the copies of one group to the host, and return their bytes.

        Args:
            leaving: Each with its block.
            place: Of the group, for profilers.
            stats: Of the group's tag.

        Streams:
            Queued on the device-to-host stream, after what the streams that saved have queued so far. See [Note: Ordering of a
            copy to the host]. The host does not block.

        Lifetime:
            The sources live until they are released.
        """
        device, d2h = self._device, self._device.d2h_stream
        streams = {device.current_stream()}
        gathers = False
        for saved, _ in leaving:
            streams.update(saved.streams)
            gathers = gathers or bool(saved.gathered)
        if gathers:
            self._join(streams, Hazard.GATHER_UNWRITTEN)
        sources = [self._gather(saved) if saved.gathered else saved.get_stretch() for saved, _ in leaving]
        if gathers:
            # What was gathered goes before its copy is done, and its memory may be another stream's than the one that gathered.
            self._join(streams, Hazard.SOURCE_STILL_USED)
        for stream in streams:
            device.wait_stream(d2h, stream, Hazard.SOURCE_UNWRITTEN)
        for _, block in leaving:
            for event in block.reads_to_wait_for:
                device.wait_event(d2h, event, Hazard.BLOCK_STILL_READ)
        watch = self._watch
        start = None if watch is None else watch.start(d2h)
        if is_profiled():
            with _name_range("offload", place):
                self._copy_out(leaving, sources)
        else:
            self._copy_out(leaving, sources)
        if watch is not None:
            watch.stop(start, d2h, stats, TimeKind.D2H)
        d2h_done = device.record_event(d2h)
        self._used.add(d2h)
        size_bytes = sum(saved.moved_bytes for saved, _ in leaving)
        references = [weakref.ref(saved) for saved, _ in leaving]
        # First: an interrupt after it finds what is in flight, and one before it finds storages that have not left.
        end_bytes = size_bytes + (self._in_flight[-1].end_bytes if self._in_flight else 0)
        self._in_flight.append(_InFlight(references, sources, streams, d2h_done, size_bytes, end_bytes, stats))
        for saved, block in leaving:
            saved.leave(block, d2h_done)
        return size_bytes

    def poll(self) -> None:
        """Release what no copy uses any more, without a wait."""
        while self._in_flight and self._device.is_done(self._in_flight[0].d2h_done):
            self._release(self._in_flight[0], is_done=True)
        while self.abandoned:
            self._order(self.abandoned[0])
            self.abandoned.popleft()  # only now: what raises before must not drop a buffer that is still touched

    def count_in_flight(self, stats: TagStats) -> int:
        """Return how many groups of the tag of `stats` are in flight to the host."""
        return sum(entry.stats is stats for entry in self._in_flight)

    def release_oldest(self) -> None:
        """Release the sources of the oldest copies to the host, which may still be in flight.

        Streams:
            The compute streams wait for these copies. The host does not block.
        """
        entry = self._in_flight[0]
        current = self._device.current_stream()
        watch = self._watch
        start = None if watch is None else watch.start(current)
        # The current stream too: it is what has run ahead of the link.
        for stream in {current} | _unite_streams(entry, _list_living(entry)):
            self._device.wait_event(stream, entry.d2h_done, Hazard.SOURCE_STILL_COPIED)
        if watch is not None:
            watch.stop(start, current, entry.stats, TimeKind.WAIT)
        self._release(entry, is_done=False)

    def reload(self, away: Mapping[SavedStorage, Place]) -> None:
        """Start the copies to the device of `away`, which are on the host only.

        Args:
            away: In the order in which they come back, each with the place of the group that it comes back for, for profilers.

        Streams:
            Queued on the host-to-device stream. See [Note: Ordering of a copy to the device]. The host does not block.

        Lifetime:
            The device buffers live as long as autograd wants them, or until `drop_reloaded`.
        """
        device, h2d = self._device, self._device.h2d_stream
        current = device.current_stream()
        buffers = [self._allocate_for(saved, current) for saved in away]
        for owner in {saved.owner for saved in away}:
            device.wait_stream(h2d, owner, Hazard.BUFFER_STILL_USED)
        self._used.add(h2d)
        has_ranges = is_profiled()
        with device.copying_on(h2d):
            for (saved, place), buffer in zip(away.items(), buffers, strict=True):
                if has_ranges:
                    with _name_range("reload", place):
                        self._fill(saved, buffer)
                else:
                    self._fill(saved, buffer)

    def take(self, saved: SavedStorage, view: View) -> torch.Tensor:
        """Return what `view` saw of the reloaded `saved`.

        Streams:
            The current stream waits for the copy to the device. The host does not block.

        Raises:
            StateError: Somebody who took it before changed it in place.
        """
        reload = saved.reload
        if reload is None:
            raise InternalError(f"What {saved.place} saved was taken and has no device buffer.")
        stream = self._device.current_stream()
        if stream not in reload.taken_on:
            watch = self._watch
            start = None if watch is None else watch.start(stream)
            self._device.wait_event(stream, reload.filled, Hazard.BUFFER_UNFILLED)
            if watch is not None:
                watch.stop(start, stream, saved.stats, TimeKind.WAIT)
            reload.taken_on.add(stream)
        if reload.is_dense:
            reload = saved.reload = self._put_in_place(saved, reload, stream)
        version = get_version(reload.buffer)
        if reload.version is None:
            reload.version = version
        elif reload.version != version:
            raise StateError(_say_changed(saved))
        if view is saved.whole or view == saved.whole:
            return reload.buffer  # the usual case: the buffer was made for it
        tensor = reload.views.get(view)
        if tensor is None:
            tensor = reload.views[view] = rebuild(view, reload.buffer, buffer_start=saved.start)
        return tensor

    def drop_reloaded(self, saved: SavedStorage) -> None:
        """Release the device buffer of `saved`; the host block still has the bytes.

        Streams:
            The buffer's stream waits for all its users. The host does not block.
        """
        reload, saved.reload = saved.reload, None
        if reload is not None:
            saved.state = SavedState.OFFLOADED
            if reload.version is not None and reload.version != get_version(reload.buffer):
                saved.fault = _say_changed(saved)  # the host block keeps the saved bytes, which torch would not return either
            self._order(reload)

    def join(self) -> None:
        """End the copies of a captured graph inside the graph, and release what they use.

        Streams:
            The current stream waits for all copies queued since `forget_streams`. The host does not block.
        """
        current = self._device.current_stream()
        for stream in self._used:
            self._device.wait_stream(current, stream, Hazard.GRAPH_UNJOINED)
        self.forget_streams()
        while self._in_flight:
            self._release(self._in_flight[0], is_done=True)
        self.poll()

    def forget_streams(self) -> None:
        """Exclude earlier copies from the next `join`."""
        self._used.clear()

    def close(self) -> None:
        """Finish all copies. The host blocks until they are done."""
        while self._in_flight:
            self._device.synchronize(self._in_flight[0].d2h_done)
            self._release(self._in_flight[0], is_done=True)
        self.poll()
        if self._filling:
            self._device.synchronize(self._device.record_event(self._device.h2d_stream))
            self._filling.clear()

    def _release(self, entry: _InFlight, *, is_done: bool) -> None:
        """Let go of the sources of `entry`, the oldest, whose copies are done, or are waited for.

        Args:
            entry: The oldest of those in flight.
            is_done: Whether the host has seen its copies done. No stream needs to wait for them any more then: whatever the
                host queues from now on comes later anyway.
        """
        living = _list_living(entry)
        self._join(_unite_streams(entry, living), Hazard.SOURCE_STILL_USED)
        self._in_flight.popleft()  # only now: it may be all that holds a source that is still read, and a wait may raise
        for saved in living:
            if saved.d2h_done is not entry.d2h_done:
                continue  # it was called back since, and has perhaps left again
            if saved.state is SavedState.OFFLOADING:
                saved.fault = saved.find_change("its copy to the host was done")
                saved.drop_aliases()
                saved.state = SavedState.OFFLOADED
            if is_done:
                saved.d2h_done = None

    def _copy_out(self, leaving: Sequence[tuple[SavedStorage, HostBlock]], sources: Sequence[torch.Tensor]) -> None:
        device, d2h = self._device, self._device.d2h_stream
        with device.copying_on(d2h):
            for (_, block), source in zip(leaving, sources, strict=True):
                for part, stretch in block.pair(source):
                    device.copy_bytes(destination=part, source=stretch, stream=d2h)

    def _fill(self, saved: SavedStorage, buffer: torch.Tensor) -> None:
        """Start the copy of `saved` into `buffer`. The host-to-device stream is current."""
        device, h2d = self._device, self._device.h2d_stream
        if saved.block is None:
            raise InternalError(f"What {saved.place} saved is on the host and has no block there.")
        if saved.d2h_done is not None:
            device.wait_event(h2d, saved.d2h_done, Hazard.BLOCK_UNWRITTEN)
        self._filling.append(buffer)
        watch = self._watch
        start = None if watch is None else watch.start(h2d)
        for part, stretch in saved.block.pair(buffer):
            device.copy_bytes(destination=stretch, source=part, stream=h2d)
        if watch is not None:
            watch.stop(start, h2d, saved.stats, TimeKind.H2D)
        h2d_done = device.record_event(h2d)
        saved.block.last_read = h2d_done
        saved.reload = Reload(buffer, h2d_done, saved.owner, is_dense=bool(saved.gathered))
        saved.state = SavedState.RELOADED
        self._filling.pop()

    def _gather(self, saved: SavedStorage) -> torch.Tensor:
        """Return uint8 `[n]` on the device: the views of `saved` that leave, packed."""
        dense = self._allocate(saved.moved_bytes)
        gather(saved.gathered, saved.get_any_alias(), dense)
        return dense

    def _put_in_place(self, saved: SavedStorage, dense: Reload, stream: Stream) -> Reload:
        """Return a buffer in which the gathered views lie where they lay in their storage."""
        stretch = self._allocate(saved.size_bytes)
        scatter(saved.gathered, dense.buffer, stretch, stretch_start=saved.start)
        placed = Reload(stretch, self._device.record_event(stream), stream, is_dense=False)
        placed.taken_on.add(stream)
        self._order(dense)
        return placed

    def _allocate_for(self, saved: SavedStorage, current: Stream) -> torch.Tensor:
        """Return a buffer of the stream that saved `saved`, on which autograd runs backward too.

        Autograd may return the unpacked tensor as a gradient, which the engine cannot track. If another stream owned the
        buffer, nothing would order its memory after the readers of that gradient.
        """
        if saved.owner == current:
            return self._allocate(saved.moved_bytes, saved.whole)
        with self._device.on(saved.owner):
            return self._allocate(saved.moved_bytes, saved.whole)

    def _allocate(self, size_bytes: int, whole: View | None = None) -> torch.Tensor:
        """Return a device buffer: for the view `whole` if there is one, or else uint8 `[size_bytes]`."""
        with as_normal_tensors():
            buffer = self._device.allocate_device(size_bytes) if whole is None else self._device.allocate_like(whole)
        for ledger in self._observers:
            ledger.observe(buffer)
        return buffer

    def _join(self, streams: Set[Stream], hazard: Hazard) -> None:
        """Make each of `streams` wait for what the others have queued so far."""
        if len(streams) > 1:
            events = {stream: self._device.record_event(stream) for stream in streams}
            for stream in streams:
                for other in streams - {stream}:
                    self._device.wait_event(stream, events[other], hazard)

    def _order(self, reload: Reload) -> None:
        """Make a buffer's own stream wait for all its users, so that it can be dropped."""
        device = self._device
        if not reload.taken_on:
            device.wait_event(reload.owner, reload.filled, Hazard.BUFFER_STILL_FILLED)
        for stream in reload.taken_on - {reload.owner}:
            device.wait_stream(reload.owner, stream, Hazard.BUFFER_STILL_READ)


def _list_living(entry: _InFlight) -> list[SavedStorage]:
    """Return what of `entry` autograd still wants."""
    return [saved for reference in entry.saved if (saved := reference()) is not None]


def _unite_streams(entry: _InFlight, living: Sequence[SavedStorage]) -> Set[Stream]:
    """Return the compute streams that used the sources of `entry`, before it left and since.

    Args:
        entry: In flight.
        living: What of it autograd still wants.
    """
    streams = entry.streams
    for saved in living:
        if saved.streams != streams:  # nearly always one stream has all
            streams = streams | saved.streams
    return streams


def _say_changed(saved: SavedStorage) -> str:
    return (
        f"A tensor that {saved.place} saved for backward was changed in place by a backward that had taken it. "
        "Change a clone there."
    )


def _name_range(act: str, place: Place) -> contextlib.AbstractContextManager[object]:
    """Return a profiler range named like the debug log's line."""
    return torch.profiler.record_function(f"fgoffload::{act} ({place})")
