"""All ranks of a profile, calibrated by the plain step and by compared steps.

`make_rank_model` calibrates a single rank by the plain step. Ranks of a pipeline wait for each other, so only a simulation of
all of them shows how much longer the plain step is. The same holds for compared steps:
[Note: Cost of copies on a launch-bound host] in `host_overhead`.
"""

import dataclasses

from fgoffload.plan import NOTHING
from fgoffload.planner.host_overhead import fit_slowdown, slow_down
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.timing.profile import Profile, make_rank_model
from fgoffload.transfer_schedule import TransferPolicy


def make_rank_models(
    profile: Profile, *, policy: TransferPolicy | None = None, microbatches: int | None = None
) -> tuple[RankModel, ...]:
    """Return all pipeline ranks of a profile for the simulator and the solver.

    If the profile has the plain step, the simulated baseline takes as long. With several stages the difference is added to the
    step of each, since the host is late in all passes. If the plain step was shorter than the simulated one, the hooks of the
    measurement delayed an unknown rank, and times stay as measured. Compared steps under plans set the slowdown beside copies
    and the time of each group.

    Args:
        profile: Profile of a training.
        policy: Window and prefetch; None takes the defaults.
        microbatches: Microbatches of a step; None takes those of the measured one.
    """
    pipeline = profile.get_rank(0).pipeline
    numbers = range(pipeline.stages)
    ranks = tuple(make_rank_model(profile, rank=rank, policy=policy, microbatches=microbatches) for rank in numbers)
    late_s = _find_late_s(
        profile, pipeline if microbatches is None else dataclasses.replace(pipeline, microbatches=microbatches)
    )
    ranks = tuple(dataclasses.replace(rank, step_end_s=rank.step_end_s + late_s) for rank in ranks)
    slowdown = find_host_slowdown(profile)
    return ranks if slowdown is None else slow_down(ranks, slowdown)


def find_host_slowdown(profile: Profile) -> float | None:
    """Return the slowdown of compute beside copies, as a fraction, from a profile's compared steps; None without any."""
    # Compared steps use the default window and prefetch, whatever settings the plan uses.
    return fit_slowdown(_make_measured(profile), profile.compared_steps) if profile.compared_steps else None


def _make_measured(profile: Profile) -> list[RankModel]:
    """Return the ranks of a profile as they were measured."""
    return [make_rank_model(profile, rank=rank) for rank in range(profile.get_rank(0).pipeline.stages)]


def _find_late_s(profile: Profile, planned: Pipeline) -> float:
    """Return the seconds that the plain step of several stages takes beyond the simulated one."""
    pipeline = profile.get_rank(0).pipeline
    if profile.plain_step_s is None or pipeline.stages == 1:
        return 0.0
    missing_s = profile.plain_step_s - simulate(_make_measured(profile), NOTHING).step_s
    return max(0.0, missing_s) * _count_passes(planned) / _count_passes(pipeline)


def _count_passes(pipeline: Pipeline) -> int:
    """Return the number of consecutive forwards, those of earlier stages included."""
    return pipeline.microbatches * pipeline.chunks + pipeline.stages - 1
