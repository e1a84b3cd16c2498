"""Steps under plans that a profile compares with those that keep all: which plans, and that each step runs by its own."""

import dataclasses
import json
import types
from pathlib import Path

import pytest
import torch
from support.processes import run_processes
from support.trainings import MOE, make_trainer, train

from fgoffload import Action, BudgetError, OffloadConfig, OffloadError, OffloadPlan, Site, StateError
from fgoffload.engine import CpuDevice
from fgoffload.integrations.link import QUICK_SIZES, measure_link
from fgoffload.integrations.megatron import collectives, compared_steps, profile_training
from fgoffload.integrations.megatron.arguments import parse_arguments
from fgoffload.integrations.megatron.compared_steps import FEWEST_ROUNDS, MOST_ROUNDS, TIMED_STEPS, choose_plans, compare_steps
from fgoffload.integrations.megatron.data import TextData
from fgoffload.integrations.megatron.profiling import StepMeasurement
from fgoffload.integrations.megatron.training_policy import Update
from fgoffload.planner.profiled_ranks import make_rank_models
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.timing.link_profile import CopyRate, LinkProfile
from fgoffload.planner.timing.profile import Profile, merge_processes
from fgoffload.tags import default_tags

pytestmark = pytest.mark.usefixtures("parallel")

AUTO = OffloadConfig(offload_modules=("auto",), offload_memory_budget_bytes=2**50, min_offloaded_tensor_size=64)
NOTHING = OffloadPlan(actions={})
ROOT = Path(__file__).parents[3]
RATE = CopyRate(size_bytes=2**20, d2h_bytes_per_s=50e9, h2d_bytes_per_s=50e9, duplex_bytes_per_s=33e9)
FLAGS = f"{MOE} --num-layers 3"
OFFLOADS = OffloadPlan(actions={Site(chunk=0, layer=0, tag="core_attn"): Action.OFFLOAD})
RUNS_AGAIN = OffloadPlan(actions={Site(chunk=0, layer=layer, tag="layer"): Action.RECOMPUTE for layer in (0, 2)})


def start(trainer):
    """Return a measurement that has measured a step, and the profile of that step."""
    integration = trainer.integration
    integration.measurement = measurement = StepMeasurement(CpuDevice(), min_offloaded_numel=64, use_plan=integration.use_plan)
    measurement.request()
    trainer.run_step()
    return measurement, make_profile(measurement.take_profile())


def make_profile(*ranks):
    link = LinkProfile(copies=(RATE,), compute_slowdown=0.0)
    return Profile(device="a GPU", versions={}, date="2026-11-25", link=link, ranks=merge_processes(ranks))


@pytest.fixture(scope="module")
def profile(parallel):
    with make_trainer(FLAGS, AUTO) as trainer:
        measurement, profile = start(trainer)
        measurement.close()
    return profile


def test_one_plan_moves_what_compute_hides_and_one_is_for_a_budget_in_the_middle(profile):
    hidden, middle = choose_plans(profile, 2**40)
    ranks = make_rank_models(profile)
    keeping = simulate(ranks, NOTHING)
    assert hidden.offloaded_tags
    assert not any(action.recomputes for action in hidden.actions.values())
    assert {site.layer for site in hidden.actions} == {0, 1, 2}
    assert simulate(ranks, hidden).step_s <= 1.02 * keeping.step_s
    assert simulate(ranks, middle).peak_bytes < 0.8 * keeping.peak_bytes
    default_tags().check(hidden.offloaded_tags)


def count_moved(profile, plan):
    return sum(rank.d2h_bytes for rank in simulate(make_rank_models(profile), plan).ranks)


@pytest.fixture
def _no_middle(monkeypatch):
    """No plan for a budget in the middle, which takes seconds to find."""

    def solve(ranks, **options):
        raise BudgetError("no plan", least_bytes=1)

    monkeypatch.setattr("fgoffload.planner.solving.solver.solve", solve)


@pytest.mark.usefixtures("_no_middle")
def test_a_slow_link_hides_less_and_without_host_memory_nothing_is_compared(profile):
    (hidden,) = choose_plans(profile, 2**40)
    # All of it would take twice as long as the step, forward and backward, whatever this machine takes for that.
    rate = count_moved(profile, hidden) / (2 * simulate(make_rank_models(profile), NOTHING).step_s)
    link = LinkProfile(copies=(dataclasses.replace(RATE, d2h_bytes_per_s=max(1e6, rate)),), compute_slowdown=0.0)
    slow = dataclasses.replace(profile, link=link)
    assert sum(count_moved(slow, less) for less in choose_plans(slow, 2**40)) < count_moved(profile, hidden)
    assert choose_plans(profile, 0) == ()


def test_a_plan_in_the_middle_that_only_recomputes_is_not_compared(monkeypatch, profile):
    asked = []

    def solve(ranks, **options):
        asked.append(options)
        return types.SimpleNamespace(plan=RUNS_AGAIN)

    monkeypatch.setattr("fgoffload.planner.solving.solver.solve", solve)
    assert choose_plans(profile, 7) == ()
    assert asked[0]["host_budget_bytes"] == 7


