"""The plan for each memory budget of a benchmark: made from what is known of the training, and tried before it is measured.

A plan from a profile knows how long each layer of this model takes on this device; one from the hardware table does not. What
operators have for a moment neither knows to the byte. So a plan that turns out to take more than the budget is made again, with
what was missing left free, as `--offload-modules auto` does.

How late the host is the table does not know either, and a profile knows it of the minute in which it was measured. So two plans
are tried, one for the host that is known and one for the other kind, in time or late ([Note: A late host] in
`fgoffload.planner.late_host`), and of those that keep to the budget the second is measured where its steps were faster by more
than noise is, and else the first.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence

from fgoffload.benchmark.job import Job
from fgoffload.benchmark.planning import build_profile_ranks, plan_for_budget
from fgoffload.benchmark.settings import Setting
from fgoffload.errors import PlanError
from fgoffload.output_files import write_file
from fgoffload.plan import OffloadPlan
from fgoffload.planner.late_host import HostGuess, Tried, assume_other_host, describe_trial, find_guess
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.timing.profile import Profile
from fgoffload.units import format_bytes

logger = logging.getLogger(__name__)

MOST_PLANS = 3
"""Plans by what is known of the host that are tried. The last one counts, whatever it takes."""

LEAST_GAIN = 0.03
"""Of a step: by how much the plan for the other host has to be faster when it is tried, or the one for the host that is known
stays. Two models of one and the same setting differ by that. Source: fifteen of `baseline` in one process, whose medians of ten
steps are 2.7% around their mean (docs/decisions.md)."""

TryPlan = Callable[[Setting], Tried | None]
"""Runs a setting for a few steps, on all ranks alike; None where nobody counts bytes, as on a CPU."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A plan that may be the one for a budget."""

    plan: OffloadPlan
    tried: Tried | None
    """None where no plan is tried."""
    beyond_bytes: int = 0
    """How much more it took than was predicted, or a plan before it."""


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
        first = self._fit(setting, self._ranks, try_plan)
        if first.tried is None:
            return self._write(setting, first.plan)
        guess = find_guess(self._ranks)
        # A late host moves no more than one in time: where that moves nothing nobody asks.
        if guess is HostGuess.IN_TIME and not first.plan.offloaded_tags:
            return self._write(setting, first.plan)
        return self._write(setting, self._pick(setting, first, guess, try_plan).plan)

    def _fit(self, setting: Setting, ranks: Sequence[RankModel], try_plan: TryPlan | None) -> _Candidate:
        """Return the plan for `ranks` that keeps to the budget when it is tried, or the last one that was.

        Raises:
            PlanError: No plan was found that fits.
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
                logger.warning("%s: the plan before stays, since there is none that takes less. %s", setting.name, error)
                break
        return candidate

    def _make_candidate(
        self,
        setting: Setting,
        ranks: Sequence[RankModel],
        try_plan: TryPlan | None,
        *,
        free_bytes: int,
        known: _Candidate | None = None,
    ) -> _Candidate:
        """Return a plan that leaves `free_bytes` free, tried unless it is that of `known`."""
        planned = plan_for_budget(ranks, budget_bytes=setting.budget_bytes or 0, free_bytes=free_bytes)
        if known is not None and planned.plan.actions == known.plan.actions:
            return known
        tried = None if try_plan is None else try_plan(self._write(setting, planned.plan))
        beyond_bytes = 0 if tried is None else tried.peak_bytes - planned.peak_bytes
        return _Candidate(plan=planned.plan, tried=tried, beyond_bytes=max(free_bytes, beyond_bytes))

    def _pick(self, setting: Setting, first: _Candidate, guess: HostGuess, try_plan: TryPlan | None) -> _Candidate:
        """Return the better one of `first`, for the host of `guess`, and the plan for the other host."""
        try:
            # What the first one took more than was predicted, this one may: it leaves that free from the start.
            second = self._make_candidate(
                setting,
                assume_other_host(self._ranks or ()),
                try_plan,
                free_bytes=first.beyond_bytes,
                known=first,
            )
        except PlanError as error:
            logger.warning("%s: the first plan stays, since there is none for another host. %s", setting.name, error)
            return first
        if second is first or first.tried is None or second.tried is None:
            return first
        budget_bytes = setting.budget_bytes or 0
        rival = dataclasses.replace(first.tried, step_s=first.tried.step_s * (1 - LEAST_GAIN))
        is_second_better = second.tried.score(budget_bytes) < rival.score(budget_bytes)
        trial = describe_trial(first.tried, second.tried, guess=guess)
        logger.warning("%s: %s: the %s is measured", setting.name, trial, "second" if is_second_better else "first")
        return second if is_second_better else first

    def _write(self, setting: Setting, plan: OffloadPlan) -> Setting:
        """Return `setting` with `plan`, in the file of this process for its budget."""
        path = self._job.find_plan_path(setting, rank=self._rank)
        write_file(path, plan.to_json())
        return setting.with_plan(path)
