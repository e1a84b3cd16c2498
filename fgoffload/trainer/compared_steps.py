"""Times steps with plans, alternating with baseline steps, to find how launch-bound training is during copies.

[Note: Which plans are compared]
There are two plans. The first offloads, in all layers, as many tags as compute can hide: the host does little besides copies.
The second is for a budget halfway between full recompute and the baseline, as users choose it: the host does much. Each plan
runs for a few steps, then the baseline runs again, and so on, since hosts change from minute to minute. The first step after
each change is not timed, since memory settles in it. A plan that offloads nothing is not compared. If no plan is left, the
profile has no data about the host.
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

MOST_ADDED_PART = 0.02
"""Maximum simulated slowdown of the plan that only offloads tags, relative to a baseline step. Beyond it, a step waits for the
link and shows less about the host."""

TIMED_STEPS = 2
"""Number of timed steps of each plan and round."""

FEWEST_ROUNDS, MOST_ROUNDS = 2, 4
"""Number of rounds, which gives four to eight steps of each plan. Their median ignores a slow step. With eight, it is within
2% where single steps differ by a tenth."""

ENOUGH_S = 30.0
"""Seconds after which no further round starts, once the fewest rounds are done."""


def compare_steps(
    trainer: Trainer,
    measurement: StepMeasurement,
    profile: Profile,
    *,
    host_budget_bytes: int,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[ComparedStep, ...]:
    """Time steps with plans and baseline steps in alternation. All processes call this and return the same result.

    If planning fails or memory runs out, a warning is logged, and only these steps are lost. The rest of the profile is intact.
    """
    measurement.stop_watching()
    measurement.apply(NOTHING)
    try:
        # Each process has timed its own link, so the first process plans for all.
        plans = ask_first(lambda: choose_plans(profile, host_budget_bytes))
    except OffloadError as error:  # on all processes alike
        logger.warning("no steps are compared, so the profile does not say how launch-bound the training is: %s", error)
        return ()
    if not plans:
        return ()
    try:
        return _take_turns(trainer, measurement, plans, on_step)
    except torch.OutOfMemoryError as error:
        if not is_alone():
            raise  # the other processes are in the middle of a step
        logger.warning("no steps are compared, because one ran out of GPU memory: %s", error)
        return ()
    finally:
        measurement.apply(NOTHING)


def _take_turns(
    trainer: Trainer, measurement: StepMeasurement, plans: Sequence[OffloadPlan], on_step: Callable[[], None]
) -> tuple[ComparedStep, ...]:
    begun_s = time.perf_counter()
    taken: list[list[float]] = [[] for _ in (NOTHING, *plans)]
    for number in range(MOST_ROUNDS):
        for seconds, plan in zip(taken, (NOTHING, *plans), strict=True):
            measurement.apply(plan)
            seconds += _time_steps(trainer, on_step)
        if number + 1 >= FEWEST_ROUNDS and broadcast(time.perf_counter() - begun_s) > ENOUGH_S:
            break
    keeping_s, *steps_s = [statistics.median(max(step) for step in zip(*gather(seconds), strict=True)) for seconds in taken]
    return tuple(
        ComparedStep.from_plan(plan, step_s=step_s, keeping_step_s=keeping_s)
        for plan, step_s in zip(plans, steps_s, strict=True)
    )


def settle() -> None:
    """Collect garbage and synchronize all processes before a step, so that neither happens within it."""
    # A collection takes as long as a layer, and is triggered by the number of objects.
    gc.collect()
    if not is_alone():
        # A stage that starts before the others would include its wait for them in its time.
        torch.distributed.barrier()


def _time_steps(trainer: Trainer, on_step: Callable[[], None]) -> list[float]:
    """Return the seconds of a few steps, after one that is not timed."""
    seconds = []
    for _ in range(1 + TIMED_STEPS):
        settle()
        seconds.append(trainer.run_step(with_digests=False).seconds)
        on_step()
    return seconds[1:]


def choose_plans(profile: Profile, host_budget_bytes: int) -> tuple[OffloadPlan, ...]:
    """Return the plans for measuring the training's host. See [Note: Which plans are compared]."""
    ranks = make_rank_models(profile)
    found = (_offload_hidden_tags(ranks, host_budget_bytes), _plan_for_middle(ranks, host_budget_bytes))
    # A plan without copies cannot show their effect on the host. It only recomputes, or the host has no room for its tags.
    limited = [dataclasses.replace(rank, host_budget_bytes=host_budget_bytes) for rank in ranks]
    return tuple(plan for plan in found if any(rank.d2h_bytes for rank in simulate(limited, plan).ranks))


def _offload_hidden_tags(ranks: Sequence[RankModel], host_budget_bytes: int) -> OffloadPlan:
    """Return the plan that offloads, in all layers, the largest tags whose copies compute can hide."""
    tags = default_tags()
    keeping_s = simulate(ranks, NOTHING).step_s
    best = NOTHING
    chosen: tuple[str, ...] = ()
    for tag in _list_largest(ranks, tags.names):
        # Some tags share a storage with others, and free it only together.
        wanted = tuple(dict.fromkeys((*chosen, tag, *tags.get(tag).requires)))
        try:
            tags.check(wanted)
        except ConfigError:
            continue  # the tag belongs to another kind of attention or MLP than the chosen ones
        flags = MegatronFlags(offload_modules=wanted)
        plan = flags.make_plan(ranks)
        result = simulate(flags.adapt(ranks), plan)
        is_hidden = result.step_s <= (1 + MOST_ADDED_PART) * keeping_s
        if is_hidden and all(rank.host_peak_bytes <= host_budget_bytes for rank in result.ranks):
            best, chosen = plan, wanted
    return best


def _list_largest(ranks: Sequence[RankModel], tags: Sequence[str]) -> list[str]:
    """Return the `tags` that have saved tensors, in descending order of total bytes over all layers."""
    saved: collections.Counter[str] = collections.Counter()
    for tensor in (
        tensor
        for rank in ranks
        for chunk in rank.chunks
        for layer in chunk.layers
        for tensor in layer.model.tensors
        if not tensor.is_below(rank.min_offloaded_numel)
    ):
        saved.update({tag: tensor.size_bytes for tag in tensor.tags if tag in tags})
    return [tag for tag, _ in saved.most_common()]


def _plan_for_middle(ranks: Sequence[RankModel], host_budget_bytes: int) -> OffloadPlan:
    """Return the plan for a budget halfway between full recompute and the baseline, or the empty plan if none fits."""
    keeping_bytes, least_bytes = (simulate(ranks, plan).peak_bytes for plan in (NOTHING, FULL_RECOMPUTE.make_plan(ranks)))
    try:
        return solve(ranks, budget_bytes=(keeping_bytes + least_bytes) // 2, host_budget_bytes=host_budget_bytes).plan
    except BudgetError:
        return NOTHING
