"""Rounds that repeat: what is left out and counted in again is the same as simulating every pass."""

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.rank_models import make_chunk, make_layer, make_link, make_rank, offload, read_passes

from fgoffload import OffloadPlan
from fgoffload.planner.ranks.layer_model import Segment
from fgoffload.planner.ranks.rank_model import HostPace
from fgoffload.planner.ranks.schedule import Pipeline, list_passes
from fgoffload.planner.simulation.rank_run import RankRun
from fgoffload.planner.simulation.repeated_passes import RepeatingRun
from fgoffload.planner.simulation.simulator import Detail, simulate, simulate_rank
from fgoffload.planner.simulation.steady_state import add_rounds, find_rounds

NOTHING = OffloadPlan(actions={})


def check_equal(found, expected):
    """Check that two results have the same numbers, but for rounding, and that the second was simulated pass by pass."""
    assert expected.timeline is not None
    for field in dataclasses.fields(found):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "tags":
            assert [dataclasses.astuple(tag) for tag in one] == [pytest.approx(dataclasses.astuple(tag)) for tag in other]
        elif field.name == "waits":
            assert dataclasses.astuple(one) == pytest.approx(dataclasses.astuple(other))
        elif field.name == "peak_at":
            assert one == other
        elif field.name not in ("timeline", "peaks"):
            assert one == pytest.approx(other)


def test_a_round_of_one_stage_is_a_forward_and_a_backward():
    rounds = find_rounds([list_passes(Pipeline(microbatches=12), rank=0)], 1)
    assert (rounds.starts, rounds.passes, rounds.microbatches, rounds.count) == ((0,), 2, 1, 12)
    # Compared are the 3rd and the 4th, and where they differ later ones.
    assert list(rounds.list_checks()) == [4, 5, 6, 7, 8, 10]
    assert rounds.list_marks()[0][:6] == [8, 6, 4, 10, 8, 6]


def test_rounds_begin_behind_the_first_forwards():
    pipeline = Pipeline(stages=3, microbatches=20)
    rounds = find_rounds([list_passes(pipeline, rank=rank) for rank in range(3)], 1)
    # The first stage begins with 2 forwards: 18 rounds follow, the fewest of all stages.
    assert (rounds.starts, rounds.count) == ((2, 1, 0), 18)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("left", [0, 5])
def test_a_round_of_interleaved_chunks_is_a_group_of_microbatches_through_all_of_them(stages, chunks, left):
    size = stages + 1
    many = Pipeline(stages=stages, chunks=chunks, microbatches=20 * size + left, group_size=size)
    passes = [list_passes(many, rank=rank) for rank in range(stages)]
    rounds = find_rounds(passes, chunks)
    assert (rounds.passes, rounds.microbatches) == (2 * chunks * size, size)
    for own, start in zip(passes, rounds.starts, strict=True):
        later = own[start + rounds.passes :]
        for one, other in zip(own[start : start + (rounds.count - 1) * rounds.passes], later, strict=False):
            assert other == dataclasses.replace(one, microbatch=one.microbatch + size)


@pytest.mark.parametrize(
    "passes",
    [
        "F0 B0 F1 B1 F2 B2 F3 B3",  # as few as would be simulated anyway
        "F0 F1 F2 F3 F4 F5 F6 F7 F8 F9 B0 B1 B2 B3 B4 B5 B6 B7 B8 B9",  # nothing in turn
        " ".join(f"F{n + 1} B{n + 1} F{n} B{n}" for n in range(0, 40, 2)),  # in turn, and not one microbatch after the other
        "",
    ],
)
def test_where_few_rounds_repeat_there_are_none_to_leave_out(passes):
    assert find_rounds([read_passes(passes)], 1) is None


SLOW_FIRST, FAST = (make_layer({"expert_fc1": 70}, forward_s=forward_s, backward_s=5.0) for forward_s in (10.0, 3.0))
SLOW_LAST = make_layer({"core_attn": 0, "expert_fc1": 70}, forward_s=3.0, backward_s=20.0)
SMALL, LARGE = (make_layer({"core_attn": 0, "expert_fc1": size}, forward_s=3.0, backward_s=5.0) for size in (70, 200))
LARGE_SECOND = [SMALL, LARGE, SMALL, SMALL]

layers = st.builds(
    make_layer,
    st.fixed_dictionaries({"core_attn": st.sampled_from((0, 50, 120)), "expert_fc1": st.sampled_from((70, 200))}),
    forward_s=st.sampled_from((3.0, 10.0)),
    backward_s=st.sampled_from((5.0, 20.0)),
)