@pytest.mark.usefixtures("_no_middle")
def test_where_no_plan_keeps_to_the_middle_only_tags_are_compared(profile):
    (plan,) = choose_plans(profile, 2**40)
    assert plan.offloaded_tags


class Spy:
    """Notes each step of a trainer: the bits, the plan in use, and what it moved and ran again."""

    def __init__(self, trainer, measurement, *, seconds=None):
        self.steps = []
        self._run, self._apply = trainer.run_step, measurement.apply
        self._trainer, self._seconds = trainer, seconds
        self._plan = None
        trainer.run_step, measurement.apply = self.run_step, self.apply

    def apply(self, plan):
        self._plan = plan
        self._apply(plan)

    def run_step(self, *, with_digests):
        result = self._run(with_digests=True)
        assert not with_digests
        self.steps.append(((result.losses, result.gradient_digests), self._plan, self._trainer.integration.last_step.d2h_bytes))
        return (
            result if self._seconds is None else dataclasses.replace(result, seconds=self._seconds(self._plan, len(self.steps)))
        )

    @property
    def plans(self):
        return [plan for _, plan, _ in self.steps]


def test_plans_and_nothing_take_turns_each_step_runs_by_its_own_and_no_bit_changes(monkeypatch):
    monkeypatch.setattr(compared_steps, "MOST_ROUNDS", 2)
    with make_trainer(FLAGS, AUTO) as trainer:
        measurement, profile = start(trainer)
        plans = hidden, middle = choose_plans(profile, 2**40)
        spy = Spy(trainer, measurement)
        found = compare_steps(trainer, measurement, profile, host_budget_bytes=2**40)
        assert spy.plans == [plan for plan in (NOTHING, hidden, middle) for _ in range(1 + TIMED_STEPS)] * 2
        assert [step.plan for step in found] == [dataclasses.replace(plan, made_for=None) for plan in plans]
        for _, plan, moved_bytes in spy.steps:
            assert (moved_bytes > 0) == bool(plan.offloaded_tags)
        trainer.run_step(with_digests=False)
        assert spy.steps[-1][2] == 0
        measurement.close()
    bits = [bits for bits, _, _ in spy.steps]
    assert bits == train(FLAGS, steps=1 + len(bits))[0][1:]


def test_what_runs_again_by_a_plan_runs_again_in_its_steps_alone():
    with make_trainer(FLAGS, AUTO) as trainer:
        measurement, _ = start(trainer)
        calls = []
        for layer in trainer.chunks[0].decoder.layers:
            layer.mlp.register_forward_hook(lambda *args: calls.append(torch.is_grad_enabled()))
        measurement.stop_watching()
        counts = []
        for plan in (NOTHING, RUNS_AGAIN, NOTHING):
            measurement.apply(plan)
            calls.clear()
            trainer.run_step(with_digests=False)
            counts.append(len(calls))
        measurement.close()
    # Two microbatches through three layers, and two of these once more.
    assert counts == [6, 10, 6]


def test_the_medians_leave_out_what_is_not_timed_and_a_few_slow_steps(monkeypatch):
    monkeypatch.setattr(compared_steps, "ENOUGH_S", 600.0)

    def seconds(plan, number):
        # Of eight that are timed three are slow: with the four that are not it would be more than half.
        is_timed = number % (1 + TIMED_STEPS) != 1
        return 99.0 if not is_timed or number <= 8 else 1.25 if plan.actions else 1.0

    with make_trainer(FLAGS, AUTO) as trainer:
        measurement, profile = start(trainer)
        monkeypatch.setattr(compared_steps, "choose_plans", lambda *args: (OFFLOADS,))
        spy, stepped = Spy(trainer, measurement, seconds=seconds), []
        (found,) = compare_steps(
            trainer, measurement, profile, host_budget_bytes=2**40, on_step=lambda: stepped.append(len(spy.steps))
        )
        measurement.close()
    assert (found.step_s, found.keeping_step_s) == (1.25, 1.0)
    assert len(spy.steps) == MOST_ROUNDS * 2 * (1 + TIMED_STEPS)
    assert stepped == list(range(1, 1 + len(spy.steps)))


