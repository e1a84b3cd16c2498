"""Tests that plans for budgets are tried, and replanned if they exceed the budget."""

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
class FakePlanner:
    """Makes plans that fill the budget up to the reserve, 900 bytes at most. Plan n offloads layer n."""

    reserves: list = dataclasses.field(default_factory=list)
    """The reserve of each plan."""

    def solve(self, ranks, *, budget_bytes, free_bytes, layer_passes):
        """Replace `solve_leaving_free`."""
        self.reserves.append(free_bytes)
        plan = OffloadPlan(actions={Site(chunk=0, layer=len(self.reserves), tag="core_attn"): Action.OFFLOAD})
        peak_bytes = min(900, budget_bytes - free_bytes)
        return types.SimpleNamespace(plan=plan, result=types.SimpleNamespace(peak_bytes=peak_bytes))


@pytest.fixture
def planner(monkeypatch):
    planner = FakePlanner()
    monkeypatch.setattr(rank_models, "solve_leaving_free", planner.solve)
    return planner


def plan(folder: Path, try_plan):
    return plan_budget(SETTING, (make_toy_rank(),), folder / "plan.json", try_plan)


def read_layer(setting) -> int:
    """Return the number of the plan in the file of `setting`."""
    (site,) = OffloadPlan.load(setting.plan).actions
    return site.layer


def measure(*peaks):
    """Return a `try_plan` that measures the next of `peaks` at each call, and repeats the last."""
    sizes = itertools.chain(peaks, itertools.repeat(peaks[-1]))
    return lambda setting: next(sizes)


def test_a_plan_above_the_budget_is_replanned_with_a_larger_reserve(planner, tmp_path):
    found = plan(tmp_path, measure(1050, 1020, 990))
    # Measured 1050 for a prediction of 900, and then 1020 for 850.
    assert planner.reserves == [0, 150, 170]
    assert read_layer(found) == 3


def test_a_budget_without_a_plan_is_an_error(monkeypatch, tmp_path):
    def refuse(ranks, **_):
        raise PlanError("no plan")

    monkeypatch.setattr(rank_models, "solve_leaving_free", refuse)
    with pytest.raises(PlanError, match="no plan"):
        plan(tmp_path, measure(0))
