"""Offloads tensors of captured graphs. Replays stage them on the device, and the engine copies them between replays.

[Note: Staging]
A CUDA graph replays its kernels at the addresses of its capture, without running Python. So a captured forward ends by copying
its regions' saved tensors into a staging slot, on its own stream, and by releasing their memory to the graph's pool. After the
replay, the engine copies the slot to the host. Before it replays the backward, it fills the slot that the backward reads. The
graph contains no host copy, no event and no second stream, so any CUDA version can capture it.

All graphs share a ring of slots. Graphs are captured in the order in which a step replays them, and each forward and backward
gets the least recently used slot. So while one graph runs, the engine can copy the slot of the previous graph to the host or
fill the slot of the next backward. If no pass in between gets a forward's slot, its backward reads the slot in place, without a
copy. Replays in another order also give correct results, because the engine offloads a slot's bytes before it reuses the slot.
"""

import collections
import dataclasses
import enum
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from fgoffload.engine.device import Device, Event
from fgoffload.engine.geometry import View, rebuild, round_up
from fgoffload.engine.hazards import Hazard
from fgoffload.engine.host_arena import HostArena
from fgoffload.engine.host_block import HostBlock
from fgoffload.engine.saved import SavedStorage
from fgoffload.engine.stats import TagStats
from fgoffload.errors import StateError
from fgoffload.transfer_schedule import STAGING_SLOTS
from fgoffload.units import format_bytes

Result = TypeVar("Result")


@dataclasses.dataclass(slots=True, eq=False)
class StagingSlot:
    """Device memory at a fixed address, which passes use one after another."""

    buffer: torch.Tensor
    """uint8 `[size_bytes]` on the device."""
    captured_for: "CapturedForward | None" = None
    """Forward whose bytes are in the slot during the capture."""
    holder: "CapturedForward | None" = None
    """Forward whose bytes are in the slot during replays."""
    last_use: Event | None = None
    """Event that must complete before the slot is written again."""


@dataclasses.dataclass(slots=True, eq=False)
class StagedPart:
    """Storage that a captured forward saved. It is staged, or stays where it is."""

    saved: SavedStorage
    stats: TagStats | None = None
    """Statistics of the tag. None if only ops between regions saved the storage."""
    forward: "CapturedForward | None" = None
    """Forward that staged the storage. None if the storage is not staged."""
    start: int = 0
    """Offset of the storage in a slot, in bytes."""
    _views: dict[View, torch.Tensor] = dataclasses.field(default_factory=dict)

    def take(self, view: View) -> torch.Tensor:
        """Return the saved tensor of `view`. Raises `StateError` if a tensor that is not staged was changed in place."""
        if self.forward is None:
            self.saved.check_unchanged("backward used it", view)
            return self.saved.get_alias(view)
        tensor = self._views.get(view)
        if tensor is None:
            slot = self.forward.staging.find_read_slot(self.forward)
            tensor = self._views[view] = rebuild(view, slot.buffer, buffer_start=self.saved.start - self.start)
        return tensor


class ForwardState(enum.Enum):
    """Location of the bytes that the last replay of a captured forward saved."""

    SPENT = enum.auto()  # nowhere: the forward has not run, or its backward has run
    STAGED = enum.auto()  # in the slot that the forward wrote
    OFFLOADED = enum.auto()  # on the host, or in flight to it
    RELOADED = enum.auto()  # in the slot that the backward reads, or in flight to it


@dataclasses.dataclass(slots=True, eq=False)
class _CapturedPass:
    """Captured forward or backward, linked to the next pass in capture order."""

    forward: "CapturedForward"
    is_backward: bool
    next: "_CapturedPass | None" = None


@dataclasses.dataclass(slots=True, eq=False)
class CapturedForward:
    """Captured forward of a layer for one microbatch, and the backward that was captured with it."""

    staging: "Staging"
    slot: StagingSlot
    """Slot that the forward writes."""
    size_bytes: int
    tags: Sequence[tuple[TagStats, int]]
    """Pairs of a tag's statistics and the number of bytes that the tag saved."""
    read_slot: StagingSlot | None = None
    """Slot that the backward reads. None before the backward is captured."""
    reads_in_place: bool = False
    """Whether the backward reads the forward's slot, which no other pass uses in between."""
    state: ForwardState = ForwardState.SPENT
    block: HostBlock | None = None
    d2h_done: Event | None = None
    filled: Event | None = None
    """Event after which the backward's slot contains the bytes. None if the forward wrote that slot."""
    passes: list[_CapturedPass] = dataclasses.field(default_factory=list)


