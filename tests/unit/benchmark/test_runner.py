"""Tests one setting in this process: step times, bitwise results and errors."""

from pathlib import Path

import pytest
from support.trainings import EXPERTS, SHAPE

from fgoffload import ConfigError, IntegrationError
from fgoffload.benchmark.job import Job
from fgoffload.benchmark.loading import load_arguments
from fgoffload.benchmark.measurement import Run
from fgoffload.benchmark.runner import Runner
from fgoffload.benchmark.settings import BASELINE, parse_setting
from fgoffload.trainer.steps import find_differences

pytestmark = pytest.mark.usefixtures("parallel")

FLAGS = f"{SHAPE} {EXPERTS} --hidden-dropout 0 --attention-dropout 0 --vocab-size 300"
OURS = "--min-offloaded-tensor-size 64 --offload-prefetch 64KiB"


def make_job(flags: str = f"{FLAGS} {OURS}", **options) -> Job:
    options = {"warmup": 1, "steps": 2, "folder": Path(), **options}
    return Job(source="test.sh", file_flags=tuple(flags.split()), **options)


def test_only_timed_steps_have_times():
    losses = []
    job = make_job(warmup=2, steps=3)
    measured = Runner(job, losses.append).measure_times(Run(setting=BASELINE, repeat=0))
    assert len(measured.step_seconds) == 3
    assert min(measured.step_seconds) > 0
    assert len(losses) == job.steps_of_run == 5
    # All steps have the same loss, since tokens and weights do not change.
    assert len(set(losses)) == 1


def test_timed_steps_start_after_the_first_replay_of_captured_graphs():
    losses = []
    job = make_job(steps_until_replay=3)
    measured = Runner(job, losses.append).measure_times(Run(setting=BASELINE, repeat=0))
    assert len(measured.step_seconds) == 2
    assert len(losses) == job.steps_of_run == 3 + 1 + 2


def test_bits_are_recorded_until_the_first_replay_of_captured_graphs():
    job = make_job(steps_until_replay=3, compares_bits=True)
    assert len(Runner(job, lambda loss: None).record_bits(BASELINE)) == job.steps_of_run == 4


@pytest.mark.parametrize("name", ["ours:core_attn+attn_proj+expert_fc1", "ours:layer_input/full"])
def test_settings_are_bitwise_identical_to_the_baseline(name):
    runner = Runner(make_job(compares_bits=True), lambda loss: None)
    before, after = (runner.record_bits(parse_setting(one)) for one in ("baseline", name))
    assert len(after) == 2
    assert after[0].gradient_digests
    assert find_differences(before, after) == {}


def test_recompute_lowers_the_activation_peak():
    runner = Runner(make_job(), lambda loss: None)
    runs = (Run(setting=parse_setting(name), repeat=0) for name in ("baseline", "recompute:full"))
    kept, full = map(runner.measure_times, runs)
    assert 0 < full.activation_peak_bytes < kept.activation_peak_bytes


def test_megatrons_engine_needs_a_gpu():
    with pytest.raises(IntegrationError, match="own offload engine needs a GPU"):
        Runner(make_job(), lambda loss: None).measure_times(Run(setting=parse_setting("megatron:core_attn"), repeat=0))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--recompute-granularity selective", "--recompute-granularity is controlled by the settings of a benchmark"),
        ("--cpu-offloading --cpu-offloading-num-layers 1", "--cpu-offloading is controlled by the settings of a benchmark"),
        ("--fp16", "--fp16, which needs loss scaling, is not supported in this version"),
        ("--num-query-groups 2", "--num-query-groups 2 has no effect without --group-query-attention"),
    ],
)
def test_flags_controlled_by_settings_and_unsupported_flags_are_rejected(flags, message):
    with pytest.raises(ConfigError) as caught:
        load_arguments(make_job(f"{FLAGS} {flags}"))
    assert message in str(caught.value)
