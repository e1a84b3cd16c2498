"""What a solution says of each decision, with the numbers that it rests on."""

import pytest
from support.toy_ranks import make_toy_rank

from fgoffload import Action, OffloadPlan, Site
from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulator import simulate_rank
from fgoffload.planner.solving.choices import list_configurations, list_modes
from fgoffload.planner.solving.placement import list_slots
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


def test_copies_that_are_waited_for_say_how_much():
    rank, plan = make_rank(bytes_per_s=0.1), OffloadPlan(actions={Site(chunk=0, layer=0, tag="core_attn"): Action.OFFLOAD})
    decision = explain(rank, {"core_attn": Action.OFFLOAD}, {})["core_attn", 0]
    result = simulate_rank(rank, plan)
    # Nothing else moves, and the only waits are for this.
    part = result.waits.copies_s / (result.d2h_s + result.h2d_s)
    assert part > 0.1
    assert decision.reason == f"leaves: 8 B, and compute waits for {part:.0%} of the time of its copies"


@pytest.mark.parametrize("bytes_per_s", [1.0, 10.0])
def test_recompute_says_its_time_and_bytes_and_nothing_of_the_link(bytes_per_s):
    decision = explain(make_rank(bytes_per_s=bytes_per_s), {"moe_act": Action.RECOMPUTE}, {})["moe_act", 0]
    assert decision.reason == "runs again: 1000.0 ms of compute, 2 B off the device"
    assert (decision.freed_bytes, decision.recompute_s) == (2, 1.0)


def test_what_is_kept_says_why():
    rank = make_rank(bytes_per_s=1.0, min_offloaded_numel=5)
    decisions = explain(rank, {"core_attn": Action.OFFLOAD}, {"moe_act": Action.RECOMPUTE})
    assert decisions["core_attn", 1].reason == (
        "kept: the last layers of the chunk, which backward wants first; the budget holds without them"
    )
    assert decisions["expert_fc1", 0].reason == "kept: the budget holds without it"
    assert decisions["layer_input", 0].reason == "kept: 1 B, below the least that moves, 5 elements"
