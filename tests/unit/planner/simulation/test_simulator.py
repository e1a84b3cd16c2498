"""Compares the simulator with schedules worked out by hand: seconds, bytes and waits, one rule at a time.

The default link copies 10 bytes a second. A layer of one segment takes 20 s forward and 40 s backward.
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

K, R, O, B = Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD, Action.RECOMPUTE_AND_OFFLOAD  # noqa: E741 - as in plan tables

BASELINE = OffloadPlan(actions={})
FC1 = make_layer({"expert_fc1": 100})
"""A layer with 20 s of forward, 40 s of backward and 100 saved bytes."""


def list_copies(result, stream):
    """Return the start and end of each copy in a timeline, in order."""
    return sorted((span.start_s, span.end_s) for span in result.timeline.spans if span.stream is stream)


def test_a_step_without_a_plan_takes_its_compute_time_and_peaks_at_all_saved_bytes():
    rank = make_rank(make_chunk(make_layer({"qkv_linear": 40, "expert_fc1": 100}), FC1), step_end_s=7.0)
    result = simulate_rank(rank, BASELINE)
    assert result.step_s == 3 * (20 + 40) + 7
    assert result.peak_bytes == STATIC_BYTES + 40 + 100 + 100
    assert result.peak_at == "F0 layers.1.expert_fc1"
    assert (result.d2h_bytes, result.h2d_bytes, result.host_peak_bytes) == (0, 0, 0)
    assert result.waits == Waits()
    assert (result.compute_s, result.recompute_s) == (180, 0)
    assert (result.static_bytes, result.end_bytes) == (STATIC_BYTES, STATIC_BYTES)


def test_tensors_above_the_host_budget_stay_on_the_gpu_and_are_reported():
    rank = make_rank(make_chunk(FC1, FC1, FC1), host_budget_bytes=250)
    result = simulate_rank(rank, offload("expert_fc1", (0, 1, 2)))
    assert (result.d2h_bytes, result.kept_bytes, result.host_peak_bytes) == (200, 100, 200)
    assert [(tag.tag, tag.d2h_bytes, tag.kept_bytes) for tag in result.tags] == [("expert_fc1", 200, 100)]
    assert result.end_bytes == STATIC_BYTES


def test_simultaneous_copies_in_both_directions_are_slower():
    # As in 1F1B, offloads of one microbatch run while another's tensors are reloaded.
    passes = read_passes("F0 F1 B0 F2 B1 B2")
    chunk = make_chunk(FC1, make_layer({"mlp_norm": 0}, forward_s=0.0, backward_s=0.0))
    ranks = [make_rank(chunk, passes=passes, link=make_link(duplex=duplex)) for duplex in (10, 4)]
    alone, both = (simulate_rank(rank, offload("expert_fc1", (0,)), detail=Detail.TIMELINE) for rank in ranks)
    # At 40 s F1's offload and F0's reload start: 10 s each, or 25 s at 4 bytes a second. F2 and B1 repeat this. The last
    # backward's reload is the only copy.
    assert list_copies(alone, StreamName.H2D) == [(40, 50), (110, 120), (160, 170)]
    assert list_copies(both, StreamName.H2D) == [(40, 65), (125, 150), (190, 200)]
    assert (alone.waits, both.waits) == (Waits(reload_s=30), Waits(reload_s=60))


def test_copies_slow_down_concurrent_compute():
    rank = make_rank(make_chunk(FC1, make_layer({"mlp_norm": 0})), link=make_link(compute_slowdown=0.25), prefetch_bytes=0)
    result = simulate_rank(rank, offload("expert_fc1", (0,)))
    # 10 s of the second layer's forward overlap the offload and do 8 s of work. Nothing overlaps the reload.
    assert result.step_s == 120 + 2 + 10
    assert (result.compute_s, result.slowed_s) == (122, 2)


def test_the_first_groups_of_the_next_backward_are_prefetched_during_the_current_pass():
    # The second chunk offloads nothing, so the engine ignores its backwards: F1 prefetches for B0, and B0 for B1.
    passes = read_passes("F0 F0.1 F1 B0.1 B0 F1.1 B1.1 B1")
    rank = make_rank(make_chunk(FC1), make_chunk(FC1, first_number=1), passes=passes)
    result = simulate_rank(rank, offload("expert_fc1", (0,)), detail=Detail.TIMELINE)
    assert list_copies(result, StreamName.H2D) == [(60, 70), (100, 110)]
    assert result.waits == Waits()


def test_recompute_adds_time_to_backward_and_frees_dropped_tensors_until_then():
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
    # Both layers save the activation's input; the last one also has the recomputed output and extra bytes.
    assert result.peak_bytes == STATIC_BYTES + 120 + 30 + 7
    assert result.peak_at == "B0 layers.1.moe_act recompute"
    assert result.end_bytes == STATIC_BYTES


def test_recompute_waits_for_the_reload_of_its_input():
    layer = make_moe_layer()
    rank = make_rank(make_chunk(layer), prefetch_bytes=0, link=make_link(d2h=1000, h2d=100, duplex=100))
    result = simulate_rank(rank, make_plan({(0, "moe_act"): B}), detail=Detail.TIMELINE)
    # Forward ends at 12, and backward of the last segment at 14. The reload of 600 bytes ends at 20; then recompute starts.
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


def test_stages_wait_for_their_neighbours_in_1f1b():
    result = simulate(make_stages(2, FC1, microbatches=2), BASELINE)
    # Rank 0: F0 0-20, F1 20-40, B0 80-120, B1 140-180. Rank 1: F0 20-40, B0 40-80, F1 80-100, B1 100-140.
    assert result.step_s == 180
    assert [rank.step_s for rank in result.ranks] == [180, 140]
    assert [rank.waits for rank in result.ranks] == [Waits(neighbours_s=40 + 20), Waits(neighbours_s=20)]
    assert [rank.peak_bytes - STATIC_BYTES for rank in result.ranks] == [200, 100]
    assert result.worst_rank.rank == 0
    assert result.peak_bytes == STATIC_BYTES + 200


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 5), (4, 4), (4, 100), (3, 1)])
def test_1f1b_step_time_matches_the_bubble_formula(stages, microbatches):
    result = simulate(make_stages(stages, FC1, microbatches=microbatches), BASELINE)
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
def test_an_incomplete_pipeline_is_rejected(ranks, message):
    with pytest.raises(ConfigError, match=message):
        simulate(ranks, BASELINE)


def test_a_plan_for_a_missing_layer_is_rejected():
    ranks = make_stages(2, FC1, microbatches=2)
    with pytest.raises(PlanError, match=r"layers\.2 in chunk 0, which no rank has"):
        simulate(ranks, offload("expert_fc1", (2,)))
    with pytest.raises(PlanError, match=r"layers\.1 in chunk 1"):
        simulate(ranks, offload("expert_fc1", (1,), chunk=1))
