"""The simulator against schedules worked out by hand: seconds, bytes, waits, one rule after the other.

Links move 10 bytes a second unless a test says otherwise, and a layer of one stretch takes 20 s forward and 40 s backward.
"""

import dataclasses

import pytest
from support.layer_models import make_moe_layer
from support.rank_models import STATIC_BYTES, make_chunk, make_layer, make_link, make_plan, make_rank, offload, read_passes

from fgoffload import Action, ConfigError, OffloadPlan, PlanError, Site
from fgoffload.planner.ranks.layer_model import HostWait, SavedTensor, Segment, UnitModel
from fgoffload.planner.ranks.rank_model import HostPace, Turn
from fgoffload.planner.ranks.schedule import Pipeline, list_passes
from fgoffload.planner.simulation import chunk_compiler
from fgoffload.planner.simulation.simulation_result import LaneName, Waits
from fgoffload.planner.simulation.simulator import Detail, simulate, simulate_rank

K, R, O, B = Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD, Action.RECOMPUTE_AND_OFFLOAD  # noqa: E741 - as in tables of plans

NOTHING = OffloadPlan(actions={})
FC1 = make_layer({"expert_fc1": 100})
"""20 s forward, 40 s backward, and 100 bytes."""

OUTPUT = (Segment(name="output", forward_s=20.0, backward_s=40.0),)
"""Behind the layers: it takes as long as one, and the engine sees nothing of it."""


def list_copies(result, lane):
    """Return start and end of each copy of a timeline, in order."""
    return sorted((span.start_s, span.end_s) for span in result.timeline.spans if span.lane is lane)


# Nothing leaves.


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


def test_microbatches_in_flight_add_up():
    rank = make_rank(make_chunk(FC1), passes=read_passes("F0 F1 F2 B0 B1 B2"))
    assert simulate_rank(rank, NOTHING).peak_bytes == STATIC_BYTES + 300


def test_what_runs_beside_a_stretch_counts_while_it_runs():
    layer = make_layer({"expert_fc1": 100}, forward_extra_bytes=30, backward_extra_bytes=500)
    result = simulate_rank(make_rank(make_chunk(layer, layer)), NOTHING)
    assert result.peak_bytes == STATIC_BYTES + 200 + 500
    assert result.peak_at == "B0 layers.1.expert_fc1"


def test_what_is_before_and_behind_the_layers_takes_time_and_bytes():
    output = Segment(name="output", forward_s=3.0, backward_s=6.0, forward_extra_bytes=900)
    embedding = Segment(name="embedding", forward_s=1.0, backward_s=2.0)
    result = simulate_rank(make_rank(make_chunk(FC1, first=(embedding,), last=(output,), saved_bytes=5)), NOTHING)
    assert result.step_s == 60 + 9 + 3
    assert (result.peak_bytes, result.peak_at) == (STATIC_BYTES + 5 + 100 + 900, "F0 output")
    assert result.end_bytes == STATIC_BYTES


def test_what_all_layers_share_counts_once_a_microbatch():
    shared = SavedTensor(name="lengths", tags=("expert_fc1",), size_bytes=8, is_same_in_all_layers=True)
    layer = dataclasses.replace(FC1, tensors=(*FC1.tensors, shared))
    rank = make_rank(make_chunk(layer, layer), passes=read_passes("F0 F1 B0 B1"))
    assert simulate_rank(rank, NOTHING).peak_bytes == STATIC_BYTES + 2 * (200 + 8)


def test_a_plan_that_keeps_everything_is_the_baseline_exactly():
    rank = make_rank(make_chunk(make_moe_layer(host_wait=HostWait.COPY)), link=make_link(compute_slowdown=0.5))
    assert simulate_rank(rank, make_plan({(0, "core_attn"): K, (0, "moe"): K})) == simulate_rank(rank, NOTHING)


# To the host: when copies start, and when their memory goes.


def test_a_group_leaves_when_its_stretch_is_over_and_its_memory_goes_at_the_next_look():
    rank = make_rank(make_chunk(FC1, FC1, FC1), prefetch_bytes=0)
    result = simulate_rank(rank, offload("expert_fc1", (0, 1, 2)), detail=Detail.TIMELINE)
    assert list_copies(result, LaneName.D2H) == [(20, 30), (40, 50), (60, 70)]
    # The first is through at 30; the engine looks at 40, when the second group has been saved too.
    assert result.peak_bytes == STATIC_BYTES + 200
    assert result.peak_at == "F0 layers.1.expert_fc1"


def test_memory_stays_until_the_engine_looks_though_the_copy_is_done():
    layer = make_layer({"qkv_linear": 100, "mlp_norm": 100})
    rank = make_rank(make_chunk(layer))
    # The copy is through at 30, and nothing ends or comes back until backward is at the first stretch, at 80.
    result = simulate_rank(rank, offload("qkv_linear", (0,)))
    assert result.peak_bytes == STATIC_BYTES + 200
    # Then it has to be fetched: 10 s.
    assert result.step_s == 120 + 10
    assert result.waits == Waits(reload_s=10)


def test_what_has_not_left_when_backward_wants_it_is_called_back():
    rank = make_rank(make_chunk(FC1))
    result = simulate_rank(rank, offload("expert_fc1", (0,)))
    assert (result.d2h_bytes, result.recalled_bytes, result.h2d_bytes) == (100, 100, 0)
    assert (result.step_s, result.d2h_s, result.h2d_s) == (60, 10, 0)
    assert result.end_bytes == STATIC_BYTES


