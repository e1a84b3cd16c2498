"""One setting in this process: what is measured, and what is left behind."""

import dataclasses
import gc
import gzip
import json
import types
from pathlib import Path

import pytest
import torch
from support.trainings import EXPERTS, SHAPE, write_plan

from fgoffload import Action, ConfigError, OffloadPlan, Site
from fgoffload.benchmark import budget_plans
from fgoffload.benchmark import runner as runner_module
from fgoffload.benchmark.forecaster import Forecaster, check_profile
from fgoffload.benchmark.job import Job, Run, make_file_name
from fgoffload.benchmark.loading import describe_workload, load_arguments
from fgoffload.benchmark.planning import Planned, build_profile_ranks
from fgoffload.benchmark.prediction import Source
from fgoffload.benchmark.runner import Runner, quiet_collector, save_on_cpu
from fgoffload.benchmark.settings import NOTHING, PROFILE, parse_setting
from fgoffload.benchmark.steps import find_gradient_difference, find_loss_difference
from fgoffload.integrations import link as link_module
from fgoffload.integrations.megatron.profile_training import PLAIN_STEPS
from fgoffload.integrations.megatron.training import Trainer
from fgoffload.integrations.megatron.training_policy import Kernels, TrainingPolicy, Update
from fgoffload.planner.late_host import Tried
from fgoffload.planner.timing.profile import MeasuredTraining, Profile

pytestmark = pytest.mark.usefixtures("parallel")

FLAGS = f"{SHAPE} {EXPERTS} --hidden-dropout 0 --attention-dropout 0 --vocab-size 300"
OURS = "--min-offloaded-tensor-size 64 --offload-prefetch 64KiB"


def make_job(flags: str = f"{FLAGS} {OURS}", **options) -> Job:
    options = {"warmup": 1, "steps": 2, "plan_folder": Path(), **options}
    return Job(source="test.sh", file_flags=tuple(flags.split()), **options)


def measure(name: str, job: Job | None = None, *, repeat: int = 0):
    return Runner(job or make_job(), lambda loss: None).measure_times(Run(setting=parse_setting(name), repeat=repeat))


def test_each_timed_step_has_a_time_and_warmup_steps_have_none():
    losses = []
    job = make_job(warmup=2, steps=3)
    measured = Runner(job, losses.append).measure_times(Run(setting=NOTHING, repeat=0))
    assert len(measured.step_seconds) == 3
    assert min(measured.step_seconds) > 0
    assert len(losses) == job.steps_of_run == 5
    # Without an update, and with the same tokens, every step is the same.
    assert len(set(losses)) == 1


def test_with_an_update_steps_go_on():
    losses = []
    Runner(make_job(update=Update.ADAMW), losses.append).measure_times(Run(setting=NOTHING, repeat=0))
    assert len(set(losses)) == 3


def test_recompute_and_offload_lower_the_peak_of_activations_and_only_offload_moves_bytes():
    nothing, full, ours = (measure(name) for name in ("nothing", "recompute:full", "ours:core_attn+attn_proj"))
    assert full.activation_peak_bytes < nothing.activation_peak_bytes / 2
    assert ours.activation_peak_bytes < nothing.activation_peak_bytes
    assert (nothing.d2h_bytes, full.d2h_bytes) == (None, None)
    assert ours.d2h_bytes > 0
    assert ours.host_bytes > 0
    assert nothing.peak_allocated_bytes is None  # no allocator counts on a CPU


def test_a_plan_is_followed(tmp_path):
    path = write_plan(tmp_path / "plan.json", {(0, "layer"): Action.RECOMPUTE, (1, "expert_fc1"): Action.OFFLOAD})
    planned = measure(f"plan:{path}")
    both, one = measure("ours:expert_fc1"), measure("nothing")
    assert 0 < planned.d2h_bytes < both.d2h_bytes
    assert planned.activation_peak_bytes < one.activation_peak_bytes


