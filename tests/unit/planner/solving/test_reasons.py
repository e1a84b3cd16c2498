"""What a solution says of each decision, with the numbers that it rests on."""

import dataclasses

import pytest
from support.deepseek_ranks import make_layer, make_ranks
from support.toy_ranks import make_toy_layer, make_toy_rank

from fgoffload import Action, OffloadPlan, Site
from fgoffload.planner.ranks.rank_model import ChunkModel, LinkModel, NumberedLayer
from fgoffload.planner.ranks.schedule import Pipeline, list_passes
from fgoffload.planner.simulation.simulator import simulate_rank
from fgoffload.planner.solving.choices import list_configurations, list_modes
from fgoffload.planner.solving.placement import keep_all, list_slots
from fgoffload.planner.solving.reasons import explain_rank


def explain(rank, *rows):
    """Return the decisions of a rank whose layers do `rows`, by tag and first layer."""
    slots = list_slots(rank)
    modes = {slot.layer.kind: list_modes(slot.layer, min_offloaded_numel=rank.min_offloaded_numel) for slot in slots}
    wanted = [tuple(sorted(row.items())) for row in rows]
    ways = {kind: {way.actions: way for way in list_configurations(of_kind)} for kind, of_kind in modes.items()}
    state = tuple(ways[slot.layer.kind][row] for slot, row in zip(slots, wanted, strict=True))
    actions = {
        Site(chunk=slot.chunk, layer=slot.number, tag=tag): action
        for slot, row in zip(slots, rows, strict=True)
        for tag, action in row.items()
    }
    result = simulate_rank(rank, OffloadPlan(actions=actions))
    decisions = explain_rank(rank, slots, state, result, keeps_within_budget=False)
    return {(decision.tag, decision.layers[0]): decision for decision in decisions}


def make_rank(*, bytes_per_s, **options):
    link = LinkModel(d2h_bytes_per_s=bytes_per_s, h2d_bytes_per_s=bytes_per_s, duplex_bytes_per_s=bytes_per_s)
    return make_toy_rank(link=link, pipeline=Pipeline(stages=2, microbatches=3), **options)


def test_every_tag_and_unit_of_every_layer_has_one_decision():
    rank = make_rank(bytes_per_s=1.0)
    decisions = explain(rank, {"core_attn": Action.OFFLOAD}, {})
    names = ["layer_input", "core_attn", "core_attn", "expert_fc1", "moe_act", "expert_fc2", "layer"]
    assert [tag for tag, _ in decisions] == names
    assert decisions["core_attn", 0].layers == (0,)
    assert decisions["core_attn", 1].layers == (1,)
    assert decisions["expert_fc1", 0].layers == (0, 1)


def test_layers_that_keep_a_tag_for_another_reason_have_another_decision():
    rank = make_rank(bytes_per_s=100.0)
    decisions = explain(rank, {"moe_act": Action.RECOMPUTE}, {})
    assert decisions["expert_fc2", 0].reason == "kept: moe_act runs again, so that it saves nothing"
    assert decisions["expert_fc2", 0].layers == (0,)
    assert decisions["expert_fc2", 1].reason == "kept: the budget holds without it"
    assert decisions["expert_fc2", 1].layers == (1,)


def test_copies_that_hide_are_waited_for_by_nobody():
    # 8 bytes at 100 a second: 80 ms beside seconds of compute. Only what backward begins with is waited for.
    decision = explain(make_rank(bytes_per_s=100.0), {"core_attn": Action.OFFLOAD}, {"expert_fc2": Action.OFFLOAD})[
        "core_attn", 0
    ]
    assert decision.reason == "leaves: 8 B, and compute waits for none of the time of its copies"
    assert (decision.moved_bytes, decision.freed_bytes) == (8, 8)


