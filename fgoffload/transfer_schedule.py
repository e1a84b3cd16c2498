"""Decides which groups are offloaded, reloaded, cancelled and released, and when. Engine and simulator share it.

The schedule knows groups by their order and bytes. The engine reports events of a device, the simulator events in simulated
time. Both execute its decisions, and their lanes know where bytes are. Locks, weak references and shared storages belong to the
engine.

    [Note: Events]
    A pass begins: `announce`. Forward reaches a site: `open`. A group ends: `close`, `submit`, then compute waits by
    `must_wait`, then `look_ahead`. Backward comes next: `list_held`, `expect_backward`. Backward reaches a group: `enter`,
    `leave`, `reach`. It has left a layer without offloaded tensors: `prefetch`. It unpacks tensors there: `release`. Before
    `submit`, `list_held`, `reach` and `prefetch` the executor releases memory that finished copies no longer need.

    [Note: Prefetch across passes]
    A caller that knows the order of passes announces, as each begins, the lane of the next backward. That backward follows the
    pass directly, or after one forward if the pass is a backward. The last groups of that lane are reloaded during the pass; in
    a backward, only after all groups of its own lane. The bytes ahead in both lanes together stay within the prefetch bytes, so
    a larger group is not reloaded: they are on the device when that forward ends and memory peaks, see docs/decisions.md. An
    announcement is a hint: it reloads only groups on the host, and wrong reloads are dropped.

All rules count bytes, never tensors or groups, whose sizes differ by a factor of 100 in one model.
"""

import abc
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from fgoffload.defaults import DEFAULT_PREFETCH_BYTES, DEFAULT_WINDOW_BYTES
from fgoffload.errors import ConfigError
from fgoffload.units import check_bytes

STAGING_SLOTS = 2
"""Number of slots for the offload of captured modules: graphs use one while the other is copied."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferPolicy:
    """Limits on how far copies may lag behind forward and run ahead of backward.

    Args:
        window_bytes: Bytes that may be in flight to the host before compute waits for the oldest copy.
        prefetch_bytes: Bytes that may be reloaded before backward needs them.
    """

    window_bytes: int = DEFAULT_WINDOW_BYTES
    prefetch_bytes: int = DEFAULT_PREFETCH_BYTES

    def __post_init__(self) -> None:
        """Reject sizes that are not whole numbers of 0 or more."""
        for flag, size_bytes in (("--offload-window", self.window_bytes), ("--offload-prefetch", self.prefetch_bytes)):
            if check_bytes(size_bytes, name=flag) < 0:
                raise ConfigError(f"{flag} {size_bytes} is below 0 bytes. Use 0 or a size, for example 512MiB.")

    def must_wait(self, *, in_flight_bytes: int) -> bool:
        """Return whether compute must wait for the oldest copy to the host."""
        return in_flight_bytes > self.window_bytes

    def may_prefetch(self, *, ahead_bytes: int, group_bytes: int) -> bool:
        """Return whether a group may be reloaded before backward needs it.

        One group of any size may be ahead, since backward would always wait for a large group otherwise. `ahead_bytes` are
        reloaded, or in flight to the device, for groups that backward has not reached.
        """
        return ahead_bytes + group_bytes <= self.prefetch_bytes or (ahead_bytes == 0 < self.prefetch_bytes)

    def may_prefetch_early(self, *, ahead_bytes: int, group_bytes: int, released_bytes: int) -> bool:
        """Return whether a group may be reloaded while backward is in layers without offloaded tensors.

        It must fit into the `released_bytes` that backward has released there. Otherwise the device would hold more than at the
        end of forward, where most steps have their peak.
        """
        may_prefetch = self.may_prefetch(ahead_bytes=ahead_bytes, group_bytes=group_bytes)
        return may_prefetch and ahead_bytes + group_bytes <= released_bytes

    def may_prefetch_across(self, *, ahead_bytes: int, group_bytes: int) -> bool:
        """Return whether a group may be reloaded while another pass runs. `ahead_bytes` counts both lanes."""
        return ahead_bytes + group_bytes <= self.prefetch_bytes


class SavedState(enum.Enum):
    """Location of saved bytes."""

    RESIDENT = enum.auto()  # on the device only: not submitted, kept, or cancelled in time
    OFFLOADING = enum.auto()  # on the device, and their copy to the host is not known to be done
    OFFLOADED = enum.auto()  # on the host only
    RELOADED = enum.auto()  # on the host, and in a device buffer that is filled when its copy is done
    FREED = enum.auto()  # nowhere, since backward no longer needs them; only in the simulator

    __hash__ = object.__hash__
    """Identity hash. Members are singletons, and `Enum`'s own hash is several times slower."""