def test_save_on_cpu_is_pytorchs_own_around_the_forward_of_every_microbatch(monkeypatch):
    saved = []
    inside = torch.autograd.graph.save_on_cpu

    def record(pin_memory):
        saved.append(pin_memory)
        return inside(pin_memory=pin_memory)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", record)
    runner = Runner(make_job(), lambda loss: None)
    one, other = (runner.record_bits(Run(setting=parse_setting(name), repeat=0)) for name in ("nothing", "save_on_cpu"))
    # Not the gradients: it makes copies contiguous, and a matrix product of a transposed tensor adds in another order.
    assert find_loss_difference(one, other) is None
    # Two steps of two microbatches.
    assert saved == [True] * 4


def test_save_on_cpu_wraps_the_forward_of_each_chunk_around_what_it_saves():
    chunk = torch.nn.Linear(2, 2)
    save_on_cpu([chunk])
    packed = chunk(torch.ones(1, 2, requires_grad=True)).grad_fn._raw_saved_mat1
    assert packed is not None
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: pytest.fail("the hooks outside ran"), lambda one: one):
        chunk(torch.ones(1, 2, requires_grad=True))


@pytest.mark.parametrize("name", ["nothing", "recompute:full", "ours:core_attn+attn_proj+expert_fc1", "ours:layer_input/full"])
def test_bits_of_a_setting_are_those_of_nothing(name):
    runner = Runner(make_job(), lambda loss: None)
    before, after = (runner.record_bits(Run(setting=parse_setting(one), repeat=0)) for one in ("nothing", name))
    assert len(after) == 2
    assert after[0].gradient_digests
    assert find_loss_difference(before, after) is None
    assert find_gradient_difference(before, after) is None


def test_bits_of_another_seed_are_others():
    first = Runner(make_job(), lambda loss: None).record_bits(Run(setting=NOTHING, repeat=0))
    other = Runner(make_job(f"{FLAGS} --seed 7"), lambda loss: None).record_bits(Run(setting=NOTHING, repeat=0))
    assert find_gradient_difference(first, other) is not None


def test_a_trace_is_written_in_the_first_repeat_alone(tmp_path):
    job = make_job(trace_folder=tmp_path, warmup=1, steps=1)
    measure("ours:core_attn+attn_proj", job, repeat=1)
    assert list(tmp_path.iterdir()) == []
    measure("ours:core_attn+attn_proj", job)
    (path,) = tmp_path.iterdir()
    assert path.name == "trace_ours_core_attn_attn_proj.json.gz"
    names = {event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert any("aten::mm" in name for name in names)


def test_names_of_settings_become_names_of_files():
    assert make_file_name("megatron:core_attn+attn_proj@0.5/layernorm") == "megatron_core_attn_attn_proj_0.5_layernorm"


def test_the_garbage_collector_is_off_inside_and_as_before_afterwards():
    assert gc.isenabled()
    with quiet_collector():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def look_in_every_step(monkeypatch, look):
    """Return a list that gets what `look` returns at the start of every step."""
    seen = []
    run_step = Trainer.run_step

    def record(self, **options):
        seen.append(look())
        return run_step(self, **options)

    monkeypatch.setattr(Trainer, "run_step", record)
    return seen


def test_the_garbage_collector_is_off_while_steps_are_timed(monkeypatch):
    seen = look_in_every_step(monkeypatch, gc.isenabled)
    measure("recompute:full")
    assert seen == [False] * 4  # one that warms up, two that are timed, and one whose activations are counted


def test_kernels_are_deterministic_where_bits_are_compared_and_the_fastest_where_times_are(monkeypatch):
    seen = look_in_every_step(monkeypatch, torch.are_deterministic_algorithms_enabled)
    run = Run(setting=NOTHING, repeat=0)
    runner = Runner(make_job(), lambda loss: None)
    runner.measure_times(run)
    assert not any(seen)
    seen.clear()
    runner.record_bits(run)
    assert seen == [True, True]


def list_models() -> list[torch.nn.Module]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one).__name__ == "GPTModel"]


def test_no_model_is_left_behind():
    before = {id(one) for one in list_models()}  # another test may have left one, in what it raised
    measure("ours:core_attn+attn_proj")
    assert not [one for one in list_models() if id(one) not in before]


def test_a_budget_is_refused_where_the_planner_does_not_know_the_device():
    with pytest.raises(ConfigError, match=r"the planner's table of hardware does not have this device\. Give plan files"):
        measure("budget:1GiB")


