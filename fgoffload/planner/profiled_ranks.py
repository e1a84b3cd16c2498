"""All ranks of a profile, whose step takes what the plain step took.

A rank by itself can be told what it takes longer than its layers, and `make_rank_model` does so. Of a pipeline the plain step
is that of all ranks, which wait for each other: how much it is longer, only a simulation of all of them says.
"""

import dataclasses

from fgoffload.plan import OffloadPlan
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.timing.profile import Profile, make_rank_model
from fgoffload.policy import TransferPolicy


def make_rank_models(
    profile: Profile, *, policy: TransferPolicy | None = None, microbatches: int | None = None
) -> tuple[RankModel, ...]:
    """Return all pipeline ranks of a profile as the simulator and the solver take them.

    Where the profile knows the plain step, a step that keeps all is simulated to take that. Of several stages what is missing
    comes on top of the step of each, since the host is late in all passes; where the plain step was shorter than what is
    simulated, the hooks of the measurement delayed some rank, nothing says which, and times stay as they were measured.

    Args:
        profile: Of a training.
        policy: Window and prefetch; None takes the defaults.
        microbatches: Of a step, where it is to have more or fewer than the measured one.

    Raises:
        ConfigError: The profile has the link alone, or the schedule cannot have so many microbatches.
    """
    pipeline = profile.get_rank(0).pipeline
    numbers = range(pipeline.stages)
    ranks = tuple(make_rank_model(profile, rank=rank, policy=policy, microbatches=microbatches) for rank in numbers)
    if profile.plain_step_s is None or pipeline.stages == 1:
        return ranks
    measured = [make_rank_model(profile, rank=rank, policy=policy) for rank in numbers]
    missing_s = profile.plain_step_s - simulate(measured, OffloadPlan(actions={})).step_s
    if missing_s <= 0:
        return ranks
    planned = pipeline if microbatches is None else dataclasses.replace(pipeline, microbatches=microbatches)
    late_s = missing_s * _count_passes(planned) / _count_passes(pipeline)
    return tuple(dataclasses.replace(rank, step_end_s=rank.step_end_s + late_s) for rank in ranks)


def _count_passes(pipeline: Pipeline) -> int:
    """Return how many forwards come one after the other, those of the stages before among them."""
    return pipeline.microbatches * pipeline.chunks + pipeline.stages - 1
