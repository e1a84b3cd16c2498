"""Copies to the host and back, and the order that keeps them right.

Every wait names the hazard that it prevents; the notes in `hazards.py` explain them together.
"""

import collections
import contextlib
import weakref
from collections.abc import Sequence, Set
from typing import NamedTuple

import torch

from fgoffload.engine.arena import HostArena, HostBlock
from fgoffload.engine.device import Device, Event, Stream
from fgoffload.engine.geometry import (
    PADDING_BYTES,
    View,
    gather,
    get_gathered_bytes,
    get_stretch,
    rebuild,
    round_up,
    scatter,
)
from fgoffload.engine.hazards import Hazard
from fgoffload.engine.identity import StorageRef, get_version
from fgoffload.engine.ledger import ActivationLedger
from fgoffload.engine.place import Place
from fgoffload.engine.saved import Reload, SavedState, SavedStorage
from fgoffload.engine.stats import TagStats, TimeKind
from fgoffload.engine.timing import StopWatch
from fgoffload.errors import InternalError, StateError


class _InFlight(NamedTuple):
    """The copies to the host of one group, and what must live, and who must wait, until they are done."""

    saved: Sequence["weakref.ref[SavedStorage]"]
    sources: Sequence[torch.Tensor]
    streams: Set[Stream]
    d2h_done: Event
    size_bytes: int
    stats: TagStats
    """Of the group's tag."""


