"""What the simulator is asked for each setting."""

from pathlib import Path

import pytest
from support.toy_ranks import make_toy_rank
from support.trainings import write_plan

from fgoffload import Action, OffloadPlan, PlanError
from fgoffload.benchmark.settings import parse_setting
from fgoffload.benchmark.simulation import make_plan, predict
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulator import simulate

RANKS = [make_toy_rank(pipeline=Pipeline(microbatches=3), static_bytes=100)]


def write(plan):
    return {f"{site}: {action.value}" for site, action in plan.actions.items()}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("nothing", set()),
        ("recompute:full", {"layers.0.layer: recompute", "layers.1.layer: recompute"}),
        ("ours:core_attn@0.5", {"layers.0.core_attn: offload"}),
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


def test_a_plan_for_another_model_is_refused(tmp_path):
    setting = parse_setting(f"plan:{write_plan(tmp_path / 'x.json', {(99, 'core_attn'): Action.OFFLOAD})}")
    with pytest.raises(PlanError, match=r"layers\.99"):
        predict(RANKS, setting)
    with pytest.raises(PlanError, match="No such file"):
        predict(RANKS, parse_setting("budget:1GiB").with_plan(Path("none.json")))
