"""What the plain step says of a profile: what a step that keeps all is simulated to take, and which times give way for it."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from fgoffload import Action, ConfigError, OffloadPlan, Site
from fgoffload.planner.ranks.layer_model import HostWait, LayerModel, SavedTensor, Segment, UnitModel
from fgoffload.planner.ranks.rank_model import ChunkModel, NumberedLayer
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.chunk_totals import count_step_s
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


def test_without_a_plain_step_times_are_those_that_were_measured():
    assert run() == pytest.approx(SIMULATED_S)


@pytest.mark.parametrize("plain_step_s", [SIMULATED_S, 100.0, 60.0])
def test_a_step_that_keeps_all_takes_what_the_plain_step_took(plain_step_s):
    assert run(plain_step_s=plain_step_s) == pytest.approx(plain_step_s)


def test_what_is_missing_comes_on_top_of_the_step_and_leaves_the_passes_as_they_are():
    profile = make_profile(make_layer("a", 1.0, 3.0), make_layer("b", 1.0, 1.0, backward_s=9.0))
    before = make_rank_model(profile, rank=0)
    # A microbatch took 8 + 20 + 2.75 s, and 4 s more are missing.
    after = make_rank_model(dataclasses.replace(profile, plain_step_s=4 * (30.75 + 4) + 0.5), rank=0)
    assert after.chunks == before.chunks
    assert after.step_end_s == pytest.approx(before.step_end_s + 4 * 4)


@pytest.mark.parametrize("plain_step_s", [None, 100.0, 60.0])
def test_a_recompute_takes_the_forward_that_was_measured(plain_step_s):
    added_s = run(FULL, plain_step_s=plain_step_s) - run(plain_step_s=plain_step_s)
    assert added_s == pytest.approx(4 * 2 * 4.0)


def test_where_no_layer_lets_the_host_wait_all_compute_takes_longer_alike():
    layers = [make_layer(kind, 1.0, 3.0, host_wait=None, extra_s=0.5) for kind in ("a", "b")]
    profile = make_profile(*layers, plain_step_s=4 * 18.75 * 1.04 + 0.5)
    found = make_rank_model(profile, rank=0)
    assert found.step_end_s == 0.5
    (chunk,) = found.chunks
    first, second = (layer.model for layer in chunk.layers)
    assert first is second
    times = [(one.forward_pass_s, one.backward_s) for one in (*chunk.first, *first.segments, *chunk.last)]
    assert times == [pytest.approx([part * 1.04 for part in one]) for one in ((0.5, 0.25), (1, 2), (3, 2), (1, 1))]
    plain_s, full_s = (simulate([found], plan).step_s for plan in (NOTHING, FULL))
    assert plain_s == pytest.approx(profile.plain_step_s)
    assert full_s - plain_s == pytest.approx(4 * 2 * 4.5 * 1.04)


def test_one_layer_that_lets_the_host_wait_makes_what_is_missing_the_hosts():
    layers = [make_layer("a", 1.0, 3.0, host_wait=None), make_layer("b", 1.0, 3.0)]
    found = make_rank_model(make_profile(*layers, plain_step_s=SIMULATED_S + 4), rank=0)
    assert found.step_end_s == pytest.approx(4.5)


def test_what_is_too_much_goes_where_the_host_can_have_been_the_cause():
    # A third of 2 s of backward is what a device needs at least: 1/3 and 7/3 s to spare in each layer.
    found = make_rank_model(make_profile(*LAYERS, plain_step_s=SIMULATED_S - 4 * 2 * 4 / 3), rank=0)
    for layer in found.chunks[0].layers:
        assert [segment.forward_host_s for segment in layer.model.segments] == pytest.approx([-1 / 6, -7 / 6])


def test_forward_never_becomes_shorter_than_a_device_needs_for_it():
    least_s = SIMULATED_S - 4 * 2 * 8 / 3
    assert run(plain_step_s=least_s) == pytest.approx(least_s)
    assert run(plain_step_s=1.0) == pytest.approx(least_s)
    # Less than that was measured, and stays.
    quick = make_layer("quick", 0.1, 0.2)
    assert run(NOTHING, quick, quick, plain_step_s=1.0) == pytest.approx(run(NOTHING, quick, quick))


def test_bounds_of_plans_are_of_the_same_step():
    assert count_step_s(make_rank_model(make_profile(*LAYERS, plain_step_s=100.0), rank=0)) == pytest.approx(100.0)


def test_layers_that_are_one_kind_stay_one():
    found = make_rank_model(make_profile(*LAYERS, plain_step_s=100.0), rank=0)
    first, second = (layer.model for layer in found.chunks[0].layers)
    assert first is second


def test_other_microbatches_than_the_measured_ones_take_what_those_took():
    longer = make_rank_model(make_profile(*LAYERS, plain_step_s=100.5), rank=0, microbatches=8)
    assert simulate([longer], NOTHING).step_s == pytest.approx(200.5)


def test_layers_without_time_and_a_rank_without_layers_take_what_the_plain_step_took():
    assert run(NOTHING, make_layer("a", 0.0, 0.0), plain_step_s=100.0) == pytest.approx(100.0)
    empty = make_rank_model(make_profile(plain_step_s=100.0), rank=0)
    assert simulate([empty], NOTHING).step_s == pytest.approx(100.0)
    profile = make_profile(make_layer("a", 0.0, backward_s=0.0, host_wait=None), plain_step_s=100.0)
    (rank,) = profile.ranks
    rank = dataclasses.replace(rank, chunks=(dataclasses.replace(rank.chunks[0], first=(), last=()),))
    timeless = make_rank_model(dataclasses.replace(profile, ranks=(rank,)), rank=0)
    assert simulate([timeless], NOTHING).step_s == pytest.approx(100.0)


@hypothesis.given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=5), st.floats(0.01, 500), st.integers(1, 9)
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_a_plain_step_is_met_unless_that_is_less_than_devices_need(forwards, plain_step_s, microbatches):
    # Backward tells layers apart, so that each keeps its own forward.
    backwards = [2 * 1.5**number for number in range(len(forwards))]
    layers = [
        make_layer(str(number), *one, backward_s=two) for number, (one, two) in enumerate(zip(forwards, backwards, strict=True))
    ]
    found_s = run(NOTHING, *layers, plain_step_s=plain_step_s, microbatches=microbatches)
    needed_s = sum(min(one, two / 3) for pair, two in zip(forwards, backwards, strict=True) for one in pair)
    least_s = 0.5 + microbatches * (2.75 + sum(2 * two for two in backwards) + needed_s)
    assert found_s == pytest.approx(max(plain_step_s, least_s), rel=1e-9)


@pytest.mark.parametrize("plain_step_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_plain_step_that_is_no_time_is_refused(plain_step_s):
    with pytest.raises(ConfigError, match=r"is no time of a step. Give seconds above 0"):
        make_profile(*LAYERS, plain_step_s=plain_step_s)
