"""The passes of a pipeline rank: properties that hold for every pipeline, and sequences written down by hand."""

import dataclasses
import doctest
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fgoffload import ConfigError
from fgoffload.planner.ranks import schedule
from fgoffload.planner.ranks.schedule import (
    Pass,
    PassKind,
    Pipeline,
    count_in_flight,
    count_warmup_passes,
    find_turning_chunk,
    list_passes,
)


@st.composite
def ranks(draw):
    """Return a pipeline of any kind and one of its ranks."""
    stages = draw(st.integers(1, 16))
    if stages == 1 or draw(st.booleans()):
        overlaps = stages == 1 and draw(st.booleans())
        pipeline = Pipeline(stages=stages, microbatches=draw(st.integers(1, 40)), has_expert_overlap=overlaps)
    else:
        size = draw(st.integers(stages, stages + 4))
        left = draw(st.sampled_from((0, *range(stages, size))))
        pipeline = Pipeline(
            stages=stages,
            microbatches=draw(st.integers(1, 4)) * size + left,
            chunks=draw(st.integers(2, 4)),
            group_size=size,
            has_expert_overlap=draw(st.booleans()),
        )
    return pipeline, draw(st.integers(0, stages - 1))


def write(pipeline, rank):
    return " ".join(map(str, list_passes(pipeline, rank=rank)))


def list_in_flight(pipeline, rank):
    """Return the microbatches in flight of each chunk, at each moment, each once."""
    current, found = [0] * pipeline.chunks, set()
    for one in list_passes(pipeline, rank=rank):
        current[one.chunk] += 1 if one.kind is PassKind.FORWARD else -1
        found.add(tuple(current))
    return found


@given(ranks())
def test_in_a_pipeline_that_is_full_more_microbatches_leave_no_more_in_flight_of_any_chunk(case):
    pipeline, rank = case
    longer = dataclasses.replace(pipeline, microbatches=pipeline.microbatches + 8 * pipeline.microbatches_of_group)
    now, then = list_in_flight(pipeline, rank), list_in_flight(longer, rank)
    has_as_many = all(any(all(map(int.__le__, later, own)) for own in now) for later in then)
    assert has_as_many or not pipeline.is_full


@given(ranks())
def test_a_pipeline_that_is_not_full_has_fewer_in_flight_than_a_longer_one_where_groups_are_as_large_as_it_is(case):
    pipeline, _ = case
    longer = dataclasses.replace(pipeline, microbatches=pipeline.microbatches + 8 * pipeline.microbatches_of_group)
    counts = [[count_in_flight(list_passes(one, rank=rank)) for rank in range(pipeline.stages)] for one in (pipeline, longer)]
    if pipeline.chunks == 1 or pipeline.microbatches_of_group == pipeline.stages:
        assert pipeline.is_full == (counts[0] == counts[1])
    elif pipeline.is_full:
        assert counts[0] == counts[1]


@given(ranks())
def test_each_forward_and_each_backward_runs_exactly_once(case):
    pipeline, rank = case
    expected = {
        Pass(kind=kind, chunk=chunk, microbatch=microbatch)
        for kind in PassKind
        for chunk in range(pipeline.chunks)
        for microbatch in range(pipeline.microbatches)
    }
    passes = list_passes(pipeline, rank=rank)
    assert len(passes) == len(expected)
    assert set(passes) == expected


@given(ranks())
def test_each_forward_is_before_its_backward(case):
    pipeline, rank = case
    places = {one: place for place, one in enumerate(list_passes(pipeline, rank=rank))}
    for one, place in places.items():
        if one.kind is PassKind.BACKWARD:
            assert places[Pass(kind=PassKind.FORWARD, chunk=one.chunk, microbatch=one.microbatch)] < place


@given(ranks())
def test_a_microbatch_goes_forward_through_the_chunks_and_back_the_other_way(case):
    pipeline, rank = case
    passes = list_passes(pipeline, rank=rank)
    for microbatch in range(pipeline.microbatches):
        chunks = list(range(pipeline.chunks))
        for kind, expected in ((PassKind.FORWARD, chunks), (PassKind.BACKWARD, chunks[::-1])):
            assert [one.chunk for one in passes if one.kind is kind and one.microbatch == microbatch] == expected


