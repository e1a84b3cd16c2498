"""Submits groups: finds host memory for their saved storages, starts the copies, and makes compute wait by the policy."""

import logging
import weakref

from fgoffload.engine.device import Device
from fgoffload.engine.group import Group
from fgoffload.engine.host_arena import HostArena
from fgoffload.engine.host_block import HostBlock
from fgoffload.engine.keep_rules import KeepRules
from fgoffload.engine.reloads import Reloads
from fgoffload.engine.saved import SavedStorage
from fgoffload.engine.stats import Counters, KeptReason, TagStats
from fgoffload.engine.transfers import Transfers
from fgoffload.transfer_schedule import GroupState, SavedState, TransferSchedule
from fgoffload.units import format_bytes

logger = logging.getLogger(__name__)


class Submission:
    """Offloads ended groups, at once or when the host has synchronized. Called under the engine's lock.

    Args:
        device: The engine's device.
        transfers: Copies in both directions.
        schedule: Decides when compute waits.
        reloads: Reloads the next tensors of another pass, after each group.
        rules: Minimum sizes of offloaded storages.
        arena: Host memory.
        counters: Statistics of waits.
    """

    def __init__(
        self,
        device: Device,
        transfers: Transfers,
        schedule: TransferSchedule,
        reloads: Reloads,
        *,
        rules: KeepRules,
        arena: HostArena,
        counters: Counters,
    ) -> None:
        # Assigned before the transfers, see `OffloadEngine.arena`.
        self._arena = arena
        self._device = device
        self._transfers = transfers
        self._schedule = schedule
        self._reloads = reloads
        self._rules = rules
        self._counters = counters
        # Weak references, since the forward of a group may have raised, or its graph may have been dropped.
        self._held: list[weakref.ref[Group]] = []
        self.most_in_flight: int | None = None
        """Limit, besides the window, of groups per tag in flight to the host before compute waits. None for no limit."""
        self.most_groups = 0
        """Maximum number of groups of a microbatch so far, for logs. It is unknown during the first one."""

    def hold(self, group: Group) -> None:
        """Hold `group` until the next `flush`."""
        self._held.append(weakref.ref(group))

    def forget_held(self) -> None:
        """Keep the held groups on the device."""
        self._held.clear()

    def flush(self) -> None:
        """Submit the held groups, in the order in which they ended."""
        held, self._held = self._held, []
        for group in (reference() for reference in held):
            if group is not None and group.state is GroupState.HELD:
                self.submit(group)

    def submit(self, group: Group) -> None:
        """Start the copies of `group` to the host.

        Streams:
            Queues copies on the device-to-host stream, after the work queued on the compute streams. If too many bytes are in
            flight, the compute streams wait for the oldest copies. The host does not block.
        """
        self._transfers.poll()  # before the new copies, which cannot be done yet: a query costs as much as a wait
        leaving: list[tuple[SavedStorage, HostBlock]] = []
        stats = group.stats
        for saved in group.submit_living():
            block = self._find_block(saved, group)
            if block is not None:
                saved.stats = stats
                leaving.append((saved, block))
        if leaving:
            size_bytes = self._transfers.offload(leaving, place=group.place, stats=stats)
            stats.d2h_bytes += size_bytes
            group.moved_bytes = size_bytes
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("offloading group %d of %d: %s", group.position + 1, self.most_groups, group.place)
                logger.debug("offload %s: %d storages, %s", group.place, len(leaving), format_bytes(size_bytes))
        if self._device.has_blocking_copies or self._must_wait(stats):
            self._transfers.poll()
            while self._must_wait(stats):
                self._counters.window_waits += 1
                self._transfers.release_oldest()
        self._reloads.execute(self._schedule.look_ahead())

    def _must_wait(self, stats: TagStats) -> bool:
        """Return whether compute must wait for the oldest copy to the host, after a group of the tag of `stats`."""
        if self._schedule.policy.must_wait(in_flight_bytes=self._transfers.in_flight_bytes):
            return True
        return self.most_in_flight is not None and self._transfers.count_in_flight(stats) > self.most_in_flight

    def _find_block(self, saved: SavedStorage, group: Group) -> HostBlock | None:
        """Return host memory for `saved`, or None if it stays on the device or was offloaded with another group."""
        stats = group.stats
        if saved.state is not SavedState.RESIDENT:
            stats.shared_bytes += saved.size_bytes
            return None
        if saved.find_change("it was offloaded") is not None:
            stats.add_kept(KeptReason.CHANGED, saved.size_bytes)
            return None  # no error yet: only a backward that takes it raises
        if saved.storage.key in group.filtered:  # filtered after it was saved
            for view in saved.views:
                group.count_kept(saved.get_alias(view), KeptReason.FILTERED)
            return None
        if self._rules.is_too_small(saved):
            stats.add_kept(KeptReason.TOO_SMALL, min(saved.covered_bytes, saved.size_bytes))
            return None
        saved.choose_form()
        block = self._arena.find_block(saved.moved_bytes)
        if block is None:
            stats.add_kept(KeptReason.HOST_BUDGET, saved.size_bytes)
        return block