def test_a_faster_link_to_the_host_can_be_slower_where_a_slow_one_is_called_back():
    # Backward comes to the first layer at 80. At 10 bytes a second its tensor has left by then, and has to come back, 10 s. At
    # 1 byte a second it has not, and stays.
    rank = make_rank(make_chunk(FC1, last=OUTPUT), link=make_link(d2h=1.0, h2d=10.0))
    assert simulate_rank(rank, offload("expert_fc1", (0,))).step_s == 120
    assert simulate_rank(make_rank(*rank.chunks), offload("expert_fc1", (0,))).step_s == 120 + 10


def test_where_backward_comes_next_the_last_group_stays_if_it_is_still_on_its_way():
    # Forward of the layers is over at 40. The first group left from 20 to 30, and the second is on its way until 50: it stays,
    # through what is behind the layers too, and the first comes back when backward comes to the second, at 100.
    rank = make_rank(make_chunk(FC1, FC1, last=OUTPUT), turning_chunk=0, turn=Turn.CALL_BACK)
    result = simulate_rank(rank, offload("expert_fc1", (0, 1)), detail=Detail.TIMELINE)
    assert list_copies(result, LaneName.D2H) == [(20, 30), (40, 50)]
    assert list_copies(result, LaneName.H2D) == [(100, 110)]
    assert (result.waits, result.step_s) == (Waits(), 3 * 60)


def test_where_backward_comes_next_no_more_stays_than_prefetch_allows():
    # At 5 bytes a second nothing has left at 40, and one group is as much as may be there before backward asks.
    link = make_link(d2h=5.0)
    rank = make_rank(make_chunk(FC1, FC1, last=OUTPUT), link=link, prefetch_bytes=100, turning_chunk=0, turn=Turn.CALL_BACK)
    result = simulate_rank(rank, offload("expert_fc1", (0, 1)), detail=Detail.TIMELINE)
    assert list_copies(result, LaneName.D2H) == [(20, 40), (40, 60)]
    assert list_copies(result, LaneName.H2D) == [(100, 110)]


@pytest.mark.parametrize("pace", HostPace)
@pytest.mark.parametrize(("window_bytes", "waits_s", "peak_bytes"), [(0, 10, 500), (99, 10, 500), (100, 0, 600), (200, 0, 600)])
def test_what_a_plan_has_gone_before_the_loss_is_waited_for_wherever_the_host_is(pace, window_bytes, waits_s, peak_bytes):
    # Forward of the layers is over at 40, and the second group is on its way from 40 to 50. Where no more than 99 bytes may be,
    # compute waits, and the loss with 500 bytes of its own begins at 50.
    output = (Segment(name="output", forward_s=20.0, backward_s=40.0, forward_extra_bytes=500),)
    rank = make_rank(make_chunk(FC1, FC1, last=output), turning_chunk=0, turn=Turn.CALL_BACK, host_pace=pace)
    plan = dataclasses.replace(offload("expert_fc1", (0, 1)), loss_window_bytes=window_bytes)
    result = simulate_rank(rank, plan, detail=Detail.TIMELINE)
    assert list_copies(result, LaneName.D2H) == [(20, 30), (40, 50)]
    assert result.waits.turn_s == waits_s
    # A host that is ahead has not seen the first one done; that one need not be waited for.
    assert result.peak_bytes == STATIC_BYTES + (700 if window_bytes == 200 and pace is not HostPace.BESIDE else peak_bytes)
    assert result.loss_window_bytes == result.peak_bytes - STATIC_BYTES - 500


@pytest.mark.parametrize(("rate", "window_bytes"), [(10.0, 100), (4.0, 200), (1e5, 0)])
def test_who_plans_waits_for_what_is_nearly_done_and_counts_the_rest(rate, window_bytes):
    # At 10 bytes a second the first of two groups is gone at 40, at 4 it is on its way; at 1e5 the second takes a millisecond.
    rank = make_rank(make_chunk(FC1, FC1, last=OUTPUT), link=make_link(d2h=rate), turning_chunk=0, turn=Turn.PLAN)
    result = simulate_rank(rank, offload("expert_fc1", (0, 1)))
    assert (result.loss_window_bytes, round(result.waits.turn_s, 6)) == (window_bytes, 0.0 if window_bytes else 0.001)


def test_what_other_chunks_let_leave_is_waited_for_before_the_loss_too():
    chunks = (make_chunk(FC1), make_chunk(make_layer({"expert_fc1": 7}), first_number=1))
    rank = make_rank(*chunks, passes=read_passes("F0.0 F0.1 B0.1 B0.0"), link=make_link(d2h=1.0), turning_chunk=1)
    plan = dataclasses.replace(offload("expert_fc1", (0,)), loss_window_bytes=0)
    assert simulate_rank(rank, plan).waits.turn_s > 0


@pytest.mark.parametrize(("pace", "peak"), [(HostPace.BESIDE, 200), (HostPace.PASS_AHEAD, 400), (HostPace.STEP_AHEAD, 600)])
def test_a_host_ahead_of_compute_sees_no_copy_done(pace, peak):
    # Groups leave at 20, 40 and 60, 10 s each. Beside compute all but the last two are seen to be through; from the start of
    # the second pass, at 60, the first two of the first pass; from the start of the step none.
    chunk, passes = make_chunk(FC1, FC1, FC1), read_passes("F0 F1 B1 B0")
    rank = make_rank(chunk, passes=passes, prefetch_bytes=0, host_pace=pace)
    result = simulate_rank(rank, offload("expert_fc1", (0, 1, 2)))
    assert result.peak_bytes == STATIC_BYTES + peak


