"""The link's queues, against times worked out by hand, and what must hold for any copies."""

import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fgoffload import ConfigError
from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.planner.simulation.link_queue import Direction, LinkQueue

D2H, H2D = Direction.D2H, Direction.H2D


def make_queue(*, d2h=10.0, h2d=10.0, duplex=6.0, latency_s=0.0, slowdown=0.0):
    return LinkQueue(
        LinkModel(
            d2h_bytes_per_s=d2h,
            h2d_bytes_per_s=h2d,
            duplex_bytes_per_s=duplex,
            copy_latency_s=latency_s,
            compute_slowdown=slowdown,
        )
    )


def test_each_direction_has_its_own_rate():
    queue = make_queue(d2h=10, h2d=20)
    assert queue.finish(queue.submit(D2H, 100, 0.0)) == 10
    assert queue.finish(queue.submit(H2D, 100, 10.0)) == 15


def test_a_copy_waits_for_those_before_it_and_starts_when_they_are_through():
    queue = make_queue()
    first, second = queue.submit(D2H, 100, 0.0), queue.submit(D2H, 30, 1.0)
    assert queue.finish(second) == 13
    assert (first.start_s, first.end_s, second.submitted_s, second.start_s) == (0, 10, 1, 10)
    assert queue.done == [first, second]


def test_a_copy_that_finds_nothing_before_it_starts_when_it_is_submitted():
    queue = make_queue()
    queue.submit(D2H, 10, 0.0)
    late = queue.submit(D2H, 10, 5.0)
    assert queue.finish(late) == 6
    assert late.start_s == 5


def test_both_ways_at_once_move_at_the_lower_rate_each_until_one_is_through():
    queue = make_queue()
    out, back = queue.submit(D2H, 100, 0.0), queue.submit(H2D, 60, 0.0)
    # 60 bytes at 6 a second take 10 s; the other way has 40 left then, and has the link alone.
    assert queue.finish(back) == 10
    assert queue.finish(out) == 14


def test_a_copy_that_joins_halfway_slows_the_other_from_then_on():
    queue = make_queue()
    out = queue.submit(D2H, 100, 0.0)
    back = queue.submit(H2D, 30, 4.0)
    # 40 bytes alone by 4 s, 30 more beside the other by 9 s, and 30 alone.
    assert queue.finish(back) == 9
    assert queue.finish(out) == 12


@settings(deadline=None)
@given(st.floats(0.01, 100), st.integers(10**6, 10**9), st.floats(0, 0.5))
def test_both_ways_are_through_where_they_end_at_one_moment_but_for_rounding(begun_s, size_bytes, part):
    queue = make_queue(d2h=50e9, h2d=50e9, duplex=35e9)
    joined_s = begun_s + part * size_bytes / 50e9
    left = size_bytes - part * size_bytes
    queue.submit(D2H, size_bytes, begun_s)
    queue.submit(H2D, left, joined_s)
    queue.advance(joined_s + left / 35e9)
    assert len(queue.done) == 2


def test_both_ways_are_never_faster_than_one_alone():
    queue = make_queue(d2h=10, h2d=4, duplex=7)
    out, back = queue.submit(D2H, 70, 0.0), queue.submit(H2D, 40, 0.0)
    assert queue.finish(out) == 10
    assert queue.finish(back) == 10


def test_a_copy_has_its_latency_first_and_leaves_the_other_way_alone_in_it():
    queue = make_queue(latency_s=2.0)
    out = queue.submit(D2H, 100, 0.0)
    back = queue.submit(H2D, 60, 2.0)
    # To the host: 2 s of latency, 20 bytes alone by 4 s. Then both move at 6: back is through at 14, and 20 bytes are left.
    assert queue.finish(back) == 14
    assert queue.finish(out) == 16
    assert out.start_s == 0


def test_copies_of_nothing_take_their_latency_alone():
    queue = make_queue(latency_s=0.5)
    assert queue.finish(queue.submit(D2H, 0, 1.0)) == 1.5


def test_a_copy_of_nothing_without_latency_is_through_at_once():
    queue = make_queue()
    first, second = queue.submit(D2H, 0, 3.0), queue.submit(D2H, 10, 3.0)
    assert queue.finish(second) == 4
    assert first.end_s == 3


def test_compute_is_slower_beside_copies_and_not_after_them():
    queue = make_queue(slowdown=0.5)
    queue.submit(D2H, 60, 0.0)
    # For 6 s compute does 4 s of its work; the other 6 s run alone.
    assert queue.run_compute(0.0, 10.0) == 12
    assert queue.now_s == 6
    assert queue.run_compute(12.0, 10.0) == 22


def test_compute_that_ends_before_the_copies_is_slower_all_the_time():
    queue = make_queue(slowdown=0.25)
    out = queue.submit(D2H, 100, 0.0)
    assert queue.run_compute(0.0, 4.0) == 5
    assert queue.finish(out) == 10


