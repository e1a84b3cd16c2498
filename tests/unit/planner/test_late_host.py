"""Ranks with a host that launches late, and which of two plans is better by what they took."""

import math

from support.toy_ranks import make_toy_rank

from fgoffload.planner.host_slowdown import slow_down
from fgoffload.planner.late_host import (
    LATE_HOST_SLOWDOWN,
    HostGuess,
    Tried,
    assume_host,
    assume_other_host,
    describe_trial,
    find_guess,
)
from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.units import GIB


def make_rank(slowdown):
    link = LinkModel(d2h_bytes_per_s=2.0, h2d_bytes_per_s=2.0, duplex_bytes_per_s=1.0, compute_slowdown=slowdown)
    return make_toy_rank(link=link)


def test_copies_slow_compute_more_and_nothing_else_is_different():
    ranks = (make_rank(0.01), make_rank(0.5))
    late = assume_host(ranks, HostGuess.LATE)
    assert [rank.link.compute_slowdown for rank in late] == [LATE_HOST_SLOWDOWN, 0.5]
    assert late[0].link.d2h_bytes_per_s == 2.0
    assert late[0].chunks == ranks[0].chunks
    assert late[1].link == ranks[1].link
    assert late[0].late_group_s == late[1].late_group_s == slow_down(ranks, LATE_HOST_SLOWDOWN)[0].late_group_s > 0
    assert [rank.late_group_s for rank in assume_host(late, HostGuess.IN_TIME)] == [0.0, 0.0]


def test_the_budget_comes_before_the_time():
    slow, fast = Tried(peak_bytes=100, step_s=2.0), Tried(peak_bytes=101, step_s=1.0)
    assert fast.score(101) < slow.score(101)
    assert slow.score(100) < fast.score(100)
    assert slow.score(99) < fast.score(99)  # nearer


def test_what_a_plan_took_is_said_with_what_is_known():
    assert Tried(peak_bytes=2 * GIB, step_s=0.5).describe() == "500.0 ms at 2.00 GiB"
    assert Tried(peak_bytes=0, step_s=0.5).describe() == "500.0 ms"
    assert Tried(peak_bytes=2 * GIB, step_s=math.inf).describe() == "more than 2.00 GiB"


def test_a_plan_for_the_other_host_is_one_for_a_host_in_time_where_this_one_is_late():
    for slowdown, guess in ((0.0, HostGuess.IN_TIME), (0.05, HostGuess.IN_TIME), (0.06, HostGuess.LATE), (0.4, HostGuess.LATE)):
        ranks = (make_rank(0.0), make_rank(slowdown))
        assert find_guess(ranks) is guess
        other = [rank.link.compute_slowdown for rank in assume_other_host(ranks)]
        assert other == ([LATE_HOST_SLOWDOWN] * 2 if guess is HostGuess.IN_TIME else [0.0, 0.01])


def test_a_trial_is_described_with_what_each_plan_took_the_host_for():
    tried = Tried(peak_bytes=0, step_s=0.5), Tried(peak_bytes=0, step_s=0.25)
    words = "a step takes 500.0 ms by the plan for {}, and 250.0 ms by the one for {}"
    in_time, late = (guess.value for guess in HostGuess)
    assert describe_trial(*tried, guess=HostGuess.IN_TIME) == words.format(in_time, late)
    assert describe_trial(*tried, guess=HostGuess.LATE) == words.format(late, in_time)