@pytest.mark.parametrize(
    ("pace", "layer_s", "peak"),
    [(HostPace.BESIDE, 0.0, 200), (HostPace.LAYER_AHEAD, 0.0, 300), (HostPace.LAYER_AHEAD, 30.0, 200)],
)
def test_a_host_that_layers_let_wait_sees_what_was_done_when_it_waited(monkeypatch, pace, layer_s, peak):
    # Copies end at 50 and 90, and the last group is submitted at 120. A host that takes no time is at 80 then, where it last
    # waited, and was at 40 when the group before was submitted: it sees the first copy then, and not before. One that takes
    # 15 s a stretch is at 70 when the second group is submitted, and sees the first.
    monkeypatch.setattr(chunk_compiler, "HOST_LAYER_S", layer_s)
    waiting = make_layer({"dispatch": 0, "expert_fc1": 100}, host_waits={"dispatch": HostWait.KERNEL})
    rank = make_rank(make_chunk(waiting, waiting, waiting), prefetch_bytes=0, host_pace=pace)
    result = simulate_rank(rank, offload("expert_fc1", (0, 1, 2)))
    assert result.peak_bytes == STATIC_BYTES + peak
    assert result.step_s == 6 * 20 + 6 * 40 + result.waits.copies_s


def test_a_host_that_layers_let_wait_is_ahead_of_a_neighbour_and_does_not_see_what_is_done_meanwhile():
    # The first stage is through with forward at 40, where its copy begins, and goes on at 160. Its host waits for no exchange:
    # when it launches backward the copy has just begun, and what it copies stays.
    waiting = make_layer({"dispatch": 0, "expert_fc1": 100}, host_waits={"dispatch": HostWait.KERNEL})
    pipeline = Pipeline(stages=2, microbatches=1)
    ranks = [
        make_rank(make_chunk(waiting, first_number=stage), rank=stage, pipeline=pipeline, host_pace=HostPace.LAYER_AHEAD)
        for stage in range(2)
    ]
    first = simulate(ranks, offload("expert_fc1", (0,))).ranks[0]
    assert (first.d2h_bytes, first.h2d_bytes, first.recalled_bytes) == (100, 0, 100)


def test_a_host_ahead_of_compute_holds_a_window_and_waits_for_nothing_in_it():
    # The window takes one group: the one before it is let go of when it leaves, and is through by then.
    rank = make_rank(make_chunk(*[FC1] * 5), window_bytes=100, prefetch_bytes=0, host_pace=HostPace.STEP_AHEAD)
    result = simulate_rank(rank, offload("expert_fc1", range(5)))
    assert (result.peak_bytes, result.waits.window_s) == (STATIC_BYTES + 200, 0)


def test_memory_that_a_copy_still_reads_goes_with_the_copy():
    # At 0.5 bytes a second the copy is through at 220, long after backward is over at 60, and the second microbatch at 120.
    rank = make_rank(make_chunk(FC1), passes=read_passes("F0 B0 F1 B1"), link=make_link(d2h=0.5))
    result = simulate_rank(rank, offload("expert_fc1", (0,)))
    assert result.peak_bytes == STATIC_BYTES + 200
    assert result.step_s == 120
    assert result.host_peak_bytes == 100


def test_memory_of_a_copy_that_is_done_goes_when_backward_leaves_the_first_site():
    # Called back at 20, and its copy, 40 s, is done when backward is through with it.
    embedding = (Segment(name="embedding", forward_s=0.0, backward_s=2.0, backward_extra_bytes=500),)
    rank = make_rank(make_chunk(FC1, first=embedding), link=make_link(d2h=2.5))
    assert simulate_rank(rank, offload("expert_fc1", (0,))).peak_bytes == STATIC_BYTES + 500


def test_compute_waits_while_more_than_the_window_is_on_its_way():
    rank = make_rank(make_chunk(FC1, FC1, last=OUTPUT), link=make_link(d2h=2), window_bytes=100)
    result = simulate_rank(rank, offload("expert_fc1", (0, 1)), detail=Detail.TIMELINE)
    # Submitted at 20 and 40; the first is through at 70, and what is behind the layers starts then. The second is through at
    # 120, when backward of that, from 90 to 130, is still running: so it has to come back, from 130 to 140, and the first comes
    # behind it beside the second layer's backward.
    assert list_copies(result, LaneName.D2H) == [(20, 70), (70, 120)]
    assert result.waits == Waits(window_s=30, reload_s=10)
    assert result.step_s == 60 + 30 + 40 + 10 + 80
    assert result.peak_bytes == STATIC_BYTES + 200


def test_a_window_of_nothing_waits_for_each_copy():
    rank = make_rank(make_chunk(FC1, FC1), window_bytes=0)
    result = simulate_rank(rank, offload("expert_fc1", (0, 1)))
    # Each forward waits 10 s for its own copy. Backward fetches the last one, and the other beside it.
    assert result.waits == Waits(window_s=20, reload_s=10)
    assert result.step_s == 120 + 30
    assert result.peak_bytes == STATIC_BYTES + 200


def test_what_does_not_fit_into_the_host_budget_stays_and_is_reported():
    rank = make_rank(make_chunk(FC1, FC1, FC1), host_budget_bytes=250)
    result = simulate_rank(rank, offload("expert_fc1", (0, 1, 2)))
    assert (result.d2h_bytes, result.kept_bytes, result.host_peak_bytes) == (200, 100, 200)
    assert [(tag.tag, tag.d2h_bytes, tag.kept_bytes) for tag in result.tags] == [("expert_fc1", 200, 100)]
    assert result.end_bytes == STATIC_BYTES


def test_host_memory_is_free_again_when_backward_is_through():
    rank = make_rank(make_chunk(FC1, FC1), passes=read_passes("F0 B0 F1 B1"))
    assert simulate_rank(rank, offload("expert_fc1", (0,))).host_peak_bytes == 100