def test_compute_without_slowdown_lets_nothing_pass():
    queue = make_queue()
    queue.submit(D2H, 100, 0.0)
    assert queue.run_compute(0.0, 4.0) == 4
    assert queue.now_s == 0


def test_what_is_last_of_a_direction_is_known_until_it_is_through():
    queue = make_queue()
    assert queue.find_last(D2H) is None
    queue.submit(D2H, 10, 0.0)
    last = queue.submit(D2H, 10, 0.0)
    queue.advance(1.5)
    assert queue.find_last(D2H) is last
    queue.advance(2.0)
    assert queue.find_last(D2H) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d2h": 0.0}, "d2h_bytes_per_s 0.0 is not above 0"),
        ({"h2d": None}, "h2d_bytes_per_s is not known"),
        ({"duplex": math.inf}, "duplex_bytes_per_s inf"),
        ({"latency_s": -1.0}, "copy_latency_s -1.0 is not from 0"),
        ({"slowdown": math.nan}, "compute_slowdown nan"),
    ],
)
def test_what_no_link_has_is_refused(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_queue(**fields)


sizes = st.integers(0, 1000)
copies = st.lists(st.tuples(st.sampled_from((D2H, H2D)), sizes, st.floats(0, 50)), min_size=1, max_size=12)
rates = st.floats(5, 50)


def submit_all(queue, requests):
    submitted, now_s = [], 0.0
    for direction, size_bytes, pause_s in requests:
        now_s += pause_s
        submitted.append(queue.submit(direction, size_bytes, now_s))
    return submitted


@settings(deadline=None, max_examples=100)
@given(st.data(), copies)
def test_time_that_passes_in_many_steps_is_the_same_as_in_one(data, requests):
    parameters = data.draw(st.tuples(rates, rates, st.floats(1, 60), st.sampled_from((0.0, 0.25))))
    d2h, h2d, duplex, latency_s = parameters
    one, other = (make_queue(d2h=d2h, h2d=h2d, duplex=duplex, latency_s=latency_s) for _ in range(2))
    in_one = submit_all(one, requests)
    one.advance(math.inf)
    in_steps = submit_all(other, requests)
    for _ in range(data.draw(st.integers(1, 200))):
        other.advance(other.now_s + 0.37)
    other.advance(math.inf)
    assert [copy.end_s for copy in in_steps] == pytest.approx([copy.end_s for copy in in_one], rel=1e-9)


@settings(deadline=None, max_examples=100)
@given(copies, rates, rates, st.sampled_from((0.0, 0.25)))
def test_copies_are_through_in_order_and_at_no_more_than_their_rates(requests, d2h, h2d, latency_s):
    queue = make_queue(d2h=d2h, h2d=h2d, latency_s=latency_s)
    submitted = submit_all(queue, requests)
    queue.advance(math.inf)
    assert len(queue.done) == len(submitted)
    for direction, rate in ((D2H, d2h), (H2D, h2d)):
        lane = [copy for copy in submitted if copy.direction is direction]
        assert [copy for copy in queue.done if copy.direction is direction] == lane
        for before, after in itertools.pairwise(lane):
            assert after.start_s == max(before.end_s, after.submitted_s)
        for copy in lane:
            assert copy.end_s - copy.start_s >= (latency_s + copy.size_bytes / rate) * (1 - 1e-9)


@settings(deadline=None, max_examples=100)
@given(copies, st.floats(1, 60))
def test_a_direction_is_never_faster_beside_the_other_than_alone(requests, duplex):
    both, alone = make_queue(duplex=duplex), make_queue(duplex=duplex)
    submitted = submit_all(both, requests)
    both.advance(math.inf)
    now_s, ends = 0.0, []
    for direction, size_bytes, pause_s in requests:
        now_s += pause_s
        if direction is D2H:
            ends.append(alone.submit(D2H, size_bytes, now_s))
    alone.advance(math.inf)
    for copy, other in zip((copy for copy in submitted if copy.direction is D2H), ends, strict=True):
        # Two moments are one where they are a part in 1e9 from each other.
        assert copy.end_s >= other.end_s * (1 - 1e-9)


@settings(deadline=None, max_examples=100)
@given(copies, st.floats(0.01, 1), st.floats(0.1, 100))
def test_compute_beside_copies_takes_between_its_own_time_and_the_slowed_one(requests, slowdown, work_s):
    queue = make_queue(slowdown=slowdown)
    start_s = submit_all(queue, requests)[-1].submitted_s
    end_s = queue.run_compute(start_s, work_s)
    assert start_s + work_s - 1e-9 <= end_s <= start_s + work_s * (1 + slowdown) + 1e-9
