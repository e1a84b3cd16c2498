"""Tests all ranks of a profile: the simulated baseline of a pipeline takes as long as the measured step."""

import dataclasses

import pytest

from fgoffload import ConfigError, OffloadPlan
from fgoffload.planner.profiled_ranks import make_rank_models
from fgoffload.planner.ranks.layer_model import LayerModel, Segment
from fgoffload.planner.ranks.rank_model import ChunkModel, NumberedLayer
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.timing.link_profile import CopyRate, LinkProfile
from fgoffload.planner.timing.profile import Profile, RankProfile

BASELINE = OffloadPlan(actions={})
RATE = CopyRate(size_bytes=1024, d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9, duplex_bytes_per_s=1e9)
# Two stages, each 1 s forward and 2 s backward: 3 s for each of 4 microbatches, and 3 s of pipeline bubble.
STEP_S = 4 * 3 + 3
END_S = 0.5


def make_profile(*, stages=2, plain_step_s=None):
    pipeline = Pipeline(stages=stages, microbatches=4)
    ranks = []
    for rank in range(stages):
        layer = LayerModel(kind="dense", segments=(Segment(name="all", forward_s=1.0, backward_s=2.0),), tensors=())
        chunk = ChunkModel(layers=(NumberedLayer(number=rank, model=layer),))
        ranks.append(
            RankProfile(rank=rank, pipeline=pipeline, chunks=(chunk,), static_bytes=100, step_s=99.0, step_end_s=END_S)
        )
    link = LinkProfile(copies=(RATE,), compute_slowdown=0.0)
    return Profile(device="a device", versions={}, date="2026-11-24", link=link, ranks=tuple(ranks), plain_step_s=plain_step_s)


def simulate_step_s(profile, **options):
    return simulate(make_rank_models(profile, **options), BASELINE).step_s


def test_the_baseline_of_a_pipeline_takes_the_measured_plain_step():
    assert simulate_step_s(make_profile()) == STEP_S + END_S
    assert simulate_step_s(make_profile(plain_step_s=20.0)) == 20.0


def test_a_link_only_profile_is_rejected():
    with pytest.raises(ConfigError, match="rank 0 is not in the profile, which has only the link"):
        make_rank_models(dataclasses.replace(make_profile(), ranks=()))
