"""What the planner takes a benchmark's training for, and plans for budgets. The planner itself has tests of its own."""

from pathlib import Path

import pytest

from fgoffload import PlanError
from fgoffload.benchmark.job import Job
from fgoffload.benchmark.loading import parse_setting_arguments
from fgoffload.benchmark.planning import build_workload, plan_for_budget
from fgoffload.benchmark.settings import NOTHING, parse_setting
from fgoffload.benchmark.simulation import predict
from fgoffload.integrations.megatron.argument_files import read_argument_file
from fgoffload.integrations.megatron.training_policy import Update
from fgoffload.planner.timing.efficiency import Efficiency
from fgoffload.planner.timing.hardware import get_hardware
from fgoffload.policy import TransferPolicy

W2 = Path(__file__).parents[3] / "arguments" / "w2_moe.sh"
GIB = 2**30


def make_job(*typed: str) -> Job:
    return Job(source="w2_moe.sh", file_flags=read_argument_file(W2), typed_flags=typed, warmup=1, steps=1, plan_folder=Path())


def build(*typed: str, update: Update = Update.NONE):
    job = make_job(*typed)
    return build_workload(
        parse_setting_arguments(job, NOTHING),
        get_hardware("h100"),
        offload=parse_setting_arguments(job, parse_setting("ours:core_attn")).offload,
        flags=(*job.file_flags, *job.typed_flags),
        source=job.source,
        update=update,
    )


def test_static_memory_is_weights_and_gradients_in_bf16_and_no_reserve():
    # 3.081 billion parameters: six layers of 4 x 4096^2, 16 x 3 x 4096 x 2048, a router and norms, and 2 x 32000 x 4096.
    layer = 4 * 4096**2 + 16 * 3 * 4096 * 2048 + 16 * 4096 + 2 * 4096
    parameters = 6 * layer + 2 * 32000 * 4096 + 4096
    (rank,) = build()
    # What comes on top are buffers of some MiB.
    assert 4 * parameters <= rank.static_bytes < 4 * parameters + 0.5 * GIB
    (updated,) = build(update=Update.ADAMW)
    assert updated.static_bytes > rank.static_bytes + 8 * parameters


def test_activations_are_fused_where_the_training_fuses_them():
    (fused,), (unfused,) = build(), build("--no-bias-swiglu-fusion")
    more = predict([unfused], NOTHING).peak_bytes - predict([fused], NOTHING).peak_bytes
    # 32768 rows of 2048 channels in bf16, three times in each layer.
    assert more == pytest.approx(6 * 3 * 128 * 2**20, rel=1e-3)


def test_rotary_embeddings_are_fused_where_the_training_fuses_them():
    (unfused,), (fused,) = build(), build("--rope-fusion")
    ones = [predict([rank], NOTHING) for rank in (unfused, fused)]
    # Query and key, 8192 tokens of 4096 channels in bf16 each, go through memory nine times and not twice, in ten kernels and
    # not in two: 6 layers and 4 microbatches, forward and backward.
    hardware, parts = get_hardware("h100"), Efficiency()
    moved_s = 7 * 2 * 8192 * 4096 * 2 / (hardware.memory_efficiency * hardware.device_memory_bytes_per_s)
    assert ones[0].step_s - ones[1].step_s == pytest.approx(2 * 6 * 4 * (moved_s + 8 * parts.kernel_start_s), rel=1e-9)
    # Cosine and sine of 4096 tokens and 128 channels in bf16, twice a layer, and not one table in fp32 for all.
    assert ones[0].peak_bytes - ones[1].peak_bytes == (6 * 8 - 4) * 4096 * 128


def test_window_and_prefetch_are_those_that_settings_run_with():
    (rank,) = build("--offload-window", "3GiB", "--offload-prefetch", "2GiB", "--min-offloaded-tensor-size", "1000")
    assert rank.policy == TransferPolicy(window_bytes=3 * GIB, prefetch_bytes=2 * GIB)
    assert rank.min_offloaded_numel == 1000


def test_a_plan_for_a_budget_is_predicted_to_keep_to_it(tmp_path):
    ranks = build()
    budget_bytes = predict(ranks, NOTHING).peak_bytes - 2 * GIB
    path = tmp_path / "plan.json"
    found = plan_for_budget(ranks, budget_bytes=budget_bytes)
    path.write_text(found.plan.to_json())
    planned = predict(ranks, parse_setting("budget:18GiB").with_plan(path))
    assert planned.peak_bytes == found.peak_bytes <= budget_bytes
    assert 1.0 < planned.ratio < 1.5
    # What is left free beside is not used.
    assert plan_for_budget(ranks, budget_bytes=budget_bytes, free_bytes=GIB).peak_bytes <= budget_bytes - GIB


def test_a_budget_below_what_does_not_move_is_refused():
    with pytest.raises(PlanError, match="static memory"):
        plan_for_budget(build(), budget_bytes=GIB)
