"""Tests the decisions of the transfer schedule on toy lanes, which have only states and bytes."""

import pytest

from fgoffload.memory_tiers import SavedState
from fgoffload.transfer_schedule import GroupState, ScheduledGroup, ScheduledLane, TransferPolicy, TransferSchedule

pytestmark = pytest.mark.quick

OFFLOADING, OFFLOADED = SavedState.OFFLOADING, SavedState.OFFLOADED
NBYTES = 100


class ToyLane(ScheduledLane[ScheduledGroup, str]):
    """A lane of named groups. Each letter of a name is a storage of 100 bytes, and groups share storages of equal letters."""

    def __init__(self, *names, state=OFFLOADED):
        super().__init__()
        self.names = names
        self.states = {letter: state for name in names for letter in name}
        for position in range(len(names)):
            group = ScheduledGroup(position)
            self.open(group)
            self.close(group, is_held=False)
            group.submit()

    def list_remaining(self, group):
        return [letter for letter in self.names[group] if self.states[letter] in (OFFLOADING, OFFLOADED)]

    def is_offloaded(self, saved):
        return self.states[saved] is OFFLOADED

    def count_bytes(self, remaining):
        return NBYTES * len(remaining)

    def execute(self, decisions):
        """Return the cancelled and the reloaded storages of each decision, in order."""
        executed = []
        for decision in decisions:
            states = decision.lane.states
            states.update(dict.fromkeys(decision.cancelled, SavedState.RESIDENT))
            states.update(dict.fromkeys(decision.reloaded, SavedState.RELOADED))
            executed.append(("".join(decision.cancelled), "".join(decision.reloaded)))
        return executed


def make_schedule(*, prefetch):
    return TransferSchedule(TransferPolicy(prefetch_bytes=prefetch))


def reach(schedule, lane, position):
    """Let backward reach a group, and return the decisions."""
    group = lane.groups[position]
    schedule.enter(lane)
    lane.leave(group.end_position)
    return lane.execute(schedule.reach(lane, group))


def test_reaching_the_last_group_cancels_its_offload_and_prefetches_earlier_groups():
    lane, schedule = ToyLane("a", "b", "c", "d"), make_schedule(prefetch=2 * NBYTES)
    assert reach(schedule, lane, 3) == [("", "d"), ("", "cb")]
    assert (lane.remaining, lane.ahead_bytes) == (1, 2 * NBYTES)
    assert reach(schedule, lane, 2) == [("", "a")]
    assert (lane.remaining, lane.ahead_bytes) == (0, 2 * NBYTES)


def test_a_group_is_reloaded_as_soon_as_it_fits_into_the_prefetch():
    lane, schedule = ToyLane("a", "b", "c", "d", "e"), make_schedule(prefetch=3 * NBYTES)
    assert reach(schedule, lane, 4) == [("", "e"), ("", "dcb")]
    assert reach(schedule, lane, 3) == [("", "a")]  # though two thirds of the prefetch are still ahead
    assert reach(schedule, lane, 2) == []


def test_a_storage_shared_by_two_groups_is_cancelled_and_counted_once():
    lane, schedule = ToyLane("xa", "xb", "c"), make_schedule(prefetch=3 * NBYTES)
    assert reach(schedule, lane, 2) == [("", "c"), ("", "xba")]
    assert [group.ahead_bytes for group in lane.groups] == [NBYTES, 2 * NBYTES, 0]


def test_groups_that_backward_has_passed_do_not_count_as_ahead():
    lane, schedule = ToyLane("a", "b", "c", "d"), make_schedule(prefetch=3 * NBYTES)
    reach(schedule, lane, 3)
    assert lane.ahead_bytes == 3 * NBYTES
    reach(schedule, lane, 1)  # nobody unpacked the third group
    assert lane.ahead_bytes == NBYTES


def test_reloads_in_a_kept_layer_fit_into_the_memory_that_backward_has_released():
    lane, schedule = ToyLane("a", "b"), make_schedule(prefetch=2 * NBYTES)
    found = [lane.execute(schedule.release(lane, size)) for size in (NBYTES - 1, 1, NBYTES, 0, 7)]
    # Backward frees an unpacked storage when it unpacks the next one.
    assert found == [[], [], [("", "b")], [("", "a")], []]
    assert lane.released_bytes == 2 * NBYTES


def test_before_a_backward_the_last_groups_in_flight_are_cancelled_in_one_decision():
    lane, schedule = ToyLane("a", "b", "c", state=OFFLOADING), make_schedule(prefetch=9 * NBYTES)
    lane.states["a"] = OFFLOADED
    assert lane.execute(schedule.expect_backward(lane)) == [("cb", "")]
    assert (lane.remaining, lane.ahead_bytes) == (1, 2 * NBYTES)


def test_before_a_backward_cancelling_stops_at_an_unsubmitted_group():
    lane, schedule = ToyLane("ab", "b", "c", state=OFFLOADING), make_schedule(prefetch=9 * NBYTES)
    lane.close(lane.groups[1], is_held=True)
    assert lane.list_held() == [lane.groups[1]]
    assert lane.execute(schedule.expect_backward(lane)) == [("c", "")]


def test_a_later_forward_resets_the_groups_ahead_after_cancelling():
    lane, schedule = ToyLane("a", "b", state=OFFLOADING), make_schedule(prefetch=9 * NBYTES)
    lane.execute(schedule.expect_backward(lane))
    lane.open(ScheduledGroup(2))
    assert (lane.end, lane.remaining, lane.ahead_bytes) == (3, 3, 0)