class Transfers:
    """What is on its way, each way, on one device.

    Args:
        device: Where the tensors live.
        arena: Where they go.
        observers: Are told of each device buffer that is made here.
    """

    def __init__(self, device: Device, arena: HostArena, *, observers: Sequence[ActivationLedger], watch: StopWatch) -> None:
        self._device = device
        self._arena = arena
        self._observers = observers
        self._watch = watch
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self.in_flight_bytes = 0
        """Bytes on their way to the host."""
        self.abandoned: collections.deque[Reload] = collections.deque()
        """Device buffers that nobody wants any more, and that other streams may still touch."""
        self.dropped: collections.deque[tuple[StorageRef, bool]] = collections.deque()
        """Storages whose saves autograd no longer wants, and whether they had left."""
        self._filling: list[torch.Tensor] = []
        """Buffers between the start of their copy and its event. What an exception leaves here is kept until `close`."""

    def offload(self, leaving: Sequence[tuple[SavedStorage, HostBlock]], *, place: Place, stats: TagStats) -> int:
        """Start the copies to the host of what leaves together, and return their bytes.

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
        for saved, _ in leaving:
            streams |= saved.streams
        sources = self._get_sources(leaving, streams)
        for stream in streams:
            device.wait_stream(d2h, stream, Hazard.SOURCE_UNWRITTEN)
        for _, block in leaving:
            for event in block.reads_to_wait_for:
                device.wait_event(d2h, event, Hazard.BLOCK_STILL_READ)
        start = self._watch.start(d2h)
        with _name_range("offload", place), device.on(d2h):
            for (_, block), source in zip(leaving, sources, strict=True):
                for part, stretch in block.pair(source):
                    device.copy_bytes(destination=part, source=stretch, stream=d2h)
        self._watch.stop(start, d2h, stats, TimeKind.D2H)
        d2h_done = device.record_event(d2h)
        for saved, block in leaving:
            saved.leave(block, d2h_done)
        size_bytes = sum(source.numel() for source in sources)
        references = [weakref.ref(saved) for saved, _ in leaving]
        self._in_flight.append(_InFlight(references, sources, streams, d2h_done, size_bytes, stats))
        self.in_flight_bytes += size_bytes
        return size_bytes

    def poll(self) -> None:
        """Drop what no copy touches any more, without waiting for anything."""
        while self._in_flight and self._device.is_done(self._in_flight[0].d2h_done):
            self._release_done(self._in_flight[0])
        while self.abandoned:
            self._order(self.abandoned[0])
            self.abandoned.popleft()  # only now: what raises before must not drop a buffer that is still touched

    def release_oldest(self) -> None:
        """Let go of the sources of the oldest copies to the host, their device memory with them, though they may be under way.

        Streams:
            The compute streams wait for these copies. The host does not block.
        """
        entry = self._in_flight[0]
        current = self._device.current_stream()
        start = self._watch.start(current)
        # The current stream too: it is what has run ahead of the link.
        for stream in {current} | self._list_streams(entry):
            self._device.wait_event(stream, entry.d2h_done, Hazard.SOURCE_STILL_COPIED)
        self._watch.stop(start, current, entry.stats, TimeKind.WAIT)
        self._release(entry)

    def reload(self, away: Sequence[SavedStorage], *, place: Place) -> None:
        """Start the copies to the device of `away`, which are on the host only.

        Args:
            away: In the order in which they come back.
            place: Of the group that they come back for, for profilers.

        Streams:
            Queued on the host-to-device stream. See [Note: Ordering of a copy to the device]. The host does not block.

        Lifetime:
            The device buffers live as long as autograd wants them, or until `drop_reloaded`.
        """
        device, h2d = self._device, self._device.h2d_stream
        buffers = [self._allocate_for(saved) for saved in away]
        for owner in {saved.owner for saved in away}:
            device.wait_stream(h2d, owner, Hazard.BUFFER_STILL_USED)
        with _name_range("reload", place), device.on(h2d):
            for saved, buffer in zip(away, buffers, strict=True):
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
            start = self._watch.start(stream)
            self._device.wait_event(stream, reload.filled, Hazard.BUFFER_UNFILLED)
            self._watch.stop(start, stream, saved.stats, TimeKind.WAIT)
            reload.taken_on.add(stream)
        if reload.is_dense:
            reload = saved.reload = self._put_in_place(saved, reload, stream)
        if reload.version is None:
            reload.version = get_version(reload.buffer)
        elif reload.version != get_version(reload.buffer):
            raise StateError(_say_changed(saved))
        return rebuild(view, reload.buffer, buffer_start=saved.start)

    def drop_reloaded(self, saved: SavedStorage) -> None:
        """Let go of the device buffer of `saved`; the host block still has the bytes.

        Streams:
            The buffer's stream waits for whoever may still touch it. The host does not block.
        """
        reload, saved.reload = saved.reload, None
        if reload is not None:
            saved.state = SavedState.OFFLOADED
            if reload.version is not None and reload.version != get_version(reload.buffer):
                saved.fault = _say_changed(saved)  # the host still has what was saved, and torch would not give it either
            self._order(reload)

    def close(self) -> None:
        """Finish all copies. The host blocks until they are done."""
        while self._in_flight:
            self._device.synchronize(self._in_flight[0].d2h_done)
            self._release_done(self._in_flight[0])
        self.poll()
        if self._filling:
            self._device.synchronize(self._device.record_event(self._device.h2d_stream))
            self._filling.clear()

    def _release_done(self, entry: _InFlight) -> None:
        """Let go of the sources of `entry`, the oldest, whose copies the host has seen done.

        No stream needs to wait for them any more: whatever the host queues from now on comes later anyway.
        """
        for saved in self._release(entry):
            saved.d2h_done = None

    def _release(self, entry: _InFlight) -> list[SavedStorage]:
        """Let go of the sources of `entry`, the oldest, whose copies are done, or are waited for; return what is gone now."""
        self._join(self._list_streams(entry), Hazard.SOURCE_STILL_USED)
        self._in_flight.popleft()  # only now: it may be all that holds a source that is still read, and a wait may raise
        self.in_flight_bytes -= entry.size_bytes
        gone = []
        for reference in entry.saved:
            saved = reference()
            # Not what was called back since, and has perhaps left again.
            if saved is not None and saved.d2h_done is entry.d2h_done:
                gone.append(saved)
                if saved.state is SavedState.OFFLOADING:
                    saved.fault = saved.find_change("its copy to the host was done")
                    saved.drop_aliases()
                    saved.state = SavedState.OFFLOADED
        return gone

    def _list_streams(self, entry: _InFlight) -> Set[Stream]:
        """Return the compute streams that used the sources of `entry`, before it left and since."""
        streams = set(entry.streams)
        for reference in entry.saved:
            saved = reference()
            if saved is not None:
                streams |= saved.streams
        return streams

    def _fill(self, saved: SavedStorage, buffer: torch.Tensor) -> None:
        """Start the copy of `saved` into `buffer`. The host-to-device stream is current."""
        device, h2d = self._device, self._device.h2d_stream
        if saved.block is None:
            raise InternalError(f"What {saved.place} saved is on the host and has no block there.")
        if saved.d2h_done is not None:
            device.wait_event(h2d, saved.d2h_done, Hazard.BLOCK_UNWRITTEN)
        self._filling.append(buffer)
        start = self._watch.start(h2d)
        destination = buffer if buffer.numel() == saved.moved_bytes else buffer[: saved.moved_bytes]
        for part, stretch in saved.block.pair(destination):
            device.copy_bytes(destination=stretch, source=part, stream=h2d)
        self._watch.stop(start, h2d, saved.stats, TimeKind.H2D)
        h2d_done = device.record_event(h2d)
        saved.block.last_read = h2d_done
        saved.reload = Reload(buffer, h2d_done, saved.owner, is_dense=bool(saved.gathered))
        saved.state = SavedState.RELOADED
        self._filling.pop()

    def _get_sources(self, leaving: Sequence[tuple[SavedStorage, HostBlock]], streams: Set[Stream]) -> Sequence[torch.Tensor]:
        if not any(saved.gathered for saved, _ in leaving):
            return [self._get_source(saved) for saved, _ in leaving]
        self._join(streams, Hazard.GATHER_UNWRITTEN)
        sources = [self._get_source(saved) for saved, _ in leaving]
        # What was gathered goes before its copy is done, and its memory may be another stream's than the one that gathered it.
        self._join(streams, Hazard.SOURCE_STILL_USED)
        return sources

    def _get_source(self, saved: SavedStorage) -> torch.Tensor:
        """Return uint8 `[n]` on the device: what has to move of `saved`."""
        tensor = saved.get_any_alias()
        if not saved.gathered:
            return get_stretch(tensor, start=saved.start, end=saved.end)
        dense = self._allocate(get_gathered_bytes(saved.gathered))
        gather(saved.gathered, tensor, dense)
        return dense

    def _put_in_place(self, saved: SavedStorage, dense: Reload, stream: Stream) -> Reload:
        """Return a buffer in which the gathered views lie where they lay in their storage."""
        stretch = self._allocate(saved.size_bytes)
        scatter(saved.gathered, dense.buffer, stretch, stretch_start=saved.start)
        placed = Reload(stretch, self._device.record_event(stream), stream, is_dense=False)
        placed.taken_on.add(stream)
        self._order(dense)
        return placed

    def _allocate_for(self, saved: SavedStorage) -> torch.Tensor:
        """Return a buffer of the stream that saved `saved`, on which autograd runs backward too.

        Backward may hand out what it takes as a gradient, which outlives whatever the engine knows. Were the buffer another
        stream's, nothing would order its memory behind those who read that gradient.
        """
        if saved.owner == self._device.current_stream():
            return self._allocate(saved.moved_bytes)
        with self._device.on(saved.owner):
            return self._allocate(saved.moved_bytes)

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        buffer = self._device.allocate_device(round_up(size_bytes, to=PADDING_BYTES))
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
        """Order a buffer's own stream behind whoever may still touch it, so that it can be dropped."""
        device = self._device
        if not reload.taken_on:
            device.wait_event(reload.owner, reload.filled, Hazard.BUFFER_STILL_FILLED)
        for stream in reload.taken_on - {reload.owner}:
            device.wait_stream(reload.owner, stream, Hazard.BUFFER_STILL_READ)


def _say_changed(saved: SavedStorage) -> str:
    return (
        f"A tensor that {saved.place} saved for backward was changed in place by a backward that had taken it. "
        "Change a clone there."
    )


def _name_range(act: str, place: Place) -> contextlib.AbstractContextManager[object]:
    """Return a profiler range named like the debug log's line; nothing where no profiler runs."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # noqa: SLF001 - no public name
        return torch.profiler.record_function(f"fgoffload::{act} ({place})")
    return _NO_RANGE


_NO_RANGE = contextlib.nullcontext()
