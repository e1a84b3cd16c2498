"""Models the overhead of offload on a launch-bound host: how much copies slow compute, and the delay per offloaded group.

[Note: Cost of copies on a launch-bound host]
We assume that copies slow the GPU by only 1% (`timing/link_rates.py`). They slow a launch-bound CPU more: copies use host
memory bandwidth, and each offloaded group adds CPU work. If token dispatchers synchronize in each layer, this work delays the
GPU. The delay differs between machines, so we measure it in the run itself: a profile includes a few steps under plans,
alternating with baseline steps. To these compared steps we fit one number, the fraction by which copies slow compute. It also
sets the delay per group, through `GROUP_S`. A cost per byte alone mispredicts plans with few large groups by up to 5%, and a
cost per group alone mispredicts them by 3% (docs/decisions.md). In a run that makes its own plan, the baseline may not fit into
memory, so we fit only to steps under the first plan.
"""

import dataclasses
import enum
from collections.abc import Sequence

from fgoffload.plan import NOTHING, OffloadPlan
from fgoffload.planner.ranks.rank_model import NOT_LATE, HostPace, RankModel, Turn
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.timing.compared_step import ComparedStep
from fgoffload.planner.timing.link_rates import COMPUTE_SLOWDOWN

GROUP_S = 3.7e-3
"""Host delay per offloaded group, in seconds, divided by how far the slowdown exceeds `COMPUTE_SLOWDOWN`. At 0.1 above it, each
group delays the host by 0.37 ms. Source: the compared steps of four runs on H100s imply 3.6 to 4.0 ms."""

LAUNCH_BOUND_SLOWDOWN = 0.1
"""Assumed fraction by which copies slow compute on a launch-bound host that was not measured. Source: the compared
steps of four runs of W2 on H100s imply 0.09 to 0.15 (docs/concepts/planner.md)."""

MOST_SLOWDOWN = 0.25
"""Maximum fitted fraction by which copies slow compute. Steps that imply a larger fraction were slow for other reasons."""

LEAST_EFFECT = 0.025
"""The fit uses a step only if a slowdown of `MOST_SLOWDOWN` would lengthen it by at least this fraction of the baseline step.
In a step with fewer copies, 1% of noise would look like a slowdown of 0.1 or more."""

_PRECISION = 1e-3  # tolerance of the fitted fraction, which changes simulated step times by about 0.1%


class HostGuess(enum.Enum):
    """Assumption about the host: whether a step is launch-bound."""

    NOT_LAUNCH_BOUND = "a step that is not launch-bound"
    LAUNCH_BOUND = "a launch-bound step"


def assume_host(ranks: Sequence[RankModel], guess: HostGuess) -> tuple[RankModel, ...]:
    """Return `ranks` with the slowdown and delay per group that `guess` implies."""
    if guess is HostGuess.LAUNCH_BOUND:
        return slow_down(ranks, LAUNCH_BOUND_SLOWDOWN)
    slowdowns = [min(rank.link.compute_slowdown, COMPUTE_SLOWDOWN) for rank in ranks]
    links = [dataclasses.replace(rank.link, compute_slowdown=one) for rank, one in zip(ranks, slowdowns, strict=True)]
    return tuple(dataclasses.replace(rank, link=link, late=NOT_LATE) for rank, link in zip(ranks, links, strict=True))


def slow_down(ranks: Sequence[RankModel], slowdown: float) -> tuple[RankModel, ...]:
    """Return `ranks` with copies slowing compute by at least the fraction `slowdown`, and with the matching delay per group."""
    return tuple(_slow_down_rank(rank, slowdown) for rank in ranks)


def _slow_down_rank(rank: RankModel, slowdown: float) -> RankModel:
    link = dataclasses.replace(rank.link, compute_slowdown=max(rank.link.compute_slowdown, slowdown))
    # A host that runs a pass or more ahead of the GPU does its work per group without delaying the GPU.
    group_s = 0.0 if rank.host_pace in (HostPace.PASS_AHEAD, HostPace.STEP_AHEAD) else find_group_s(slowdown)
    return dataclasses.replace(rank, link=link, late=rank.late._replace(group_s=max(rank.late.group_s, group_s)))


def find_group_s(slowdown: float) -> float:
    """Return the host delay per offloaded group, in seconds, if copies slow compute by the fraction `slowdown`."""
    return GROUP_S * max(0.0, slowdown - COMPUTE_SLOWDOWN)


def fit_slowdown(ranks: Sequence[RankModel], steps: Sequence[ComparedStep]) -> float:
    """Fit the fraction by which copies slow compute, so that simulated step times match those of the measured `steps`.

    Steps with too few copies are ignored. The result lies between the `compute_slowdown` of the ranks' links and
    `MOST_SLOWDOWN`. If no step is usable, the result is that `compute_slowdown`.
    """
    baseline_s = simulate(_cancel_at_loss(ranks), NOTHING).step_s
    return _find_slowdown(ranks, [(step.plan, baseline_s + step.step_s - step.keeping_step_s) for step in steps])


def fit_slowdown_to_step(ranks: Sequence[RankModel], plan: OffloadPlan, *, step_s: float) -> float:
    """Fit the slowdown to the measured time `step_s` of steps under a single plan.

    The fitted slowdown then also reflects all other delays in the step. `fit_slowdown` excludes them, but needs baseline steps.
    """
    return _find_slowdown(ranks, [(plan, step_s)])


def _find_slowdown(ranks: Sequence[RankModel], steps: Sequence[tuple[OffloadPlan, float]]) -> float:
    ranks = _cancel_at_loss(ranks)
    sensitive = [(plan, step_s) for plan, step_s in steps if _is_sensitive(ranks, plan)]
    least, most = max(rank.link.compute_slowdown for rank in ranks), MOST_SLOWDOWN

    def is_enough(slowdown: float) -> bool:
        slowed = slow_down(ranks, slowdown)
        return sum(simulate(slowed, plan).step_s - step_s for plan, step_s in sensitive) >= 0

    if is_enough(least):  # also true without steps
        return least
    if not is_enough(most):
        return most
    while most - least > _PRECISION:
        middle = (least + most) / 2
        least, most = (least, middle) if is_enough(middle) else (middle, most)
    return (least + most) / 2


def _is_sensitive(ranks: Sequence[RankModel], plan: OffloadPlan) -> bool:
    grown_s = simulate(slow_down(ranks, MOST_SLOWDOWN), plan).step_s - simulate(ranks, plan).step_s
    return grown_s >= LEAST_EFFECT * simulate(ranks, NOTHING).step_s


def _cancel_at_loss(ranks: Sequence[RankModel]) -> list[RankModel]:
    """Return `ranks` that cancel unfinished offloads at the loss, as in measured steps. A plan's own limit takes precedence."""
    return [dataclasses.replace(rank, turn=Turn.CANCEL) for rank in ranks]