# And back.


def test_backward_finds_what_was_brought_back_ahead():
    rank = make_rank(make_chunk(FC1, FC1, last=OUTPUT))
    result = simulate_rank(rank, offload("expert_fc1", (0, 1)), detail=Detail.TIMELINE)
    # Nobody looks before backward comes to layer 1, at 100: that one is waited for, and layer 0 comes right behind it.
    assert list_copies(result, LaneName.H2D) == [(100, 110), (110, 120)]
    assert result.waits == Waits(reload_s=10)
    assert result.step_s == 180 + 10


def test_nothing_is_brought_back_ahead_where_prefetch_may_not():
    rank = make_rank(make_chunk(FC1, FC1, last=OUTPUT), prefetch_bytes=0)
    result = simulate_rank(rank, offload("expert_fc1", (0, 1)), detail=Detail.TIMELINE)
    assert list_copies(result, LaneName.H2D) == [(100, 110), (150, 160)]
    assert result.waits == Waits(reload_s=20)


def test_prefetch_counts_the_bytes_that_are_back_ahead():
    rank = make_rank(make_chunk(FC1, FC1, FC1, last=OUTPUT), prefetch_bytes=100)
    result = simulate_rank(rank, offload("expert_fc1", (0, 1, 2)), detail=Detail.TIMELINE)
    # Layer 2 is wanted at 120, and layer 1 may come ahead; layer 0 only when layer 1 is wanted, at 170.
    assert list_copies(result, LaneName.H2D) == [(120, 130), (130, 140), (170, 180)]
    assert result.waits == Waits(reload_s=10)
    # Two are back at once, at most.
    assert result.peak_bytes == STATIC_BYTES + 200


def test_prefetch_looks_again_when_half_of_it_is_used():
    small, large = make_layer({"expert_fc1": 50}), make_layer({"expert_fc1": 200})
    rank = make_rank(make_chunk(small, large, small, FC1, last=OUTPUT), prefetch_bytes=250)
    result = simulate_rank(rank, offload("expert_fc1", (0, 1, 2, 3)), detail=Detail.TIMELINE)
    # Forward is over at 100, and layer 3 is wanted at 140. Layers 2 and 1 come behind it: 250 bytes. At 190, when layer 2 is
    # wanted, 200 bytes are ahead; layer 0 would fit, but more than half is used. It comes when layer 1 is wanted, at 230.
    assert list_copies(result, LaneName.H2D) == [(140, 150), (150, 155), (155, 175), (230, 235)]


def test_groups_come_back_when_backward_has_passed_a_layer_that_stayed():
    rank = make_rank(make_chunk(FC1, FC1, FC1), passes=read_passes("F0 F1 B0 B1"))
    result = simulate_rank(rank, offload("expert_fc1", (0,)), detail=Detail.TIMELINE)
    # B0 begins at 120 and has passed the last layer at 160. B1 is the same from 240 on.
    assert list_copies(result, LaneName.H2D) == [(160, 170), (280, 290)]
    assert result.waits == Waits()


def test_a_layer_that_runs_again_as_a_whole_says_nothing_when_backward_passes_it():
    unit = UnitModel(name="layer", segments=("expert_fc1",), drops=(), before="expert_fc1")
    again = dataclasses.replace(FC1, units=(unit,))
    rank = make_rank(make_chunk(FC1, again, again), passes=read_passes("F0 F1 B0 B1"))
    plan = make_plan({(0, "expert_fc1"): O, (1, "layer"): R, (2, "layer"): R})
    # 60 s each, so that backward is at the first layer 120 s after 120.
    assert list_copies(simulate_rank(rank, plan, detail=Detail.TIMELINE), LaneName.H2D)[0] == (240, 250)


@pytest.mark.parametrize(
    ("combine_bytes", "copies"),
    [
        # At 200 backward has let go of 109 bytes: 10 come back, and the 100 before them do not fit. They come when backward is
        # at those 10, at 240.
        (109, [(200, 201), (240, 250)]),
        (110, [(200, 201), (201, 211)]),
    ],
)
def test_while_backward_is_in_sites_that_stay_no_more_comes_back_than_it_has_let_go_of(combine_bytes, copies):
    mixed = make_layer({"core_attn": 10, "expert_fc1": 100, "moe_combine": combine_bytes})
    rank = make_rank(make_chunk(FC1, mixed), passes=read_passes("F0 F1 B0 B1"))
    # Each forward takes 80 s. B0 begins at 160, and is through with the last stretch at 200.
    plan = make_plan({(0, "expert_fc1"): O, (1, "core_attn"): O})
    result = simulate_rank(rank, plan, detail=Detail.TIMELINE)
    assert list_copies(result, LaneName.H2D)[:2] == copies
    assert result.waits == Waits()


def test_a_site_that_runs_again_lets_go_of_its_input_when_it_does():
    unit = UnitModel(name="moe_act", segments=("moe_act",), drops=("expert_fc2",), before="expert_fc2")
    layer = make_layer({"core_attn": 10, "mlp_norm": 20, "moe_act": 100, "expert_fc2": 30}, units=(unit,))
    rank = make_rank(make_chunk(layer), passes=read_passes("F0 F1 B0 B1"))
    plan = make_plan({(0, "core_attn"): O, (0, "moe_act"): R})
    result = simulate_rank(rank, plan, detail=Detail.TIMELINE)
    # B0 begins at 160, where the activation takes its input and runs again, until 180. The norm is the next to take something,
    # behind the backwards of the linear and of the activation, at 260: the 10 fit into what the input was.
    assert list_copies(result, LaneName.H2D)[0] == (260, 261)


