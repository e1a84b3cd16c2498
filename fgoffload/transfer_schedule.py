"""What is offloaded, reloaded, cancelled and released, and when: the state machine that the engine and the simulator share.

It knows groups by their order and bytes. The engine reports events on a device, the simulator in simulated time; both execute
what it decides, and answer where bytes are (`SavedBytes`). Locks, weak references and shared storages are the engine's.

    [Note: Events]
    A pass begins: `announce`. Forward reaches a site: `open`; a group ends: `close`, `submit`, and compute waits as `must_wait`
    says, then `look_ahead`; backward comes next: `list_held`, `expect_backward`. Backward reaches a group: `enter`, `leave`,
    `reach`; has left a layer of which nothing was offloaded: `prefetch`; takes tensors there: `let_go`. Before `submit`,
    `list_held`, `reach` and `prefetch` the executor releases what finished copies no longer need.

    [Note: Prefetch across passes]
    Who knows the order of passes announces, as each begins, the lane whose backward comes next: right behind the pass, or after
    one forward behind a backward. Its last groups return meanwhile, in a backward once all of its own lane have.
    Bytes ahead in both lanes count together, and stay within the prefetch bytes: no single larger group comes. They are on the
    device where that forward ends and a step has its peak; docs/decisions.md says why. An announcement is a hint: it calls back
    only groups that are on the host alone, and where another backward comes the executor drops what was reloaded in vain.

All rules count bytes, never tensors or groups: groups of one model differ in size by a hundred times.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from fgoffload.defaults import DEFAULT_PREFETCH_BYTES, DEFAULT_WINDOW_BYTES
from fgoffload.errors import ConfigError
from fgoffload.units import check_bytes

STAGING_SLOTS = 2
"""Slots through which captured modules offload: one that graphs use, and one that is copied meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferPolicy:
    """How far copies may run behind forward and ahead of backward.

    Args:
        window_bytes: How many bytes may be in flight to the host before compute waits for the oldest copy.
        prefetch_bytes: How many bytes may be back on the GPU before backward asks for them.
    """

    window_bytes: int = DEFAULT_WINDOW_BYTES
    prefetch_bytes: int = DEFAULT_PREFETCH_BYTES

    def __post_init__(self) -> None:
        """Refuse sizes that are not whole numbers from 0.

        Raises:
            ConfigError: With the flag, the value and the fix.
        """
        for flag, size_bytes in (("--offload-window", self.window_bytes), ("--offload-prefetch", self.prefetch_bytes)):
            if check_bytes(size_bytes, name=flag) < 0:
                raise ConfigError(f"{flag} {size_bytes} is below 0 bytes. Give 0 or a size like 512MiB.")

    def must_wait(self, *, in_flight_bytes: int) -> bool:
        """Return whether compute must wait for the oldest copy to the host."""
        return in_flight_bytes > self.window_bytes

    def may_begin_prefetch(self, *, ahead_bytes: int) -> bool:
        """Return whether to look for groups to reload.

        Not while more than half of the prefetch bytes are used: several groups at once cost less CPU time than one by one.

        Args:
            ahead_bytes: As for `may_prefetch`.
        """
        return 2 * ahead_bytes <= self.prefetch_bytes

    def may_prefetch(self, *, ahead_bytes: int, group_bytes: int) -> bool:
        """Return whether a group may be reloaded before backward asks for it.

        One group of any size may be ahead; otherwise backward would always wait for a large one.

        Args:
            ahead_bytes: Bytes that are back on the device, or on the way, for groups that backward has not asked for.
            group_bytes: Bytes of the group in question.
        """
        return ahead_bytes + group_bytes <= self.prefetch_bytes or (ahead_bytes == 0 < self.prefetch_bytes)

    def may_prefetch_early(self, *, ahead_bytes: int, group_bytes: int, let_go_bytes: int) -> bool:
        """Return whether a group may be reloaded while backward is in layers without offloaded tensors.

        It must not take more than backward has let go of there: else the device would hold more than where forward ended, and
        that is where most steps have their peak.

        Args:
            ahead_bytes: As for `may_prefetch`.
            group_bytes: As for `may_prefetch`.
            let_go_bytes: Bytes that stayed on the device, and that backward is through with.
        """
        may_prefetch = self.may_prefetch(ahead_bytes=ahead_bytes, group_bytes=group_bytes)
        return may_prefetch and ahead_bytes + group_bytes <= let_go_bytes

    def may_prefetch_across(self, *, ahead_bytes: int, group_bytes: int) -> bool:
        """Return whether a group may start its way back while another pass runs; `ahead_bytes` are those of both lanes."""
        return ahead_bytes + group_bytes <= self.prefetch_bytes


