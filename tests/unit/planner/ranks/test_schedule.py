"""The passes of a pipeline rank: properties that hold for every pipeline, and sequences written down by hand."""

import pytest

from fgoffload import ConfigError
from fgoffload.planner.ranks.schedule import (
    Pipeline,
    count_in_flight,
    list_passes,
)

# By hand. Interleaved, 2 stages and 2 chunks: rank 0 warms up with 2 (2 - 0 - 1) + (2 - 1) 2 = 4 forwards, rank 1 with 2.


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
        ({"microbatches": 6, "stages": 4, "chunks": 2}, r"a last group of 2 after groups of 4, below stages 4. Give a"),
    ],
)
def test_a_pipeline_that_cannot_run_is_refused_with_the_fix(fields, message):
    with pytest.raises(ConfigError, match=message):
        Pipeline(**fields)
