"""What each thing that a plan does comes to, simulated: a step of all ranks with it, and one without.

Nothing is priced by itself. What runs again may be hidden behind a wait, copies that nobody waits for slow compute, and what
one rank does others may wait for: the difference of two whole steps has all of that.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from fgoffload.errors import PlanError
from fgoffload.plan import OffloadPlan, Site
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.simulation.simulation_result import StepResult
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.choices import list_needs
from fgoffload.planner.solving.reasons import Decision
from fgoffload.units import format_bytes

_SHOWN_S = 5e-5
"""Half of what a table shows: a step that is longer by less is as long there."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """A step under a plan beside one under the plan without something that it does."""

    cost_s: float
    """How much longer the step is with it; below 0 where it is shorter."""
    rank: int
    """The pipeline rank with the highest peak without it."""
    peak_bytes: int
    """That peak."""
    lacking_bytes: int
    """What that peak is above the budget; 0 where it is not."""
    taken_along: tuple[str, ...] = ()
    """Tags that need what was left out, and were left out with it."""

    def describe(self) -> str:
        """Return why the plan does it, as far as the two steps say."""
        along = f" (and {', '.join(self.taken_along)}, which needs it)" if self.taken_along else ""
        # What runs again hides copies, and what leaves moves others to a better time.
        longer = ", and what else the plan does takes longer" if self.cost_s <= -_SHOWN_S else ""
        if self.lacking_bytes:
            return f"without it{along} rank {self.rank} lacks {format_bytes(self.lacking_bytes)}{longer}"
        return f"the budget holds without it{along} too{longer}"


def price_decisions(
    ranks: Sequence[RankModel],
    plan: OffloadPlan,
    result: StepResult,
    decisions: Iterable[Decision],
    *,
    budget_bytes: int,
) -> Price | None:
    """Return what `decisions` come to together, or None where the rest of the plan cannot be done without them.

    Args:
        ranks: That the plan is for, with their host budgets.
        plan: All of it.
        result: What it comes to.
        decisions: What to leave out. None of them keeps.
        budget_bytes: Of each device.
    """
    left_out = {Site(chunk=one.chunk, layer=layer, tag=one.tag) for one in decisions for layer in one.layers}
    along = {site for site in plan.actions if _needs_one(site, left_out)}
    rest = {site: action for site, action in plan.actions.items() if site not in left_out | along}
    try:
        without = simulate(ranks, dataclasses.replace(plan, actions=rest))
    except PlanError:
        return None
    worst = without.worst_rank
    return Price(
        cost_s=result.step_s - without.step_s,
        rank=worst.rank,
        peak_bytes=worst.peak_bytes,
        lacking_bytes=max(0, worst.peak_bytes - budget_bytes),
        taken_along=tuple(sorted({site.tag for site in along})),
    )


def _needs_one(site: Site, left_out: Collection[Site]) -> bool:
    others = (dataclasses.replace(site, tag=name) for name in list_needs(site.tag))
    return site not in left_out and any(other in left_out for other in others)