def test_what_two_sites_share_is_let_go_of_once():
    # Both stretches at the end take the 100 that they share. At 240, when attention takes its own, backward has let go of 100.
    shared = SavedTensor(name="normed", tags=("shared_expert", "router"), size_bytes=100)
    layer = make_layer({"qkv_linear": 150, "core_attn": 1, "router": 0, "shared_expert": 0})
    rank = make_rank(
        make_chunk(dataclasses.replace(layer, tensors=(*layer.tensors, shared))), passes=read_passes("F0 F1 B0 B1")
    )
    result = simulate_rank(rank, offload("qkv_linear", (0,)), detail=Detail.TIMELINE)
    # So the 150 come back when they are wanted, 40 s later.
    assert list_copies(result, LaneName.H2D)[0] == (280, 295)


def test_one_group_may_be_larger_than_the_prefetch():
    rank = make_rank(make_chunk(FC1, FC1, FC1, last=OUTPUT), prefetch_bytes=10)
    result = simulate_rank(rank, offload("expert_fc1", (0, 1, 2)), detail=Detail.TIMELINE)
    # Layer 2 is wanted at 120. Layer 1 comes behind it though it is larger, and layer 0 only when layer 1 is wanted, at 170.
    assert list_copies(result, LaneName.H2D) == [(120, 130), (130, 140), (170, 180)]


def test_a_tensor_of_two_sites_leaves_once_and_comes_back_once_for_the_one_that_asks_first():
    layer = dataclasses.replace(
        make_layer({"core_attn": 0, "attn_proj": 0}),
        tensors=(
            SavedTensor(name="output", tags=("core_attn", "attn_proj"), size_bytes=100),
            SavedTensor(name="query", tags=("core_attn",), size_bytes=300),
        ),
    )
    rank = make_rank(make_chunk(layer, last=(Segment(name="output", forward_s=50.0, backward_s=40.0),)), prefetch_bytes=0)
    plan = make_plan({(0, "core_attn"): O, (0, "attn_proj"): O})
    result = simulate_rank(rank, plan, detail=Detail.TIMELINE)
    assert list_copies(result, LaneName.D2H) == [(20, 60)]
    # Backward of the projection starts at 130 and waits for its input alone, 10 s. Attention waits for the rest, 30 s.
    assert list_copies(result, LaneName.H2D) == [(130, 140), (180, 210)]
    assert result.waits == Waits(reload_s=40)
    assert (result.d2h_bytes, result.h2d_bytes) == (400, 400)


def test_a_site_that_stays_fetches_what_left_with_another():
    layer = dataclasses.replace(
        make_layer({"core_attn": 0, "attn_proj": 0}),
        tensors=(SavedTensor(name="output", tags=("core_attn", "attn_proj"), size_bytes=100),),
    )
    rank = make_rank(make_chunk(layer, last=OUTPUT))
    result = simulate_rank(rank, offload("core_attn", (0,)), detail=Detail.TIMELINE)
    # At 100 the projection asks. The engine has not looked since the group left: the bytes are still there. At 140 attention
    # asks, and that is a place to look: they have gone, and come back.
    assert list_copies(result, LaneName.H2D) == [(140, 150)]
    assert result.waits == Waits(reload_s=10)
    rank = make_rank(make_chunk(FC1, layer, FC1), prefetch_bytes=0)
    plan = make_plan({(1, "core_attn"): O, (0, "expert_fc1"): O, (2, "expert_fc1"): O})
    # The end of the last layer is one, too: then the projection finds the output gone. Attention has it back.
    result = simulate_rank(rank, plan, detail=Detail.TIMELINE)
    assert list_copies(result, LaneName.H2D) == [(120, 130), (210, 220)]


# Both ways at once, and compute beside copies.


def test_both_ways_at_once_are_slower():
    # As in 1F1B: copies of one microbatch leave while those of another come back.
    passes = read_passes("F0 F1 B0 F2 B1 B2")
    chunk = make_chunk(FC1, make_layer({"mlp_norm": 0}, forward_s=0.0, backward_s=0.0))
    ranks = [make_rank(chunk, passes=passes, link=make_link(duplex=duplex)) for duplex in (10, 4)]
    alone, both = (simulate_rank(rank, offload("expert_fc1", (0,)), detail=Detail.TIMELINE) for rank in ranks)
    # What F1 saved leaves at 40, when what F0 saved comes back: 10 s each, or 25 s at 4 bytes a second. The same again with F2
    # and B1. The last backward has the link alone.
    assert list_copies(alone, LaneName.H2D) == [(40, 50), (110, 120), (160, 170)]
    assert list_copies(both, LaneName.H2D) == [(40, 65), (125, 150), (190, 200)]
    assert (alone.waits, both.waits) == (Waits(reload_s=30), Waits(reload_s=60))


def test_copies_slow_compute_beside_them():
    rank = make_rank(make_chunk(FC1, make_layer({"mlp_norm": 0})), link=make_link(compute_slowdown=0.25), prefetch_bytes=0)
    result = simulate_rank(rank, offload("expert_fc1", (0,)))
    # 10 s of the second layer's forward are beside the copy and do 8 s of its work. Nothing runs beside the copy back.
    assert result.step_s == 120 + 2 + 10
    assert (result.compute_s, result.slowed_s) == (122, 2)


