"""Compares the simulator with schedules worked out by hand: seconds, bytes and waits, one rule at a time.

Links move 10 bytes a second unless a test says otherwise, and a layer of one segment takes 20 s forward and 40 s backward.
"""

import dataclasses

import pytest
from support.layer_models import make_moe_layer
from support.rank_models import STATIC_BYTES, make_chunk, make_layer, make_link, make_plan, make_rank, offload, read_passes

from fgoffload import Action, ConfigError, OffloadPlan, PlanError
from fgoffload.planner.ranks.layer_model import SavedTensor, UnitModel
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulation_result import StreamName, Waits
from fgoffload.planner.simulation.simulator import Detail, simulate, simulate_rank

K, R, O, B = Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD, Action.RECOMPUTE_AND_OFFLOAD  # noqa: E741 - as in tables of plans

NOTHING = OffloadPlan(actions={})
FC1 = make_layer({"expert_fc1": 100})
"""20 s forward, 40 s backward, and 100 bytes."""


def list_copies(result, stream):
    """Return start and end of each copy of a timeline, in order."""
    return sorted((span.start_s, span.end_s) for span in result.timeline.spans if span.stream is stream)


def test_without_a_plan_a_step_is_its_compute_and_its_peak_is_all_that_is_saved():
    rank = make_rank(make_chunk(make_layer({"qkv_linear": 40, "expert_fc1": 100}), FC1), step_end_s=7.0)
    result = simulate_rank(rank, NOTHING)
    assert result.step_s == 3 * (20 + 40) + 7
    assert result.peak_bytes == STATIC_BYTES + 40 + 100 + 100
    assert result.peak_at == "F0 layers.1.expert_fc1"
    assert (result.d2h_bytes, result.h2d_bytes, result.host_peak_bytes) == (0, 0, 0)
    assert result.waits == Waits()
    assert (result.compute_s, result.recompute_s) == (180, 0)
    assert (result.static_bytes, result.end_bytes) == (STATIC_BYTES, STATIC_BYTES)


# To the host: when copies start, and when their memory goes.


def test_tensors_above_the_host_budget_stay_on_the_gpu_and_are_reported():
    rank = make_rank(make_chunk(FC1, FC1, FC1), host_budget_bytes=250)
    result = simulate_rank(rank, offload("expert_fc1", (0, 1, 2)))
    assert (result.d2h_bytes, result.kept_bytes, result.host_peak_bytes) == (200, 100, 200)
    assert [(tag.tag, tag.d2h_bytes, tag.kept_bytes) for tag in result.tags] == [("expert_fc1", 200, 100)]
    assert result.end_bytes == STATIC_BYTES


# Both ways at once, and compute beside copies.


def test_both_ways_at_once_are_slower():
    # As in 1F1B: copies of one microbatch leave while those of another come back.
    passes = read_passes("F0 F1 B0 F2 B1 B2")
    chunk = make_chunk(FC1, make_layer({"mlp_norm": 0}, forward_s=0.0, backward_s=0.0))
    ranks = [make_rank(chunk, passes=passes, link=make_link(duplex=duplex)) for duplex in (10, 4)]
    alone, both = (simulate_rank(rank, offload("expert_fc1", (0,)), detail=Detail.TIMELINE) for rank in ranks)
    # What F1 saved leaves at 40, when what F0 saved comes back: 10 s each, or 25 s at 4 bytes a second. The same again with F2
    # and B1. The last backward has the link alone.
    assert list_copies(alone, StreamName.H2D) == [(40, 50), (110, 120), (160, 170)]
    assert list_copies(both, StreamName.H2D) == [(40, 65), (125, 150), (190, 200)]
    assert (alone.waits, both.waits) == (Waits(reload_s=30), Waits(reload_s=60))


def test_copies_slow_compute_beside_them():
    rank = make_rank(make_chunk(FC1, make_layer({"mlp_norm": 0})), link=make_link(compute_slowdown=0.25), prefetch_bytes=0)
    result = simulate_rank(rank, offload("expert_fc1", (0,)))
    # 10 s of the second layer's forward are beside the copy and do 8 s of its work. Nothing runs beside the copy back.
    assert result.step_s == 120 + 2 + 10
    assert (result.compute_s, result.slowed_s) == (122, 2)


def test_the_first_groups_of_the_next_backward_are_reloaded_meanwhile():
    # Nothing leaves of the second chunk, so the engine does not notice its backwards: F1 is told of B0, and B0 of B1.
    passes = read_passes("F0 F0.1 F1 B0.1 B0 F1.1 B1.1 B1")
    rank = make_rank(make_chunk(FC1), make_chunk(FC1, first_number=1), passes=passes)
    result = simulate_rank(rank, offload("expert_fc1", (0,)), detail=Detail.TIMELINE)
    assert list_copies(result, StreamName.H2D) == [(60, 70), (100, 110)]
    assert result.waits == Waits()


