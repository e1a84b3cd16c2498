"""What comes back from the host, and when: backward walks a lane's groups from the last to the first."""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from fgoffload.engine.group import Group, GroupState, Lane
from fgoffload.engine.ledger import ActivationLedger
from fgoffload.engine.place import Place
from fgoffload.engine.saved import SavedState, SavedStorage
from fgoffload.engine.stats import KeptReason
from fgoffload.engine.staying import HeldSpots, StayingStorages
from fgoffload.engine.transfers import Transfers
from fgoffload.transfer_schedule import TransferPolicy
from fgoffload.units import format_bytes

logger = logging.getLogger(__name__)

_AWAY = (SavedState.OFFLOADING, SavedState.OFFLOADED)
"""What can be called back."""


class Reloads:
    """Calls back what backward wants next, and lets go of what it no longer wants. Called under the engine's lock.

    Args:
        transfers: Move the bytes.
        policy: How much may be back before backward asks for it.
        staying: Is told of storages that something else holds: to move them frees nothing.
        held_spots: Is told where they were saved.
        observers: Are told where backward is.
    """

    def __init__(
        self,
        transfers: Transfers,
        policy: TransferPolicy,
        *,
        staying: StayingStorages,
        held_spots: HeldSpots,
        observers: Sequence[ActivationLedger],
    ) -> None:
        self._transfers = transfers
        self.policy = policy
        """As `policy`; it may change between any two calls."""
        self._staying = staying
        self._held_spots = held_spots
        self._observers = observers

    def approach(self, lane: Lane, group: Group) -> None:
        """Backward has come to `group`, and has left what came after it: bring back what comes next."""
        for ledger in self._observers:
            ledger.reach_backward(place=group.place)
        self.leave(lane, group.end_position)
        self.prefetch(lane, wanted=group)

    def leave(self, lane: Lane, position: int) -> None:
        """Backward has left the groups from `position` on: drop what it no longer needs."""
        for group in lane.leave(position):
            # What a kept graph still wants goes back to being on the host only, once no group before this one wants it too.
            for saved in group.list_saved(SavedState.RELOADED):
                if saved.uses <= 0:
                    self._transfers.drop_reloaded(saved)
        self._transfers.poll()

    def prefetch(self, lane: Lane, *, wanted: Group | None = None) -> None:
        """Call back what backward wants next, from the end of the lane on, as far as the policy lets it.

        Args:
            lane: Where backward is.
            wanted: The group that backward has just come to, if any.
        """
        if wanted is not None:
            lane.expect(wanted, 0)
            if wanted.position == lane.end - 1 and lane.away == lane.end:
                lane.away -= 1
                waiting = wanted.list_saved(*_AWAY)
                _log_reload(lane, wanted, waiting)
                wanted.stats.prefetch_misses += sum(saved.state is SavedState.OFFLOADED for saved in waiting)
                self._call_back(dict.fromkeys(waiting, wanted.place))
        if lane.away == 0 or not self.policy.may_begin_prefetch(ahead_bytes=lane.ahead_bytes):
            return
        self._call_back_ahead(lane, self.policy.may_prefetch)

    def prefetch_early(self, lane: Lane, size_bytes: int) -> None:
        """Call back what backward wants later, as far as it fits into what backward has let go of.

        Backward is in a layer of which nothing left, and takes `size_bytes` there, which it still reads. The groups of layers
        before it would else be called back when backward has come to the first of them, and that one would be waited for.
        """
        let_go_bytes = lane.let_go_bytes
        lane.let_go_bytes += size_bytes
        if self.policy.may_begin_prefetch(ahead_bytes=lane.ahead_bytes):
            self._call_back_ahead(lane, functools.partial(self.policy.may_prefetch_early, let_go_bytes=let_go_bytes))

    def call_back_unfinished(self, lane: Lane) -> None:
        """Backward comes next: let the last groups stay, as far as they are still on their way to the host."""
        self._call_back_ahead(lane, self.policy.may_prefetch, states=(SavedState.OFFLOADING,))

    def _call_back_ahead(self, lane: Lane, may_prefetch: Callable[..., bool], *, states: Sequence[SavedState] = _AWAY) -> None:
        """Call back the groups before those that were called back, as long as `may_prefetch` lets the next one.

        Args:
            lane: Where backward is.
            may_prefetch: As those of the policy.
            states: In which all of a group is that comes back: one with something in another one, or that has not left yet,
                ends it.
        """
        coming: dict[SavedStorage, Place] = {}  # each once, though several groups may want it
        while lane.away > 0:
            group = lane.groups[lane.away - 1]
            waiting = [saved for saved in group.list_saved(*_AWAY) if saved not in coming]
            if states is not _AWAY and not (
                group.state is GroupState.SUBMITTED and all(saved.state in states for saved in waiting)
            ):
                break
            group_bytes = sum(saved.moved_bytes for saved in waiting)
            if waiting and not may_prefetch(ahead_bytes=lane.ahead_bytes, group_bytes=group_bytes):
                break
            lane.away -= 1
            if waiting:
                _log_reload(lane, group, waiting)
                lane.expect(group, group_bytes)
                coming.update(dict.fromkeys(waiting, group.place))
        self._call_back(coming)

    def _call_back(self, coming: Mapping[SavedStorage, Place]) -> None:
        """Keep on the device what of `coming` has not left yet, and bring back what has.

        Args:
            coming: In the order in which they come back, each with the place of the group that it comes back for.
        """
        away = {}
        for saved, place in coming.items():
            if saved.state is SavedState.OFFLOADED:
                away[saved] = place
            else:
                saved.stats.recalled_bytes += saved.moved_bytes
                saved.recall()
        if away:
            self.reload(away)

    def reload(self, away: Mapping[SavedStorage, Place]) -> None:
        """Bring back `away`, which is on the host only.

        Args:
            away: In the order in which it comes back, each with the place of the group that it comes back for.
        """
        for saved in away:
            saved.stats.h2d_bytes += saved.moved_bytes
            is_held = not saved.storage.is_freed
            if saved.spot is not None:
                self._held_spots.note(saved.spot, is_held=is_held)
            if is_held:
                saved.stats.held_elsewhere_bytes += saved.size_bytes
                self._staying.add(saved.storage, KeptReason.HELD)
        self._transfers.reload(away)
        if logger.isEnabledFor(logging.DEBUG):
            for saved, place in away.items():
                logger.debug("reload %s: %s", place, format_bytes(saved.moved_bytes))


def _log_reload(lane: Lane, group: Group, waiting: Iterable[SavedStorage]) -> None:
    """Log that what is `waiting` of `group` comes back, unless all of it has not left yet."""
    if logger.isEnabledFor(logging.DEBUG) and any(saved.state is SavedState.OFFLOADED for saved in waiting):
        logger.debug("reloading group %d of %d: %s", group.position + 1, len(lane.groups), group.place)
