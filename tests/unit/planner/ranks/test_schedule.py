"""The passes of a pipeline rank: properties that hold for every pipeline, and sequences written down by hand."""

import doctest

import pytest

from fgoffload import ConfigError
from fgoffload.planner.ranks import schedule
from fgoffload.planner.ranks.schedule import (
    Pipeline,
    count_in_flight,
    list_passes,
)


def write(pipeline, rank):
    return " ".join(map(str, list_passes(pipeline, rank=rank)))


# By hand. Interleaved, 2 stages and 2 chunks: rank 0 warms up with 2 (2 - 0 - 1) + (2 - 1) 2 = 4 forwards, rank 1 with 2.


@pytest.mark.parametrize(
    ("pipeline", "rank", "expected"),
    [
        (Pipeline(microbatches=3), 0, "F0 B0 F1 B1 F2 B2"),
        (Pipeline(microbatches=3, has_expert_overlap=True), 0, "F0 F1 B0 F2 B1 B2"),
        (Pipeline(stages=4, microbatches=5), 2, "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"),
        (
            Pipeline(stages=2, chunks=2, microbatches=4),
            0,
            "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        ),
        (
            Pipeline(stages=2, chunks=2, microbatches=4, has_expert_overlap=True),
            1,
            "F0 F1 F0.1 F1.1 B0.1 F2 B1.1 F3 B0 F2.1 B1 F3.1 B2.1 B3.1 B2 B3",
        ),
    ],
)
def test_the_passes_are_those_written_by_hand(pipeline, rank, expected):
    assert write(pipeline, rank) == expected


def test_the_chunks_of_a_rank_have_their_most_in_flight_at_different_times():
    passes = list_passes(Pipeline(stages=2, chunks=2, microbatches=4), rank=0)
    assert (count_in_flight(passes, chunk=0), count_in_flight(passes, chunk=1), count_in_flight(passes)) == (4, 2, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"microbatches": 0}, r"microbatches 0 is below 1. Give 1 or more"),
        ({"microbatches": 4, "chunks": 2}, r"chunks 2 with stages 1: .* Give 2 stages, or 1 chunk"),
        ({"microbatches": 4, "group_size": 4}, r"group_size 4 with chunks 1 has no effect"),
        ({"microbatches": 4, "stages": 2, "has_expert_overlap": True}, r"has_expert_overlap with stages 2 and chunks 1"),
        ({"microbatches": 3, "stages": 4, "chunks": 2}, r"microbatches 3 is below stages 4, .* Give 4 microbatches or more"),
        (
            {"microbatches": 6, "stages": 4, "chunks": 2},
            r"a last group of 2 after groups of 4, below stages 4. Give a multiple of 4",
        ),
    ],
)
def test_a_pipeline_that_cannot_run_is_refused_with_the_fix(fields, message):
    with pytest.raises(ConfigError, match=message):
        Pipeline(**fields)


def test_the_example_of_the_module_runs():
    results = doctest.testmod(schedule)
    assert (results.failed, results.attempted) == (0, 3)