class GroupState(enum.Enum):
    """Life cycle of one run of a site."""

    SAVING = enum.auto()  # forward is in the site, or after it and before the group's end
    HELD = enum.auto()  # ended, and waits until the host has synchronized
    SUBMITTED = enum.auto()  # its copies to the host are queued or done
    SPENT = enum.auto()  # backward has left the site


class ScheduledGroup:
    """Schedule's view of one run of a site for one microbatch."""

    __slots__ = ("ahead_bytes", "end_position", "position", "state")

    def __init__(self, position: int, end_position: int | None = None) -> None:
        self.position = position
        """Number of groups in the lane before this one."""
        self.end_position = position + 1 if end_position is None else end_position
        """Number of groups in the lane when this one ended. Groups between its region and its end are included."""
        self.ahead_bytes = 0
        """Bytes reloaded or cancelled before backward has reached the group."""
        self.state = GroupState.SAVING

    def submit(self) -> None:
        """Note that the group's copies to the host start."""
        self.state = GroupState.SUBMITTED

    def spend(self) -> None:
        """Note that backward has left the site. A backward inside of the region, which still saves, does not count."""
        if self.state is not GroupState.SAVING:
            self.state = GroupState.SPENT


Group = TypeVar("Group", bound=ScheduledGroup)
Saved = TypeVar("Saved")
"""Bytes that are copied together and have one state: a storage in the engine, a bundle's number in the simulator."""


class ScheduledLane(abc.ABC, Generic[Group, Saved]):
    """Groups of one microbatch in one model chunk, in the order in which forward reached them.

    Backward needs them from the last to the first. Lanes may run in any order.
    """

    __slots__ = ("_leftover", "ahead_bytes", "end", "groups", "released_bytes", "remaining")

    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self.groups = list(groups)
        """Groups in forward order."""
        self.end = self.remaining = len(self.groups)
        """Number of groups that backward has not left (`end`), and that are neither reloaded nor cancelled (`remaining`)."""
        self.ahead_bytes = 0
        """Bytes ahead in all groups together."""
        self.released_bytes = 0
        """Bytes that backward unpacked in layers without offloaded tensors, and releases after the op that uses them."""
        self._leftover: list[Group] = []

    @abc.abstractmethod
    def list_remaining(self, group: int) -> list[Saved]:
        """Return the bytes of a group, by position, that are still needed and `OFFLOADING` or `OFFLOADED`, in order."""

    @abc.abstractmethod
    def is_offloaded(self, saved: Saved) -> bool:
        """Return whether `saved`, one of `list_remaining`, is `OFFLOADED`."""

    @abc.abstractmethod
    def count_bytes(self, remaining: Iterable[Saved]) -> int:
        """Return the number of bytes to copy for `remaining`."""

    def open(self, group: Group) -> None:
        """Append `group`, whose site forward has reached."""
        groups = self.groups
        if self.remaining < len(groups):
            for reloaded in groups[self.remaining :]:
                self.expect(reloaded, 0)  # forward continues, so backward needs later groups first
        groups.append(group)
        self.end = self.remaining = len(groups)

    def close(self, group: Group, *, is_held: bool) -> None:
        """End `group`. It is submitted next, or with `is_held` once the host has synchronized."""
        group.end_position = len(self.groups)
        if is_held:
            group.state = GroupState.HELD

    def list_held(self) -> list[Group]:
        """Return the held groups, which stay if backward comes next: their offload would end just when backward needs them."""
        return [group for group in self.groups if group.state is GroupState.HELD]

    def expect(self, group: Group, size_bytes: int) -> None:
        """Note that `size_bytes` of `group` are ahead of backward. 0 once backward has reached it."""
        self.ahead_bytes += size_bytes - group.ahead_bytes
        group.ahead_bytes = size_bytes

    def is_news(self, group: Group, *, is_offloaded: bool) -> bool:
        """Return whether an unpack of bytes of `group` shows for the first time that backward has reached the group.

        If backward has left the group, an unpack of bytes that are on the host only (`is_offloaded`) shows that another
        backward of the same graph has begun. Late unpacks by ops of other branches find reloaded bytes. A group may have been
        reloaded before backward reached any group, or in a group inside of it. Its bytes count as ahead until backward reaches
        it.
        """
        if self.end > group.end_position or self.remaining > group.position:
            return True
        return group.position >= self.end if is_offloaded else group.ahead_bytes > 0

    def leave(self, position: int) -> list[Group]:
        """Note that backward has left the groups from `position` on, and return groups whose reloaded bytes may be dropped.

        These are the groups that it left at the previous call, since ops between two regions, such as the rotary embedding, may
        share storages with the region that backward has just left. A position after the end means that another backward of the
        same graph has begun.
        """
        if position > self.end:
            self.end = self.remaining = position
        left = self.groups[position : self.end]
        if not left:
            return []
        self.end = position
        self.remaining = min(self.remaining, position)
        for group in left:
            group.spend()
            if group.ahead_bytes:
                self.expect(group, 0)
        leftover, self._leftover = self._leftover, left
        return leftover

    def discard_prefetched(self) -> list[Group]:
        """Return the groups that were reloaded for a backward that does not come next. Their reloaded bytes may be dropped."""
        reloaded = self.groups[self.remaining : self.end]
        for group in reloaded:
            self.expect(group, 0)
        self.remaining = self.end
        return reloaded