@settings(deadline=None, max_examples=90)
@given(
    st.lists(layers, min_size=4, max_size=4),
    st.sampled_from(((1, 1, 40), (2, 1, 40), (3, 1, 45), (2, 2, 60))),
    st.sampled_from((3.0, 10.0, 40.0)),
    st.sampled_from((0, 100, 10**6)),
    st.sampled_from((0, 150, 10**6)),
    st.sampled_from((0.0, 0.25)),
    st.sampled_from((None, 500)),
    st.lists(st.sampled_from((0.0, 0.01, 0.3, 1.0)), min_size=3, max_size=3),
    st.sampled_from(HostPace),
    st.sampled_from((0.0, 0.7)),
)
# A copy ends just when the engine looks: in round 34 the rounding of all times before it once made that a bit later.
@example([SLOW_FIRST, *[FAST] * 3], (3, 1, 45), 40.0, 100, 150, 0.25, None, [1.0, 1.0, 0.0], HostPace.BESIDE, 0.0)
# A copy that is through counts in its own round, whoever looks next.
@example([SMALL, LARGE, SMALL, SMALL], (2, 2, 60), 10.0, 100, 0, 0.25, 500, [0.0] * 3, HostPace.BESIDE, 0.0)
# What waits for the link grows by a bit in each round, without end.
@example([SLOW_LAST, LARGE, SLOW_LAST, SLOW_LAST], (1, 1, 40), 3.0, 10**6, 0, 0.0, None, [0.0] * 3, HostPace.BESIDE, 0.0)
# The peak is behind the rounds that were left out, and has its number of the step.
@example(LARGE_SECOND, (2, 2, 60), 3.0, 100, 150, 0.0, None, [0.0, 0.0, 0.0], HostPace.STEP_AHEAD, 0.0)
def test_a_step_of_many_microbatches_is_the_same_as_pass_by_pass(
    own, shape, rate, window, prefetch, slowdown, budget, more_s, pace, late_group_s
):
    stages, chunks, microbatches = shape
    more = [Segment(name="more", forward_s=one_s, backward_s=0.0) for one_s in more_s]
    pipeline = Pipeline(stages=stages, chunks=chunks, microbatches=microbatches)
    ranks = [
        make_rank(
            *(make_chunk(*own[:2], first_number=2 * (chunk * stages + rank), first=(more[rank],)) for chunk in range(chunks)),
            rank=rank,
            pipeline=pipeline,
            link=make_link(d2h=rate, h2d=10.0, duplex=8.0, compute_slowdown=slowdown),
            window_bytes=window,
            prefetch_bytes=prefetch,
            host_budget_bytes=budget,
            host_pace=pace,
            late_group_s=late_group_s,
        )
        for rank in range(stages)
    ]
    plan = OffloadPlan(
        actions=offload("expert_fc1", range(0, 2 * stages)).actions
        | (offload("expert_fc1", range(2 * stages, 4 * stages, 2), chunk=1).actions if chunks > 1 else {})
    )
    for found, expected in zip(simulate(ranks, plan).ranks, simulate(ranks, plan, detail=Detail.TIMELINE).ranks, strict=True):
        check_equal(found, expected)
    check_equal(simulate_rank(ranks[0], plan), simulate_rank(ranks[0], plan, detail=Detail.TIMELINE))


def count_simulated(monkeypatch, ranks, plan):
    """Return how many passes are simulated, those that are counted with them."""
    passes = set()

    def count(run_pass):
        def counted(self, one, *, ready_s):
            passes.add((self, one))
            return run_pass(self, one, ready_s=ready_s)

        return counted

    with monkeypatch.context() as patches:
        for owner in (RankRun, RepeatingRun):
            patches.setattr(owner, "run_pass", count(owner.run_pass))
        simulate(ranks, plan)
    return len(passes)


def make_stage(rank, *, saved=100, forward_s=20.0, **fields):
    layer = make_layer({"expert_fc1": saved}, forward_s=forward_s)
    pipeline = Pipeline(stages=2, microbatches=100)
    return make_rank(make_chunk(layer, first_number=rank), rank=rank, pipeline=pipeline, **fields)


def check_pass_by_pass(ranks, plan):
    """Check that a step is the same where every pass is simulated."""
    found, expected = simulate(ranks, plan), simulate(ranks, plan, detail=Detail.TIMELINE)
    for one, other in zip(found.ranks, expected.ranks, strict=True):
        check_equal(one, other)


def test_of_a_steady_step_a_few_rounds_are_simulated(monkeypatch):
    ranks = [make_stage(rank) for rank in range(2)]
    # 6 microbatches of 100, at most: the first stage has one forward before its rounds, and the second may run a round ahead.
    assert count_simulated(monkeypatch, ranks, offload("expert_fc1", (0, 1))) <= 2 * 2 * 6
    assert simulate(ranks, NOTHING).step_s == (100 + 1) * 60


