"""Executes the transfer schedule's reload decisions: cancels copies to the host, starts copies to the device."""

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch

from fgoffload.engine.device import Device
from fgoffload.engine.geometry import View
from fgoffload.engine.group import Group, Lane
from fgoffload.engine.ledger import ActivationLedger
from fgoffload.engine.pass_order import PassOrder
from fgoffload.engine.place import Place
from fgoffload.engine.region import is_in_backward
from fgoffload.engine.saved import SavedStorage
from fgoffload.engine.saved_registry import SavedRegistry
from fgoffload.engine.transfers import Transfers
from fgoffload.errors import StateError
from fgoffload.transfer_schedule import CallBack, SavedState, TransferSchedule
from fgoffload.units import format_bytes

logger = logging.getLogger(__name__)


class Reloads:
    """Reloads what the schedule decides, and releases what backward no longer needs. Called under the engine's lock.

    Args:
        device: Of the engine.
        transfers: Move the bytes.
        schedule: Decides.
        registry: Is told of reloaded storages.
        observers: Are told where backward is.
    """

    def __init__(
        self,
        device: Device,
        transfers: Transfers,
        schedule: TransferSchedule,
        registry: SavedRegistry,
        observers: Sequence[ActivationLedger],
    ) -> None:
        self._device = device
        self._transfers = transfers
        self._schedule = schedule
        self._registry = registry
        self._observers = observers
        self._order = PassOrder()

    def begin_forward(self, lane: Lane) -> None:
        """Forward begins in `lane`: what the backward behind it wants first may return as groups leave."""
        self._drop_untaken(self._schedule.announce(self._order.begin_forward(lane), during=None))

    def _begin_backward(self, lane: Lane) -> None:
        self._drop_untaken(self._schedule.enter(lane))
        self._schedule.announce(self._order.begin_backward(lane), during=lane)

    def _drop_untaken(self, groups: Iterable[Group]) -> None:
        """Drop what was brought back for a backward that does not come next, but for what another one has taken."""
        for group in groups:
            for saved in group.list_saved(SavedState.RELOADED):
                if saved.reload is not None and not saved.reload.taken_on:
                    self._transfers.drop_reloaded(saved)

    def approach(self, lane: Lane, group: Group) -> None:
        """Backward has reached `group` and left the later ones: reload what comes next."""
        for ledger in self._observers:
            ledger.reach_backward(place=group.place)
        if lane is not self._schedule.current:
            self._begin_backward(lane)
        self.leave(lane, group.end_position)
        self.execute(self._schedule.reach(lane, group))

    def take(self, saved: SavedStorage, view: View, lane: Lane, group: Group | None) -> torch.Tensor:
        """Return the saved tensor of `view`, reloaded where it was offloaded. See `OffloadEngine.take`."""
        if saved.fault is not None:
            raise StateError(saved.fault)
        if group is None:
            if lane.away and is_in_backward():
                is_let_go = not saved.is_let_go and saved.state is SavedState.RESIDENT
                saved.is_let_go = saved.is_let_go or is_let_go
                self.execute(self._schedule.let_go(lane, saved.size_bytes if is_let_go else 0))
        elif is_in_backward() and lane.is_news(group, is_offloaded=saved.state is SavedState.OFFLOADED):
            self.approach(lane, group)
        if saved.state in (SavedState.RESIDENT, SavedState.OFFLOADING):
            # While the copy to the host is queued the storage is still there; who frees it waits for that copy.
            saved.check_unchanged("backward took it", view)
            if saved.state is SavedState.OFFLOADING:
                saved.streams.add(self._device.current_stream())  # one that reads it now, and need not have saved it
            return saved.get_alias(view)
        if saved.state is SavedState.OFFLOADED:
            saved.stats.prefetch_misses += 1
            self.reload({saved: saved.place})
        return self._transfers.take(saved, view)

    def leave(self, lane: Lane, position: int) -> None:
        """Backward has left the groups from `position` on: drop what it no longer needs."""
        for group in lane.leave(position):
            # What a kept graph still wants goes back to being on the host only, once no group before this one wants it too.
            for saved in group.list_saved(SavedState.RELOADED):
                if saved.uses <= 0:
                    self._transfers.drop_reloaded(saved)
        self._transfers.poll()

    def execute(self, decisions: Iterable[CallBack[Group, SavedStorage]]) -> None:
        """Cancel the offload of what is still on the device, and reload the rest."""
        for decision in decisions:
            for saved in decision.cancelled:
                saved.stats.recalled_bytes += saved.moved_bytes
                saved.recall()
            away = decision.reloaded
            if decision.is_late and away:
                next(iter(away.values())).stats.prefetch_misses += len(away)
            if logger.isEnabledFor(logging.DEBUG):
                for group in dict.fromkeys(away.values()):
                    logger.debug("reloading group %d of %d: %s", group.position + 1, len(decision.lane.groups), group.place)
            if away:
                self.reload({saved: group.place for saved, group in away.items()})

    def reload(self, away: Mapping[SavedStorage, Place]) -> None:
        """Bring back `away`, which is on the host only, in this order, each for the group at its place."""
        for saved in away:
            saved.stats.h2d_bytes += saved.moved_bytes
            self._registry.note_reload(saved)
        self._transfers.reload(away)
        if logger.isEnabledFor(logging.DEBUG):
            for saved, place in away.items():
                logger.debug("reload %s: %s", place, format_bytes(saved.moved_bytes))
