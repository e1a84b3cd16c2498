"""Rounds that repeat: what is left out and counted in again is the same as simulating every pass."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rank_models import make_chunk, make_layer, make_link, make_rank, offload, read_passes

from fgoffload import OffloadPlan
from fgoffload.planner.ranks.schedule import Pipeline, count_in_flight, list_passes
from fgoffload.planner.simulation import simulator
from fgoffload.planner.simulation.simulator import Detail, simulate, simulate_rank
from fgoffload.planner.simulation.steady_state import ROUNDS, RoundState, add_rounds, take_out_rounds

NOTHING = OffloadPlan(actions={})


def write(passes):
    return " ".join(map(str, passes))


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
        elif field.name != "timeline":
            assert one == pytest.approx(other)


def test_rounds_are_taken_out_of_one_stage():
    passes = list_passes(Pipeline(microbatches=12), rank=0)
    ((rounds,), left_out) = take_out_rounds([passes], 1)
    # A round is a forward and a backward, and 6 stay.
    assert left_out == 12 - ROUNDS == 6
    assert write(rounds.passes) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"
    assert rounds.places == (4, 6, 8)


def test_rounds_are_taken_out_behind_the_first_forwards_and_before_the_last_backwards():
    pipeline = Pipeline(stages=3, microbatches=20)
    found, left_out = take_out_rounds([list_passes(pipeline, rank=rank) for rank in range(3)], 1)
    # The first stage begins with 2 forwards: 18 rounds follow, the fewest of all stages.
    assert left_out == 18 - ROUNDS == 12
    assert [write(rounds.passes) for rounds in found] == [
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]
    assert [rounds.places for rounds in found] == [(6, 8, 10), (5, 7, 9), (4, 6, 8)]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("left", [0, 5])
def test_what_is_left_of_interleaved_chunks_is_what_fewer_microbatches_would_be(stages, chunks, left):
    size = stages + 1
    many = Pipeline(stages=stages, chunks=chunks, microbatches=20 * size + left, group_size=size)
    found, left_out = take_out_rounds([list_passes(many, rank=rank) for rank in range(stages)], chunks)
    assert left_out >= 8
    few = dataclasses.replace(many, microbatches=many.microbatches - left_out * size)
    assert [rounds.passes for rounds in found] == [list_passes(few, rank=rank) for rank in range(stages)]


@pytest.mark.parametrize(
    "passes",
    [
        "F0 B0 F1 B1 F2 B2 F3 B3",  # as few as would be simulated anyway
        "F0 F1 F2 F3 F4 F5 F6 F7 F8 F9 B0 B1 B2 B3 B4 B5 B6 B7 B8 B9",  # nothing in turn
        " ".join(f"F{n + 1} B{n + 1} F{n} B{n}" for n in range(0, 40, 2)),  # in turn, and not one microbatch after the other
        "",
    ],
)
def test_where_few_rounds_repeat_none_is_taken_out(passes):
    assert take_out_rounds([read_passes(passes)], 1) is None


layers = st.builds(
    make_layer,
    st.fixed_dictionaries({"core_attn": st.sampled_from((0, 50, 120)), "expert_fc1": st.sampled_from((70, 200))}),
    forward_s=st.sampled_from((3.0, 10.0)),
    backward_s=st.sampled_from((5.0, 20.0)),
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(layers, min_size=4, max_size=4),
    st.sampled_from(((1, 1, 40), (2, 1, 40), (3, 1, 45), (2, 2, 60))),
    st.sampled_from((3.0, 10.0, 40.0)),
    st.sampled_from((0, 100, 10**6)),
    st.sampled_from((0, 150, 10**6)),
    st.sampled_from((0.0, 0.25)),
    st.sampled_from((None, 500)),
)
def test_a_step_of_many_microbatches_is_the_same_as_pass_by_pass(own, shape, rate, window, prefetch, slowdown, budget):
    stages, chunks, microbatches = shape
    pipeline = Pipeline(stages=stages, chunks=chunks, microbatches=microbatches)
    ranks = [
        make_rank(
            *(make_chunk(*own[:2], first_number=2 * (chunk * stages + rank)) for chunk in range(chunks)),
            rank=rank,
            pipeline=pipeline,
            link=make_link(d2h=rate, h2d=10.0, duplex=8.0, compute_slowdown=slowdown),
            window_bytes=window,
            prefetch_bytes=prefetch,
            host_budget_bytes=budget,
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
    """Return how many passes each run of the ranks has."""
    counts = []
    run = simulator.InPipeline.run

    def count(self, runs, passes, places=()):
        counts.append(sum(map(len, passes)))
        return run(self, runs, passes, places)

    monkeypatch.setattr(simulator.InPipeline, "run", count)
    simulate(ranks, plan)
    return counts


def make_stage(rank, *, saved=100, forward_s=20.0, **fields):
    layer = make_layer({"expert_fc1": saved}, forward_s=forward_s)
    pipeline = Pipeline(stages=2, microbatches=100)
    return make_rank(make_chunk(layer, first_number=rank), rank=rank, pipeline=pipeline, **fields)


def test_of_a_steady_step_a_few_rounds_are_simulated(monkeypatch):
    ranks = [make_stage(rank) for rank in range(2)]
    # 7 microbatches of 100: the first stage has one forward before its rounds.
    assert count_simulated(monkeypatch, ranks, offload("expert_fc1", (0, 1))) == [2 * 2 * (ROUNDS + 1)]
    assert simulate(ranks, NOTHING).step_s == (100 + 1) * 60


def test_a_queue_that_grows_with_each_round_is_simulated_to_its_end(monkeypatch):
    # A round takes 60 s and its copy 70: the window is full only after some more rounds, and then compute waits.
    ranks = [make_stage(rank, saved=350, link=make_link(d2h=5.0), window_bytes=1000) for rank in range(2)]
    plan = offload("expert_fc1", (0,))
    assert len(count_simulated(monkeypatch, ranks, plan)) == 2
    assert simulate(ranks, plan).ranks[0].waits.window_s > 0


def test_ranks_of_which_one_is_slower_are_simulated_to_the_end_where_others_have_not_waited_yet():
    ranks = [make_stage(0), make_stage(1, forward_s=21.0)]
    for found, expected in zip(
        simulate(ranks, NOTHING).ranks, simulate(ranks, NOTHING, detail=Detail.TIMELINE).ranks, strict=True
    ):
        check_equal(found, expected)


def test_a_timeline_has_every_microbatch():
    result = simulate([make_stage(rank) for rank in range(2)], NOTHING, detail=Detail.TIMELINE)
    labels = {span.label for span in result.ranks[1].timeline.spans}
    assert {f"{kind}{number} layers.1.expert_fc1" for kind in "FB" for number in range(100)} <= labels


def make_state(step_s, *, left_behind=(0.0,)):
    result = simulate_rank(make_stage(0), NOTHING)
    return RoundState(totals=dataclasses.replace(result, step_s=step_s), left_behind=left_behind)


@pytest.mark.parametrize(
    ("states", "step_s"),
    [
        ([[make_state(s) for s in (100, 160, 220)]] * 2, 1000 + 5 * 60),
        # A round that took longer than the one before it; one that left more behind; a rank that is slower than the other.
        ([[make_state(s) for s in (100, 160, 221)]] * 2, None),
        ([[make_state(s, left_behind=(s,)) for s in (100, 160, 220)]] * 2, None),
        ([[make_state(s) for s in (100, 160, 220)], [make_state(s) for s in (100, 161, 222)]], None),
    ],
    ids=["alike", "longer", "more left", "unlike ranks"],
)
def test_rounds_are_counted_in_where_they_are_alike(states, step_s):
    results = [make_state(1000).totals] * 2
    found = add_rounds(results, states, 5)
    assert found is None if step_s is None else [result.step_s for result in found] == [step_s] * 2


def test_microbatches_in_flight_stay_the_same_without_rounds():
    passes = list_passes(Pipeline(stages=4, microbatches=64), rank=1)
    ((rounds,), _) = take_out_rounds([passes], 1)
    assert count_in_flight(rounds.passes) == count_in_flight(passes) == 3