def test_copies_that_are_waited_for_say_how_much():
    rank, plan = make_rank(bytes_per_s=0.1), OffloadPlan(actions={Site(chunk=0, layer=0, tag="core_attn"): Action.OFFLOAD})
    decision = explain(rank, {"core_attn": Action.OFFLOAD}, {})["core_attn", 0]
    result = simulate_rank(rank, plan)
    # Nothing else moves, and the only waits are for this.
    part = result.waits.copies_s / (result.d2h_s + result.h2d_s)
    assert part > 0.1
    assert decision.reason == f"leaves: 8 B, and compute waits for {part:.0%} of the time of its copies"


def test_what_the_host_budget_has_no_room_for_is_not_said_to_move():
    rank = make_rank(bytes_per_s=100.0, host_budget_bytes=7)
    decision = explain(rank, {"core_attn": Action.OFFLOAD}, {})["core_attn", 0]
    assert decision.reason == "leaves: nothing of it, since something else holds it or the host budget is used up"


@pytest.mark.parametrize("bytes_per_s", [1.0, 10.0])
def test_recompute_says_its_time_and_bytes_and_nothing_of_the_link(bytes_per_s):
    decision = explain(make_rank(bytes_per_s=bytes_per_s), {"moe_act": Action.RECOMPUTE}, {})["moe_act", 0]
    assert decision.reason == "runs again: 1000.0 ms of compute, 2 B off the device"
    assert (decision.freed_bytes, decision.recompute_s) == (2, 1.0)


def test_what_runs_again_and_leaves_says_both():
    rows = ({"moe_act": Action.RECOMPUTE_AND_OFFLOAD}, {"expert_fc2": Action.OFFLOAD})
    decision = explain(make_rank(bytes_per_s=1e3), *rows)["moe_act", 0]
    assert decision.reason == (
        "runs again, and what it needs leaves: 1000.0 ms of compute, 6 B off the device; 4 B, and compute waits for none of "
        "the time of its copies"
    )
    assert (decision.moved_bytes, decision.freed_bytes) == (4, 6)


def test_what_leaves_with_a_tag_counts_though_recompute_spares_another_tag_as_much():
    # The norm's input of 58.7 MB leaves, and its output, which the projection behind it would send, is made again.
    rank = dataclasses.replace(
        make_ranks()[0], chunks=(ChunkModel(layers=(NumberedLayer(number=0, model=make_layer("moe")),)),)
    )
    rank = dataclasses.replace(rank, passes=list_passes(Pipeline(microbatches=2), rank=0))
    rows = {"attn_norm": Action.RECOMPUTE_AND_OFFLOAD, "qkv_linear": Action.OFFLOAD}
    decision = explain(rank, rows)["attn_norm", 0]
    assert decision.moved_bytes == 2 * 4096 * 7168


def test_what_is_kept_says_why():
    rank = make_rank(bytes_per_s=1.0, min_offloaded_numel=5)
    decisions = explain(rank, {"core_attn": Action.OFFLOAD}, {"moe_act": Action.RECOMPUTE})
    assert decisions["core_attn", 1].reason == (
        "kept: the last layers of the chunk, which backward wants first; the budget holds without them"
    )
    assert decisions["expert_fc1", 0].reason == "kept: the budget holds without it"
    assert decisions["layer_input", 0].reason == "kept: 1 B, below the least that moves, 5 elements"


def test_what_a_unit_covers_says_so():
    decisions = explain(make_rank(bytes_per_s=1.0), {"layer": Action.RECOMPUTE}, {"layer": Action.RECOMPUTE})
    assert decisions["expert_fc1", 0].reason == "kept: layer runs again, so that it saves nothing"


def test_what_fits_says_so():
    rank = make_rank(bytes_per_s=1.0)
    slots = list_slots(rank)
    modes = {"toy": list_modes(make_toy_layer(), min_offloaded_numel=1)}
    kept = keep_all(slots, modes)
    result = simulate_rank(rank, OffloadPlan(actions={}))
    decisions = explain_rank(rank, slots, kept, result, keeps_within_budget=True)
    assert {decision.reason for decision in decisions} == {"kept: everything fits"}
