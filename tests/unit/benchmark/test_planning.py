"""What the planner takes a benchmark's training for, and plans for budgets. The planner itself has tests of its own."""

from pathlib import Path

from fgoffload.benchmark.job import Job
from fgoffload.benchmark.loading import parse_setting_arguments
from fgoffload.benchmark.planning import build_workload
from fgoffload.benchmark.settings import NOTHING, parse_setting
from fgoffload.integrations.megatron.argument_files import read_argument_file
from fgoffload.integrations.megatron.training_policy import Update
from fgoffload.planner.timing.hardware import get_hardware

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