def test_copies_are_counted_by_kind_of_layer_tag_and_action():
    other = dataclasses.replace(make_moe_layer(), kind="other")
    rank = make_rank(make_chunk(make_moe_layer(), make_moe_layer(), other), link=make_link(d2h=1e3, h2d=1e3))
    rows = {(0, "moe_act"): O, (1, "moe_act"): B, (2, "moe_act"): O, (2, "core_attn"): O}
    result = simulate_rank(rank, make_plan(rows))
    alone = {row: simulate_rank(rank, make_plan({row: action})).d2h_bytes for row, action in rows.items()}
    kind = make_moe_layer().kind
    assert {(tag.kind, tag.tag, tag.action): tag.d2h_bytes for tag in result.tags} == {
        (kind, "moe_act", O): alone[0, "moe_act"],
        (kind, "moe_act", B): alone[1, "moe_act"],
        ("other", "moe_act", O): alone[2, "moe_act"],
        ("other", "core_attn", O): alone[2, "core_attn"],
    }
    assert all(alone.values())


def test_the_share_of_a_copy_that_compute_waits_for_is_exposed():
    rank = make_rank(make_chunk(FC1, FC1, last=OUTPUT), link=make_link(d2h=2), window_bytes=100)
    result = simulate_rank(rank, offload("expert_fc1", (0, 1)))
    (tag,) = result.tags
    # To the host 50 s each, of which compute waits from 40 to 70. To the device 10 s each, and it waits for the first.
    assert (tag.d2h_s, tag.h2d_s, tag.exposed_s, tag.hidden_s) == (100, 20, 40, 80)
    assert (tag.d2h_bytes, tag.h2d_bytes, tag.recalled_bytes) == (200, 200, 0)
    assert (result.d2h_s, result.h2d_s) == (100, 20)


# Where the host is late.


def test_behind_each_group_that_leaves_a_late_host_launches_later():
    rank = make_rank(make_chunk(FC1, FC1, FC1), late_group_s=3.0, passes=read_passes("F0 F1 B0 B1"))
    plan = make_plan({(0, "expert_fc1"): O, (1, "expert_fc1"): O})
    result = simulate_rank(rank, plan, detail=Detail.TIMELINE)
    # The first leaves at 20 and all that follows is 3 s later: the second at 43, and the next microbatch begins at 66.
    assert [start_s for start_s, _ in list_copies(result, LaneName.D2H)] == [20, 43, 86, 109]
    # What comes back is waited for as without: 10 s in each backward.
    assert result.waits == Waits(late_s=4 * 3, reload_s=2 * 10)
    assert result.step_s == 2 * 3 * 60 + 12 + 20


def test_a_late_host_and_the_window_are_waited_for_at_the_same_time():
    rank = make_rank(make_chunk(FC1, FC1), late_group_s=3.0, window_bytes=0)
    # The copy takes 10 s: 3 of them the host is late anyway.
    assert simulate_rank(rank, make_plan({(0, "expert_fc1"): O})).waits == Waits(late_s=3, window_s=7, reload_s=10)


def test_where_nothing_leaves_a_late_host_is_as_late_as_without_a_plan():
    rank = make_rank(make_chunk(FC1, FC1), late_group_s=3.0, host_budget_bytes=99)
    for plan in (NOTHING, make_plan({(0, "expert_fc1"): O})):
        assert simulate_rank(rank, plan).waits == Waits()


# Where the host waits.


def make_waiting(host_wait):
    """Return a layer whose attention leaves before the host waits, and whose experts' tokens leave behind that."""
    return make_layer({"core_attn": 100, "dispatch": 0, "expert_fc1": 30}, host_waits={"dispatch": host_wait})


@pytest.mark.parametrize(
    ("host_wait", "host_s", "starts"),
    [
        # Submitted at 20. The tokens leave at 60.
        (None, 0, [20, 60]),
        (HostWait.KERNEL, 0, [20, 60]),
        # The host's bytes are behind the 100 until 30: all that follows is 10 s later.
        (HostWait.COPY, 10, [20, 70]),
        # Held until the wait at 20 is over, which has nothing before it.
        (HostWait.HOLD, 0, [20, 60]),
    ],
)
def test_the_host_waits_behind_what_has_been_submitted(host_wait, host_s, starts):
    rank = make_rank(make_chunk(make_waiting(host_wait), make_layer({"mlp_norm": 0})))
    plan = make_plan({(0, "core_attn"): O, (0, "expert_fc1"): O})
    result = simulate_rank(rank, plan, detail=Detail.TIMELINE)
    assert result.waits.host_s == host_s
    assert [start_s for start_s, _ in list_copies(result, LaneName.D2H)] == starts


def test_held_groups_leave_right_behind_the_wait_and_not_when_they_end():
    layer = make_layer({"core_attn": 100, "attn_proj": 10, "dispatch": 0}, host_waits={"dispatch": HostWait.HOLD})
    rank = make_rank(make_chunk(layer))
    plan = make_plan({(0, "core_attn"): O, (0, "attn_proj"): O})
    result = simulate_rank(rank, plan, detail=Detail.TIMELINE)
    # They end at 20 and at 40, and leave at 40, one behind the other.
    assert list_copies(result, LaneName.D2H) == [(40, 50), (50, 51)]
    assert result.waits.host_s == 0


def test_groups_of_the_layer_before_are_not_held_and_the_host_waits_behind_them():
    rank = make_rank(make_chunk(make_waiting(HostWait.HOLD), make_waiting(HostWait.HOLD)), link=make_link(d2h=1))
    plan = make_plan({(0, "expert_fc1"): O, (1, "core_attn"): O})
    result = simulate_rank(rank, plan, detail=Detail.TIMELINE)
    # The first layer's tokens leave at 60, 30 s at 1 byte a second; the second layer's host waits at 80 until 90.
    assert result.waits.host_s == 10
    assert list_copies(result, LaneName.D2H) == [(60, 90), (90, 190)]


