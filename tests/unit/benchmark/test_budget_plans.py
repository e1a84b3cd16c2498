"""Plans for budgets: tried, and made again where they take more than the budget."""

import dataclasses
import itertools
from pathlib import Path

import pytest
from support.toy_ranks import make_toy_rank

from fgoffload import Action, OffloadPlan, PlanError, Site
from fgoffload.benchmark import budget_plans
from fgoffload.benchmark.budget_plans import BudgetPlans
from fgoffload.benchmark.job import Job
from fgoffload.benchmark.rank_models import Planned
from fgoffload.benchmark.settings import parse_setting
from fgoffload.planner.tried_plan import Tried

BUDGET_BYTES = 1000
SETTING = parse_setting(f"budget:{BUDGET_BYTES}B")


@dataclasses.dataclass
class Planner:
    """Plans of as many bytes as are not left free, 900 at most, each for a layer with the number of the plan."""

    asked: list = dataclasses.field(default_factory=list)
    """What was to be left free, of each plan."""

    def plan(self, ranks, *, budget_bytes, free_bytes):
        """Stand in for `plan_for_budget`."""
        self.asked.append(free_bytes)
        plan = OffloadPlan(actions={Site(chunk=0, layer=len(self.asked), tag="core_attn"): Action.OFFLOAD})
        return Planned(plan=plan, peak_bytes=min(900, budget_bytes - free_bytes))


@pytest.fixture
def planner(monkeypatch):
    planner = Planner()
    monkeypatch.setattr(budget_plans, "plan_for_budget", planner.plan)
    return planner


def make_plans(folder: Path) -> BudgetPlans:
    job = Job(source="x.sh", file_flags=(), warmup=1, steps=1, plan_folder=folder)
    return BudgetPlans(job, rank=0, build_ranks=lambda: (make_toy_rank(),))


def read_layer(setting) -> int:
    """Return the number of the plan in the file of `setting`."""
    (site,) = OffloadPlan.load(setting.plan).actions
    return site.layer


def take(*peaks):
    """Return a trial of plans that take `peaks` bytes one after the other, the last one on and on."""
    sizes = itertools.chain(peaks, itertools.repeat(peaks[-1]))
    return lambda setting: Tried(peak_bytes=next(sizes), step_s=1.0)


def test_a_plan_that_takes_more_is_made_again_with_what_was_missing_left_free(planner, tmp_path):
    found = make_plans(tmp_path).find(SETTING, take(1050, 1020, 990))
    # 1050 where 900 were predicted; then 1020 where 850 were.
    assert planner.asked == [0, 150, 170]
    assert read_layer(found) == 3


def test_that_there_is_no_plan_at_all_is_an_error(monkeypatch, tmp_path):
    def refuse(ranks, **_):
        raise PlanError("no plan")

    monkeypatch.setattr(budget_plans, "plan_for_budget", refuse)
    with pytest.raises(PlanError, match="no plan"):
        make_plans(tmp_path).find(SETTING, take(0))
