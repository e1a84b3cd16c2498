"""How fast plans are for models of `arguments/` that run on one pipeline stage: no slower than what was once found."""

from pathlib import Path

import pytest

from fgoffload import OffloadPlan
from fgoffload.integrations.megatron.model_shapes import read_model_file
from fgoffload.planner.model_ranks import build_ranks
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.megatron_flags import baselines
from fgoffload.planner.solving.solver import solve
from fgoffload.planner.timing.hardware import get_hardware

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