class Staging:
    """Ring of slots and their copies. See [Note: Staging]."""

    def __init__(self, device: Device, arena: HostArena, lock: threading.RLock) -> None:
        self._device = device
        self._arena = arena
        self._lock = lock
        self._ring: collections.deque[StagingSlot] = collections.deque()
        self._last_pass: _CapturedPass | None = None
        self._d2h_done: Event | None = None
        """Event recorded after the last copy to the host."""

    def is_copying_out(self) -> bool:
        """Return whether a copy to the host may be in flight. The host does not block."""
        if self._d2h_done is not None and self._device.is_done(self._d2h_done):
            self._d2h_done = None
        return self._d2h_done is not None

    # Methods for the capture.

    def reserve(self, size_bytes: int) -> None:
        """Allocate slots of at least `size_bytes` before a capture begins. Captured graphs keep the slots that they use."""
        with self._lock:
            if not self._ring or self._ring[0].buffer.numel() < size_bytes:
                self._ring = collections.deque(
                    StagingSlot(self._device.allocate_device(size_bytes)) for _ in range(STAGING_SLOTS)
                )

    def stage(self, parts: Sequence[StagedPart]) -> CapturedForward | None:
        """Capture copies of the `parts` that fit into a slot, and release their storages. Return None if no part fits.

        Streams:
            The copies are queued on the current stream, on which the parts were saved.
        """
        with self._lock:
            fitting, size_bytes = [], 0
            room_bytes = self._ring[0].buffer.numel() if self._ring else 0
            for part in parts:
                end = size_bytes + round_up(part.saved.size_bytes)
                if end <= room_bytes:
                    part.start, size_bytes = size_bytes, end
                    fitting.append(part)
            if not fitting:
                return None
            slot = self._take_slot()
            tags: dict[int, tuple[TagStats, int]] = {}
            for part in fitting:
                if part.stats is not None:
                    _, before = tags.get(id(part.stats), (part.stats, 0))
                    tags[id(part.stats)] = (part.stats, before + part.saved.size_bytes)
            forward = CapturedForward(self, slot, size_bytes, tuple(tags.values()))
            slot.captured_for = forward
            for part in fitting:
                slot.buffer[part.start : part.start + part.saved.size_bytes].copy_(part.saved.get_byte_range())
                part.saved.drop_aliases()
                part.forward = forward
            self._add_pass(_CapturedPass(forward, is_backward=False))
            return forward

    def find_read_slot(self, forward: CapturedForward) -> StagingSlot:
        """Return the slot that the backward of `forward` reads in each replay. The first call must be during the capture."""
        with self._lock:
            if forward.read_slot is None:
                if forward.slot.captured_for is forward:
                    forward.read_slot, forward.reads_in_place = forward.slot, True
                    self._ring.remove(forward.slot)
                    self._ring.append(forward.slot)
                else:
                    forward.read_slot = self._take_slot()
                forward.read_slot.captured_for = None
                self._add_pass(_CapturedPass(forward, is_backward=True))
            return forward.read_slot

    def _take_slot(self) -> StagingSlot:
        slot = self._ring.popleft()
        self._ring.append(slot)
        return slot

    def _add_pass(self, added: _CapturedPass) -> None:
        added.forward.passes.append(added)
        if self._last_pass is not None:
            self._last_pass.next = added
        self._last_pass = added

    # Methods for replays.

    def replay_forward(self, forward: CapturedForward, replay: Callable[[], Result]) -> Result:
        """Replay a captured forward with `replay`, and offload the staged bytes.

        Streams:
            The current stream, on which the graph is replayed, waits for earlier copies of the slot. The host does not block.

        Raises:
            StateError: The host budget is too small.
        """
        device = self._device
        with self._lock:
            self._evict(forward.slot, forward)
            if forward.slot.last_use is not None:
                device.wait_event(device.current_stream(), forward.slot.last_use, Hazard.SLOT_STILL_USED)
        result = replay()
        with self._lock:
            forward.slot.holder, forward.state = forward, ForwardState.STAGED
            forward.slot.last_use = device.record_event(device.current_stream())
            for stats, size_bytes in forward.tags:
                stats.groups += 1
                if forward.reads_in_place:
                    stats.recalled_bytes += size_bytes
            if not forward.reads_in_place:
                self._copy_out(forward)
            self._reload(self._list_next(forward.passes[0]))
        return result

    def enter_backward(self, forward: CapturedForward) -> None:
        """Fill the slot that the backward of `forward` reads. Call this before each replay of the backward.

        Streams:
            The current stream, on which the graph is replayed, waits for the copy. The host does not block.
        """
        with self._lock:
            slot = forward.read_slot
            if slot is None:
                return
            wanted = [forward] if forward.state is ForwardState.OFFLOADED else []
            for stats, _ in forward.tags:
                stats.prefetch_misses += len(wanted)
            self._reload([*wanted, *self._list_next(forward.passes[1])])
            if forward.filled is not None:
                self._device.wait_event(self._device.current_stream(), forward.filled, Hazard.SLOT_UNFILLED)

    def leave_backward(self, forward: CapturedForward) -> None:
        """Release the slot of `forward`. Call this after each replay of the backward on the current stream."""
        with self._lock:
            slot = forward.read_slot or forward.slot
            forward.state, forward.block, forward.filled = ForwardState.SPENT, None, None
            if slot.holder is forward:
                slot.holder = None
                slot.last_use = self._device.record_event(self._device.current_stream())

    def _evict(self, slot: StagingSlot, forward: CapturedForward) -> None:
        """Make `slot` available to `forward`. If another forward has bytes only in this slot, offload them first."""
        holder, slot.holder = slot.holder, None
        if holder is None or holder is forward:
            return
        if holder.state is ForwardState.STAGED:
            self._copy_out(holder)
        elif holder.state is ForwardState.RELOADED:
            holder.state, holder.filled = ForwardState.OFFLOADED, None

    def _copy_out(self, forward: CapturedForward) -> None:
        device, d2h, slot = self._device, self._device.d2h_stream, forward.slot
        block = self._arena.find_block(forward.size_bytes)
        if block is None:
            raise StateError(
                f"A captured graph offloads {format_bytes(forward.size_bytes)}, but the host budget is used up. Increase "
                "--offload-host-budget (`host_budget_bytes` of a TransferConfig), or offload fewer modules inside graphs."
            )
        if slot.last_use is not None:
            device.wait_event(d2h, slot.last_use, Hazard.SLOT_UNWRITTEN)
        for event in block.reads_to_wait_for:
            device.wait_event(d2h, event, Hazard.BLOCK_STILL_READ)
        with device.copying_on(d2h):
            for part, source in block.pair(slot.buffer[: forward.size_bytes]):
                device.copy_bytes(destination=part, source=source, stream=d2h)
        forward.block, forward.state = block, ForwardState.OFFLOADED
        forward.d2h_done = slot.last_use = self._d2h_done = device.record_event(d2h)
        for stats, size_bytes in forward.tags:
            stats.d2h_bytes += size_bytes

    def _list_next(self, current: _CapturedPass) -> list[CapturedForward]:
        """List the forward whose backward directly follows `current`, unless its bytes are not on the host."""
        following = current.next  # it uses a different slot from `current`, unless it reads in place
        if following is None or not following.is_backward or following.forward.state is not ForwardState.OFFLOADED:
            return []
        return [following.forward]

    def _reload(self, forwards: Sequence[CapturedForward]) -> None:
        """Fill the slots that the backwards of `forwards` read. The bytes must be on the host."""
        device, h2d = self._device, self._device.h2d_stream
        for forward in forwards:
            slot, block = forward.read_slot, forward.block
            if slot is None or block is None or forward.d2h_done is None:
                continue
            self._evict(slot, forward)
            if slot.last_use is not None:
                device.wait_event(h2d, slot.last_use, Hazard.SLOT_STILL_USED)
            device.wait_event(h2d, forward.d2h_done, Hazard.BLOCK_UNWRITTEN)
            with device.copying_on(h2d):
                for part, destination in block.pair(slot.buffer[: forward.size_bytes]):
                    device.copy_bytes(destination=destination, source=part, stream=h2d)
            block.place.last_read = forward.filled = slot.last_use = device.record_event(h2d)
            slot.holder, forward.state = forward, ForwardState.RELOADED
            for stats, size_bytes in forward.tags:
                stats.h2d_bytes += size_bytes
