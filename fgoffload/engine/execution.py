"""Executes the transfer schedule: offloads groups that have ended, cancels offloads, and reloads storages."""

import dataclasses
import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch

from fgoffload.engine.copies import Transfers
from fgoffload.engine.device import Device
from fgoffload.engine.geometry import View
from fgoffload.engine.group import Group, Lane
from fgoffload.engine.host_arena import HostArena
from fgoffload.engine.host_block import HostBlock
from fgoffload.engine.keep_rules import KeepRules
from fgoffload.engine.ledger import ActivationLedger
from fgoffload.engine.pass_order import PassOrder
from fgoffload.engine.place import Place
from fgoffload.engine.region import is_in_backward
from fgoffload.engine.saved import SavedStorage
from fgoffload.engine.saved_registry import SavedRegistry
from fgoffload.engine.stats import Counters, KeptReason, TagStats
from fgoffload.errors import StateError
from fgoffload.memory_tiers import SavedState
from fgoffload.transfer_schedule import GroupState, ReloadDecision, TransferSchedule
from fgoffload.units import format_bytes

logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True, eq=False)
class Execution:
    """Executes the decisions of `schedule` with `transfers`. The engine calls all methods under its lock."""

    arena: HostArena  # declared before `transfers`: Python frees fields in order, and host memory must be freed first
    device: Device
    transfers: Transfers
    schedule: TransferSchedule
    registry: SavedRegistry
    rules: KeepRules
    counters: Counters
    observers: Sequence[ActivationLedger]
    order: PassOrder = dataclasses.field(default_factory=PassOrder)
    held: list["weakref.ref[Group]"] = dataclasses.field(default_factory=list)
    """Groups that wait for `flush`. The references are weak, because a forward may raise and a graph may be dropped."""
    most_in_flight: int | None = None
    """Limit on how many groups of a tag may be in flight to the host, in addition to the window limit. None means no limit."""
    max_groups: int = 0
    """Largest number of groups in a microbatch so far, for logs. During the first microbatch, it is not final yet."""

    # Forward.

    def begin_forward(self, lane: Lane) -> None:
        """Begin the forward of `lane`. While it offloads groups, the first groups of the next backward may be reloaded."""
        self._drop_unused(self.schedule.announce(self.order.begin_forward(lane), during=None))

    def flush(self) -> None:
        """Submit the held groups, in the order in which they ended."""
        held, self.held = self.held, []
        for group in (reference() for reference in held):
            if group is not None and group.state is GroupState.HELD:
                self.submit(group)

    def submit(self, group: Group) -> None:
        """Start the copies of `group` to the host.

        Streams:
            Queues copies on the device-to-host stream, after the work queued on the compute streams. If too many bytes are in
            flight, the compute streams wait for the oldest copies. The host does not block.
        """
        self.transfers.poll()  # before the new copies are queued, because they cannot have finished yet
        storages: list[tuple[SavedStorage, HostBlock]] = []
        stats = group.stats
        for saved in group.submit_living():
            block = self._find_block(saved, group)
            if block is not None:
                saved.stats = stats
                storages.append((saved, block))
        if storages:
            size_bytes = self.transfers.offload(storages, place=group.place, stats=stats)
            stats.d2h_bytes += size_bytes
            group.moved_bytes = size_bytes
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("offloading group %d of %d: %s", group.position + 1, self.max_groups, group.place)
                logger.debug("offload %s: %d storages, %s", group.place, len(storages), format_bytes(size_bytes))
        if self.device.has_blocking_copies or self._must_wait(stats):
            self.transfers.poll()
            while self._must_wait(stats):
                self.counters.window_waits += 1
                self.transfers.release_oldest()
        self.execute(self.schedule.look_ahead())

    def _must_wait(self, stats: TagStats) -> bool:
        if self.schedule.policy.must_wait(in_flight_bytes=self.transfers.in_flight_bytes):
            return True
        return self.most_in_flight is not None and self.transfers.count_in_flight(stats) > self.most_in_flight

    def _find_block(self, saved: SavedStorage, group: Group) -> HostBlock | None:
        """Return host memory for `saved`, or None if it stays on the device or was offloaded with another group."""
        stats = group.stats
        if saved.state is not SavedState.RESIDENT:
            stats.shared_bytes += saved.size_bytes
            return None
        if saved.find_change("it was offloaded") is not None:
            stats.add_kept(KeptReason.CHANGED, saved.size_bytes)
            return None  # backward raises an error if it needs the tensor
        if saved.storage.key in group.filtered:  # the filter later kept another tensor of this storage
            for view in saved.views:
                group.count_kept(saved.get_alias(view), KeptReason.FILTERED)
            return None
        if self.rules.is_too_small(saved):
            stats.add_kept(KeptReason.TOO_SMALL, min(saved.covered_bytes, saved.size_bytes))
            return None
        saved.choose_format()
        block = self.arena.find_block(saved.moved_bytes)
        if block is None:
            stats.add_kept(KeptReason.HOST_BUDGET, saved.size_bytes)
        return block

    # Backward.

    def approach(self, lane: Lane, group: Group) -> None:
        """Reload the next groups after backward has reached `group`."""
        for ledger in self.observers:
            ledger.reach_backward(place=group.place)
        if lane is not self.schedule.current:
            self._drop_unused(self.schedule.enter(lane))
            self.schedule.announce(self.order.begin_backward(lane), during=lane)
        self.leave(lane, group.end_position)
        self.execute(self.schedule.reach(lane, group))

    def leave(self, lane: Lane, position: int) -> None:
        """Release the tensors that backward no longer needs once the groups from `position` onward are done."""
        for group in lane.leave(position):
            # A retained graph may still need the tensors, but their host blocks still contain the bytes.
            for saved in group.list_saved(SavedState.RELOADED):
                if saved.uses <= 0:
                    self.transfers.drop_reloaded(saved)
        self.transfers.poll()

    def _drop_unused(self, groups: Iterable[Group]) -> None:
        """Release tensors that were reloaded for a backward that does not run next, unless another backward used them."""
        for group in groups:
            for saved in group.list_saved(SavedState.RELOADED):
                if saved.reload is not None and not saved.reload.taken_on:
                    self.transfers.drop_reloaded(saved)

    def take(self, saved: SavedStorage, view: View, lane: Lane, group: Group | None) -> torch.Tensor:
        """Return the tensor saved as `view`, reloaded if it was offloaded. See `OffloadEngine.take`."""
        if saved.fault is not None:
            raise StateError(saved.fault)
        if group is None:
            if lane.remaining and is_in_backward():
                is_released = not saved.is_released and saved.state is SavedState.RESIDENT
                saved.is_released = saved.is_released or is_released
                self.execute(self.schedule.release(lane, saved.size_bytes if is_released else 0))
        elif is_in_backward() and lane.is_first_unpack(group, is_offloaded=saved.state is SavedState.OFFLOADED):
            self.approach(lane, group)
        if saved.state in (SavedState.RESIDENT, SavedState.OFFLOADING):
            # During the copy to the host, the storage is still on the device. It is freed only after a wait for that copy.
            saved.check_unchanged("backward used it", view)
            if saved.state is SavedState.OFFLOADING:
                saved.streams.add(self.device.current_stream())  # this stream reads it
            return saved.get_alias(view)
        if saved.state is SavedState.OFFLOADED:
            saved.stats.prefetch_misses += 1
            self._reload({saved: saved.place})
        return self.transfers.take(saved, view)

    def execute(self, decisions: Iterable[ReloadDecision[Group, SavedStorage]]) -> None:
        """Cancel the offload of storages that are still on the device, and reload the others."""
        for decision in decisions:
            for saved in decision.cancelled:
                saved.stats.recalled_bytes += saved.moved_bytes
                saved.cancel_offload()
            storages = decision.reloaded
            if decision.is_late and storages:
                next(iter(storages.values())).stats.prefetch_misses += len(storages)
            if logger.isEnabledFor(logging.DEBUG):
                for group in dict.fromkeys(storages.values()):
                    logger.debug("reloading group %d of %d: %s", group.position + 1, len(decision.lane.groups), group.place)
            if storages:
                self._reload({saved: group.place for saved, group in storages.items()})

    def _reload(self, storages: Mapping[SavedStorage, Place]) -> None:
        """Reload `storages` from the host, in order. Each value is the place of the group that needs the storage."""
        for saved in storages:
            saved.stats.h2d_bytes += saved.moved_bytes
            self.registry.exclude_if_referenced(saved)
        self.transfers.reload(storages)
        if logger.isEnabledFor(logging.DEBUG):
            for saved, place in storages.items():
                logger.debug("reload %s: %s", place, format_bytes(saved.moved_bytes))
