"""What the simulator is asked for each setting."""

from pathlib import Path

import pytest
from support.toy_ranks import make_toy_layer, make_toy_rank
from support.trainings import write_plan

from fgoffload import Action, ConfigError, OffloadPlan, PlanError, Site
from fgoffload.benchmark.settings import NOTHING, parse_setting
from fgoffload.benchmark.simulation import make_plan, predict
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulator import simulate

LAYER = make_toy_layer()
RANKS = [make_toy_rank(pipeline=Pipeline(microbatches=3), static_bytes=100)]


def write(plan):
    return {f"{site}: {action.value}" for site, action in plan.actions.items()}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("nothing", set()),
        ("recompute:full", {"layers.0.layer: recompute", "layers.1.layer: recompute"}),
        ("recompute:moe_act", {"layers.0.moe_act: recompute", "layers.1.moe_act: recompute"}),
        ("ours:core_attn", {"layers.0.core_attn: offload", "layers.1.core_attn: offload"}),
        ("ours:core_attn@0.5", {"layers.0.core_attn: offload"}),
        (
            "ours:layer_input/full",
            {f"layers.{layer}.{row}" for layer in (0, 1) for row in ("layer: recompute", "layer_input: offload")},
        ),
        (
            "ours:expert_fc1/moe_act",
            {f"layers.{layer}.{row}" for layer in (0, 1) for row in ("moe_act: recompute", "expert_fc1: offload")},
        ),
    ],
)
def test_a_setting_is_the_plan_that_its_flags_come_to(name, rows):
    setting = parse_setting(name)
    plan = make_plan(RANKS, setting)
    assert write(plan) == rows
    predicted, simulated = predict(RANKS, setting), simulate(RANKS, plan)
    assert (predicted.step_s, predicted.peak_bytes) == (simulated.step_s, simulated.peak_bytes)
    assert predicted.ratio == simulated.step_s / simulate(RANKS, OffloadPlan(actions={})).step_s
    assert predicted.static_bytes == 100


def test_a_plan_and_a_budgets_plan_are_followed(tmp_path):
    path = write_plan(tmp_path / "x.json", {(0, "layer"): Action.RECOMPUTE, (1, "expert_fc1"): Action.OFFLOAD})
    expected = {"layers.0.layer: recompute", "layers.1.expert_fc1: offload"}
    assert write(make_plan(RANKS, parse_setting(f"plan:{path}"))) == expected
    assert write(make_plan(RANKS, parse_setting("budget:1GiB").with_plan(path))) == expected


def test_of_a_plan_what_saves_nothing_in_a_layer_stays_and_still_runs_again(tmp_path):
    actions = {(0, "router"): Action.OFFLOAD, (0, "mlp_norm"): Action.RECOMPUTE_AND_OFFLOAD, (1, "core_attn"): Action.OFFLOAD}
    setting = parse_setting(f"plan:{write_plan(tmp_path / 'x.json', actions)}")
    assert write(make_plan(RANKS, setting)) == {"layers.0.mlp_norm: recompute", "layers.1.core_attn: offload"}


def test_a_plan_for_another_model_is_refused(tmp_path):
    setting = parse_setting(f"plan:{write_plan(tmp_path / 'x.json', {(99, 'core_attn'): Action.OFFLOAD})}")
    with pytest.raises(PlanError, match=r"layers\.99"):
        predict(RANKS, setting)
    with pytest.raises(PlanError, match="No such file"):
        predict(RANKS, parse_setting("budget:1GiB").with_plan(Path("none.json")))


def test_a_module_that_the_planner_does_not_know_is_refused():
    with pytest.raises(ConfigError, match="--recompute-modules 'mhc'"):
        predict(RANKS, parse_setting("recompute:mhc"))


def test_what_the_model_runs_again_and_the_measured_layers_cannot_is_refused():
    measured = type(LAYER)(kind="measured", segments=LAYER.segments, tensors=LAYER.tensors, units=LAYER.units[:1])
    # Of two layers, one was measured with the activation as a unit.
    ranks = [make_toy_rank(layers=[[LAYER, measured]], pipeline=Pipeline(microbatches=3))]
    assert predict(ranks, parse_setting("recompute:full"), like=RANKS).ratio > 1
    assert predict(ranks, NOTHING, like=RANKS).ratio == 1
    with pytest.raises(PlanError, match=r"nothing is known of what it takes to run layers\.1\.moe_act again by itself"):
        predict(ranks, parse_setting("recompute:moe_act"), like=RANKS)


def test_without_a_model_to_compare_with_each_module_has_to_run_again_somewhere():
    with pytest.raises(PlanError, match="to run layernorm again by itself"):
        predict(RANKS, parse_setting("recompute:moe_act+layernorm"))
    # The model has none of these either: its flag does nothing.
    assert predict(RANKS, parse_setting("recompute:moe_act+layernorm"), like=RANKS).ratio > 1


def test_sites_of_a_plan_keep_their_chunk():
    pipeline = Pipeline(stages=1, chunks=1, microbatches=2)
    ranks = [make_toy_rank(layers=[[LAYER]], pipeline=pipeline)]
    assert list(make_plan(ranks, parse_setting("ours:core_attn")).actions) == [Site(chunk=0, layer=0, tag="core_attn")]