class SavedState(enum.Enum):
    """Where saved bytes are."""

    RESIDENT = enum.auto()  # on the device only: not submitted, kept, or cancelled in time
    OFFLOADING = enum.auto()  # on the device, and nobody has seen that their copy to the host is done
    OFFLOADED = enum.auto()  # on the host only
    RELOADED = enum.auto()  # on the host, and in a device buffer that is filled when its copy is done
    FREED = enum.auto()  # nowhere: backward no longer wants them. In the engine nothing is left then that has a state

    __hash__ = object.__hash__
    """Members are singletons. The hash of `Enum` is in Python and several times slower."""


class GroupState(enum.Enum):
    """The life cycle of one run of a site."""

    SAVING = enum.auto()  # forward is in the site, or behind it and before its end
    HELD = enum.auto()  # ended, and waits until the host has synchronized
    SUBMITTED = enum.auto()  # its copies to the host were started, or done
    SPENT = enum.auto()  # backward has left the site


class ScheduledGroup:
    """One run of a site for one microbatch, as the schedule sees it."""

    __slots__ = ("ahead_bytes", "end_position", "position", "state")

    def __init__(self, position: int, end_position: int | None = None) -> None:
        self.position = position
        """The groups of the lane before this one."""
        self.end_position = position + 1 if end_position is None else end_position
        """The groups of the lane when this one ended: itself, those before it, and those between its region and its end."""
        self.ahead_bytes = 0
        """Called back before backward has come to the group."""
        self.state = GroupState.SAVING

    def submit(self) -> None:
        """Take note that what may leave of the group starts its way to the host."""
        self.state = GroupState.SUBMITTED

    def spend(self) -> None:
        """Take note that backward has left the site; one inside of the region, which saves on behind it, has not."""
        if self.state is not GroupState.SAVING:
            self.state = GroupState.SPENT


Group = TypeVar("Group", bound=ScheduledGroup)
Saved = TypeVar("Saved")
"""Bytes that move together and have one state: a storage of the engine, the number of a parcel of the simulator."""


class SavedBytes(Protocol[Saved]):
    """What the schedule asks about the bytes of a lane."""

    __slots__ = ()

    def list_away(self, group: int) -> list[Saved]:
        """Return what the group at a position saved, is still wanted, and is `OFFLOADING` or `OFFLOADED`, in order."""

    def is_offloaded(self, saved: Saved) -> bool:
        """Return whether `saved`, which is away, is `OFFLOADED`."""

    def count_bytes(self, away: Iterable[Saved]) -> int:
        """Return the bytes that move for `away`."""


