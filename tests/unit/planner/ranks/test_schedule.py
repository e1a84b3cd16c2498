"""Tests shortened and invalid pipelines. `test_schedule_megatron` compares valid ones with Megatron."""

import itertools

import pytest

from fgoffload import ConfigError
from fgoffload.planner.ranks.schedule import PassKind, Pipeline, list_passes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"microbatches": 0}, r"microbatches 0 is below 1. Use 1 or more"),
        ({"microbatches": 4, "chunks": 2}, r"chunks 2 with stages 1: .* Use 2 stages, or 1 chunk"),
        ({"microbatches": 4, "group_size": 4}, r"group_size 4 with chunks 1 has no effect"),
        ({"microbatches": 4, "stages": 2, "has_expert_overlap": True}, r"overlap is not supported with stages 2 and chunks 1"),
        ({"microbatches": 3, "stages": 4, "chunks": 2}, r"microbatches 3 is below stages 4, .* Use 4 microbatches or more"),
        ({"microbatches": 6, "stages": 4, "chunks": 2}, r"of 4 leave a last group of 2, which is below stages 4. Use a"),
    ],
)
def test_an_invalid_pipeline_is_rejected_with_a_fix(fields, message):
    with pytest.raises(ConfigError, match=message):
        Pipeline(**fields)


@pytest.mark.parametrize("extra", [{"microbatches": 45, "group_size": 8, "has_expert_overlap": True}, {"microbatches": 64}])
def test_a_shortened_step_has_the_same_peak(extra):
    pipeline = Pipeline(stages=4, chunks=3, **extra)
    for rank in range(pipeline.stages):
        steps = [list_passes(one, rank=rank) for one in (pipeline, pipeline.shorten())]
        whole, short = ([(-1) ** (one.kind is PassKind.BACKWARD) * (3, 3, 7)[one.chunk] for one in step] for step in steps)
        assert max(itertools.accumulate(whole)) == max(itertools.accumulate(short))
        assert len(short) < len(whole)
