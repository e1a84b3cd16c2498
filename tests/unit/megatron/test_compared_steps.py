"""Steps with plans that a profile compares with baseline steps: each step runs its own plan, with the same bits."""

import pytest
from support.trainings import MOE, make_trainer, train

from fgoffload import Action, BudgetError, OffloadConfig, OffloadError, OffloadPlan, Site
from fgoffload.engine import CpuDevice
from fgoffload.integrations.megatron import collectives, compared_steps
from fgoffload.integrations.megatron.compared_steps import TIMED_STEPS, choose_plans, compare_steps
from fgoffload.integrations.megatron.profiling import StepMeasurement
from fgoffload.planner.timing.link_profile import CopyRate, LinkProfile
from fgoffload.planner.timing.profile import Profile, merge_processes

pytestmark = pytest.mark.usefixtures("parallel")

AUTO = OffloadConfig(offload_modules=("auto",), offload_memory_budget_bytes=2**50, min_offloaded_tensor_size=64)
RATE = CopyRate(size_bytes=2**20, d2h_bytes_per_s=50e9, h2d_bytes_per_s=50e9, duplex_bytes_per_s=33e9)
FLAGS = f"{MOE} --num-layers 3"
MIXES = OffloadPlan(
    actions={
        Site(chunk=0, layer=0, tag="layer"): Action.RECOMPUTE,
        Site(chunk=0, layer=1, tag="core_attn"): Action.OFFLOAD,
    }
)


def start(trainer):
    """Return a measurement that has measured a step, and the profile of that step."""
    integration = trainer.integration
    integration.measurement = measurement = StepMeasurement(CpuDevice(), min_offloaded_numel=64, use_plan=integration.use_plan)
    measurement.request()
    trainer.run_step()
    link = LinkProfile(copies=(RATE,), compute_slowdown=0.0)
    ranks = merge_processes([measurement.take_profile()])
    return measurement, Profile(device="a GPU", versions={}, date="2026-11-25", link=link, ranks=ranks)


def test_plans_take_turns_with_the_baseline_and_change_no_bit(monkeypatch):
    def solve(ranks, **options):
        raise BudgetError("a plan for a budget in the middle takes seconds to find", least_bytes=1)

    monkeypatch.setattr("fgoffload.planner.solving.solver.solve", solve)
    monkeypatch.setattr(compared_steps, "MOST_ROUNDS", 1)
    steps, plan_in_use = [], [None]
    with make_trainer(FLAGS, AUTO) as trainer:
        measurement, profile = start(trainer)
        run_step, apply = trainer.run_step, measurement.apply

        def note_step(*, with_digests):
            result = run_step(with_digests=True)
            moved_bytes = trainer.integration.last_step.d2h_bytes
            steps.append((plan_in_use[0], moved_bytes, (result.losses, result.gradient_digests)))
            return result

        def note_plan(plan):
            plan_in_use[0] = plan
            apply(plan)

        monkeypatch.setattr(trainer, "run_step", note_step)
        monkeypatch.setattr(measurement, "apply", note_plan)
        plans = (*choose_plans(profile, 2**40), MIXES)
        assert choose_plans(profile, 0) == ()  # without host memory nothing can be offloaded
        monkeypatch.setattr(compared_steps, "choose_plans", lambda *args: plans)
        found = compare_steps(trainer, measurement, profile, host_budget_bytes=2**40)
        measurement.close()
    assert [plan for plan, _, _ in steps] == [one for one in (OffloadPlan(actions={}), *plans) for _ in range(1 + TIMED_STEPS)]
    assert all((moved_bytes > 0) == bool(plan.offloaded_tags) for plan, moved_bytes, _ in steps)
    assert [bits for _, _, bits in steps] == train(FLAGS, steps=1 + len(steps))[0][1:]
    assert len(found) == len(plans) == 2
    assert all(0 < step.step_s < 60 and 0 < step.keeping_step_s < 60 for step in found)


def test_an_error_of_the_first_process_is_raised_on_all(monkeypatch):
    def fail():
        raise ValueError("a fault")

    with pytest.raises(OffloadError, match=r"^the first process: ValueError: a fault$"):
        collectives.ask_first(fail)
    # Another process is told the result, and computes nothing.
    monkeypatch.setattr(collectives, "is_first_process", lambda: False)
    monkeypatch.setattr(collectives, "broadcast", lambda own: (None, "the first process: ValueError: a fault"))
    with pytest.raises(OffloadError, match=r"^the first process: ValueError: a fault$"):
        collectives.ask_first(pytest.fail)
    monkeypatch.setattr(collectives, "broadcast", lambda own: (7, ""))
    assert collectives.ask_first(pytest.fail) == 7
