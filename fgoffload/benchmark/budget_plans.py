"""Plans for each memory budget of a benchmark, and tries each plan before the measurement.

A profile has the times of each layer of this model on this device; the hardware table does not. Neither predicts the temporary
memory of operators to the byte. So a plan that exceeds the budget is replaced by one that leaves the excess free, as with
`--offload-modules auto`.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence

from fgoffload.benchmark.job import Job
from fgoffload.benchmark.rank_models import build_profile_ranks, plan_for_budget
from fgoffload.benchmark.settings import Setting
from fgoffload.errors import PlanError
from fgoffload.output_files import write_file
from fgoffload.plan import OffloadPlan
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.timing.profile import Profile
from fgoffload.planner.tried_plan import Tried
from fgoffload.units import format_bytes

logger = logging.getLogger(__name__)

MOST_PLANS = 3
"""Maximum number of plans tried for a budget. The last one is used, whatever its peak."""

TryPlan = Callable[[Setting], Tried | None]
"""Runs a setting for a few steps on all ranks together. Returns None if no allocator counts bytes, as on a CPU."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A candidate plan for a budget."""

    plan: OffloadPlan
    tried: Tried | None
    """Result of the trial; None where no plan is tried."""
    beyond_bytes: int = 0
    """Bytes by which this plan, or an earlier one, exceeded its predicted peak."""


class BudgetPlans:
    """Plans each setting that has a budget, once.

    Args:
        job: The benchmark's options.
        rank: Rank of this process, from 0. Each rank writes its own file.
        build_ranks: Returns the planner's model of the training, from the hardware table.
    """

    def __init__(self, job: Job, *, rank: int, build_ranks: Callable[[], Sequence[RankModel]]) -> None:
        self._job = job
        self._rank = rank
        self._build_ranks = build_ranks
        self._ranks: Sequence[RankModel] | None = None
        self._found: dict[Setting, Setting] = {}

    def learn(self, profile: Profile) -> None:
        """Use `profile` for all later plans. All ranks pass the same profile."""
        self._ranks = build_profile_ranks(self._job, profile)
        self._found.clear()

    def find(self, setting: Setting, try_plan: TryPlan | None) -> Setting:
        """Return `setting` with a plan for its budget. Later calls return the same plan.

        Args:
            setting: A setting with a budget.
            try_plan: Called on all ranks together. None takes the first plan without a trial.

        Raises:
            ConfigError: The device is not in the hardware table, and there is no profile.
            PlanError: No plan fits the budget.
        """
        if setting not in self._found:
            self._found[setting] = self._make(setting, try_plan)
        return self._found[setting]

    def _make(self, setting: Setting, try_plan: TryPlan | None) -> Setting:
        if self._ranks is None:
            self._ranks = self._build_ranks()
        return self._write(setting, self._fit(setting, self._ranks, try_plan).plan)

    def _fit(self, setting: Setting, ranks: Sequence[RankModel], try_plan: TryPlan | None) -> _Candidate:
        """Return the first plan for `ranks` whose trial stays within the budget, or else the last one tried.

        Raises:
            PlanError: No plan fits the budget.
        """
        candidate = self._make_candidate(setting, ranks, try_plan, free_bytes=0)
        for _ in range(MOST_PLANS - 1):
            if candidate.tried is None or candidate.tried.peak_bytes <= (setting.budget_bytes or 0):
                break
            taken, beyond = format_bytes(candidate.tried.peak_bytes), format_bytes(candidate.beyond_bytes)
            logger.warning("%s: a plan took %s, %s more than predicted", setting.name, taken, beyond)
            try:
                candidate = self._make_candidate(setting, ranks, try_plan, free_bytes=candidate.beyond_bytes)
            except PlanError as error:
                logger.warning("%s: keeping the plan, since none takes less. %s", setting.name, error)
                break
        return candidate

    def _make_candidate(
        self, setting: Setting, ranks: Sequence[RankModel], try_plan: TryPlan | None, *, free_bytes: int
    ) -> _Candidate:
        """Make a plan that leaves `free_bytes` free, and try it."""
        planned = plan_for_budget(ranks, budget_bytes=setting.budget_bytes or 0, free_bytes=free_bytes)
        tried = None if try_plan is None else try_plan(self._write(setting, planned.plan))
        beyond_bytes = 0 if tried is None else tried.peak_bytes - planned.peak_bytes
        return _Candidate(plan=planned.plan, tried=tried, beyond_bytes=max(free_bytes, beyond_bytes))

    def _write(self, setting: Setting, plan: OffloadPlan) -> Setting:
        """Write `plan` to this rank's file for the budget, and return `setting` with it."""
        path = self._job.find_plan_path(setting, rank=self._rank)
        write_file(path, plan.to_json())
        return setting.with_plan(path)