def test_a_queue_that_grows_with_each_round_is_simulated_until_it_is_full(monkeypatch):
    # A round takes 60 s and its copy 70: the window is full after seven rounds, and then compute waits in each.
    ranks = [make_stage(rank, saved=350, link=make_link(d2h=5.0), window_bytes=1000) for rank in range(2)]
    plan = offload("expert_fc1", (0,))
    assert 2 * 2 * 8 < count_simulated(monkeypatch, ranks, plan) < 2 * 2 * 12
    assert simulate(ranks, plan).ranks[0].waits.window_s > 0
    check_pass_by_pass(ranks, plan)


@pytest.mark.parametrize(("slower_s", "most"), [(5.0, 10), (1.0, 12), (0.01, 12), (-0.01, 12), (-1.0, 12), (-5.0, 10)])
@pytest.mark.parametrize("stages", [2, 4])
def test_ranks_that_are_not_equally_fast_are_simulated_until_they_wait_alike(monkeypatch, slower_s, most, stages):
    pipeline = Pipeline(stages=stages, microbatches=200)
    for slow in range(stages):
        ranks = [
            make_rank(
                make_chunk(make_layer({"a": 100}, forward_s=20.0 + slower_s * (rank == slow)), first_number=rank),
                rank=rank,
                pipeline=pipeline,
            )
            for rank in range(stages)
        ]
        # `most` rounds on each of the ranks, and the first and last passes.
        assert count_simulated(monkeypatch, ranks, NOTHING) <= 2 * stages * (most + 2 * stages)
        check_pass_by_pass(ranks, NOTHING)


def test_rounds_are_left_out_only_until_a_slower_rank_has_to_be_waited_for(monkeypatch):
    # The first rank may be two microbatches ahead of the last: it is for as long as what it gains in a round fits into them.
    pipeline = Pipeline(stages=3, microbatches=400)
    ranks = [
        make_rank(
            make_chunk(make_layer({"a": 100}, forward_s=forward_s), first_number=rank),
            rank=rank,
            pipeline=pipeline,
        )
        for rank, forward_s in enumerate((20.0, 20.1, 20.3))
    ]
    assert count_simulated(monkeypatch, ranks, NOTHING) < 3 * 2 * 40
    check_pass_by_pass(ranks, NOTHING)
    assert simulate(ranks, NOTHING).ranks[0].waits.neighbours_s > 0


def test_a_timeline_has_every_microbatch():
    result = simulate([make_stage(rank) for rank in range(2)], NOTHING, detail=Detail.TIMELINE)
    labels = {span.label for span in result.ranks[1].timeline.spans}
    assert {f"{kind}{number} layers.1.expert_fc1" for kind in "FB" for number in range(100)} <= labels


def test_rounds_are_counted_in():
    result = simulate_rank(make_stage(0), NOTHING)
    found = add_rounds(result, {"step_s": 60.0, "waits.reload_s": 2.0}, 5)
    assert (found.step_s, found.waits.reload_s, found.compute_s) == (result.step_s + 300, 10, result.compute_s)


@pytest.mark.parametrize(("stages", "budget_bytes"), [(4, 100), (8, 300), (16, 500)])
def test_what_the_host_budget_takes_of_some_microbatches_comes_around_again(stages, budget_bytes):
    # Of the microbatches in flight only as many leave as the budget has room for, so that rounds differ in turns.
    layer = make_layer({"expert_fc1": 100}, forward_s=10.0, backward_s=20.0)
    passes = list_passes(Pipeline(stages=stages, microbatches=100), rank=0)
    rank = make_rank(make_chunk(layer), passes=passes, link=make_link(d2h=40.0, h2d=40.0), host_budget_bytes=budget_bytes)
    plan = offload("expert_fc1", (0,))
    check_equal(simulate_rank(rank, plan), simulate_rank(rank, plan, detail=Detail.TIMELINE))


def test_rounds_of_ranks_that_send_over_a_slow_network_repeat_only_after_a_while():
    layer = make_layer({"expert_fc1": 0}, forward_s=6.0, backward_s=12.0)
    pipeline = Pipeline(stages=3, microbatches=120)
    ranks = [make_rank(make_chunk(layer), rank=rank, passes=list_passes(pipeline, rank=rank)) for rank in range(3)]
    found, expected = (simulate(ranks, NOTHING, p2p_s=2.0, detail=detail) for detail in (Detail.TOTALS, Detail.TIMELINE))
    assert found.step_s == pytest.approx(expected.step_s)