@pytest.mark.parametrize("host_wait", [HostWait.COPY, HostWait.HOLD])
def test_what_runs_again_waits_for_the_host_again_where_bytes_take_the_copy_engine(host_wait):
    unit = UnitModel(name="moe", segments=("dispatch", "expert_fc1"), drops=("expert_fc1",), before="expert_fc1")
    layer = dataclasses.replace(make_waiting(host_wait), units=(unit,))
    rank = make_rank(make_chunk(layer, FC1), passes=read_passes("F0 F1 B0 B1"), link=make_link(d2h=1))
    result = simulate_rank(rank, make_plan({(1, "expert_fc1"): O, (0, "moe"): R}))
    # The group of F0 leaves at 80, until 180, and the host of F1 waits for it from 100 on. The group of F1 leaves at 240, until
    # 340. In B0, layer 1 has its tensor back at 250 and is through at 290; what runs again then waits until 340.
    assert result.waits == Waits(host_s=80 + 50, reload_s=10 + 10)


def test_what_runs_again_behind_the_dispatcher_waits_for_nothing_of_it():
    # The tokens of each expert are waited for before the first linear, as in profiles, which runs again alone.
    unit = UnitModel(name="expert_fc1", segments=("expert_fc1",), drops=("expert_fc2",), before="expert_fc2")
    saved = {"core_attn": 100, "expert_fc1": 30, "expert_fc2": 10}
    layer = make_layer(saved, units=(unit,), host_waits={"expert_fc1": HostWait.COPY})
    rank = make_rank(make_chunk(layer, FC1), passes=read_passes("F0 F1 B0 B1"), link=make_link(d2h=1))
    result = simulate_rank(rank, make_plan({(1, "expert_fc1"): O, (0, "expert_fc1"): R}))
    # As above the host of F1 waits from 100 to 180. The group of F1 leaves at 240, until 340. The linear runs again at 290.
    assert result.waits == Waits(host_s=80, reload_s=10 + 10)


@pytest.mark.parametrize(("pace", "recalled_bytes"), [(HostPace.BESIDE, 0), (HostPace.LAYER_AHEAD, 100)])
def test_a_host_that_knows_the_counts_of_forward_stays_ahead_where_experts_run_again(monkeypatch, pace, recalled_bytes):
    monkeypatch.setattr(chunk_compiler, "HOST_LAYER_S", 0.0)
    unit = UnitModel(name="moe", segments=("dispatch", "expert_fc1"), drops=("expert_fc1",), before="expert_fc1")
    layer = make_layer({"dispatch": 0, "expert_fc1": 100}, units=(unit,), host_waits={"dispatch": HostWait.KERNEL})
    rank = make_rank(make_chunk(layer, layer), link=make_link(d2h=5), host_pace=pace)
    result = simulate_rank(rank, make_plan({(0, "expert_fc1"): O, (1, "moe"): R}))
    # The first layer's group leaves at 40, where the host waits in the second one, and is through at 60. The experts of the
    # second run again from 80 on. Did the host wait there, it would see the copy. So it is at 40 still when it launches what
    # asks for the group at 200: that stays.
    assert (result.recalled_bytes, result.h2d_bytes) == (recalled_bytes, 100 - recalled_bytes)
    assert result.waits.host_s == 0


# What runs again.


def test_what_runs_again_takes_its_time_in_backward_and_frees_what_it_drops_until_then():
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
    assert result.peak_at == "B0 layers.1.moe_act again"
    assert result.end_bytes == STATIC_BYTES


def test_the_input_of_what_runs_again_is_waited_for_before_it_runs():
    layer = make_moe_layer()
    rank = make_rank(make_chunk(layer), prefetch_bytes=0, link=make_link(d2h=1000, h2d=100, duplex=100))
    result = simulate_rank(rank, make_plan({(0, "moe_act"): B}), detail=Detail.TIMELINE)
    # 12 s forward; backward of the last stretch until 14. 600 bytes are back at 20, and only then the activation runs again.
    assert list_copies(result, LaneName.H2D) == [(14, 20)]
    again = next(span for span in result.timeline.spans if span.label.endswith("again"))
    assert (again.start_s, again.end_s) == (20, 21.25)
    assert result.step_s == 12 + 24 + 6 + 1.25


def test_a_layer_that_runs_again_has_its_input_back_first():
    layer = make_moe_layer()
    rank = make_rank(make_chunk(layer, layer), prefetch_bytes=0, link=make_link(d2h=1000, h2d=100, duplex=100))
    plan = make_plan({(layer, tag): action for layer in (0, 1) for tag, action in (("layer", R), ("layer_input", O))})
    result = simulate_rank(rank, plan)
    # The first layer's input is held by the schedule and stays. The second one's has not left when backward asks.
    assert (result.d2h_bytes, result.recalled_bytes) == (100, 100)
    assert result.recompute_s == 24
    # Two inputs, and all that one layer saves (2495, the input among it) when it has run again; the rotary tables (7) once.
    assert result.peak_bytes == STATIC_BYTES + 100 + 2495 + 7


def test_the_input_of_a_stage_stays_and_that_of_the_whole_model_may_leave():
    layer = make_moe_layer()
    embedding = (Segment(name="embedding", forward_s=1.0, backward_s=2.0),)
    for first, moved in ((), 100), (embedding, 200):
        rank = make_rank(make_chunk(layer, layer, first=first))
        assert simulate_rank(rank, make_plan({(0, "attn_norm"): O, (1, "attn_norm"): O})).d2h_bytes == moved


