"""Copies to the host and back, and the order that keeps them right.

[Note: Ordering of a copy to the host]
(a) The copy waits for the compute streams that produced and used the source: it must not read bytes that are not there yet.
(b) The copy waits for the copies to the device that still read its host block: it must not overwrite what they read.
(c) The source is kept alive until the copy is done, and the compute streams wait for it before the source is dropped: the
    allocator hands freed memory to the next kernel of that stream, which must not overwrite what the copy still reads.

[Note: Ordering of a copy to the device]
(d) The buffer is allocated on the compute stream, and the copy waits for that point: the allocator may have given out memory
    that earlier kernels of that stream still use.
(e) The copy waits for the storage's own copy to the host: it must not read a block that is not written yet.
(f) A stream that takes the bytes waits for the copy.
(g) A buffer that was not taken, or was taken on another stream than its own, is dropped only after its own stream waits for
    the copy and for the other streams: as in (c), the other way round.
"""

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from fgoffload.engine.arena import HostArena, HostBlock
from fgoffload.engine.device import Device, Event, Stream
from fgoffload.engine.geometry import View, gather, get_gathered_bytes, get_stretch, rebuild, scatter
from fgoffload.engine.saved import Reload, SavedState, SavedStorage
from fgoffload.errors import InternalError


class _InFlight(NamedTuple):
    """The copies to the host of one group, and what must live, and who must wait, until they are done."""

    saved: tuple["weakref.ref[SavedStorage]", ...]
    sources: tuple[torch.Tensor, ...]
    streams: frozenset[Stream]
    d2h_done: Event
    size_bytes: int


