"""How far ahead of compute a rank's host runs: by what lets it wait."""

import pytest
from support.rank_models import make_chunk, make_layer

from fgoffload.planner.ranks.layer_model import HostWait
from fgoffload.planner.ranks.rank_model import HostPace, find_host_pace
from fgoffload.planner.ranks.schedule import Pipeline

DENSE = make_layer({"core_attn": 10, "mlp_fc1": 10})
ONE_STAGE = Pipeline(microbatches=8)
ONE_FORWARD_ONE_BACKWARD = Pipeline(stages=4, microbatches=8)
INTERLEAVED = Pipeline(stages=4, chunks=2, microbatches=8)


@pytest.mark.parametrize(
    ("pipeline", "pace"),
    [
        (ONE_STAGE, HostPace.STEP_AHEAD),
        (ONE_FORWARD_ONE_BACKWARD, HostPace.PASS_AHEAD),
        (INTERLEAVED, HostPace.STEP_AHEAD),
    ],
)
def test_where_no_layer_lets_the_host_wait_it_waits_for_exchanges_alone(pipeline, pace):
    assert find_host_pace([make_chunk(DENSE, DENSE)] * pipeline.chunks, pipeline) is pace


@pytest.mark.parametrize("pipeline", [ONE_STAGE, ONE_FORWARD_ONE_BACKWARD, INTERLEAVED])
@pytest.mark.parametrize("wait", HostWait)
def test_one_layer_that_lets_the_host_wait_keeps_it_a_layer_ahead(pipeline, wait):
    waiting = make_layer({"core_attn": 10, "dispatch": 0}, host_waits={"dispatch": wait})
    assert find_host_pace([make_chunk(DENSE), make_chunk(DENSE, waiting)], pipeline) is HostPace.LAYER_AHEAD
