"""How late a training's own host is beside copies: what a profile's compared steps say.

[Note: What copies cost a late host]
A profile has the device's times. Copies hardly slow a device, by 1% ([link_rates]), but they cost a host that is late already:
its memory serves both, and each group that leaves is something more to do. What is launched late is on the clock. How much
differs from machine to machine and nothing but a step of the training says it. So a profile has a few steps under plans,
measured in turn with steps that keep all, and the simulator is given the lateness with which these steps take, on average, what
they took. It is one figure, since a few steps tell no more than that: the part by which compute takes longer beside copies, and
with it the time of each group, `GROUP_S` of it.

Either alone says as much of all steps together, and is wrong about some. By bytes alone `expert_fc1`, whose groups are few and
large, was predicted to take 4% to 5% longer than it did in each of three runs, and by groups alone a plan with two groups of
640 MiB to take 3% less (docs/decisions.md). With both, four of the 76 steps that are predicted from profiles with
compared steps are more than 4% off, where eight were by bytes. Where a training plans for itself, steps that
keep all may not fit: those under its first plan say it alone.

[link_rates]: fgoffload/planner/timing/link_rates.py
"""

import dataclasses
from collections.abc import Callable, Sequence

from fgoffload.plan import NOTHING, OffloadPlan
from fgoffload.planner.ranks.rank_model import HostPace, RankModel, Turn
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.timing.compared_step import ComparedStep
from fgoffload.planner.timing.link_rates import COMPUTE_SLOWDOWN

GROUP_S = 3.7e-3
"""Seconds by which a late host launches later behind each group that leaves, for a whole of slowdown beyond the device's own:
0.37 ms where that is a tenth. Source: what compared steps of four runs on H100s took beyond a host in time, for each group of
their plans, is 3.6 to 4.0 ms for a whole of the slowdown that says it by bytes alone (docs/decisions.md)."""

MOST_SLOWDOWN = 0.25
"""What compute takes longer beside copies at most, as a part. What took longer than that says was late for other reasons."""

LEAST_EFFECT = 0.025
"""Of a step that keeps all: by how much at least a step grows from no slowdown to `MOST_SLOWDOWN`, if it is to say which it is.
One that moves little would make a percent of noise a tenth of slowdown and more."""

_PRECISION = 2e-3
"""Of what is found. A plan's step changes by about 0.1% with it."""


def slow_down(ranks: Sequence[RankModel], slowdown: float) -> tuple[RankModel, ...]:
    """Return `ranks` whose compute takes so much longer beside copies, as a part, and whose groups cost what that goes with.

    None gets faster by it.
    """
    return tuple(_slow_down_rank(rank, slowdown) for rank in ranks)


def _slow_down_rank(rank: RankModel, slowdown: float) -> RankModel:
    link = dataclasses.replace(rank.link, compute_slowdown=max(rank.link.compute_slowdown, slowdown))
    # A host that has launched passes ahead does all of that meanwhile.
    group_s = 0.0 if rank.host_pace in (HostPace.PASS_AHEAD, HostPace.STEP_AHEAD) else find_group_s(slowdown)
    return dataclasses.replace(rank, link=link, late_group_s=max(rank.late_group_s, group_s))


def find_group_s(slowdown: float) -> float:
    """Return the seconds that each group that leaves costs a host with such a slowdown beside copies, as a part."""
    return GROUP_S * max(0.0, slowdown - COMPUTE_SLOWDOWN)


def fit_slowdown(ranks: Sequence[RankModel], steps: Sequence[ComparedStep]) -> float:
    """Return what compute takes longer beside copies, as a part, by what `steps` took.

    Args:
        ranks: The pipeline as it was measured, by number.
        steps: Of it. Those of plans that move too little to say anything are not looked at.

    Returns:
        From what the link of `ranks` has, which it is too where no step says more, to `MOST_SLOWDOWN`.

    Raises:
        PlanError: A layer cannot do what the plan of a step says.
    """
    ranks = _call_back(ranks)
    keeping_s = simulate(ranks, NOTHING).step_s

    telling = [step for step in steps if _is_telling(ranks, step.plan)]

    def count_excess_s(slowdown: float) -> float:
        """Return what `telling` steps are simulated to take more than they took, all together."""
        slowed = slow_down(ranks, slowdown)
        return sum(simulate(slowed, step.plan).step_s - keeping_s - step.added_s for step in telling)

    return _find_slowdown(ranks, count_excess_s)


def fit_slowdown_to_step(ranks: Sequence[RankModel], plan: OffloadPlan, *, step_s: float) -> float:
    """Return what compute takes longer beside copies, as a part, where all that is known is what steps under one plan took.

    Whatever else is late in them counts as slowdown too: `fit_slowdown` leaves that out, and needs steps that keep all.

    Args:
        ranks: The pipeline as it was measured, by number.
        plan: Of the steps. One that these ranks cannot do is a mistake of whoever made it.
        step_s: Seconds of one.

    Returns:
        From what the link of `ranks` has to `MOST_SLOWDOWN`; the former where `plan` moves too little to say anything.

    Raises:
        PlanError: A layer cannot do what `plan` says.
    """
    ranks = _call_back(ranks)
    if not _is_telling(ranks, plan):
        return _get_least(ranks)
    return _find_slowdown(ranks, lambda slowdown: simulate(slow_down(ranks, slowdown), plan).step_s - step_s)


def _is_telling(ranks: Sequence[RankModel], plan: OffloadPlan) -> bool:
    """Return whether a step under `plan` is longer enough with the most slowdown to say which it is."""
    grown_s = simulate(slow_down(ranks, MOST_SLOWDOWN), plan).step_s - simulate(ranks, plan).step_s
    return grown_s >= LEAST_EFFECT * simulate(ranks, NOTHING).step_s


def _call_back(ranks: Sequence[RankModel]) -> list[RankModel]:
    """Return `ranks` as they run: where a plan does not say what is called back at a loss, the last groups are."""
    return [dataclasses.replace(rank, turn=Turn.CALL_BACK) for rank in ranks]


def _get_least(ranks: Sequence[RankModel]) -> float:
    return max(rank.link.compute_slowdown for rank in ranks)


def _find_slowdown(ranks: Sequence[RankModel], count_excess_s: Callable[[float], float]) -> float:
    """Return the slowdown, of those that can be, where what is simulated takes what was measured.

    Args:
        ranks: Whose link has the least one.
        count_excess_s: Returns what steps are simulated to take more than they took with a slowdown, which adds to it.
    """
    from scipy.optimize import brentq

    least = _get_least(ranks)
    if count_excess_s(least) >= 0:  # where there is no step too
        return least
    if count_excess_s(MOST_SLOWDOWN) <= 0:
        return MOST_SLOWDOWN
    return float(brentq(count_excess_s, least, MOST_SLOWDOWN, xtol=_PRECISION))