@given(ranks())
def test_the_microbatches_of_a_chunk_go_in_order_each_way(case):
    pipeline, rank = case
    passes = list_passes(pipeline, rank=rank)
    for kind in PassKind:
        for chunk in range(pipeline.chunks):
            order = [one.microbatch for one in passes if one.kind is kind and one.chunk == chunk]
            assert order == list(range(pipeline.microbatches))


@given(ranks())
def test_after_the_warm_up_forwards_and_backwards_take_turns_until_forwards_end(case):
    pipeline, rank = case
    kinds = [one.kind for one in list_passes(pipeline, rank=rank)]
    warmup, total = count_warmup_passes(pipeline, rank=rank), pipeline.microbatches * pipeline.chunks
    turns = [PassKind.FORWARD, PassKind.BACKWARD] * (total - warmup)
    assert kinds == [PassKind.FORWARD] * warmup + turns + [PassKind.BACKWARD] * warmup


@given(ranks())
def test_in_flight_is_the_warm_up_and_one_more_as_long_as_there_are_microbatches(case):
    pipeline, rank = case
    warmup, total = count_warmup_passes(pipeline, rank=rank), pipeline.microbatches * pipeline.chunks
    assert count_in_flight(list_passes(pipeline, rank=rank)) == min(warmup + 1, total)


@given(ranks())
def test_in_flight_of_the_chunks_is_at_least_that_of_all_together_and_never_above_the_microbatches(case):
    pipeline, rank = case
    passes = list_passes(pipeline, rank=rank)
    chunks = [count_in_flight(passes, chunk=chunk) for chunk in range(pipeline.chunks)]
    assert max(chunks) <= pipeline.microbatches
    assert max(chunks) <= count_in_flight(passes) <= sum(chunks)


@given(ranks())
def test_a_later_rank_never_has_more_in_flight(case):
    pipeline, rank = case
    counts = [count_in_flight(list_passes(pipeline, rank=one)) for one in range(rank + 1)]
    assert counts == sorted(counts, reverse=True)


@given(stages=st.integers(1, 64), microbatches=st.integers(1, 64), data=st.data())
def test_without_interleaving_a_rank_warms_up_with_one_forward_for_each_stage_behind_it(stages, microbatches, data):
    rank = data.draw(st.integers(0, stages - 1))
    pipeline = Pipeline(stages=stages, microbatches=microbatches)
    assert count_warmup_passes(pipeline, rank=rank) == min(stages - rank - 1, microbatches)
    assert count_in_flight(list_passes(pipeline, rank=rank)) == min(stages - rank, microbatches)


# By hand. Interleaved, 2 stages and 2 chunks: rank 0 warms up with 2 (2 - 0 - 1) + (2 - 1) 2 = 4 forwards, rank 1 with 2.