def test_of_a_plan_that_is_tried_the_median_step_counts_and_the_peak_behind_the_first(monkeypatch):
    class Steps:
        """Steps that get faster, the first of which takes most."""

        seconds = iter([9.0, 4.0, 3.0, 2.0, 1.0])

        def run_step(self, *, with_digests):
            assert not with_digests
            since_reset.append(self)
            return types.SimpleNamespace(seconds=next(self.seconds))

    since_reset = []
    monkeypatch.setattr(runner_module, "reset_peaks", since_reset.clear)
    monkeypatch.setattr(runner_module, "find_peak", lambda: len(since_reset))
    told = []
    assert runner_module.try_steps(Steps(), lambda: told.append(1)) == Tried(peak_bytes=4, step_s=2.5)
    assert len(told) == 5  # so that nobody takes the process for lost


def make_planned(tag="core_attn"):
    return Planned(plan=OffloadPlan(actions={Site(chunk=0, layer=0, tag=tag): Action.OFFLOAD}), peak_bytes=100)


def test_a_budget_is_planned_for_and_the_plan_is_measured(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(runner_module, "build_job_ranks", lambda job, hardware: asked.append(job.update) or ())
    monkeypatch.setattr(
        budget_plans, "plan_for_budget", lambda ranks, *, budget_bytes, free_bytes: asked.append(budget_bytes) or make_planned()
    )
    measured = measure("budget:1GiB", make_job(plan_folder=tmp_path))
    assert asked == [Update.NONE, 1 << 30]
    assert measured.d2h_bytes > 0
    # Where what predicts it looks.
    assert json.loads(make_job(plan_folder=tmp_path).find_plan_path(parse_setting("budget:1GiB")).read_text())["sites"]


@pytest.mark.usefixtures("_quick_link")
def test_a_budget_is_planned_for_by_the_profile_that_was_measured(monkeypatch, tmp_path):
    """On a device that the hardware table does not have, as this one."""
    asked = []
    monkeypatch.setattr(
        budget_plans, "plan_for_budget", lambda ranks, *, budget_bytes, free_bytes: asked.append(ranks) or make_planned()
    )
    job = make_job(plan_folder=tmp_path)
    runner = Runner(job, lambda loss: None)
    runner.measure_times(Run(setting=PROFILE, repeat=0))
    runner.measure_times(Run(setting=parse_setting("budget:1GiB"), repeat=0))
    measured = Profile.load(job.profile_path)
    assert asked == [build_profile_ranks(job, measured)]
    # And by one that was measured before.
    given = dataclasses.replace(job, profile=job.profile_path)
    Runner(given, lambda loss: None).measure_times(Run(setting=parse_setting("budget:1GiB"), repeat=0))
    assert asked == [build_profile_ranks(job, measured)] * 2
    # But not of another device.
    dataclasses.replace(measured, device="another").save(job.profile_path)
    with pytest.raises(ConfigError, match="table of hardware does not have this device"):
        Runner(given, lambda loss: None).measure_times(Run(setting=parse_setting("budget:1GiB"), repeat=0))


@pytest.fixture
def _quick_link(monkeypatch):
    monkeypatch.setattr(link_module.measure_link, "__kwdefaults__", {"sizes": link_module.QUICK_SIZES})


@pytest.mark.usefixtures("_quick_link")
@pytest.mark.parametrize("update", list(Update))
def test_a_profile_is_of_the_same_training_with_or_without_an_optimizer(monkeypatch, tmp_path, update):
    policies = []
    build = Trainer.__init__
    monkeypatch.setattr(
        Trainer, "__init__", lambda *args, **options: policies.append(options["policy"]) or build(*args, **options)
    )
    job = make_job(plan_folder=tmp_path, update=update)
    runner = Runner(job, lambda loss: None)
    seen = []
    iterate = runner._tokens.iterate_microbatches
    runner._tokens.iterate_microbatches = lambda *args, **options: seen.append(1) or iterate(*args, **options)
    measured = runner.measure_times(Run(setting=PROFILE, repeat=0))
    profile = Profile.load(job.profile_path)
    (rank,) = profile.ranks
    # Plain steps first, and the same training again to be measured.
    assert policies == [TrainingPolicy(kernels=Kernels.FASTEST, update=update)] * 2
    assert measured.step_seconds == (rank.step_s,)
    assert profile.has_optimizer is (update is Update.ADAMW)
    assert profile.training == MeasuredTraining(
        source=job.source, flags=(*job.file_flags, *job.typed_flags), world_size=job.world_size
    )
    assert [layer.number for layer in rank.layers] == [0, 1]
    assert rank.min_offloaded_numel == 64
    # The tokens of all settings, in steps that warm up and those that count.
    assert len(seen) == 1 + PLAIN_STEPS + 2
    assert profile.plain_step_s > 0
    check_profile(profile, load_arguments(job), update=update, source="profile.json")


@pytest.mark.usefixtures("_quick_link")
def test_the_plain_step_of_a_profile_is_that_of_nothing_where_it_was_just_measured(monkeypatch, tmp_path):
    job = make_job(plan_folder=tmp_path)
    runner = Runner(job, lambda loss: None)
    measured = runner.measure_times(Run(setting=NOTHING, repeat=0))
    runner.measure_times(Run(setting=parse_setting("recompute:full"), repeat=0))
    steps = []
    run_step = Trainer.run_step
    monkeypatch.setattr(Trainer, "run_step", lambda *args, **options: steps.append(1) or run_step(*args, **options))
    runner.measure_times(Run(setting=PROFILE, repeat=0))
    assert Profile.load(job.profile_path).plain_step_s == measured.seconds
    assert len(steps) == 2

    forecaster = Forecaster(job)
    forecaster.meet("CPU")
    forecaster.read_profile()
    # Hooks take so long on a CPU that what a device needs may be more than the plain step.
    assert forecaster.predict(NOTHING).predictions[Source.PROFILE].step_s >= 0.999 * measured.seconds


@pytest.mark.usefixtures("_quick_link")
def test_what_a_profile_predicts_of_memory_is_what_settings_then_take(tmp_path):
    job = make_job(plan_folder=tmp_path)
    runner = Runner(job, lambda loss: None)
    runner.measure_times(Run(setting=PROFILE, repeat=0))
    forecaster = Forecaster(job)
    forecaster.meet("CPU")
    forecaster.read_profile()
    for name in ("nothing", "recompute:core_attn", "recompute:full"):
        setting = parse_setting(name)
        measured = runner.measure_times(Run(setting=setting, repeat=0))
        predicted = forecaster.predict(setting).predictions[Source.PROFILE].find_peak(measured)
        if name == "recompute:full":
            # What the loss saves counts for the whole backward, and is gone at its start: of a model this small it is the most.
            assert measured.peak_bytes < predicted < 2 * measured.peak_bytes
        else:
            assert predicted == pytest.approx(measured.peak_bytes, rel=0.05), name


# Loading.


def test_offload_flags_of_the_file_are_those_of_our_settings_and_off_for_the_others():
    job = make_job(f"{FLAGS} --fine-grained-activation-offloading --offload-modules core_attn {OURS}")
    assert load_arguments(job).offload is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--recompute-granularity selective", "--recompute-granularity is what settings choose here"),
        ("--cpu-offloading --cpu-offloading-num-layers 1", "--cpu-offloading is what settings choose here"),
        ("--fp16", "--fp16, which needs loss scaling, is not built yet"),
        ("--num-query-groups 2", "--num-query-groups 2 has no effect without --group-query-attention"),
    ],
)
def test_what_settings_choose_and_what_cannot_be_trained_is_refused(flags, message):
    with pytest.raises(ConfigError) as caught:
        load_arguments(make_job(f"{FLAGS} {flags}"))
    assert message in str(caught.value)


def test_a_workload_has_the_tokens_and_the_processes_of_a_step():
    workload = describe_workload(load_arguments(make_job(f"{FLAGS} --pipeline-model-parallel-size 2 --bf16")))
    assert (workload.world_size, workload.layers, workload.dtype) == (2, 2, "bfloat16")
    assert workload.tokens == 4 * 32
