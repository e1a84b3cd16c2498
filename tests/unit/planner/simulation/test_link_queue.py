"""The link's queues, against times worked out by hand, and what must hold for any copies."""

import re

import pytest
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


def test_a_copy_has_its_latency_first_and_leaves_the_other_way_alone_in_it():
    queue = make_queue(latency_s=2.0)
    out = queue.submit(D2H, 100, 0.0)
    back = queue.submit(H2D, 60, 2.0)
    # To the host: 2 s of latency, 20 bytes alone by 4 s. Then both move at 6: back is through at 14, and 20 bytes are left.
    assert queue.finish(back) == 14
    assert queue.finish(out) == 16
    assert out.start_s == 0


def test_compute_is_slower_beside_copies_and_not_after_them():
    queue = make_queue(slowdown=0.5)
    queue.submit(D2H, 60, 0.0)
    # For 6 s compute does 4 s of its work; the other 6 s run alone.
    assert queue.run_compute(0.0, 10.0) == 12
    assert queue.now_s == 6
    assert queue.run_compute(12.0, 10.0) == 22


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d2h": 0.0}, "d2h_bytes_per_s 0.0 is not above 0"),
        ({"h2d": None}, "h2d_bytes_per_s is not known"),
        ({"latency_s": -1.0}, "copy_latency_s -1.0 is not from 0"),
    ],
)
def test_what_no_link_has_is_refused(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_queue(**fields)


sizes = st.integers(0, 1000)
copies = st.lists(st.tuples(st.sampled_from((D2H, H2D)), sizes, st.floats(0, 50)), min_size=1, max_size=12)
