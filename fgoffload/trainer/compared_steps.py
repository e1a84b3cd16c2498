"""Steps under plans, in turn with steps that keep all: what a profile says of how late the host is beside copies.

[Note: Which plans are compared]
Two: one that offloads as many tags as copies hide, in all layers, and one for a budget in the middle between what recomputing
all and keeping all take, as users ask for it. The first has the host do little beside its copies, the second much. Each is run
for a few steps, then those that keep all again, and so on: hosts change from minute to minute. The first step behind each
change is not timed, since memory finds its place in it. A plan that moves nothing is not compared, and where there is no other
one nothing is known of the host.
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
from fgoffload.planner.timing.compared_step import ComparedStep
from fgoffload.planner.timing.profile import Profile
from fgoffload.tags import default_tags
from fgoffload.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

MOST_ADDED_PART = 0.02
"""Of a step that keeps all: what a plan of tags alone is simulated to take longer at most. Beyond that a step waits for the
link, and says less of the host."""

TIMED_STEPS = 2
"""Of each plan and round."""

FEWEST_ROUNDS, MOST_ROUNDS = 2, 4
"""Four to eight steps of each, of which the median leaves out a slow one. Eight are within 2% where single ones differ by a
tenth."""

ENOUGH_S = 30.0
"""Seconds after which no round begins, but for the fewest."""

MOST_COMPARED_STEPS = 3 * MOST_ROUNDS * (1 + TIMED_STEPS)
"""Steps that two plans and nothing take together at most."""


def compare_steps(
    trainer: Trainer,
    measurement: StepMeasurement,
    profile: Profile,
    *,
    host_budget_bytes: int,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[ComparedStep, ...]:
    """Return what steps under plans take beside those that keep all. All processes call it, and find the same.

    What cannot be planned or has no room costs these steps alone, and a warning says why: the rest of a profile is measured.
    """
    measurement.stop_watching()
    measurement.apply(NOTHING)
    try:
        # By the first process's link: each has timed its own.
        plans = ask_first(lambda: choose_plans(profile, host_budget_bytes))
    except OffloadError as error:  # on all processes alike
        logger.warning("no steps are compared, and nothing is known of how late the host is: %s", error)
        return ()
    if not plans:
        return ()
    try:
        return _take_turns(trainer, measurement, plans, on_step)
    except torch.OutOfMemoryError as error:
        if not is_alone():
            raise  # the others are in the middle of a step
        logger.warning("no steps are compared, since one had no room on the device: %s", error)
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
    """Do before a step what must not come inside of it, on all processes."""
    # A collection takes as long as a layer, and comes when objects have been counted.
    gc.collect()
    if not is_alone():
        # A stage that begins before the others would count how long it waits for them.
        torch.distributed.barrier()


def _time_steps(trainer: Trainer, on_step: Callable[[], None]) -> list[float]:
    """Return the seconds of a few steps, behind one that is not timed."""
    seconds = []
    for _ in range(1 + TIMED_STEPS):
        settle()
        seconds.append(trainer.run_step(with_digests=False).seconds)
        on_step()
    return seconds[1:]


def choose_plans(profile: Profile, host_budget_bytes: int) -> tuple[OffloadPlan, ...]:
    """Return the plans that a training's host is judged by. See [Note: Which plans are compared]."""
    ranks = make_rank_models(profile)
    found = (_offload_hidden_tags(ranks, host_budget_bytes), _plan_for_middle(ranks, host_budget_bytes))
    # One that only recomputes has no copies that could make the host late. Nor has one of whose tags nothing has room there.
    limited = [dataclasses.replace(rank, host_budget_bytes=host_budget_bytes) for rank in ranks]
    return tuple(plan for plan in found if any(rank.d2h_bytes for rank in simulate(limited, plan).ranks))


def _offload_hidden_tags(ranks: Sequence[RankModel], host_budget_bytes: int) -> OffloadPlan:
    """Return the plan that offloads, in all layers, the tags whose copies compute hides: of those that save most first."""
    # Here: SciPy takes longer to load than all else, and one process plans.
    from fgoffload.planner.solving.megatron_flags import MegatronFlags

    tags = default_tags()
    keeping_s = simulate(ranks, NOTHING).step_s
    best = NOTHING
    chosen: tuple[str, ...] = ()
    for tag in _list_largest(ranks, tags.names):
        # Some save one storage with others, and free it only with them.
        wanted = tuple(dict.fromkeys((*chosen, tag, *tags.get(tag).requires)))
        try:
            tags.check(wanted)
        except ConfigError:
            continue  # one of another kind of attention or MLP than those before
        flags = MegatronFlags(offload_modules=wanted)
        plan = flags.make_plan(ranks)
        result = simulate(flags.adapt(ranks), plan)
        is_hidden = result.step_s <= (1 + MOST_ADDED_PART) * keeping_s
        if is_hidden and all(rank.host_peak_bytes <= host_budget_bytes for rank in result.ranks):
            best, chosen = plan, wanted
    return best


def _list_largest(ranks: Sequence[RankModel], tags: Sequence[str]) -> list[str]:
    """Return those of `tags` that save something, from the one that saves most in all layers together."""
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
    """Return the plan for a budget in the middle; one that does nothing where no plan takes so little."""
    from fgoffload.planner.solving.megatron_flags import FULL_RECOMPUTE
    from fgoffload.planner.solving.solver import solve

    keeping_bytes, least_bytes = (simulate(ranks, plan).peak_bytes for plan in (NOTHING, FULL_RECOMPUTE.make_plan(ranks)))
    try:
        return solve(ranks, budget_bytes=(keeping_bytes + least_bytes) // 2, host_budget_bytes=host_budget_bytes).plan
    except BudgetError:
        return NOTHING
