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
    """Executes the schedule's reloads, and releases memory that backward no longer needs. Called under the engine's lock.

    Args:
        device: The engine's device.
        transfers: Copies in both directions.
        schedule: Decides what is reloaded, and when.
        registry: Notes each reloaded storage.
        observers: Ledgers that note the position of backward.
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
        """Note that forward begins in `lane`. The first groups of the next backward may be reloaded as groups are offloaded."""
        self._drop_untaken(self._schedule.announce(self._order.begin_forward(lane), during=None))

    def _begin_backward(self, lane: Lane) -> None:
        self._drop_untaken(self._schedule.enter(lane))
        self._schedule.announce(self._order.begin_backward(lane), during=lane)

    def _drop_untaken(self, groups: Iterable[Group]) -> None:
        """Drop tensors that were reloaded for a backward that does not come next, unless another backward has taken them."""
        for group in groups:
            for saved in group.list_saved(SavedState.RELOADED):
                if saved.reload is not None and not saved.reload.taken_on:
                    self._transfers.drop_reloaded(saved)

    def approach(self, lane: Lane, group: Group) -> None:
        """Reload the next groups, since backward has reached `group` and left the later ones."""
        for ledger in self._observers:
            ledger.reach_backward(place=group.place)
        if lane is not self._schedule.current:
            self._begin_backward(lane)
        self.leave(lane, group.end_position)
        self.execute(self._schedule.reach(lane, group))

    def take(self, saved: SavedStorage, view: View, lane: Lane, group: Group | None) -> torch.Tensor:
        """Return the saved tensor of `view`, reloaded if it was offloaded. See `OffloadEngine.take`."""
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
            # While the copy to the host is queued, the storage is still there. It is freed only after a wait for that copy.
            saved.check_unchanged("backward took it", view)
            if saved.state is SavedState.OFFLOADING:
                saved.streams.add(self._device.current_stream())  # this stream reads it, and perhaps did not save it
            return saved.get_alias(view)
        if saved.state is SavedState.OFFLOADED:
            saved.stats.prefetch_misses += 1
            self.reload({saved: saved.place})
        return self._transfers.take(saved, view)

    def leave(self, lane: Lane, position: int) -> None:
        """Drop the tensors that backward no longer needs, since it has left the groups from `position` on."""
        for group in lane.leave(position):
            # Tensors that a retained graph still needs stay on the host only, once no earlier group needs them.
            for saved in group.list_saved(SavedState.RELOADED):
                if saved.uses <= 0:
                    self._transfers.drop_reloaded(saved)
        self._transfers.poll()

    def execute(self, decisions: Iterable[CallBack[Group, SavedStorage]]) -> None:
        """Cancel the offload of storages that are still on the device, and reload the others."""
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
        """Reload the storages `away`, which are on the host only, in this order, each with the place of its group."""
        for saved in away:
            saved.stats.h2d_bytes += saved.moved_bytes
            self._registry.note_reload(saved)
        self._transfers.reload(away)
        if logger.isEnabledFor(logging.DEBUG):
            for saved, place in away.items():
                logger.debug("reload %s: %s", place, format_bytes(saved.moved_bytes))