def test_slow_trainings_take_the_fewest_rounds(monkeypatch):
    monkeypatch.setattr(compared_steps, "ENOUGH_S", 0.0)
    monkeypatch.setattr(compared_steps, "choose_plans", lambda *args: (OFFLOADS,))
    with make_trainer(FLAGS, AUTO) as trainer:
        measurement, profile = start(trainer)
        spy = Spy(trainer, measurement)
        assert len(compare_steps(trainer, measurement, profile, host_budget_bytes=2**40)) == 1
        measurement.close()
    assert len(spy.steps) == FEWEST_ROUNDS * 2 * (1 + TIMED_STEPS)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("a fault"), "nothing is known of how late the host is: the first process: ValueError: a fault"),
        (torch.OutOfMemoryError("no room"), "since one had no room on the device: no room"),
    ],
)
def test_what_cannot_be_planned_or_has_no_room_costs_the_compared_steps_alone(monkeypatch, caplog, error, reason):
    def fail(*args):
        raise error

    where = "choose_plans" if isinstance(error, ValueError) else "_take_turns"
    monkeypatch.setattr(compared_steps, "choose_plans", lambda *args: (OFFLOADS,))
    monkeypatch.setattr(compared_steps, where, fail)
    with make_trainer(FLAGS, AUTO) as trainer:
        measurement, profile = start(trainer)
        assert compare_steps(trainer, measurement, profile, host_budget_bytes=2**40) == ()
        trainer.run_step(with_digests=False)
        assert trainer.integration.last_step.d2h_bytes == 0
        measurement.close()
    assert reason in caplog.text


def test_a_step_that_raises_is_an_error_since_it_is_not_the_planners(monkeypatch):
    def fail(*args):
        raise StateError("a fault of a step")

    monkeypatch.setattr(compared_steps, "choose_plans", lambda *args: (OFFLOADS,))
    monkeypatch.setattr(compared_steps, "_take_turns", fail)
    with make_trainer(FLAGS, AUTO) as trainer:
        measurement, profile = start(trainer)
        with pytest.raises(StateError, match="a fault of a step"):
            compare_steps(trainer, measurement, profile, host_budget_bytes=2**40)
        measurement.close()


def test_where_others_are_in_the_middle_of_a_step_memory_that_runs_out_is_an_error(monkeypatch):
    def fail(*args):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(compared_steps, "choose_plans", lambda *args: (OFFLOADS,))
    monkeypatch.setattr(compared_steps, "_take_turns", fail)
    with make_trainer(FLAGS, AUTO) as trainer:
        measurement, profile = start(trainer)
        monkeypatch.setattr(compared_steps, "is_alone", lambda: False)
        with pytest.raises(torch.OutOfMemoryError):
            compare_steps(trainer, measurement, profile, host_budget_bytes=2**40)
        measurement.close()


def test_a_planner_that_fails_is_an_error_of_all_processes(monkeypatch):
    def fail():
        raise ValueError("a fault")

    with pytest.raises(OffloadError, match=r"^the first process: ValueError: a fault$"):
        collectives.ask_first(fail)
    # Another process is told so, and calls nothing.
    monkeypatch.setattr(collectives, "is_first_process", lambda: False)
    monkeypatch.setattr(collectives, "broadcast", lambda own: (None, "the first process: ValueError: a fault"))
    with pytest.raises(OffloadError, match=r"^the first process: ValueError: a fault$"):
        collectives.ask_first(pytest.fail)
    monkeypatch.setattr(collectives, "broadcast", lambda own: (7, ""))
    assert collectives.ask_first(pytest.fail) == 7


@pytest.mark.parametrize(
    ("has_own_host", "flags", "compared"),
    [
        (True, "", True),
        (False, "", False),
        (None, "", False),
        (True, "--rampup-batch-size 2 2 64", False),
        (True, "--variable-seq-lengths --moe-token-dispatcher-type alltoall", False),
        (True, "--offload-host-budget 64B", False),
    ],
)
def test_a_profile_has_compared_steps_where_the_host_is_not_the_device(monkeypatch, has_own_host, flags, compared):
    monkeypatch.setattr(compared_steps, "MOST_ROUNDS", 1)
    sizes = "--fine-grained-activation-offloading --offload-modules core_attn --min-offloaded-tensor-size 64"
    arguments = parse_arguments(f"{FLAGS} {sizes} {flags}".split(), source="test")
    link = measure_link(CpuDevice(), sizes=QUICK_SIZES)
    found = profile_training.profile_training(
        arguments, TextData.load(), link, update=Update.NONE, plain_step_s=1.0, has_own_host=has_own_host
    )
    assert bool(found.compared_steps) is compared
    models = [1.0, *(step.keeping_step_s for step in found.compared_steps[:1])]
    assert found.plain_step_s == pytest.approx(sum(models) / len(models))
    if compared:
        assert Profile.from_json(found.to_json(), source="text") == found


def test_all_processes_compare_the_same_plans_and_keep_the_same_times(tmp_path):
    flags = (
        f"{FLAGS.replace('--num-layers 3', '--num-layers 2')} --fine-grained-activation-offloading --offload-modules core_attn"
    )
    flags = f"{flags} --min-offloaded-tensor-size 64"
    settings = [f"{flags} --pipeline-model-parallel-size 2", f"{flags} --expert-model-parallel-size 2 --global-batch-size 8"]
    for number, setting in enumerate(settings):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "flags.txt").write_text(setting)
        run_processes(str(ROOT / "tests" / "support" / "comparing.py"), folder, processes=2, timeout_seconds=120)
        first, second = (json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(2))
        assert first == second
        assert first
        layers = {row["site"]["layer"] for step in first for row in step["sites"]}
        assert layers == {0, 1}
