"""Decides when to offload, reload and release groups, and when to cancel offloads. The engine and simulator share the rules.

A group is what one run of a site saves, and a lane has the groups of one microbatch. The schedule uses only their order
and sizes. The engine calls it for real events, and the simulator for simulated ones. Both execute its decisions and record in
their lanes which bytes are on the device. Only the engine handles locks, weak references and shared storages.

    [Note: Events]
    Calls to make for each event, in order:
    - a pass begins: `announce`; forward reaches a site: `open`
    - a group ends: `close`, `submit`, wait if `must_wait` is true, `look_ahead`
    - a forward has ended and its backward runs next: `list_held`, `expect_backward`
    - backward reaches a group: `enter`, `leave`, `reach`
    - backward unpacks tensors in a layer without offloaded tensors: `release`; backward has left that layer: `prefetch`
    Before `submit`, `list_held`, `reach` and `prefetch`, the caller releases memory whose copies have finished.

    [Note: Prefetch across passes]
    If the order of passes is fixed, the caller announces the lane of the next backward when a pass begins. That backward runs
    next, or after one forward if the running pass is a backward. The last groups of that lane are reloaded during the running
    pass. A backward first reloads all groups of its own lane. The bytes reloaded ahead of backward in both lanes together must
    not exceed the prefetch size, even for a single group: they are on the device when forward ends and memory peaks (see
    docs/decisions.md). An announcement is a hint: the schedule reloads only groups on the host, and drops unneeded reloads.

All rules count bytes, never tensors or groups, whose sizes can differ by a factor of 100 within one model.
"""

import abc
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from fgoffload.defaults import DEFAULT_PREFETCH_BYTES, DEFAULT_WINDOW_BYTES
from fgoffload.errors import ConfigError
from fgoffload.memory_tiers import SavedState
from fgoffload.units import check_bytes

STAGING_SLOTS = 2
"""Number of staging slots for captured modules: graphs fill one while the other is copied to the host."""


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
        """Reject negative sizes, and sizes that are not ints."""
        for flag, size_bytes in (("--offload-window", self.window_bytes), ("--offload-prefetch", self.prefetch_bytes)):
            if check_bytes(size_bytes, name=flag) < 0:
                raise ConfigError(f"{flag} {size_bytes} is below 0 bytes. Use 0 or a size, for example 512MiB.")

    def must_wait(self, *, in_flight_bytes: int) -> bool:
        """Return whether compute must wait for the oldest copy to the host."""
        return in_flight_bytes > self.window_bytes

    def may_prefetch(self, *, ahead_bytes: int, group_bytes: int) -> bool:
        """Return whether a group may be reloaded before backward needs it.

        Unless prefetch is disabled, one group of any size may be reloaded ahead. Otherwise, backward would always wait for a
        large group. `ahead_bytes` counts bytes reloaded, or in flight to the device, for groups that backward has not reached.
        """
        return ahead_bytes + group_bytes <= self.prefetch_bytes or (ahead_bytes == 0 < self.prefetch_bytes)

    def may_prefetch_early(self, *, ahead_bytes: int, group_bytes: int, released_bytes: int) -> bool:
        """Return whether a group may be reloaded while backward is in layers without offloaded tensors.

        The group and `ahead_bytes` must fit into `released_bytes`, the memory that backward has released in these layers.
        Otherwise, the device would use more memory than at the end of forward, when memory peaks in most steps.
        """
        may_prefetch = self.may_prefetch(ahead_bytes=ahead_bytes, group_bytes=group_bytes)
        return may_prefetch and ahead_bytes + group_bytes <= released_bytes

    def may_prefetch_across(self, *, ahead_bytes: int, group_bytes: int) -> bool:
        """Return whether a group may be reloaded while another pass runs. `ahead_bytes` counts both passes' lanes."""
        return ahead_bytes + group_bytes <= self.prefetch_bytes


class GroupState(enum.Enum):
    """State of a group in forward and backward."""

    SAVING = enum.auto()  # forward has entered the site, and the group has not ended
    HELD = enum.auto()  # ended, but its copies wait for `OffloadEngine.flush`
    SUBMITTED = enum.auto()  # its copies to the host are queued or done
    SPENT = enum.auto()  # backward has left the site


