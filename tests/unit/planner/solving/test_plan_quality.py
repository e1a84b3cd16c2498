"""How fast plans are for models of `arguments/`: no slower than what was once found, and as long as is predicted."""

import dataclasses
from pathlib import Path

import pytest

from fgoffload import OffloadPlan
from fgoffload.integrations.megatron.model_shapes import read_model_file
from fgoffload.planner.model_ranks import build_ranks
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.megatron_flags import baselines, list_offloading_flags
from fgoffload.planner.solving.solver import find_least_budget, solve
from fgoffload.planner.timing.hardware import get_hardware
from fgoffload.units import GIB

ARGUMENTS = Path(__file__).parents[4] / "arguments"


@pytest.mark.parametrize(
    ("model", "gpu", "part", "most"),
    [
        # Chunks of 27, 32 and 48 layers: the link takes what a layer moves beside it, or nearly, and not what all of them do.
        ("llama3_8b", "h100", 0.45, 1.061),
        ("llama3_8b", "h100", 0.55, 1.039),
        ("deepseek_v2_lite", "h100", 0.35, 1.098),
        ("qwen3_30b_a3b", "h200", 0.15, 1.132),
        ("qwen3_30b_a3b", "h200", 0.30, 1.084),
        ("qwen3_30b_a3b", "h200", 0.45, 1.048),
        ("qwen3_30b_a3b", "h200", 0.60, 1.0216),
        # Chunks of two and three layers: what is watched hides the first copy back. Without it 1.030 and 1.0165.
        ("deepseek_v3", "h100", 0.282, 1.0075),
        ("qwen3_235b_a22b", "h100", 0.281, 1.0115),
        # And the program of each rank says what its plan takes, or its plans stay above the budget: 1.017.
        ("qwen3_235b_a22b", "h100", 0.477, 1.0042),
        # What the last layer of a chunk calls back there makes the copies of the others late: 1.0057 with such ways alone.
        ("qwen3_235b_a22b", "h200", 0.4996, 1.0045),
    ],
)
def test_a_plan_is_as_fast_as_before(model, gpu, part, most):
    """`part` is of what lies between full recompute and keeping all, `most` the step over that of keeping all."""
    ranks = build_ranks(*read_model_file(ARGUMENTS / f"{model}.sh"), get_hardware(gpu))
    kept = simulate(ranks, OffloadPlan(actions={}))
    full = simulate(ranks, baselines(ranks)["full recompute"])
    budget_bytes = round(full.peak_bytes + (kept.peak_bytes - full.peak_bytes) * part)
    found = solve(ranks, budget_bytes=budget_bytes).result
    assert found.peak_bytes <= budget_bytes
    assert found.step_s <= most * kept.step_s


@pytest.mark.parametrize(
    ("budget_gib", "best_s"),
    [
        # Of 33 000 plans that random walks over the whole scale of budgets had simulated: steps of the fastest that fit.
        (60.10, 0.9019),
        (60.25, 0.8877),
        (60.44, 0.8736),
    ],
)
def test_near_the_least_budget_of_one_stage_a_plan_is_near_the_best_known(budget_gib, best_s):
    """Full recompute takes 60.5 GiB and 0.973 s. Without walks these plans took 1.007, 0.999 and 1.002 s."""
    ranks = build_ranks(*read_model_file(ARGUMENTS / "mla_moe.sh"), get_hardware("h200"))
    found = solve(ranks, budget_bytes=round(budget_gib * GIB)).result
    assert found.peak_bytes <= round(budget_gib * GIB)
    assert found.step_s <= 1.02 * best_s


def load_ranks(model, *, gpu="h100", host_gib=153.6):
    """Return the ranks of a file of `arguments/` with the host memory that `fgoffload plan` takes for a rank."""
    ranks = build_ranks(*read_model_file(ARGUMENTS / f"{model}.sh"), get_hardware(gpu))
    return [dataclasses.replace(rank, host_budget_bytes=round(host_gib * GIB)) for rank in ranks]


@pytest.mark.parametrize(
    ("model", "part"),
    [
        # What is on its way when a loss begins: more than nothing in each plan, and in two of them on one stage.
        ("deepseek_v2_lite", 0.3),
        ("llama3_8b", 0.4),
        ("llama3_8b", 0.05),
        ("llama3_70b", 0.05),
    ],
)
def test_what_is_predicted_is_what_the_plan_comes_to_and_fits(model, part):
    """`part` is of what lies between full recompute and keeping all."""
    ranks = load_ranks(model)
    kept = simulate(ranks, OffloadPlan(actions={}))
    full = simulate(ranks, baselines(ranks)["full recompute"])
    budget_bytes = round(full.peak_bytes + (kept.peak_bytes - full.peak_bytes) * part)
    solution = solve(ranks, budget_bytes=budget_bytes)
    assert solution.plan.loss_window_bytes is not None
    found = simulate(ranks, OffloadPlan.from_json(solution.plan.to_json(), source="it"))
    assert found == solution.result
    assert found.peak_bytes <= budget_bytes


@pytest.mark.parametrize(
    ("model", "recompute", "more_gib", "part"),
    [
        # DeepSeek-V3's plan was 31.6% slower there, Llama-3 70B's 15.9%, and for GPT-OSS none was found.
        ("deepseek_v3", "moe_act", 0.0, 1.0),
        # What rank by rank is best waits for neighbours: all ranks alike are 0.2% faster.
        ("deepseek_v3", "moe_act", 3.6, 1.0),
        # With a little less than that: what begins with such plans comes near them, and without it takes 1.19.
        ("deepseek_v3", "moe_act", -0.0005, 1.14),
        # With nothing on its way before the loss there is room for more elsewhere on the last rank.
        # And that rank, which all others wait for, runs nothing again: with recompute it is as fast alone, and the step 0.978.
        ("llama3_70b", "", 0.01, 0.96),
        ("gpt_oss_120b", "", 0.0, 1.0),
    ],
)
def test_a_plan_is_no_slower_than_to_offload_everything_and_wait_for_it_before_the_loss(model, recompute, more_gib, part):
    """`more_gib` is above what that takes, `part` the most of its step that the plan may take."""
    ranks = load_ranks(model)
    plan = baselines(ranks)["offload everything"]
    if recompute:
        sets = {one.recompute.modules: one for one in list_offloading_flags(ranks)}
        plan = sets[(recompute,)].make_plan(ranks)
    by_hand = simulate(ranks, dataclasses.replace(plan, loss_window_bytes=0))
    budget_bytes = by_hand.peak_bytes + round(more_gib * GIB)
    found = solve(ranks, budget_bytes=budget_bytes).result
    assert found.peak_bytes <= budget_bytes
    assert found.step_s <= part * by_hand.step_s


def test_the_least_budget_is_no_more_than_to_offload_everything_and_wait_for_it_before_the_loss():
    ranks = load_ranks("gpt_oss_120b")
    by_hand = simulate(ranks, dataclasses.replace(baselines(ranks)["offload everything"], loss_window_bytes=0))
    assert find_least_budget(ranks) <= by_hand.peak_bytes