def test_unpacks_count_as_the_first_until_backward_has_reached_the_group():
    lane, schedule = ToyLane("a", "b", "c"), make_schedule(prefetch=NBYTES)
    assert all(lane.is_first_unpack(group, is_offloaded=False) for group in lane.groups)
    reach(schedule, lane, 2)
    assert [lane.is_first_unpack(group, is_offloaded=False) for group in lane.groups] == [True, True, False]


def test_the_first_unpack_is_found_if_the_group_was_reloaded_from_inside_its_region():
    lane, schedule = ToyLane("a", "b"), make_schedule(prefetch=NBYTES)
    lane.close(lane.groups[0], is_held=False)
    reach(schedule, lane, 1)
    assert (lane.end, lane.remaining) == (lane.groups[0].end_position, 0)
    assert lane.is_first_unpack(lane.groups[0], is_offloaded=False)
    reach(schedule, lane, 0)
    assert not lane.is_first_unpack(lane.groups[0], is_offloaded=False)


def test_a_group_that_ends_after_a_later_group_is_reached_at_its_end():
    lane, schedule = ToyLane("a", "b", "c"), make_schedule(prefetch=0)
    lane.close(lane.groups[1], is_held=False)  # like the group of a norm, which ends after attention
    assert reach(schedule, lane, 1) == []  # until then, unpacked storages are reloaded one at a time
    assert (lane.end, lane.remaining) == (3, 3)
    assert reach(schedule, lane, 2) == [("", "c")]
    assert reach(schedule, lane, 0) == [("", "a")]


def test_groups_are_dropped_when_backward_has_passed_the_next_group():
    lane = ToyLane("a", "b", "c")
    first, second, third = lane.groups
    assert [lane.leave(position) for position in (3, 2, 1, 1, 0)] == [[], [], [third], [], [second]]
    assert {group.state for group in lane.groups} == {GroupState.SPENT}
    assert first.position == 0


def test_a_backward_inside_a_region_does_not_spend_its_group():
    lane = ToyLane("a")
    lane.open(ScheduledGroup(1))
    lane.leave(0)
    assert [group.state for group in lane.groups] == [GroupState.SPENT, GroupState.SAVING]


def test_a_second_backward_of_the_same_graph_starts_after_all_groups():
    lane, schedule = ToyLane("a", "b"), make_schedule(prefetch=0)
    for position in (1, 0):
        reach(schedule, lane, position)
    lane.leave(0)
    lane.states["b"] = OFFLOADED  # as the engine drops it
    assert lane.is_first_unpack(lane.groups[1], is_offloaded=True)
    assert not lane.is_first_unpack(lane.groups[1], is_offloaded=False)
    assert reach(schedule, lane, 1) == [("", "b")]


def test_the_last_groups_of_an_announced_lane_are_prefetched_during_a_forward():
    lane, schedule = ToyLane("a", "b", "c", "d"), make_schedule(prefetch=2 * NBYTES)
    assert schedule.announce(lane, during=None) == []
    assert [lane.execute(schedule.look_ahead()) for _ in range(2)] == [[("", "dc")], []]
    assert all(lane.is_first_unpack(group, is_offloaded=False) for group in lane.groups[2:])
    assert reach(schedule, lane, 3) == [("", "b")]  # without waiting


def test_bytes_ahead_in_the_current_and_the_next_lane_count_together():
    lane, other, schedule = ToyLane("a", "b", "c"), ToyLane("x", "yz"), make_schedule(prefetch=2 * NBYTES)
    schedule.announce(other, during=lane)
    # The other lane is prefetched only once all groups of this lane are reloaded, into the rest of the prefetch.
    assert reach(schedule, lane, 2) == [("", "c"), ("", "ba")]
    assert reach(schedule, lane, 1) == []
    assert (lane.ahead_bytes, other.ahead_bytes) == (NBYTES, 0)
    assert reach(schedule, lane, 0) == [("", "yz")]
    assert schedule.announce(None, during=other) == []  # its backward begins: its reloads are not discarded
    assert other.states == {"x": OFFLOADED, "y": SavedState.RELOADED, "z": SavedState.RELOADED}


def test_an_announcement_does_not_reload_groups_in_flight_or_above_the_prefetch():
    large, offloading, held, schedule = ToyLane("a", "bcd"), ToyLane("a", "b"), ToyLane("a", "b"), make_schedule(prefetch=250)
    offloading.states["b"] = OFFLOADING
    held.close(held.groups[1], is_held=True)
    for lane in (large, offloading, held):
        schedule.announce(lane, during=None)
        assert lane.execute(schedule.look_ahead()) == []
        assert lane.remaining == 2


@pytest.mark.parametrize("next_event", ["another announcement", "another backward", "none"])
def test_prefetches_are_dropped_if_another_backward_comes_next(next_event):
    lane, other, schedule = ToyLane("a", "b", "c"), ToyLane("x"), make_schedule(prefetch=2 * NBYTES)
    schedule.announce(lane, during=None)
    lane.execute(schedule.look_ahead())
    announced = {"another announcement": other, "none": None}
    discarded = schedule.announce(announced[next_event], during=None) if next_event in announced else schedule.enter(other)
    assert discarded == lane.groups[1:]
    assert (lane.remaining, lane.ahead_bytes) == (3, 0)
    assert list(schedule.look_ahead()) == [] or next_event == "another announcement"
    lane.states.update(b=OFFLOADED, c=OFFLOADED)  # as the executor drops them
    assert reach(schedule, lane, 2) == [("", "c"), ("", "ba")]
