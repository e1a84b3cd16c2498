"""Alternates between baseline steps and steps with plans, to measure how much copies slow down a launch-bound step.

[Note: Compared plans]
The first plan offloads, in all layers, the largest tags whose copies can overlap with compute. Besides these copies, it adds
little CPU work. The second plan is for a budget halfway between the peaks of full recompute and the baseline, and adds much
more CPU work. Plans without copies are skipped. The steps alternate because a host's speed changes from minute to minute.
"""

import collections
import dataclasses
import gc
import logging
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from fgoffload.errors import BudgetError, ConfigError, OffloadError
from fgoffload.integrations.collectives import ask_first, broadcast, gather, is_alone
from fgoffload.integrations.megatron.profile.step_measurement import StepMeasurement
from fgoffload.plan import NOTHING, OffloadPlan
from fgoffload.planner.profiled_ranks import make_rank_models
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.megatron_flags import FULL_RECOMPUTE, MegatronFlags
from fgoffload.planner.solving.solver import solve
from fgoffload.planner.timing.compared_step import ComparedStep
from fgoffload.planner.timing.profile import Profile
from fgoffload.tags import default_tags
from fgoffload.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

MAX_SLOWDOWN = 0.02
"""Maximum simulated slowdown of the first plan, as a fraction of the baseline step time."""

TIMED_STEPS = 2
"""Number of timed steps per plan and round."""

MIN_ROUNDS, MAX_ROUNDS = 2, 4
"""Limits on the number of rounds. Four rounds give the median step time to within 2% even if steps vary by 10%."""

TIME_LIMIT_S = 30.0
"""After `MIN_ROUNDS` rounds and this many seconds, no new round starts."""


def compare_steps(
    trainer: Trainer,
    measurement: StepMeasurement,
    profile: Profile,
    *,
    host_budget_bytes: int,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[ComparedStep, ...]:
    """Time baseline steps and steps with plans in alternation. All processes must call this. All get the same result.

    If planning fails, or a single-process run runs out of GPU memory, log a warning and return an empty tuple.
    """
    measurement.stop_watching()
    measurement.apply(NOTHING)
    try:
        # Link times differ between processes, so the first process plans for all processes.
        plans = ask_first(lambda: choose_plans(profile, host_budget_bytes))
    except OffloadError as error:  # raised on all processes
        logger.warning("no steps were compared, so the profile does not show whether training is launch-bound: %s", error)
        return ()
    if not plans:
        return ()
    try:
        return _time_steps(trainer, measurement, plans, on_step)
    except torch.OutOfMemoryError as error:
        if not is_alone():
            raise  # the other processes are in the middle of a step
        logger.warning("no steps were compared, because a step ran out of GPU memory: %s", error)
        return ()
    finally:
        measurement.apply(NOTHING)


def _time_steps(
    trainer: Trainer, measurement: StepMeasurement, plans: Sequence[OffloadPlan], on_step: Callable[[], None]
) -> tuple[ComparedStep, ...]:
    start_s = time.perf_counter()
    times: list[list[float]] = [[] for _ in (NOTHING, *plans)]
    for number in range(MAX_ROUNDS):
        for seconds, plan in zip(times, (NOTHING, *plans), strict=True):
            measurement.apply(plan)
            for step in range(1 + TIMED_STEPS):
                settle()
                step_s = trainer.run_step(with_digests=False).seconds
                on_step()
                if step > 0:  # the first step after a change of plan is a warm-up
                    seconds.append(step_s)
        if number + 1 >= MIN_ROUNDS and broadcast(time.perf_counter() - start_s) > TIME_LIMIT_S:
            break
    keeping_s, *steps_s = [statistics.median(max(step) for step in zip(*gather(seconds), strict=True)) for seconds in times]
    return tuple(
        ComparedStep.from_plan(plan, step_s=step_s, keeping_step_s=keeping_s)
        for plan, step_s in zip(plans, steps_s, strict=True)
    )


def settle() -> None:
    """Collect garbage and synchronize all processes before a timed step."""
    gc.collect()
    if not is_alone():
        torch.distributed.barrier()


def choose_plans(profile: Profile, host_budget_bytes: int) -> tuple[OffloadPlan, ...]:
    """Return the plans to time. See [Note: Compared plans]."""
    ranks = make_rank_models(profile)
    found = (_offload_hidden_tags(ranks, host_budget_bytes), _plan_for_middle(ranks, host_budget_bytes))
    limited = [dataclasses.replace(rank, host_budget_bytes=host_budget_bytes) for rank in ranks]
    return tuple(plan for plan in found if any(rank.d2h_bytes for rank in simulate(limited, plan).ranks))


def _offload_hidden_tags(ranks: Sequence[RankModel], host_budget_bytes: int) -> OffloadPlan:
    """Return a plan that offloads, in all layers, the largest tags whose copies can overlap with compute."""
    tags = default_tags()
    keeping_s = simulate(ranks, NOTHING).step_s
    best = NOTHING
    chosen: tuple[str, ...] = ()
    saved: collections.Counter[str] = collections.Counter()
    for rank in ranks:
        for tensor in (tensor for chunk in rank.chunks for layer in chunk.layers for tensor in layer.model.tensors):
            if not tensor.is_below(rank.min_offloaded_numel):
                saved.update({tag: tensor.size_bytes for tag in tensor.tags if tag in tags.names})
    for tag, _ in saved.most_common():
        candidate = tuple(dict.fromkeys((*chosen, tag, *tags.get(tag).requires)))
        try:
            tags.check(candidate)
        except ConfigError:
            continue  # the tag is for another kind of attention or MLP
        flags = MegatronFlags(offload_modules=candidate)
        plan = flags.make_plan(ranks)
        result = simulate(flags.adapt(ranks), plan)
        is_hidden = result.step_s <= (1 + MAX_SLOWDOWN) * keeping_s
        if is_hidden and all(rank.host_peak_bytes <= host_budget_bytes for rank in result.ranks):
            best, chosen = plan, candidate
    return best


def _plan_for_middle(ranks: Sequence[RankModel], host_budget_bytes: int) -> OffloadPlan:
    """Return a plan for a budget halfway between the peaks of full recompute and the baseline, or `NOTHING` if none fits."""
    peaks_bytes = [simulate(ranks, plan).peak_bytes for plan in (NOTHING, FULL_RECOMPUTE.make_plan(ranks))]
    try:
        return solve(ranks, budget_bytes=sum(peaks_bytes) // 2, host_budget_bytes=host_budget_bytes).plan
    except BudgetError:
        return NOTHING