@pytest.mark.parametrize(
    ("pipeline", "rank", "expected"),
    [
        (Pipeline(microbatches=3), 0, "F0 B0 F1 B1 F2 B2"),
        (Pipeline(microbatches=3, has_expert_overlap=True), 0, "F0 F1 B0 F2 B1 B2"),
        (Pipeline(microbatches=1, has_expert_overlap=True), 0, "F0 B0"),
        (Pipeline(stages=4, microbatches=5), 0, "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"),
        (Pipeline(stages=4, microbatches=5), 2, "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"),
        (Pipeline(stages=4, microbatches=5), 3, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"),
        (Pipeline(stages=4, microbatches=2), 0, "F0 F1 B0 B1"),
        (Pipeline(stages=4, microbatches=2), 2, "F0 F1 B0 B1"),
        (Pipeline(stages=4, microbatches=2), 3, "F0 B0 F1 B1"),
        (
            Pipeline(stages=2, chunks=2, microbatches=4),
            0,
            "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        ),
        (
            Pipeline(stages=2, chunks=2, microbatches=4),
            1,
            "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
        ),
        (
            Pipeline(stages=2, chunks=2, microbatches=4, has_expert_overlap=True),
            1,
            "F0 F1 F0.1 F1.1 B0.1 F2 B1.1 F3 B0 F2.1 B1 F3.1 B2.1 B3.1 B2 B3",
        ),
        (Pipeline(stages=2, chunks=2, microbatches=2), 0, "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"),
        # Groups of 3 and a last one of 2, as in the comment on the table in Megatron's schedules.py; rank 1 warms up with 3.
        (
            Pipeline(stages=2, chunks=2, microbatches=5, group_size=3),
            1,
            "F0 F1 F2 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3 B0 F4 B1 F3.1 B2 F4.1 B3.1 B4.1 B3 B4",
        ),
    ],
)
def test_the_passes_are_those_written_by_hand(pipeline, rank, expected):
    assert write(pipeline, rank) == expected


def test_the_chunks_of_a_rank_have_their_most_in_flight_at_different_times():
    passes = list_passes(Pipeline(stages=2, chunks=2, microbatches=4), rank=0)
    assert (count_in_flight(passes, chunk=0), count_in_flight(passes, chunk=1), count_in_flight(passes)) == (4, 2, 5)


@given(ranks())
def test_in_the_chunk_that_turns_each_backward_comes_right_after_its_forward(case):
    pipeline, rank = case
    passes = list_passes(pipeline, rank=rank)
    forwards = [one for one in itertools.pairwise(passes) if one[0].kind is PassKind.FORWARD]
    turning = find_turning_chunk(pipeline, rank=rank)
    assert (turning is None) == (rank < pipeline.stages - 1 or pipeline.has_expert_overlap)
    # Behind a last group that is smaller than the others, forwards and backwards of interleaved chunks shift.
    is_even = pipeline.chunks == 1 or pipeline.microbatches % pipeline.microbatches_of_group == 0
    for forward, following in forwards:
        if is_even and forward.chunk == turning:
            assert following == Pass(kind=PassKind.BACKWARD, chunk=turning, microbatch=forward.microbatch)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"microbatches": 0}, r"microbatches 0 is below 1. Give 1 or more"),
        ({"microbatches": True}, r"microbatches True is no whole number"),
        ({"microbatches": 4, "stages": 2.0}, r"stages 2.0 is no whole number"),
        ({"microbatches": 4, "chunks": -1}, r"chunks -1 is below 1"),
        ({"microbatches": 4, "chunks": 2}, r"chunks 2 with stages 1: .* Give 2 stages, or 1 chunk"),
        ({"microbatches": 4, "group_size": 4}, r"group_size 4 with chunks 1 has no effect"),
        ({"microbatches": 4, "stages": 2, "has_expert_overlap": True}, r"has_expert_overlap with stages 2 and chunks 1"),
        ({"microbatches": 3, "stages": 4, "chunks": 2}, r"microbatches 3 is below stages 4, .* Give 4 microbatches or more"),
        (
            {"microbatches": 8, "stages": 4, "chunks": 2, "group_size": 3},
            r"group_size 3 is not from stages 4 to microbatches 8",
        ),
        (
            {"microbatches": 8, "stages": 4, "chunks": 2, "group_size": 9},
            r"group_size 9 is not from stages 4 to microbatches 8",
        ),
        ({"microbatches": 8, "stages": 4, "chunks": 2, "group_size": "4"}, r"group_size '4' is no whole number"),
        (
            {"microbatches": 6, "stages": 4, "chunks": 2},
            r"a last group of 2 after groups of 4, below stages 4. Give a multiple of 4",
        ),
    ],
)
def test_a_pipeline_that_cannot_run_is_refused_with_the_fix(fields, message):
    with pytest.raises(ConfigError, match=message):
        Pipeline(**fields)


@pytest.mark.parametrize("rank", [-1, 4, 0.0, True])
@pytest.mark.parametrize("function", [list_passes, count_warmup_passes, find_turning_chunk])
def test_a_rank_that_the_pipeline_has_not_is_refused(function, rank):
    with pytest.raises(ConfigError, match=rf"rank {rank} is not one of the 4 stages. Give a whole number from 0 to 3"):
        function(Pipeline(stages=4, microbatches=4), rank=rank)


def test_the_example_of_the_module_runs():
    results = doctest.testmod(schedule)
    assert (results.failed, results.attempted) == (0, 3)