class Transfers:
    """What is on its way, each way, on one device.

    Args:
        device: Where the tensors live.
        arena: Where they go.
        observe: Called with each device buffer that is made here.
    """

    def __init__(self, device: Device, arena: HostArena, *, observe: Callable[[torch.Tensor], None]) -> None:
        self._device = device
        self._arena = arena
        self._observe = observe
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self.in_flight_bytes = 0
        """Bytes on their way to the host."""
        self.abandoned: collections.deque[tuple[Reload, torch.Tensor | None]] = collections.deque()
        """Device buffers that nobody wants any more, and that other streams may still touch."""

    def find_block(self, saved: SavedStorage) -> HostBlock | None:
        """Return host memory for what `saved` has to move, or None where the budget does not allow it."""
        return self._arena.find_block(saved.moved_bytes)

    def offload(self, leaving: Sequence[tuple[SavedStorage, HostBlock]], *, streams: Iterable[Stream], label: str) -> int:
        """Start the copies to the host of what leaves together, and return their bytes.

        Streams:
            Queued on the device-to-host stream, after what `streams` have queued so far. See [Note: Ordering of a copy to the
            host]. The host does not block.

        Lifetime:
            The sources live until `release`.
        """
        device, d2h = self._device, self._device.d2h_stream
        streams = frozenset(streams)
        sources = []
        for saved, block in leaving:
            saved.block = block
            sources.append(self._get_source(saved))
        for stream in streams:
            device.wait_event(d2h, device.record_event(stream))  # (a): after the kernels that wrote the sources
        for _, block in leaving:
            for event in block.reads_to_wait_for:
                device.wait_event(d2h, event)  # (b): after the copies that read the block's last contents
        with _label(f"fgoffload::offload ({label})"):
            for (_, block), source in zip(leaving, sources, strict=True):
                device.copy_bytes(destination=block.buffer, source=source, stream=d2h)
        d2h_done = device.record_event(d2h)
        for saved, _ in leaving:
            saved.d2h_done = d2h_done
            saved.state = SavedState.OFFLOADING
            if saved.gathered:
                # The gathered bytes are a copy in the order of the compute stream: the storage itself may go at once.
                saved.state = SavedState.OFFLOADED
                saved.drop_aliases()
        size_bytes = sum(source.numel() for source in sources)
        references = tuple(weakref.ref(saved) for saved, _ in leaving)
        self._in_flight.append(_InFlight(references, tuple(sources), streams, d2h_done, size_bytes))
        self.in_flight_bytes += size_bytes
        return size_bytes

    def poll(self) -> None:
        """Drop what no copy touches any more, without waiting for anything."""
        while self._in_flight and self._device.is_done(self._in_flight[0].d2h_done):
            self.release_oldest()
        while self.abandoned:
            self._drop(*self.abandoned.popleft())

    def release_oldest(self) -> None:
        """Let go of the sources of the oldest copies to the host, their device memory with them.

        Streams:
            The compute streams wait for these copies. The host does not block.

        Raises:
            StateError: A source was changed in place, or its storage resized, while it was being copied.
        """
        entry = self._in_flight.popleft()
        self.in_flight_bytes -= entry.size_bytes
        for stream in entry.streams | {self._device.current_stream()}:
            # (c): the next kernel that gets this memory must not write it before the copy has read it. Where the copy is done
            # already this costs nothing; past the window it is where compute waits for the link.
            self._device.wait_event(stream, entry.d2h_done)
        for reference in entry.saved:
            saved = reference()
            if saved is not None and saved.state is SavedState.OFFLOADING:
                saved.check_unchanged("its copy to the host was done")
                saved.drop_aliases()
                saved.state = SavedState.OFFLOADED

    def reload(self, waiting: Sequence[SavedStorage]) -> None:
        """Start the copies to the device of `waiting`, which are on the host only.

        Streams:
            Queued on the host-to-device stream. See [Note: Ordering of a copy to the device]. The host does not block.

        Lifetime:
            The device buffers live as long as autograd wants them, or until `drop_reloaded`.
        """
        device, h2d = self._device, self._device.h2d_stream
        compute = device.current_stream()
        buffers = [device.allocate_device(saved.moved_bytes) for saved in waiting]
        device.wait_event(h2d, device.record_event(compute))  # (d): after earlier users of the buffers' memory
        for saved, buffer in zip(waiting, buffers, strict=True):
            self._observe(buffer)
            if saved.block is None:
                raise InternalError(f"What {saved.label} saved is on the host and has no block there.")
            device.wait_event(h2d, saved.d2h_done)  # (e): after the copy that writes the block
            with _label(f"fgoffload::reload ({saved.label})"):
                device.copy_bytes(destination=buffer, source=saved.block.buffer, stream=h2d)
            h2d_done = device.record_event(h2d)
            saved.block.last_read = h2d_done
            saved.reload = Reload(buffer, h2d_done, compute, set())
            saved.state = SavedState.RELOADED

    def take(self, saved: SavedStorage, view: View) -> torch.Tensor:
        """Return what `view` saw of the reloaded `saved`.

        Streams:
            The current stream waits for the copy to the device. The host does not block.
        """
        reload = saved.reload
        if reload is None:
            raise InternalError(f"What {saved.label} saved was taken and has no device buffer.")
        stream = self._device.current_stream()
        if stream not in reload.taken_on:
            self._device.wait_event(stream, reload.h2d_done)  # (f): after the copy that fills the buffer
            reload.taken_on.add(stream)
        if saved.stretch is None:
            saved.stretch = reload.buffer
            if saved.gathered:
                saved.stretch = self._device.allocate_device(saved.size_bytes)
                self._observe(saved.stretch)
                scatter(saved.gathered, reload.buffer, saved.stretch, stretch_start=saved.start)
        return rebuild(view, saved.stretch, buffer_start=saved.start)

    def drop_reloaded(self, saved: SavedStorage) -> None:
        """Let go of the device buffer of `saved`; the host block still has the bytes.

        Streams:
            The current stream waits for whoever may still touch the buffer. The host does not block.
        """
        if saved.reload is not None:
            self._drop(saved.reload, saved.stretch)
            saved.reload = saved.stretch = None
            saved.state = SavedState.OFFLOADED

    def close(self) -> None:
        """Finish all copies. The host blocks until they are done."""
        while self._in_flight:
            self._device.synchronize(self._in_flight[0].d2h_done)
            self.release_oldest()
        self.poll()

    def _get_source(self, saved: SavedStorage) -> torch.Tensor:
        """Return uint8 `[n]` on the device: what has to move of `saved`."""
        tensor = saved.get_any_alias()
        if not saved.gathered:
            return get_stretch(tensor, start=saved.start, end=saved.end)
        dense = self._device.allocate_device(get_gathered_bytes(saved.gathered))
        self._observe(dense)
        gather(saved.gathered, tensor, dense)
        return dense

    def _drop(self, reload: Reload, stretch: torch.Tensor | None) -> None:
        """Order the buffer's own stream behind whoever may still touch the buffer: (g)."""
        device = self._device
        if not reload.taken_on:
            device.wait_event(reload.allocated_on, reload.h2d_done)
        for stream in reload.taken_on - {reload.allocated_on}:
            device.wait_event(reload.allocated_on, device.record_event(stream))


def _label(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a profiler range; nothing where no profiler runs."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # noqa: SLF001 - no public name
        return torch.profiler.record_function(name)
    return contextlib.nullcontext()
