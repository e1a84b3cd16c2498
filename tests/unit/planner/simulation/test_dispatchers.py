"""What token dispatchers hold of a recompute where this package does not run, in bytes that can be counted by hand."""

import dataclasses

import pytest
from support.toy_ranks import make_toy_rank

from fgoffload import Action, OffloadPlan, Site
from fgoffload.benchmark.settings import parse_setting
from fgoffload.benchmark.simulation import predict
from fgoffload.cli.plan_report import describe_flags
from fgoffload.planner.ranks.layer_model import LayerModel, SavedTensor, Segment, UnitModel
from fgoffload.planner.ranks.rank_model import Turn
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulator import Detail, simulate, simulate_rank
from fgoffload.planner.solving.flag_search import NearestFlags, find_nearest
from fgoffload.planner.solving.megatron_flags import (
    FullMethod,
    FullRecompute,
    MegatronFlags,
    SelectiveRecompute,
)
from fgoffload.planner.solving.rank_searches import RankSearches
from fgoffload.planner.solving.search_limits import SearchLimits
from fgoffload.planner.solving.solver import solve
from fgoffload.units import GIB

NAMES = ("core_attn", "router", "expert_fc1", "moe_act")
EXPERTS = NAMES[1:]


def make_layer(names=NAMES, *, scale=1):
    """Return a layer whose input has 10 bytes, and whose other tensors have 100 each: one for each stretch."""
    tensors = tuple(SavedTensor(name=name, tags=(name,), size_bytes=100 * scale) for name in names)
    layer_input = SavedTensor(name="layer input", tags=("layer_input",), size_bytes=10 * scale)
    table = SavedTensor(name="table", tags=("layer_input",), size_bytes=5000, is_same_in_all_layers=True)
    inside = tuple(name for name in names if name in EXPERTS)
    return LayerModel(
        kind="moe",
        segments=tuple(Segment(name=name, forward_s=1.0, backward_s=2.0) for name in names),
        tensors=(layer_input, table, *tensors),
        units=(
            UnitModel(name="layer", segments=names, drops=names, before=names[-1]),
            UnitModel(name="moe", segments=inside, drops=inside, before=names[-1]),
            UnitModel(name="moe_act", segments=("moe_act",), drops=("moe_act",), before="moe_act"),
        ),
    )


def make_rank(*, layers=3, microbatches=2, stages=1, rank=0, has_engine=False, layer=None):
    made = make_toy_rank(
        layers=[[layer or make_layer()] * layers], pipeline=Pipeline(microbatches=microbatches, stages=stages), rank=rank
    )
    return dataclasses.replace(made, has_engine=has_engine, static_bytes=1000)


def make_plan(unit, *, layers=3):
    return OffloadPlan(actions={Site(chunk=0, layer=number, tag=unit): Action.RECOMPUTE for number in range(layers)})


@pytest.mark.parametrize("unit", ["layer", "moe"])
def test_each_layer_holds_input_and_gradient_of_its_last_recompute_between_two_steps(unit):
    result = simulate_rank(make_rank(), make_plan(unit))
    assert (result.static_bytes, result.end_bytes) == (1000, 1000 + 3 * 20)
    again = simulate_rank(make_rank(has_engine=True), make_plan(unit))
    assert (again.end_bytes, again.step_s) == (1000, result.step_s)


@pytest.mark.parametrize("unit", ["layer", "moe"])
def test_the_last_layer_of_backward_has_what_all_others_hold(unit):
    with_engine = simulate_rank(make_rank(has_engine=True), make_plan(unit)).peak_bytes
    without = simulate_rank(make_rank(), make_plan(unit))
    # Inputs of 10 (and 100 of attention) go from layer to layer, and 20 come: the peak moves, or stays where it was.
    expected = max(
        1000 + 5000 + kept * (layer + 1) + made + 20 * (2 - layer)
        for kept, made in [(10, 400) if unit == "layer" else (110, 300)]
        for layer in range(3)
    )
    assert (with_engine, without.peak_bytes) == (1000 + 5000 + (430 if unit == "layer" else 630), expected)


def test_forward_lets_go_layer_by_layer_where_the_router_has_run():
    result = simulate_rank(make_rank(microbatches=1), make_plan("layer"), detail=Detail.TIMELINE)
    memory = [(point.at_s, point.device_bytes) for point in result.timeline.memory]
    # Stretches of a second, of which the router is the second; the input is saved with the first.
    at = {seconds: device_bytes for seconds, device_bytes in memory if seconds <= 10}
    assert [at[seconds] - 6000 for seconds in (1.0, 2.0, 6.0, 10.0)] == [10 + 60, 10 + 40, 20 + 20, 30]