class ScheduledLane(SavedBytes[Saved], Generic[Group, Saved]):
    """The groups of one microbatch in one model chunk, in the order in which forward reached them.

    Backward asks for them from the last to the first. What it does in between the lanes is the pipeline schedule's business,
    and nothing here depends on it.

    Args:
        groups: That forward has reached already.
    """

    __slots__ = ("_leftover", "ahead_bytes", "away", "end", "groups", "let_go_bytes")

    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self.groups = list(groups)
        """Groups in forward order."""
        self.end = self.away = len(self.groups)
        """Backward has left all groups but the first `end`; the first `away` have not been called back."""
        self.ahead_bytes = 0
        """Bytes ahead of all groups together."""
        self.let_go_bytes = 0
        """What backward took of layers of which nothing left: it lets go of it when the op that asked is done."""
        self._leftover: list[Group] = []

    def open(self, group: Group) -> None:
        """Add `group`, whose site forward has reached."""
        groups = self.groups
        if self.away < len(groups):
            for called in groups[self.away :]:
                self.expect(called, 0)  # forward goes on, and backward comes to them last: they must not hold up those behind
        groups.append(group)
        self.end = self.away = len(groups)

    def close(self, group: Group, *, is_held: bool) -> None:
        """End `group`: it is submitted next, or with `is_held` when the host has synchronized."""
        group.end_position = len(self.groups)
        if is_held:
            group.state = GroupState.HELD

    def list_held(self) -> list[Group]:
        """Return the groups that stay where backward comes next: submitted now, they would leave just when it asks for them."""
        return [group for group in self.groups if group.state is GroupState.HELD]

    def expect(self, group: Group, size_bytes: int) -> None:
        """Take note that `size_bytes` of `group` are called back before backward has come to it; 0 when it has."""
        self.ahead_bytes += size_bytes - group.ahead_bytes
        group.ahead_bytes = size_bytes

    def is_news(self, group: Group, *, is_offloaded: bool) -> bool:
        """Return whether bytes of `group` that backward takes, on the host only or not, show that it has reached the group.

        Not where it was known already. Of a group that backward has left, what is on the host only shows that another backward
        of the same graph has begun; ops of other branches take what they want late, and nothing of it is away. A group may have
        been called back while backward was behind all groups, or in one inside of it: what it brought back counts as ahead
        until then, and holds up what is before it.
        """
        if self.end > group.end_position or self.away > group.position:
            return True
        return group.position >= self.end if is_offloaded else group.ahead_bytes > 0

    def leave(self, position: int) -> list[Group]:
        """Take note that backward has left the groups from `position` on, and return those whose reloaded bytes may go.

        These are the ones that it left the time before, because ops between two regions, as the rotary embedding, may share the
        storages of the region that backward has just left. A position behind the end means that another backward of the same
        graph has begun.
        """
        if position > self.end:
            self.end = self.away = position
        left = self.groups[position : self.end]
        if not left:
            return []
        self.end = position
        self.away = min(self.away, position)
        for group in left:
            group.spend()
            if group.ahead_bytes:
                self.expect(group, 0)
        leftover, self._leftover = self._leftover, left
        return leftover

    def take_back(self) -> list[Group]:
        """Return the groups that were called back for a backward that does not come next: their reloaded bytes may go."""
        called = self.groups[self.away : self.end]
        for group in called:
            self.expect(group, 0)
        self.away = self.end
        return called


@dataclasses.dataclass(slots=True)
class CallBack(Generic[Group, Saved]):
    """A decision to reload bytes."""

    lane: ScheduledLane[Group, Saved]
    """Their lane."""
    cancelled: list[Saved]
    """Still on the device: their offload is cancelled."""
    reloaded: dict[Saved, Group]
    """Bytes on the host only: their copies to the device start, in this order, each for its group."""
    is_late: bool
    """Whether backward has reached their group already."""


