"""Executes the transfer schedule: offloads ended groups, cancels offloads, and reloads storages."""

import dataclasses
import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch

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
from fgoffload.engine.transfers import Transfers
from fgoffload.errors import StateError
from fgoffload.transfer_schedule import GroupState, ReloadDecision, SavedState, TransferSchedule
from fgoffload.units import format_bytes

logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True, eq=False)
class Execution:
    """Executes the decisions of `schedule` with `transfers`. Called under the engine's lock."""

    arena: HostArena  # before the transfers, see `OffloadEngine.staging`
    device: Device
    transfers: Transfers
    schedule: TransferSchedule
    registry: SavedRegistry
    rules: KeepRules
    counters: Counters
    observers: Sequence[ActivationLedger]
    order: PassOrder = dataclasses.field(default_factory=PassOrder)
    held: list["weakref.ref[Group]"] = dataclasses.field(default_factory=list)
    """Groups that wait for `flush`. Weak: a group's forward may have raised, or its graph may have been dropped."""
    most_in_flight: int | None = None
    """Limit, besides the window, of groups per tag in flight to the host before compute waits. None for no limit."""
    most_groups: int = 0
    """Maximum number of groups of a microbatch so far, for logs. It is unknown during the first one."""

    # Forward.

    def begin_forward(self, lane: Lane) -> None:
        """Note that forward begins in `lane`. The first groups of the next backward may be reloaded as groups are offloaded."""
        self._drop_untaken(self.schedule.announce(self.order.begin_forward(lane), during=None))

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
        self.transfers.poll()  # before the new copies, which cannot be done yet
        leaving: list[tuple[SavedStorage, HostBlock]] = []
        stats = group.stats
        for saved in group.submit_living():
            block = self._find_block(saved, group)
            if block is not None:
                saved.stats = stats
                leaving.append((saved, block))
        if leaving:
            size_bytes = self.transfers.offload(leaving, place=group.place, stats=stats)
            stats.d2h_bytes += size_bytes
            group.moved_bytes = size_bytes
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("offloading group %d of %d: %s", group.position + 1, self.most_groups, group.place)
                logger.debug("offload %s: %d storages, %s", group.place, len(leaving), format_bytes(size_bytes))
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
            return None  # only a backward that needs it raises
        if saved.storage.key in group.filtered:  # filtered after it was saved
            for view in saved.views:
                group.count_kept(saved.get_alias(view), KeptReason.FILTERED)
            return None
        if self.rules.is_too_small(saved):
            stats.add_kept(KeptReason.TOO_SMALL, min(saved.covered_bytes, saved.size_bytes))
            return None
        saved.choose_form()
        block = self.arena.find_block(saved.moved_bytes)
        if block is None:
            stats.add_kept(KeptReason.HOST_BUDGET, saved.size_bytes)
        return block

    # Backward.

    def approach(self, lane: Lane, group: Group) -> None:
        """Reload the next groups, since backward has reached `group` and left the later ones."""
        for ledger in self.observers:
            ledger.reach_backward(place=group.place)
        if lane is not self.schedule.current:
            self._drop_untaken(self.schedule.enter(lane))
            self.schedule.announce(self.order.begin_backward(lane), during=lane)
        self.leave(lane, group.end_position)
        self.execute(self.schedule.reach(lane, group))

    def leave(self, lane: Lane, position: int) -> None:
        """Drop the tensors that backward no longer needs, since it has left the groups from `position` on."""
        for group in lane.leave(position):
            # A retained graph may still need them. Their host blocks keep the bytes.
            for saved in group.list_saved(SavedState.RELOADED):
                if saved.uses <= 0:
                    self.transfers.drop_reloaded(saved)
        self.transfers.poll()

    def _drop_untaken(self, groups: Iterable[Group]) -> None:
        """Drop tensors that were reloaded for a backward that does not come next, unless another backward has used them."""
        for group in groups:
            for saved in group.list_saved(SavedState.RELOADED):
                if saved.reload is not None and not saved.reload.taken_on:
                    self.transfers.drop_reloaded(saved)

    def take(self, saved: SavedStorage, view: View, lane: Lane, group: Group | None) -> torch.Tensor:
        """Return the saved tensor of `view`, reloaded if it was offloaded. See `OffloadEngine.take`."""
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
            # During the copy to the host the storage is still there. It is freed only after a wait for that copy.
            saved.check_unchanged("backward took it", view)
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
                saved.recall()
            storages = decision.reloaded
            if decision.is_late and storages:
                next(iter(storages.values())).stats.prefetch_misses += len(storages)
            if logger.isEnabledFor(logging.DEBUG):
                for group in dict.fromkeys(storages.values()):
                    logger.debug("reloading group %d of %d: %s", group.position + 1, len(decision.lane.groups), group.place)
            if storages:
                self._reload({saved: group.place for saved, group in storages.items()})

    def _reload(self, storages: Mapping[SavedStorage, Place]) -> None:
        """Reload `storages`, which are on the host only, in order. Each has the place of its group."""
        for saved in storages:
            saved.stats.h2d_bytes += saved.moved_bytes
            self.registry.note_reload(saved)
        self.transfers.reload(storages)
        if logger.isEnabledFor(logging.DEBUG):
            for saved, place in storages.items():
                logger.debug("reload %s: %s", place, format_bytes(saved.moved_bytes))