def test_what_does_not_run_the_dispatcher_again_holds_nothing():
    assert simulate_rank(make_rank(), make_plan("moe_act")).end_bytes == 1000
    dense = make_layer(("core_attn", "expert_fc1", "moe_act"))
    assert simulate_rank(make_rank(layer=dense), make_plan("layer")).end_bytes == 1000
    assert simulate_rank(make_rank(), OffloadPlan(actions={})).end_bytes == 1000


def test_a_recompute_in_a_pipeline_takes_the_place_of_the_one_before():
    # The last backwards come without a forward between them: each layer still holds one leaf.
    ranks = [make_rank(layers=1, stages=2, rank=0), dataclasses.replace(make_rank(layers=1, stages=2, rank=1))]
    ranks[1] = dataclasses.replace(
        ranks[1],
        chunks=(
            dataclasses.replace(ranks[1].chunks[0], layers=(dataclasses.replace(ranks[1].chunks[0].layers[0], number=1),)),
        ),
    )
    result = simulate(ranks, make_plan("layer", layers=2))
    assert [one.end_bytes for one in result.ranks] == [1020, 1020]


def test_rounds_that_are_left_out_change_no_byte():
    long, short = (simulate_rank(make_rank(microbatches=count), make_plan("layer")) for count in (40, 8))
    assert (long.peak_bytes, long.end_bytes) == (short.peak_bytes, short.end_bytes)
    timeline = simulate_rank(make_rank(microbatches=40), make_plan("layer"), detail=Detail.TIMELINE)
    assert (long.peak_bytes, long.end_bytes) == (timeline.peak_bytes, timeline.end_bytes)


def test_settings_of_megatrons_own_recompute_are_predicted_without_this_package_and_ours_with_it():
    ranks = [make_rank(has_engine=True)]
    alone = simulate([make_rank()], make_plan("layer")).peak_bytes
    assert predict(ranks, parse_setting("recompute:full")).peak_bytes == alone
    with_engine = predict(ranks, parse_setting("ours:layer_input/full")).peak_bytes
    assert with_engine < alone


@pytest.mark.parametrize("recompute", [FullRecompute(method=FullMethod.UNIFORM), SelectiveRecompute(modules=("moe",))])
def test_flags_run_without_this_package_unless_they_offload(recompute):
    ranks = [make_rank(has_engine=True)]
    assert [rank.has_engine for rank in MegatronFlags(recompute=recompute).adapt(ranks)] == [False]
    offloading = MegatronFlags(offload_modules=("core_attn",), recompute=recompute)
    assert [rank.has_engine for rank in offloading.adapt(ranks)] == [True]
    # Without a plan nothing is waited for before the loss.
    assert [rank.turn for rank in offloading.adapt(ranks)] == [Turn.CALL_BACK]


def test_the_nearest_flags_are_shown_with_what_dispatchers_hold():
    ranks = [make_rank(has_engine=True, layer=make_layer(scale=GIB))]
    flags = MegatronFlags(recompute=FullRecompute(method=FullMethod.UNIFORM))
    # The same plan beside this package: three inputs of 10 GiB and the last layer's 400, less than one input and twice 20.
    nearest = NearestFlags(flags=flags, result=simulate(flags.adapt(ranks), flags.make_plan(ranks)))
    text = describe_flags(nearest, simulate(ranks, make_plan("layer"))).plain
    assert "and +20.00 GiB of peak." in text


def test_a_plan_is_not_taken_for_megatrons_own_recompute_though_both_do_the_same(monkeypatch):
    ranks = [make_rank(has_engine=True)]
    nearest = find_nearest(ranks, budget_bytes=6450)
    assert nearest.flags == MegatronFlags(recompute=FullRecompute(method=FullMethod.BLOCK, layers=2))
    monkeypatch.setattr(RankSearches, "_find_apart", lambda self, *_: self.list_baselines()["full recompute"])
    solution = solve(ranks, budget_bytes=6450, limits=SearchLimits(exhaustive_plans=0, simulations=0))
    assert solution.plan == nearest.flags.make_plan(ranks)
    assert solution.result == simulate(ranks, solution.plan) != nearest.result
