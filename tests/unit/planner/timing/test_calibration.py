"""What the plain step says of a profile: what a step that keeps all is simulated to take, and which times give way for it."""

import pytest

from fgoffload import Action, ConfigError, OffloadPlan, Site
from fgoffload.planner.ranks.layer_model import HostWait, LayerModel, SavedTensor, Segment, UnitModel
from fgoffload.planner.ranks.rank_model import ChunkModel, NumberedLayer
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.timing.link_profile import CopyRate, LinkProfile
from fgoffload.planner.timing.profile import Profile, RankProfile, make_rank_model

NOTHING = OffloadPlan(actions={})
FULL = OffloadPlan(actions={Site(chunk=0, layer=number, tag="layer"): Action.RECOMPUTE for number in (0, 1)})


def make_layer(kind, *forwards, backward_s=2.0, host_wait=HostWait.KERNEL, extra_s=0.0):
    """Return a layer with a stretch for each of `forwards`, which are seconds; the host waits before the last of them."""
    segments = tuple(
        Segment(
            name=f"stretch {place}",
            forward_s=seconds,
            backward_s=backward_s,
            host_wait=host_wait if place == len(forwards) - 1 else None,
        )
        for place, seconds in enumerate(forwards)
    )
    names = tuple(segment.name for segment in segments)
    unit = UnitModel(name="layer", segments=names, drops=("output",), before=names[-1], extra_s=extra_s)
    output = SavedTensor(name="output", tags=("core_attn",), size_bytes=10)
    return LayerModel(kind=kind, segments=segments, tensors=(output,), units=(unit,))


def make_profile(*layers, plain_step_s=None, microbatches=4, step_end_s=0.5):
    numbered = tuple(NumberedLayer(number=number, model=layer) for number, layer in enumerate(layers))
    chunk = ChunkModel(
        layers=numbered,
        first=(Segment(name="first", forward_s=0.5, backward_s=0.25),),
        last=(Segment(name="last", forward_s=1.0, backward_s=1.0),),
    )
    copies = (CopyRate(size_bytes=1024, d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9, duplex_bytes_per_s=1e9),)
    return Profile(
        device="a device",
        versions={},
        date="2026-11-22",
        link=LinkProfile(copies=copies, compute_slowdown=0.0),
        ranks=(
            RankProfile(
                rank=0,
                pipeline=Pipeline(microbatches=microbatches),
                chunks=(chunk,),
                static_bytes=100,
                step_s=99.0,
                step_end_s=step_end_s,
            ),
        ),
        plain_step_s=plain_step_s,
    )


# A microbatch of two such layers, of 4 s forward and 4 s backward, and of 2.75 s before and behind them: 18.75 s.
LAYERS = (make_layer("moe (layer 0)", 1.0, 3.0), make_layer("moe (layer 1)", 1.0, 3.0))
SIMULATED_S = 4 * 18.75 + 0.5


def run(plan=NOTHING, *layers, **fields):
    return simulate([make_rank_model(make_profile(*(layers or LAYERS), **fields), rank=0)], plan).step_s


@pytest.mark.parametrize("plain_step_s", [SIMULATED_S, 100.0, 60.0])
def test_a_step_that_keeps_all_takes_what_the_plain_step_took(plain_step_s):
    assert run(plain_step_s=plain_step_s) == pytest.approx(plain_step_s)


@pytest.mark.parametrize("plain_step_s", [None, 100.0, 60.0])
def test_a_recompute_takes_the_forward_that_was_measured(plain_step_s):
    added_s = run(FULL, plain_step_s=plain_step_s) - run(plain_step_s=plain_step_s)
    assert added_s == pytest.approx(4 * 2 * 4.0)


def test_one_layer_that_lets_the_host_wait_makes_what_is_missing_the_hosts():
    layers = [make_layer("a", 1.0, 3.0, host_wait=None), make_layer("b", 1.0, 3.0)]
    found = make_rank_model(make_profile(*layers, plain_step_s=SIMULATED_S + 4), rank=0)
    assert found.step_end_s == pytest.approx(4.5)


@pytest.mark.parametrize("plain_step_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_plain_step_that_is_no_time_is_refused(plain_step_s):
    with pytest.raises(ConfigError, match=r"is no time of a step. Give seconds above 0"):
        make_profile(*LAYERS, plain_step_s=plain_step_s)
