"""The plan for each memory budget of a benchmark: made from what is known of the training, and tried before it is measured.

A plan from a profile knows how long each layer of this model takes on this device; one from the hardware table does not. What
operators have for a moment neither knows to the byte. So a plan that turns out to take more than the budget is made again, with
what was missing left free, as `--offload-modules auto` does.
"""

import logging
from collections.abc import Callable, Sequence

from fgoffload.benchmark.job import Job
from fgoffload.benchmark.planning import build_profile_ranks, plan_for_budget
from fgoffload.benchmark.settings import Setting
from fgoffload.errors import PlanError
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.timing.profile import Profile
from fgoffload.units import format_bytes

logger = logging.getLogger(__name__)

TryPlan = Callable[[Setting], int | None]
"""Runs a setting and returns the device bytes that it takes at peak on any rank; None where nobody counts them."""

MOST_PLANS = 3
"""Plans for a budget that are tried. The last one is measured, whatever it takes."""


class BudgetPlans:
    """Makes the plan of each setting that names a budget, once.

    Args:
        job: What is measured.
        rank: Of this process, from 0: each writes a file of its own.
        build_ranks: Returns what the planner takes the training for by the hardware table.
    """

    def __init__(self, job: Job, *, rank: int, build_ranks: Callable[[], Sequence[RankModel]]) -> None:
        self._job = job
        self._rank = rank
        self._build_ranks = build_ranks
        self._ranks: Sequence[RankModel] | None = None
        self._found: dict[Setting, Setting] = {}

    def learn(self, profile: Profile) -> None:
        """Plan from `profile` from now on. The same on all ranks."""
        self._ranks = build_profile_ranks(self._job, profile)
        self._found.clear()

    def find(self, setting: Setting, try_plan: TryPlan | None) -> Setting:
        """Return `setting` with a plan for its budget, the same each time.

        Args:
            setting: With a budget.
            try_plan: Called on all ranks alike; None where the first plan is the one.

        Raises:
            ConfigError: The hardware table does not have the device, and there is no profile.
            PlanError: No plan was found that fits.
        """
        if setting not in self._found:
            self._found[setting] = self._make(setting, try_plan)
        return self._found[setting]

    def _make(self, setting: Setting, try_plan: TryPlan | None) -> Setting:
        if self._ranks is None:
            self._ranks = self._build_ranks()
        budget_bytes = setting.budget_bytes or 0
        path = self._job.find_plan_path(setting, rank=self._rank)
        free_bytes = 0
        for number in range(MOST_PLANS):
            try:
                planned = plan_for_budget(self._ranks, budget_bytes=budget_bytes, free_bytes=free_bytes)
            except PlanError as error:
                if number == 0:
                    raise
                logger.warning("%s: the plan before stays, since there is none that takes less. %s", setting.name, error)
                break
            path.write_text(planned.plan.to_json(), encoding="utf-8")
            taken_bytes = None if try_plan is None else try_plan(setting.with_plan(path))
            if taken_bytes is None or taken_bytes <= budget_bytes:
                break
            beyond_bytes = taken_bytes - planned.peak_bytes
            free_bytes = max(free_bytes, beyond_bytes)
            taken, beyond = format_bytes(taken_bytes), format_bytes(beyond_bytes)
            logger.warning("%s: a plan took %s, %s more than predicted", setting.name, taken, beyond)
        return setting.with_plan(path)