@dataclasses.dataclass(slots=True)
class ReloadDecision(Generic[Group, Saved]):
    """Decision to cancel the offload of bytes that are still on the device, and to reload other bytes."""

    lane: ScheduledLane[Group, Saved]
    """Lane of the bytes."""
    cancelled: list[Saved]
    """Bytes still on the device, whose offload is cancelled."""
    reloaded: dict[Saved, Group]
    """Bytes on the host only, with the group that needs them, in the order of their copies to the device."""
    is_late: bool
    """Whether backward has already reached their group."""


class TransferSchedule:
    """Decides which bytes are reloaded, and when. The offload of bytes that are still on the device is cancelled instead.

    Each event returns an iterator of decisions. Exhaust it, and execute each decision before you request the next one.
    """

    def __init__(self, policy: TransferPolicy) -> None:
        self.policy = policy
        """Window and prefetch sizes. They may change between any two events."""
        self.current: ScheduledLane[Any, Any] | None = None
        """Lane of the running backward. None in a forward."""
        self._next: ScheduledLane[Any, Any] | None = None
        """Lane whose backward comes next, if announced."""

    def announce(self, lane: ScheduledLane[Group, Saved] | None, *, during: ScheduledLane[Group, Saved] | None) -> list[Group]:
        """Note that a pass begins and that the backward of `lane` comes next. Return groups as `enter` does.

        Args:
            lane: None if it is unknown, its forward has not run, or more than one other forward comes before its backward.
            during: Lane whose backward begins. None if a forward begins.
        """
        discarded = self._discard_prefetched() if self._next is not lane and self._next is not during else []
        self.current, self._next = during, lane
        return discarded

    def enter(self, lane: ScheduledLane[Group, Saved]) -> list[Group]:
        """Note that backward is in `lane`. Return groups of another lane that were reloaded for nothing."""
        if lane is self.current:
            return []
        discarded = self._discard_prefetched() if self._next is not lane else []
        self.current, self._next = lane, None
        return discarded

    def _discard_prefetched(self) -> list[Any]:
        return [] if self._next is None else self._next.discard_prefetched()

    def look_ahead(self) -> Iterator[ReloadDecision[Any, Any]]:
        """Reload the first groups of the announced backward, since the running pass has made progress."""
        lane, current = self._next, self.current
        if lane is None or not lane.remaining or (current is not None and current.remaining):
            return
        other_ahead_bytes = 0 if current is None else current.ahead_bytes
        may_prefetch = self.policy.may_prefetch_across
        yield from self._reload_ahead(lane, may_prefetch, other_ahead_bytes=other_ahead_bytes, only=SavedState.OFFLOADED)

    def expect_backward(self, lane: ScheduledLane[Group, Saved]) -> Iterator[ReloadDecision[Group, Saved]]:
        """Cancel the offload of the last groups of `lane` that are in flight, since its backward comes next."""
        return self._reload_ahead(lane, self.policy.may_prefetch, only=SavedState.OFFLOADING)

    def reach(self, lane: ScheduledLane[Group, Saved], group: Group) -> Iterator[ReloadDecision[Group, Saved]]:
        """Reload `group` if nothing did, and the next groups: backward has reached `group` and left the later ones."""
        lane.expect(group, 0)
        if group.position == lane.end - 1 and lane.remaining == lane.end:
            lane.remaining -= 1
            yield _sort(lane, dict.fromkeys(lane.list_remaining(group.position), group), is_late=True)
        yield from self.prefetch(lane)

    def prefetch(self, lane: ScheduledLane[Group, Saved]) -> Iterator[ReloadDecision[Group, Saved]]:
        """Reload the next groups, as far as the policy allows, since backward has made progress in `lane`."""
        yield from self._reload_ahead(lane, self.policy.may_prefetch)
        if not lane.remaining:
            yield from self.look_ahead()

    def release(self, lane: ScheduledLane[Group, Saved], size_bytes: int) -> Iterator[ReloadDecision[Group, Saved]]:
        """Reload groups that fit into the memory that backward has released in layers without offloaded tensors.

        Backward unpacks `size_bytes` in such a layer now. Without these reloads it would always wait for its first group.
        """
        if not lane.remaining:
            return
        released_bytes = lane.released_bytes
        lane.released_bytes += size_bytes
        may_prefetch = functools.partial(self.policy.may_prefetch_early, released_bytes=released_bytes)
        yield from self._reload_ahead(lane, may_prefetch)

    def _reload_ahead(
        self,
        lane: ScheduledLane[Group, Saved],
        may_prefetch: Callable[..., bool],
        *,
        other_ahead_bytes: int = 0,
        only: SavedState | None = None,
    ) -> Iterator[ReloadDecision[Group, Saved]]:
        """Reload further groups, from the last to the first, as long as `may_prefetch` allows the next one.

        `other_ahead_bytes` are ahead in another lane. With `only`, stop at a group that is not submitted or not in this state.
        """
        chosen: dict[Saved, Group] = {}  # each once, though several groups may need it
        while lane.remaining > 0:
            group = lane.groups[lane.remaining - 1]
            remaining = [saved for saved in lane.list_remaining(lane.remaining - 1) if saved not in chosen]
            if only is not None and (
                group.state is not GroupState.SUBMITTED
                or any(lane.is_offloaded(saved) is not (only is SavedState.OFFLOADED) for saved in remaining)
            ):
                break
            group_bytes = lane.count_bytes(remaining)
            if remaining and not may_prefetch(ahead_bytes=lane.ahead_bytes + other_ahead_bytes, group_bytes=group_bytes):
                break
            lane.remaining -= 1
            if remaining:
                lane.expect(group, group_bytes)
                chosen.update(dict.fromkeys(remaining, group))
        if chosen:
            yield _sort(lane, chosen, is_late=False)


def _sort(lane: ScheduledLane[Group, Saved], chosen: dict[Saved, Group], *, is_late: bool) -> ReloadDecision[Group, Saved]:
    """Return the decision for `chosen`: cancel the offload of bytes still on the device, and reload the rest."""
    reloaded = {saved: group for saved, group in chosen.items() if lane.is_offloaded(saved)}
    return ReloadDecision(lane, [saved for saved in chosen if saved not in reloaded], reloaded, is_late)