class TransferSchedule:
    """Decides which bytes are reloaded, and when.

    Each event returns decisions. Execute one before you ask for the next, and ask for all.

    Args:
        policy: How much may be in flight, and back before backward asks for it.
    """

    def __init__(self, policy: TransferPolicy) -> None:
        self.policy = policy
        """The rules; they may change between any two events."""
        self.current: ScheduledLane[Any, Any] | None = None
        """The lane in which backward is; None in a forward."""
        self._next: ScheduledLane[Any, Any] | None = None
        """Lane whose backward comes next, if announced."""

    def announce(self, lane: ScheduledLane[Group, Saved] | None, *, during: ScheduledLane[Group, Saved] | None) -> list[Group]:
        """A pass begins, and the backward of `lane` comes next: return groups as `enter` does.

        Args:
            lane: None where nobody knows, its forward has not run, or more than one other forward comes before.
            during: The lane whose backward begins; None where a forward does.
        """
        vain = self._take_back() if self._next is not lane and self._next is not during else []
        self.current, self._next = during, lane
        return vain

    def enter(self, lane: ScheduledLane[Group, Saved]) -> list[Group]:
        """Backward is in `lane`, announced or not: return groups of another one that were called back in vain."""
        if lane is self.current:
            return []
        vain = self._take_back() if self._next is not lane else []
        self.current, self._next = lane, None
        return vain

    def _take_back(self) -> list[Any]:
        return [] if self._next is None else self._next.take_back()

    def look_ahead(self) -> Iterator[CallBack[Any, Any]]:
        """The pass that runs has got ahead: call back what the backward behind it wants first."""
        lane, current = self._next, self.current
        if lane is None or not lane.away or (current is not None and current.away):
            return
        beside_bytes = 0 if current is None else current.ahead_bytes
        if self.policy.may_begin_prefetch(ahead_bytes=beside_bytes + lane.ahead_bytes):
            may_prefetch = self.policy.may_prefetch_across
            yield from self._call_back_ahead(lane, may_prefetch, beside_bytes=beside_bytes, only=SavedState.OFFLOADED)

    def expect_backward(self, lane: ScheduledLane[Group, Saved]) -> Iterator[CallBack[Group, Saved]]:
        """Forward of `lane` is over and its backward comes next: the last groups stay, as far as their copies are under way."""
        return self._call_back_ahead(lane, self.policy.may_prefetch, only=SavedState.OFFLOADING)

    def reach(self, lane: ScheduledLane[Group, Saved], group: Group) -> Iterator[CallBack[Group, Saved]]:
        """Backward has come to `group`, and has left those behind it: call it back if nothing did, and what comes next."""
        lane.expect(group, 0)
        if group.position == lane.end - 1 and lane.away == lane.end:
            lane.away -= 1
            yield _sort(lane, dict.fromkeys(lane.list_away(group.position), group), is_late=True)
        yield from self.prefetch(lane)

    def prefetch(self, lane: ScheduledLane[Group, Saved]) -> Iterator[CallBack[Group, Saved]]:
        """Backward has got ahead in `lane`: call back what it wants next, as far as the policy lets it."""
        if lane.away and self.policy.may_begin_prefetch(ahead_bytes=lane.ahead_bytes):
            yield from self._call_back_ahead(lane, self.policy.may_prefetch)
        if not lane.away:
            yield from self.look_ahead()

    def let_go(self, lane: ScheduledLane[Group, Saved], size_bytes: int) -> Iterator[CallBack[Group, Saved]]:
        """Backward takes `size_bytes` in a layer of which nothing was offloaded: call back what fits into what it let go of.

        It still reads these bytes. Without this the first group that it comes to would always be waited for.
        """
        if not lane.away:
            return
        let_go_bytes = lane.let_go_bytes
        lane.let_go_bytes += size_bytes
        if self.policy.may_begin_prefetch(ahead_bytes=lane.ahead_bytes):
            may_prefetch = functools.partial(self.policy.may_prefetch_early, let_go_bytes=let_go_bytes)
            yield from self._call_back_ahead(lane, may_prefetch)

    def _call_back_ahead(
        self,
        lane: ScheduledLane[Group, Saved],
        may_prefetch: Callable[..., bool],
        *,
        beside_bytes: int = 0,
        only: SavedState | None = None,
    ) -> Iterator[CallBack[Group, Saved]]:
        """Call back the groups before those that were called back, as long as `may_prefetch`, of the policy, lets the next one.

        Args:
            lane: Whose groups.
            may_prefetch: Of the policy.
            beside_bytes: Ahead in another lane.
            only: A group that was not submitted, or has bytes in another state, ends it too. None for any state.
        """
        coming: dict[Saved, Group] = {}  # each once, though several groups may want it
        while lane.away > 0:
            group = lane.groups[lane.away - 1]
            away = [saved for saved in lane.list_away(lane.away - 1) if saved not in coming]
            if only is not None and not (group.state is GroupState.SUBMITTED and _are_all(lane, away, only)):
                break
            group_bytes = lane.count_bytes(away)
            if away and not may_prefetch(ahead_bytes=lane.ahead_bytes + beside_bytes, group_bytes=group_bytes):
                break
            lane.away -= 1
            if away:
                lane.expect(group, group_bytes)
                coming.update(dict.fromkeys(away, group))
        if coming:
            yield _sort(lane, coming, is_late=False)


def _are_all(lane: ScheduledLane[Group, Saved], away: Iterable[Saved], state: SavedState) -> bool:
    return all(lane.is_offloaded(saved) is (state is SavedState.OFFLOADED) for saved in away)


def _sort(lane: ScheduledLane[Group, Saved], coming: dict[Saved, Group], *, is_late: bool) -> CallBack[Group, Saved]:
    """Return the decision to call `coming` back: what has not left yet stays, and the rest is reloaded."""
    reloaded = {saved: group for saved, group in coming.items() if lane.is_offloaded(saved)}
    return CallBack(lane, [saved for saved in coming if saved not in reloaded], reloaded, is_late)
