"""The plan for each memory budget of a benchmark: made from what is known of the training, and tried before it is measured.

A plan from a profile knows how long each layer of this model takes on this device; one from the hardware table does not. What
operators have for a moment neither knows to the byte. So a plan that turns out to take more than the budget is made again, with
what was missing left free, as `--offload-modules auto` does.

How late the host is neither knows either. So two plans are tried, one as for a host that is in time and one as for a late one
([Note: A late host] in `fgoffload.planner.late_host`), and the one whose steps were faster is measured.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence

from fgoffload.benchmark.job import Job
from fgoffload.benchmark.planning import build_profile_ranks, plan_for_budget
from fgoffload.benchmark.settings import Setting
from fgoffload.errors import PlanError
from fgoffload.plan import OffloadPlan
from fgoffload.planner.late_host import assume_late_host
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.timing.profile import Profile
from fgoffload.units import format_bytes, format_ms

logger = logging.getLogger(__name__)

MOST_PLANS = 3
"""Plans for a budget and one kind of host that are tried. The last one counts, whatever it takes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What a few steps under a plan took."""

    peak_bytes: int
    """Device bytes at their worst moment on any rank."""
    step_s: float
    """Their median."""


TryPlan = Callable[[Setting], Tried | None]
"""Runs a setting for a few steps, on all ranks alike; None where nobody counts bytes, as on a CPU."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A plan that may be the one for a budget."""

    plan: OffloadPlan
    tried: Tried | None
    """None where no plan is tried."""

    def score(self, budget_bytes: int) -> tuple[int, float]:
        """Return what a better one has less of: bytes above the budget, and time."""
        if self.tried is None:
            return (0, 0.0)
        return (max(self.tried.peak_bytes - budget_bytes, 0), self.tried.step_s)


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
        best = self._fit(setting, self._ranks, try_plan)
        # Without copies, and where nothing is tried, nobody asks for the host.
        if best.tried is not None and best.plan.offloaded_tags:
            best = self._pick(setting, best, self._fit(setting, assume_late_host(self._ranks), try_plan, known=best))
        return self._write(setting, best.plan)

    def _fit(
        self, setting: Setting, ranks: Sequence[RankModel], try_plan: TryPlan | None, *, known: _Candidate | None = None
    ) -> _Candidate:
        """Return the plan for `ranks` that keeps to the budget when it is tried, or the last one that was.

        Args:
            setting: With the budget.
            ranks: What is planned for.
            try_plan: None where nothing is tried.
            known: A plan that need not be tried again, and that stays where none is found.
        """
        budget_bytes = setting.budget_bytes or 0
        free_bytes = 0
        candidate = known
        left = MOST_PLANS
        while True:
            try:
                planned = plan_for_budget(ranks, budget_bytes=budget_bytes, free_bytes=free_bytes)
            except PlanError as error:
                if candidate is None:
                    raise
                logger.warning("%s: the plan before stays, since there is none that takes less. %s", setting.name, error)
                return candidate
            if known is not None and planned.plan.actions == known.plan.actions:
                return known
            tried = None if try_plan is None else try_plan(self._write(setting, planned.plan))
            candidate = _Candidate(plan=planned.plan, tried=tried)
            left -= 1
            if tried is None or tried.peak_bytes <= budget_bytes:
                return candidate
            beyond_bytes = tried.peak_bytes - planned.peak_bytes
            free_bytes = max(free_bytes, beyond_bytes)
            taken, beyond = format_bytes(tried.peak_bytes), format_bytes(beyond_bytes)
            logger.warning("%s: a plan took %s, %s more than predicted", setting.name, taken, beyond)
            if not left:
                return candidate

    def _pick(self, setting: Setting, first: _Candidate, late: _Candidate) -> _Candidate:
        """Return the better one of the plan for a host that is in time and the one for a late host."""
        if late is first:
            return first
        best = min(first, late, key=lambda one: one.score(setting.budget_bytes or 0))  # the first of two that are alike
        steps = [format_ms(one.tried.step_s) for one in (first, late) if one.tried is not None]
        logger.warning(
            "%s: %s a step by the plan for a host that is in time, and %s by the one for a late host: the %s is measured",
            setting.name,
            *steps,
            "first" if best is first else "second",
        )
        return best

    def _write(self, setting: Setting, plan: OffloadPlan) -> Setting:
        """Return `setting` with `plan`, in the file of this process for its budget."""
        path = self._job.find_plan_path(setting, rank=self._rank)
        path.write_text(plan.to_json(), encoding="utf-8")
        return setting.with_plan(path)