@pytest.mark.parametrize(("leaves", "resident_bytes"), [((), 600), ((1,), 500), ((0,), 600), ((0, 1), 500)])
def test_the_model_holds_its_first_layers_input_until_its_forward_is_over(leaves, resident_bytes):
    given = SavedTensor(name="layer input", tags=("layer_input", "attn_norm"), size_bytes=100)
    layer = make_layer({"attn_norm": 0, "expert_fc1": 200})
    layer = dataclasses.replace(layer, tensors=(given, *layer.tensors))
    embedding = (Segment(name="embedding", forward_s=1.0, backward_s=2.0),)
    output = (Segment(name="output", forward_s=3.0, backward_s=6.0, forward_extra_bytes=900),)
    # A layer behind these two, so that their copies are done when forward comes to the output.
    rank = make_rank(make_chunk(layer, layer, make_layer({"expert_fc1": 0}), first=embedding, last=output))
    result = simulate_rank(rank, offload("attn_norm", leaves))
    assert (result.peak_at, result.peak_bytes) == ("F0 output", STATIC_BYTES + resident_bytes + 900)
    assert (result.d2h_bytes, result.end_bytes) == (100 * len(leaves), STATIC_BYTES)


# Pipelines.


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


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 5), (4, 4), (4, 9), (3, 1)])
def test_1f1b_takes_as_long_as_the_formula_of_its_bubble_says(stages, microbatches):
    result = simulate(make_stages(stages, FC1, microbatches=microbatches), NOTHING)
    assert result.step_s == (microbatches + stages - 1) * 60


def test_what_goes_between_stages_takes_its_time():
    result = simulate(make_stages(2, FC1, microbatches=2), NOTHING, p2p_s=1.0)
    # Rank 1 begins at 21, and is through with B0 at 81: rank 0's B0 82-122. F1 is there at 41, so 81-101, and B1 101-141.
    assert [rank.step_s for rank in result.ranks] == [142 + 40, 141]
    assert [rank.waits.neighbours_s for rank in result.ranks] == [42 + 20, 21]


def test_chunks_are_interleaved():
    result = simulate(make_stages(2, FC1, microbatches=2, chunks=2), NOTHING)
    # Rank 0: F0 0-20, F1 20-40, F0.1 40-60, F1.1 60-80, B0.1 120-160, B1.1 180-220, B0 220-260, B1 260-300.
    # Rank 1: F0 20-40, F1 40-60, F0.1 60-80, B0.1 80-120, F1.1 120-140, B1.1 140-180, B0 180-220, B1 220-260.
    assert [rank.step_s for rank in result.ranks] == [300, 260]
    assert [rank.waits.neighbours_s for rank in result.ranks] == [40 + 20, 20]
    assert [rank.peak_bytes - STATIC_BYTES for rank in result.ranks] == [400, 300]


def test_a_wait_on_one_rank_is_passed_on_to_its_neighbours():
    ranks = make_stages(2, FC1, microbatches=1, window_bytes=0)
    result = simulate(ranks, offload("expert_fc1", (0,)))
    # The copy of rank 0 is waited for, 10 s, so rank 1 runs from 30 to 90, and rank 0 fetches it, 10 s.
    assert [rank.step_s for rank in result.ranks] == [30 + 60 + 10 + 40, 90]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "not all ranks of a pipeline in order"),
        (make_stages(2, FC1, microbatches=2)[1:], r"ranks \[1\] are not all ranks"),
        ([make_rank(make_chunk(FC1)), make_rank(make_chunk(FC1), make_chunk(FC1), rank=1, passes=())], r"\[1, 2\] chunks"),
    ],
    ids=["none", "one of two", "unlike"],
)
def test_ranks_that_are_no_pipeline_are_refused(ranks, message):
    with pytest.raises(ConfigError, match=message):
        simulate(ranks, NOTHING)


def test_passes_that_wait_for_each_other_are_refused_and_not_waited_for():
    pipeline = list_passes(Pipeline(stages=2, microbatches=2), rank=0)
    ranks = [make_rank(make_chunk(FC1), passes=read_passes("F0 B0 F1 B1")), make_rank(make_chunk(FC1), rank=1, passes=pipeline)]
    assert str(pipeline[1]) == "F1"
    with pytest.raises(ConfigError, match="rank 0 waits for ever before B0"):
        simulate(ranks, NOTHING)


@pytest.mark.parametrize("p2p_s", [-1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(p2p_s):
    with pytest.raises(ConfigError, match="p2p_s"):
        simulate(make_stages(2, FC1, microbatches=2), NOTHING, p2p_s=p2p_s)


# What a plan may say.


def test_a_plan_that_a_layer_cannot_follow_is_refused_with_the_layer():
    rank = make_rank(make_chunk(FC1, FC1))
    with pytest.raises(PlanError, match=r"layers\.1 of chunk 0: The plan offloads 'mlp_norm'"):
        simulate_rank(rank, offload("mlp_norm", (1,)))


def test_a_plan_for_a_layer_that_no_rank_has_is_refused():
    ranks = make_stages(2, FC1, microbatches=2)
    with pytest.raises(PlanError, match=r"layers\.2 in chunk 0, and no rank has it"):
        simulate(ranks, offload("expert_fc1", (2,)))
    with pytest.raises(PlanError, match=r"layers\.1 in chunk 1"):
        simulate(ranks, offload("expert_fc1", (1,), chunk=1))


def test_one_rank_follows_its_own_part_of_a_plan():
    plan = OffloadPlan(actions={Site(chunk=0, layer=layer, tag="expert_fc1"): O for layer in (0, 1, 7)})
    assert simulate_rank(make_rank(make_chunk(FC1)), plan).d2h_bytes == 100


def test_what_is_too_small_stays():
    rank = make_rank(make_chunk(FC1), min_offloaded_numel=101)
    assert simulate_rank(rank, offload("expert_fc1", (0,))).d2h_bytes == 0
