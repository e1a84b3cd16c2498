"""Overhead of a launch-bound host: how much longer compute takes beside copies, and the time of each offloaded group.

[Note: Cost of copies on a launch-bound host]
Copies hardly slow a GPU, by 1% ([link_rates]). They do slow a CPU that already launches late: both use its memory, and each
offloaded group is more work for it. On three machines with an H100 a look-up that misses caches took 1.16 to 1.29 times as
long beside copies to the host, and 1.36 to 1.85 times as long beside copies both ways. If each layer waits for the host, as
in token dispatchers, this delay is on the critical path. It differs by machine, and only a step of the training shows it. So a
profile has a few steps under plans, measured alternately with baseline steps, and one number is fitted to all of them:
the fraction by which copies slow compute. It also sets the time of each group, by `GROUP_S`.

Either alone fits all steps together as well, and is wrong about some. By bytes alone `expert_fc1`, with few large groups, was
predicted 4% to 5% too slow in each of three runs, and by groups alone a plan with two groups of 640 MiB 3% too fast
(docs/decisions.md). With both, four of the 76 steps that are predicted from profiles with compared steps are more than 4% off,
where eight were by bytes. A training that plans for itself may not fit baseline steps: only those under its first plan count.

[link_rates]: fgoffload/planner/timing/link_rates.py
"""

import dataclasses
import enum
from collections.abc import Sequence

from fgoffload.plan import NOTHING, OffloadPlan
from fgoffload.planner.ranks.rank_model import HostPace, RankModel, Turn
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.timing.compared_step import ComparedStep
from fgoffload.planner.timing.link_rates import COMPUTE_SLOWDOWN

GROUP_S = 3.7e-3
"""Seconds of host delay per offloaded group, for a slowdown of 1 beyond the device's own: 0.37 ms for a slowdown of a tenth.
Source: compared steps of four runs on H100s say 3.6 to 4.0 ms (docs/decisions.md)."""

LAUNCH_BOUND_SLOWDOWN = 0.1
"""Assumed slowdown of compute beside copies, as a fraction, of an unmeasured launch-bound host. Source: compared steps of four
runs of W2 on H100s say 0.088, 0.145, 0.095 and 0.090 (docs/concepts/planner.md)."""

MOST_SLOWDOWN = 0.25
"""Largest slowdown of compute beside copies, as a fraction. Steps that took longer were late for other reasons."""

LEAST_EFFECT = 0.025
"""Smallest growth of a step from no slowdown to `MOST_SLOWDOWN`, as a part of the baseline, from which its slowdown is read.
In a step that moves little, a percent of noise would read as a slowdown of a tenth and more."""

_PRECISION = 1e-3  # precision of a fitted slowdown. A plan's step changes by about 0.1% with it.


class HostGuess(enum.Enum):
    """Whether a plan assumes a launch-bound step."""

    IN_TIME = "a step that is not launch-bound"
    LATE = "a launch-bound step"


def assume_host(ranks: Sequence[RankModel], guess: HostGuess) -> tuple[RankModel, ...]:
    """Return `ranks` with another host."""
    if guess is HostGuess.LATE:
        return slow_down(ranks, LAUNCH_BOUND_SLOWDOWN)
    least = [min(rank.link.compute_slowdown, COMPUTE_SLOWDOWN) for rank in ranks]
    links = [dataclasses.replace(rank.link, compute_slowdown=one) for rank, one in zip(ranks, least, strict=True)]
    return tuple(dataclasses.replace(rank, link=link, late_group_s=0.0) for rank, link in zip(ranks, links, strict=True))


def slow_down(ranks: Sequence[RankModel], slowdown: float) -> tuple[RankModel, ...]:
    """Return `ranks` with at least this slowdown of compute beside copies, as a fraction, and its time per group."""
    return tuple(_slow_down_rank(rank, slowdown) for rank in ranks)


def _slow_down_rank(rank: RankModel, slowdown: float) -> RankModel:
    link = dataclasses.replace(rank.link, compute_slowdown=max(rank.link.compute_slowdown, slowdown))
    # A host that runs passes ahead does its work per group meanwhile.
    group_s = 0.0 if rank.host_pace in (HostPace.PASS_AHEAD, HostPace.STEP_AHEAD) else find_group_s(slowdown)
    return dataclasses.replace(rank, link=link, late_group_s=max(rank.late_group_s, group_s))


def find_group_s(slowdown: float) -> float:
    """Return the seconds of host delay per offloaded group for a slowdown beside copies, as a fraction."""
    return GROUP_S * max(0.0, slowdown - COMPUTE_SLOWDOWN)


def fit_slowdown(ranks: Sequence[RankModel], steps: Sequence[ComparedStep]) -> float:
    """Return the slowdown of compute beside copies, as a fraction, at which simulated `steps` take the measured time.

    Steps that move too little are left out. The result is at most `MOST_SLOWDOWN`, and at least the slowdown of the link of
    `ranks`, which is the result if no step tells more.
    """
    keeping_s = simulate(_cancel_at_loss(ranks), NOTHING).step_s
    return _find_slowdown(ranks, [(step.plan, keeping_s + step.added_s) for step in steps])


def fit_slowdown_to_step(ranks: Sequence[RankModel], plan: OffloadPlan, *, step_s: float) -> float:
    """Return the same if only steps under one plan were measured, of `step_s` each.

    Other delays of the step count as slowdown too. `fit_slowdown` leaves them out, and needs baseline steps.
    """
    return _find_slowdown(ranks, [(plan, step_s)])


def _find_slowdown(ranks: Sequence[RankModel], steps: Sequence[tuple[OffloadPlan, float]]) -> float:
    """Return the slowdown at which all steps together take their seconds, from the least of `ranks` to `MOST_SLOWDOWN`."""
    ranks = _cancel_at_loss(ranks)
    telling = [(plan, step_s) for plan, step_s in steps if _is_telling(ranks, plan)]
    least, most = max(rank.link.compute_slowdown for rank in ranks), MOST_SLOWDOWN

    def is_enough(slowdown: float) -> bool:
        slowed = slow_down(ranks, slowdown)
        return sum(simulate(slowed, plan).step_s - step_s for plan, step_s in telling) >= 0

    if is_enough(least):  # also without steps
        return least
    if not is_enough(most):
        return most
    while most - least > _PRECISION:
        middle = (least + most) / 2
        least, most = (least, middle) if is_enough(middle) else (middle, most)
    return (least + most) / 2


def _is_telling(ranks: Sequence[RankModel], plan: OffloadPlan) -> bool:
    """Return whether a step under `plan` grows enough with the largest slowdown to read its slowdown from it."""
    grown_s = simulate(slow_down(ranks, MOST_SLOWDOWN), plan).step_s - simulate(ranks, plan).step_s
    return grown_s >= LEAST_EFFECT * simulate(ranks, NOTHING).step_s


def _cancel_at_loss(ranks: Sequence[RankModel]) -> list[RankModel]:
    """Return `ranks` as they ran: unless a plan says otherwise, the offload of the last groups is cancelled at the loss."""
    return [dataclasses.replace(rank, turn=Turn.CALL_BACK) for rank in ranks]
