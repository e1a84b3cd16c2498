"""Builds the models of all pipeline ranks in a profile, calibrated against measured steps.

`make_rank_model` calibrates a single rank against the plain step, which runs without measurement hooks. Ranks of a pipeline
wait for each other, so only a simulation of all ranks can be compared with the plain step. The same holds for compared steps
(see [Note: Cost of copies on a launch-bound host]).
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
    """Return the models of all pipeline ranks of a profile, for the simulator and the solver.

    If the profile has a plain step, times are calibrated so that the simulated baseline matches it. With several stages, we add
    the missing time to the end of every rank's step, scaled to `microbatches`, because the host delays every pass. If the plain
    step is shorter than the simulated baseline, the measurement hooks delayed a rank, but we cannot tell which, so times are
    not adjusted. Compared steps determine the fraction by which copies slow compute, and the delay per group.

    Args:
        profile: Profile of a training run.
        policy: Window and prefetch settings. None means the defaults.
        microbatches: Microbatches per step; defaults to the measured number.
    """
    pipeline = profile.get_rank(0).pipeline
    numbers = range(pipeline.stages)
    ranks = tuple(make_rank_model(profile, rank=rank, policy=policy, microbatches=microbatches) for rank in numbers)
    missing_s = _find_missing_s(
        profile, pipeline if microbatches is None else dataclasses.replace(pipeline, microbatches=microbatches)
    )
    ranks = tuple(dataclasses.replace(rank, step_end_s=rank.step_end_s + missing_s) for rank in ranks)
    slowdown = find_host_slowdown(profile)
    return ranks if slowdown is None else slow_down(ranks, slowdown)


def find_host_slowdown(profile: Profile) -> float | None:
    """Fit the fraction by which copies slow compute to a profile's compared steps. Return None if there are none."""
    # Compared steps always use the default window and prefetch.
    return fit_slowdown(_make_measured(profile), profile.compared_steps) if profile.compared_steps else None


def _make_measured(profile: Profile) -> list[RankModel]:
    """Return the models of a profile's ranks with the settings that the measurement used."""
    return [make_rank_model(profile, rank=rank) for rank in range(profile.get_rank(0).pipeline.stages)]


def _find_missing_s(profile: Profile, planned: Pipeline) -> float:
    pipeline = profile.get_rank(0).pipeline
    if profile.plain_step_s is None or pipeline.stages == 1:
        return 0.0
    missing_s = profile.plain_step_s - simulate(_make_measured(profile), NOTHING).step_s
    return max(0.0, missing_s) * _count_passes(planned) / _count_passes(pipeline)


def _count_passes(pipeline: Pipeline) -> int:
    """Return the length of a step as a number of forward passes, including the pipeline fill."""
    return pipeline.microbatches * pipeline.chunks + pipeline.stages - 1