# What runs again.


def test_recompute_takes_time_in_backward_and_frees_dropped_tensors_until_then():
    unit = UnitModel(
        name="moe_act", segments=("moe_act",), drops=("activated",), before="expert_fc2", extra_s=1.0, extra_bytes=7
    )
    tensors = {"gate and up": ("moe_act", 60), "activated": ("expert_fc2", 30)}
    layer = dataclasses.replace(
        make_layer({"moe_act": 0, "expert_fc2": 0}, units=(unit,)),
        tensors=tuple(SavedTensor(name=name, tags=(tag,), size_bytes=size) for name, (tag, size) in tensors.items()),
    )
    rank = make_rank(make_chunk(layer, layer))
    result = simulate_rank(rank, make_plan({(0, "moe_act"): R, (1, "moe_act"): R}))
    assert (result.step_s, result.recompute_s, result.compute_s) == (240 + 2 * 21, 42, 282)
    # Of both layers the input of the activation; of the last one what it makes again, and what it has beside.
    assert result.peak_bytes == STATIC_BYTES + 120 + 30 + 7
    assert result.peak_at == "B0 layers.1.moe_act recompute"
    assert result.end_bytes == STATIC_BYTES


def test_the_input_of_what_runs_again_is_waited_for_before_it_runs():
    layer = make_moe_layer()
    rank = make_rank(make_chunk(layer), prefetch_bytes=0, link=make_link(d2h=1000, h2d=100, duplex=100))
    result = simulate_rank(rank, make_plan({(0, "moe_act"): B}), detail=Detail.TIMELINE)
    # 12 s forward; backward of the last segment until 14. 600 bytes are back at 20, and only then the activation runs again.
    assert list_copies(result, StreamName.H2D) == [(14, 20)]
    recompute = next(span for span in result.timeline.spans if span.label.endswith("recompute"))
    assert (recompute.start_s, recompute.end_s) == (20, 21.25)
    assert result.step_s == 12 + 24 + 6 + 1.25


def make_stages(count, *layers, microbatches, chunks=1, **fields):
    """Return the ranks of a pipeline: `layers` on each stage, 20 s forward and 40 s backward each."""
    pipeline = Pipeline(stages=count, microbatches=microbatches, chunks=chunks)
    ranks = []
    for rank in range(count):
        own = [make_chunk(*layers, first_number=(chunk * count + rank) * len(layers)) for chunk in range(chunks)]
        ranks.append(make_rank(*own, rank=rank, pipeline=pipeline, **fields))
    return ranks


def test_stages_wait_for_each_other_as_in_1f1b():
    result = simulate(make_stages(2, FC1, microbatches=2), NOTHING)
    # Rank 0: F0 0-20, F1 20-40, B0 80-120, B1 140-180. Rank 1: F0 20-40, B0 40-80, F1 80-100, B1 100-140.
    assert result.step_s == 180
    assert [rank.step_s for rank in result.ranks] == [180, 140]
    assert [rank.waits for rank in result.ranks] == [Waits(neighbours_s=40 + 20), Waits(neighbours_s=20)]
    assert [rank.peak_bytes - STATIC_BYTES for rank in result.ranks] == [200, 100]
    assert result.worst_rank.rank == 0
    assert result.peak_bytes == STATIC_BYTES + 200


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 5), (4, 4), (4, 100), (3, 1)])
def test_1f1b_takes_as_long_as_the_formula_of_its_bubble_says(stages, microbatches):
    result = simulate(make_stages(stages, FC1, microbatches=microbatches), NOTHING)
    assert result.step_s == (microbatches + stages - 1) * 60
    assert {rank.compute_s for rank in result.ranks} == {microbatches * 60}


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "not a whole pipeline"),
        (make_stages(2, FC1, microbatches=2)[1:], r"ranks \[1\] are not a whole pipeline"),
        ([make_rank(make_chunk(FC1)), make_rank(make_chunk(FC1), make_chunk(FC1), rank=1, passes=())], r"\[1, 2\] chunks"),
    ],
    ids=["none", "one of two", "unlike"],
)
def test_ranks_that_are_no_pipeline_are_refused(ranks, message):
    with pytest.raises(ConfigError, match=message):
        simulate(ranks, NOTHING)


def test_a_plan_for_a_layer_that_no_rank_has_is_refused():
    ranks = make_stages(2, FC1, microbatches=2)
    with pytest.raises(PlanError, match=r"layers\.2 in chunk 0, which no rank has"):
        simulate(ranks, offload("expert_fc1", (2,)))
    with pytest.raises(PlanError, match=r"layers\.1 in chunk 1"):
        simulate(ranks, offload("expert_fc1", (1,), chunk=1))
