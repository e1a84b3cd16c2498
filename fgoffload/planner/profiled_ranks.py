"""Builds the models of all ranks of a profile, calibrated against the plain step and compared steps.

`make_rank_model` calibrates a single rank against the plain step. Ranks of a pipeline wait for each other, so only a simulation
of all of them shows the difference to the plain step and to compared steps ([Note: Cost of copies on a launch-bound host]).
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

    If the profile has the plain step, times are calibrated so that the simulated baseline matches it. With several stages, the
    missing time is added to the step of each, since all passes are launch-bound. If the plain step was shorter than the
    simulated one, the measurement hooks delayed an unknown rank, and times stay as measured. Compared steps set the fraction by
    which copies slow compute, and the delay per group.

    Args:
        profile: Profile of a training run.
        policy: Window and prefetch settings; None means the defaults.
        microbatches: Microbatches per step; defaults to the measured number.
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
    """Fit the fraction by which copies slow compute to a profile's compared steps; None if it has none."""
    # Compared steps use the default window and prefetch, whatever settings the plan uses.
    return fit_slowdown(_make_measured(profile), profile.compared_steps) if profile.compared_steps else None


def _make_measured(profile: Profile) -> list[RankModel]:
    """Return the ranks of a profile with the settings under which they were measured."""
    return [make_rank_model(profile, rank=rank) for rank in range(profile.get_rank(0).pipeline.stages)]


def _find_late_s(profile: Profile, planned: Pipeline) -> float:
    pipeline = profile.get_rank(0).pipeline
    if profile.plain_step_s is None or pipeline.stages == 1:
        return 0.0
    missing_s = profile.plain_step_s - simulate(_make_measured(profile), NOTHING).step_s
    return max(0.0, missing_s) * _count_passes(planned) / _count_passes(pipeline)


def _count_passes(pipeline: Pipeline) -> int:
    """Return the number of consecutive forwards in a step, including the pipeline fill."""
    return pipeline.microbatches * pipeline.chunks + pipeline.stages - 1
