"""Executes the transfer schedule's reload decisions: cancels copies to the host, starts copies to the device."""

import logging
from collections.abc import Iterable, Mapping, Sequence

from fgoffload.engine.group import Group, Lane
from fgoffload.engine.ledger import ActivationLedger
from fgoffload.engine.pass_order import PassOrder
from fgoffload.engine.place import Place
from fgoffload.engine.saved import SavedStorage
from fgoffload.engine.stats import KeptReason
from fgoffload.engine.staying import ReferencedSpots, StayingStorages
from fgoffload.engine.transfers import Transfers
from fgoffload.transfer_schedule import CallBack, SavedState, TransferSchedule
from fgoffload.units import format_bytes

logger = logging.getLogger(__name__)


class Reloads:
    """Reloads what the schedule decides, and releases what backward no longer needs. Called under the engine's lock.

    Args:
        transfers: Move the bytes.
        schedule: Decides.
        staying: Is told of storages that something else holds: to move them frees nothing.
        referenced_spots: Is told where they were saved.
        observers: Are told where backward is.
    """

    def __init__(
        self,
        transfers: Transfers,
        schedule: TransferSchedule,
        *,
        staying: StayingStorages,
        referenced_spots: ReferencedSpots,
        observers: Sequence[ActivationLedger],
    ) -> None:
        self._transfers = transfers
        self._schedule = schedule
        self._staying = staying
        self._referenced_spots = referenced_spots
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
            is_held = not saved.storage.is_freed
            if saved.spot is not None:
                self._referenced_spots.note(saved.spot, is_held=is_held)
            if is_held:
                saved.stats.held_elsewhere_bytes += saved.size_bytes
                self._staying.add(saved.storage, KeptReason.REFERENCED)
        self._transfers.reload(away)
        if logger.isEnabledFor(logging.DEBUG):
            for saved, place in away.items():
                logger.debug("reload %s: %s", place, format_bytes(saved.moved_bytes))