class ScheduledGroup:
    """One run of a site for one microbatch, with the state that the schedule needs."""

    __slots__ = ("ahead_bytes", "end_position", "position", "state")

    def __init__(self, position: int, end_position: int | None = None) -> None:
        self.position = position
        """Number of groups in the lane before this group."""
        self.end_position = position + 1 if end_position is None else end_position
        """Number of groups in the lane when this group ended, including those opened after this group."""
        self.ahead_bytes = 0
        """Bytes reloaded, or kept by cancelling their offload, before backward reached the group."""
        self.state = GroupState.SAVING

    def submit(self) -> None:
        """Record that the group's copies to the host start."""
        self.state = GroupState.SUBMITTED

    def spend(self) -> None:
        """Record that backward has left the site. A backward that runs inside the region, before the group ends, is ignored."""
        if self.state is not GroupState.SAVING:
            self.state = GroupState.SPENT


Group = TypeVar("Group", bound=ScheduledGroup)
Saved = TypeVar("Saved")
"""Bytes that are copied together and share a state: a storage in the engine, a bundle index in the simulator."""


class ScheduledLane(abc.ABC, Generic[Group, Saved]):
    """Groups of one microbatch in one model chunk, in the order in which forward reached them.

    Backward needs them in reverse order. The passes of different lanes may run in any order.
    """

    __slots__ = ("_leftover", "ahead_bytes", "end", "groups", "released_bytes", "remaining")

    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self.groups = list(groups)
        """Groups in forward order."""
        self.end = self.remaining = len(self.groups)
        """`end` counts the groups that backward has not left. `remaining` counts those not yet reloaded or cancelled."""
        self.ahead_bytes = 0
        """Sum of the groups' `ahead_bytes`."""
        self.released_bytes = 0
        """Bytes that backward has unpacked in layers without offloaded tensors. Each tensor is freed after its use."""
        self._leftover: list[Group] = []

    @abc.abstractmethod
    def list_remaining(self, group: int) -> list[Saved]:
        """Return bytes that the group at position `group` still needs and that are `OFFLOADING` or `OFFLOADED`, in order."""

    @abc.abstractmethod
    def is_offloaded(self, saved: Saved) -> bool:
        """Return whether `saved`, an element of `list_remaining`, is `OFFLOADED`."""

    @abc.abstractmethod
    def count_bytes(self, remaining: Iterable[Saved]) -> int:
        """Return the size of `remaining` in bytes."""

    def open(self, group: Group) -> None:
        """Append `group`, whose site forward has reached."""
        groups = self.groups
        if self.remaining < len(groups):
            for reloaded in groups[self.remaining :]:
                self.expect(reloaded, 0)  # forward continues, so backward needs later groups first
        groups.append(group)
        self.end = self.remaining = len(groups)

    def close(self, group: Group, *, is_held: bool) -> None:
        """End `group`. The caller then submits it. If `is_held`, the next `OffloadEngine.flush` submits it instead."""
        group.end_position = len(self.groups)
        if is_held:
            group.state = GroupState.HELD

    def list_held(self) -> list[Group]:
        """Return the held groups. If backward runs next, they stay on the device, because backward needs them immediately."""
        return [group for group in self.groups if group.state is GroupState.HELD]

    def expect(self, group: Group, size_bytes: int) -> None:
        """Record that `size_bytes` of `group` are ahead of backward: 0 once backward has reached the group."""
        self.ahead_bytes += size_bytes - group.ahead_bytes
        group.ahead_bytes = size_bytes

    def is_first_unpack(self, group: Group, *, is_offloaded: bool) -> bool:
        """Return whether unpacking bytes of `group` is the first sign that backward has reached the group.

        Once backward has left the group, an unpack of bytes that are on the host only (`is_offloaded`) means that another
        backward of the same graph has begun. A late unpack by an op of another branch does not, because its bytes are still
        on the device. A group may have been reloaded before backward reached any group, or while backward was in a nested
        group. Its bytes then count as ahead until backward reaches the group.
        """
        if self.end > group.end_position or self.remaining > group.position:
            return True
        return group.position >= self.end if is_offloaded else group.ahead_bytes > 0

    def leave(self, position: int) -> list[Group]:
        """Record that backward has left the groups from `position` on. Return groups whose reloaded bytes may be dropped.

        These are the groups that backward left at the previous call: ops between two regions, such as the rotary embedding,
        may share storages with the region that backward has just left. A `position` beyond `end` means that another backward
        of the same graph has begun.
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
        """Undo the prefetch for a backward that does not run next. Return the groups whose reloaded bytes may be dropped."""
        reloaded = self.groups[self.remaining : self.end]
        for group in reloaded:
            self.expect(group, 0)
        self.remaining = self.end
        return reloaded


@dataclasses.dataclass(slots=True)
class ReloadDecision(Generic[Group, Saved]):
    """Storages whose offload to cancel, and storages to reload."""

    lane: ScheduledLane[Group, Saved]
    cancelled: list[Saved]
    """Storages whose offload is cancelled. They are still on the device."""
    reloaded: dict[Saved, Group]
    """Storages to reload, in copy order, with the group that needs each of them. They are on the host only."""
    is_late: bool
    """Whether backward has already reached the group that needs the storages."""


class TransferSchedule:
    """Decides which storages are reloaded, and when. If a storage is still on the device, its offload is cancelled instead.

    Most methods return an iterator of decisions. Exhaust it, and execute each decision before requesting the next one.
    """

    def __init__(self, policy: TransferPolicy) -> None:
        self.policy = policy
        """Window and prefetch sizes. They may change between calls."""
        self.current: ScheduledLane[Any, Any] | None = None
        """Lane of the running backward, or None during a forward."""
        self._next: ScheduledLane[Any, Any] | None = None
        """Lane of the next backward, if announced."""

    def announce(self, lane: ScheduledLane[Group, Saved] | None, *, during: ScheduledLane[Group, Saved] | None) -> list[Group]:
        """Record that a pass begins and that the backward of `lane` is the next backward. For the result, see `enter`.

        Args:
            lane: None if the next backward's lane is unknown, has not run forward, or is more than one forward away.
            during: Lane whose backward begins. None if a forward begins.
        """
        discarded = self._discard_prefetched() if self._next is not lane and self._next is not during else []
        self.current, self._next = during, lane
        return discarded

    def enter(self, lane: ScheduledLane[Group, Saved]) -> list[Group]:
        """Record that backward is in `lane`. Return groups of another lane that need not have been reloaded."""
        if lane is self.current:
            return []
        discarded = self._discard_prefetched() if self._next is not lane else []
        self.current, self._next = lane, None
        return discarded

    def _discard_prefetched(self) -> list[Any]:
        return [] if self._next is None else self._next.discard_prefetched()

    def look_ahead(self) -> Iterator[ReloadDecision[Any, Any]]:
        """Reload the first groups that the announced backward needs. Call this when the running pass has made progress."""
        lane, current = self._next, self.current
        if lane is None or not lane.remaining or (current is not None and current.remaining):
            return
        other_ahead_bytes = 0 if current is None else current.ahead_bytes
        may_prefetch = self.policy.may_prefetch_across
        yield from self._reload_ahead(lane, may_prefetch, other_ahead_bytes=other_ahead_bytes, only=SavedState.OFFLOADED)

    def expect_backward(self, lane: ScheduledLane[Group, Saved]) -> Iterator[ReloadDecision[Group, Saved]]:
        """Cancel the offload of the last groups in flight, because the backward of `lane` runs next."""
        return self._reload_ahead(lane, self.policy.may_prefetch, only=SavedState.OFFLOADING)

    def reach(self, lane: ScheduledLane[Group, Saved], group: Group) -> Iterator[ReloadDecision[Group, Saved]]:
        """Reload `group` unless it was prefetched, then the next groups. Call this when backward reaches `group`."""
        lane.expect(group, 0)
        if group.position == lane.end - 1 and lane.remaining == lane.end:
            lane.remaining -= 1
            yield _sort(lane, dict.fromkeys(lane.list_remaining(group.position), group), is_late=True)
        yield from self.prefetch(lane)

    def prefetch(self, lane: ScheduledLane[Group, Saved]) -> Iterator[ReloadDecision[Group, Saved]]:
        """Reload the next groups within the policy's limits. Call this when backward has made progress in `lane`."""
        yield from self._reload_ahead(lane, self.policy.may_prefetch)
        if not lane.remaining:
            yield from self.look_ahead()

    def release(self, lane: ScheduledLane[Group, Saved], size_bytes: int) -> Iterator[ReloadDecision[Group, Saved]]:
        """Reload groups that fit into the memory that backward has released in layers without offloaded tensors.

        Call this when backward unpacks `size_bytes` there. Without the call, backward would always wait for its first group.
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

        `other_ahead_bytes` counts the bytes reloaded ahead in another lane. With `only`, the loop stops at the first
        group that is not submitted or has bytes in another state.
        """
        chosen: dict[Saved, Group] = {}  # several groups may need the same bytes
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
    """Return a decision that cancels the offload of `chosen` bytes still on the device and reloads the rest."""
    reloaded = {saved: group for saved, group in chosen.items() if lane.is_offloaded(saved)}
    return ReloadDecision(lane, [saved for saved in chosen if saved not in reloaded], reloaded, is_late)
