"""Plans for budgets: one for each, tried, and made again where it takes more than the budget."""

from pathlib import Path

import pytest

from fgoffload import Action, OffloadPlan, PlanError, Site
from fgoffload.benchmark import budget_plans
from fgoffload.benchmark.budget_plans import MOST_PLANS, BudgetPlans
from fgoffload.benchmark.job import Job
from fgoffload.benchmark.planning import Planned
from fgoffload.benchmark.settings import parse_setting

BUDGET_BYTES = 1000
SETTING = parse_setting(f"budget:{BUDGET_BYTES}B")


@pytest.fixture
def planner(monkeypatch):
    """Plans of as many bytes as are not left free, 900 at most. Each offloads a layer with the number of the plan."""
    asked = []

    def plan(ranks, *, budget_bytes, free_bytes):
        if free_bytes > 400:
            raise PlanError("no plan")
        asked.append(free_bytes)
        actions = {Site(chunk=0, layer=len(asked), tag="core_attn"): Action.OFFLOAD}
        return Planned(plan=OffloadPlan(actions=actions), peak_bytes=min(900, budget_bytes - free_bytes))

    monkeypatch.setattr(budget_plans, "plan_for_budget", plan)
    return asked


def make_plans(folder: Path, *, rank: int = 0) -> BudgetPlans:
    job = Job(source="x.sh", file_flags=(), warmup=1, steps=1, plan_folder=folder)
    return BudgetPlans(job, rank=rank, build_ranks=list)


def read_layer(setting) -> int:
    """Return the number of the plan in the file of `setting`."""
    (site,) = OffloadPlan.load(setting.plan).actions
    return site.layer


def test_a_plan_that_keeps_to_its_budget_is_tried_once_and_is_the_same_each_time(planner, tmp_path):
    tried = []
    plans = make_plans(tmp_path, rank=3)
    first = plans.find(SETTING, lambda setting: tried.append(setting) or BUDGET_BYTES)
    assert plans.find(SETTING, None) == first
    assert tried == [first]
    assert planner == [0]
    assert (read_layer(first), first.plan.name) == (1, "plan_budget_1000B_rank3.json")


def test_a_plan_that_takes_more_is_made_again_with_what_was_missing_left_free(planner, tmp_path):
    taken = iter([1050, 1020, 990])
    found = make_plans(tmp_path).find(SETTING, lambda setting: next(taken))
    # 1050 where 900 were predicted; then 1020 where 850 were.
    assert planner == [0, 150, 170]
    assert read_layer(found) == 3


def test_after_some_plans_the_last_one_stays(planner, tmp_path):
    found = make_plans(tmp_path).find(SETTING, lambda setting: BUDGET_BYTES + 1)
    assert len(planner) == MOST_PLANS
    assert read_layer(found) == MOST_PLANS


def test_where_there_is_no_plan_that_takes_less_the_one_before_stays(planner, tmp_path, caplog):
    found = make_plans(tmp_path).find(SETTING, lambda setting: 2000)
    assert planner == [0]
    assert read_layer(found) == 1
    assert "the plan before stays" in caplog.text


def test_where_nobody_counts_bytes_or_nothing_is_tried_the_first_plan_is_the_one(planner, tmp_path):
    make_plans(tmp_path).find(SETTING, None)
    make_plans(tmp_path).find(SETTING, lambda setting: None)
    assert planner == [0, 0]


def test_that_there_is_no_plan_at_all_is_an_error(monkeypatch, tmp_path):
    def refuse(ranks, **_):
        raise PlanError("no plan")

    monkeypatch.setattr(budget_plans, "plan_for_budget", refuse)
    with pytest.raises(PlanError, match="no plan"):
        make_plans(tmp_path).find(SETTING, lambda setting: 0)
