"""All ranks of a profile, whose step takes what the plain step took, and whose host is as late as compared steps say.

A rank by itself can be told what it takes longer than its layers, and `make_rank_model` does so. Of a pipeline the plain step
is that of all ranks, which wait for each other: how much it is longer, only a simulation of all of them says. So it is with
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
    """Return all pipeline ranks of a profile as the simulator and the solver take them.

    Where the profile knows the plain step, a step that keeps all is simulated to take that. Of several stages what is missing
    comes on top of the step of each, since the host is late in all passes; where the plain step was shorter than what is
    simulated, the hooks of the measurement delayed some rank, nothing says which, and times stay as they were measured. Where
    steps under plans were measured too, the host is as late, beside copies and for each group, as those took.

    Args:
        profile: Of a training.
        policy: Window and prefetch; None takes the defaults.
        microbatches: Of a step, where it is to have more or fewer than the measured one.

    Raises:
        ConfigError: The profile has the link alone, or the schedule cannot have so many microbatches.
        PlanError: A step that was compared is of a plan that the layers of the profile cannot do.
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
    """Return what compute takes longer beside copies, as a part, by the steps of a profile that were compared; None without.

    Raises:
        ConfigError: The profile has the link alone.
        PlanError: A step is of a plan that the layers of the profile cannot do.
    """
    # Measured with the default window and prefetch, whatever is planned with.
    return fit_slowdown(_make_measured(profile), profile.compared_steps) if profile.compared_steps else None


def _make_measured(profile: Profile) -> list[RankModel]:
    """Return the ranks of a profile as they were measured."""
    return [make_rank_model(profile, rank=rank) for rank in range(profile.get_rank(0).pipeline.stages)]


def _find_late_s(profile: Profile, planned: Pipeline) -> float:
    """Return what comes on top of a planned step of several stages, since the plain step took longer than is simulated."""
    pipeline = profile.get_rank(0).pipeline
    if profile.plain_step_s is None or pipeline.stages == 1:
        return 0.0
    missing_s = profile.plain_step_s - simulate(_make_measured(profile), NOTHING).step_s
    return max(0.0, missing_s) * _count_passes(planned) / _count_passes(pipeline)


def _count_passes(pipeline: Pipeline) -> int:
    """Return how many forwards come one after the other, those of the stages before among them."""
    return pipeline.microbatches * pipeline.chunks + pipeline.stages - 1
