"""Tests that plans for budgets are tried, and made again if they exceed the budget."""

import dataclasses
import itertools
import types
from pathlib import Path

import pytest
from support.toy_ranks import make_toy_rank

from fgoffload import Action, OffloadPlan, PlanError, Site
from fgoffload.benchmark import rank_models
from fgoffload.benchmark.rank_models import plan_budget
from fgoffload.benchmark.settings import parse_setting

BUDGET_BYTES = 1000
SETTING = parse_setting(f"budget:{BUDGET_BYTES}B")


@dataclasses.dataclass
class Planner:
    """Plans of as many bytes as are not left free, 900 at most, each for a layer with the number of the plan."""

    asked: list = dataclasses.field(default_factory=list)
    """What was to be left free, of each plan."""

    def solve(self, ranks, *, budget_bytes, free_bytes, layer_passes):
        """Stand in for `solve_leaving_free`."""
        self.asked.append(free_bytes)
        plan = OffloadPlan(actions={Site(chunk=0, layer=len(self.asked), tag="core_attn"): Action.OFFLOAD})
        peak_bytes = min(900, budget_bytes - free_bytes)
        return types.SimpleNamespace(plan=plan, result=types.SimpleNamespace(peak_bytes=peak_bytes))


@pytest.fixture
def planner(monkeypatch):
    planner = Planner()
    monkeypatch.setattr(rank_models, "solve_leaving_free", planner.solve)
    return planner


def plan(folder: Path, try_plan):
    return plan_budget(SETTING, (make_toy_rank(),), folder / "plan.json", try_plan)


def read_layer(setting) -> int:
    """Return the number of the plan in the file of `setting`."""
    (site,) = OffloadPlan.load(setting.plan).actions
    return site.layer


def take(*peaks):
    """Return a trial of plans that take `peaks` bytes one after the other, the last one on and on."""
    sizes = itertools.chain(peaks, itertools.repeat(peaks[-1]))
    return lambda setting: next(sizes)


def test_a_plan_that_takes_more_is_made_again_with_what_was_missing_left_free(planner, tmp_path):
    found = plan(tmp_path, take(1050, 1020, 990))
    # 1050 where 900 were predicted; then 1020 where 850 were.
    assert planner.asked == [0, 150, 170]
    assert read_layer(found) == 3


def test_that_there_is_no_plan_at_all_is_an_error(monkeypatch, tmp_path):
    def refuse(ranks, **_):
        raise PlanError("no plan")

    monkeypatch.setattr(rank_models, "solve_leaving_free", refuse)
    with pytest.raises(PlanError, match="no plan"):
        plan(tmp_path, take(0))
