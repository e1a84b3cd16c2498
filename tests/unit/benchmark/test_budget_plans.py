"""Plans for budgets: two for each, tried, made again where they take more than the budget, and the faster one is taken."""

import dataclasses
import itertools
from pathlib import Path

import pytest
from support.toy_ranks import make_toy_rank

from fgoffload import Action, OffloadPlan, PlanError, Site
from fgoffload.benchmark import budget_plans
from fgoffload.benchmark.budget_plans import MOST_PLANS, BudgetPlans
from fgoffload.benchmark.job import Job
from fgoffload.benchmark.planning import Planned
from fgoffload.benchmark.settings import parse_setting
from fgoffload.planner.late_host import LATE_HOST_SLOWDOWN, HostGuess, Tried, assume_host

BUDGET_BYTES = 1000
SETTING = parse_setting(f"budget:{BUDGET_BYTES}B")


@dataclasses.dataclass
class Planner:
    """Plans of as many bytes as are not left free, 900 at most, each for a layer with the number of the plan."""

    asked: list = dataclasses.field(default_factory=list)
    """What was to be left free, of each plan for a host that is in time."""
    asked_late: list = dataclasses.field(default_factory=list)
    """The same, of each plan for a late host."""
    late_action: Action = Action.RECOMPUTE
    late_layer: int | None = None
    """Of plans for a late host; None numbers them on."""

    def plan(self, ranks, *, budget_bytes, free_bytes):
        """Stand in for `plan_for_budget`."""
        is_late = ranks[0].link.compute_slowdown == LATE_HOST_SLOWDOWN
        if free_bytes > 400:
            raise PlanError("no plan")
        (self.asked_late if is_late else self.asked).append(free_bytes)
        number = len(self.asked) + len(self.asked_late)
        layer = self.late_layer if is_late and self.late_layer is not None else number
        action = self.late_action if is_late else Action.OFFLOAD
        plan = OffloadPlan(actions={Site(chunk=0, layer=layer, tag="core_attn"): action})
        return Planned(plan=plan, peak_bytes=min(900, budget_bytes - free_bytes))


@pytest.fixture
def planner(monkeypatch):
    planner = Planner()
    monkeypatch.setattr(budget_plans, "plan_for_budget", planner.plan)
    return planner


def make_plans(folder: Path, *, rank: int = 0) -> BudgetPlans:
    job = Job(source="x.sh", file_flags=(), warmup=1, steps=1, plan_folder=folder)
    return BudgetPlans(job, rank=rank, build_ranks=lambda: (make_toy_rank(),))


def read_layer(setting) -> int:
    """Return the number of the plan in the file of `setting`."""
    (site,) = OffloadPlan.load(setting.plan).actions
    return site.layer


def take(*peaks, seconds=()):
    """Return a trial of plans that take `peaks` bytes one after the other, the last one on and on, and `seconds`."""
    times = itertools.chain(seconds, itertools.repeat(1.0))
    sizes = itertools.chain(peaks, itertools.repeat(peaks[-1]))
    tried = []

    def try_plan(setting):
        tried.append(read_layer(setting))
        return Tried(peak_bytes=next(sizes), step_s=next(times))

    try_plan.tried = tried
    return try_plan


def test_of_two_plans_that_keep_to_a_budget_the_first_stays_where_they_are_alike_and_is_the_same_each_time(planner, tmp_path):
    plans, trial = make_plans(tmp_path, rank=3), take(BUDGET_BYTES)
    first = plans.find(SETTING, trial)
    assert plans.find(SETTING, None) == first
    assert trial.tried == [1, 2]
    assert (planner.asked, planner.asked_late) == ([0], [100])
    assert (read_layer(first), first.plan.name) == (1, "plan_budget_1000B_rank3.json")


@pytest.mark.parametrize(
    ("seconds", "layer", "word"),
    [((1.0, 0.96), 2, "second"), ((1.0, 0.98), 1, "first"), ((0.9, 1.0), 1, "first")],
)
def test_the_second_plan_is_measured_where_its_steps_were_faster_by_more_than_noise_is(
    planner, tmp_path, caplog, seconds, layer, word
):
    found = make_plans(tmp_path).find(SETTING, take(BUDGET_BYTES, seconds=seconds))
    assert read_layer(found) == layer
    first, second = (f"{1e3 * one:.1f} ms at 1000 B" for one in seconds)
    assert (
        f"a step takes {first} by the plan for a host that is in time, and {second} by the one for a late host" in caplog.text
    )
    assert f"the {word} is measured" in caplog.text


def test_a_faster_plan_that_takes_more_than_the_budget_is_not_taken(planner, tmp_path):
    found = make_plans(tmp_path).find(SETTING, take(BUDGET_BYTES, BUDGET_BYTES + 1, seconds=(1.0, 0.5)))
    assert read_layer(found) == 1


def test_where_a_late_host_gets_the_same_plan_it_is_tried_once(planner, tmp_path, caplog):
    planner.late_action, planner.late_layer = Action.OFFLOAD, 1
    trial = take(BUDGET_BYTES)
    assert read_layer(make_plans(tmp_path).find(SETTING, trial)) == 1
    assert trial.tried == [1]
    assert "late host" not in caplog.text


def test_where_nothing_leaves_nobody_asks_for_the_host(planner, tmp_path, monkeypatch):
    nothing = Planned(plan=OffloadPlan(actions={}), peak_bytes=900)
    monkeypatch.setattr(budget_plans, "plan_for_budget", lambda ranks, **options: planner.asked.append(1) or nothing)
    make_plans(tmp_path).find(SETTING, lambda setting: Tried(peak_bytes=900, step_s=1.0))
    assert planner.asked == [1]


@pytest.mark.parametrize(("seconds", "layer"), [((1.0, 0.9), 2), ((0.9, 1.0), 1)])
def test_where_the_host_is_known_to_be_late_one_in_time_is_tried_second(planner, tmp_path, monkeypatch, caplog, seconds, layer):
    late = assume_host((make_toy_rank(),), HostGuess.LATE)
    job = Job(source="x.sh", file_flags=(), warmup=1, steps=1, plan_folder=tmp_path)
    plans = BudgetPlans(job, rank=0, build_ranks=lambda: late)
    # Recompute alone: for a host that is known to be in time nobody would ask further.
    assert planner.late_action is Action.RECOMPUTE
    assert read_layer(plans.find(SETTING, take(950, seconds=seconds))) == layer
    assert (planner.asked, planner.asked_late) == ([50], [0])
    first, second = (f"{1e3 * one:.1f} ms at 950 B" for one in seconds)
    assert (
        f"a step takes {first} by the plan for a late host, and {second} by the one for a host that is in time" in caplog.text
    )


def test_where_no_plan_is_found_for_a_late_host_the_first_stays(planner, tmp_path, monkeypatch, caplog):
    def plan(ranks, **options):
        if ranks[0].link.compute_slowdown == LATE_HOST_SLOWDOWN:
            raise PlanError("no plan")
        return planner.plan(ranks, **options)

    monkeypatch.setattr(budget_plans, "plan_for_budget", plan)
    assert read_layer(make_plans(tmp_path).find(SETTING, take(BUDGET_BYTES))) == 1
    assert "the first plan stays, since there is none for another host. no plan" in caplog.text


def test_a_plan_for_a_late_host_leaves_free_what_the_first_one_took_more(planner, tmp_path):
    make_plans(tmp_path).find(SETTING, take(1050, 990))
    # 900 and 850 were predicted: what the second took more counts, though it keeps to the budget.
    assert (planner.asked, planner.asked_late) == ([0, 150], [150])
    make_plans(tmp_path).find(SETTING, take(950))
    assert planner.asked_late[1:] == [50]


def test_a_plan_that_takes_more_is_made_again_with_what_was_missing_left_free(planner, tmp_path):
    found = make_plans(tmp_path).find(SETTING, take(1050, 1020, 990, 990, seconds=(1.0, 1.0, 1.0, 2.0)))
    # 1050 where 900 were predicted; then 1020 where 850 were.
    assert planner.asked == [0, 150, 170]
    assert read_layer(found) == 3


def test_after_some_plans_the_last_one_stays(planner, tmp_path):
    found = make_plans(tmp_path).find(SETTING, take(BUDGET_BYTES + 1))
    assert len(planner.asked) == MOST_PLANS
    assert read_layer(found) == MOST_PLANS


def test_where_there_is_no_plan_that_takes_less_the_one_before_stays(planner, tmp_path, caplog):
    found = make_plans(tmp_path).find(SETTING, take(2000))
    assert planner.asked == [0]
    assert read_layer(found) == 1
    assert "the plan before stays" in caplog.text


def test_where_nobody_counts_bytes_or_nothing_is_tried_the_first_plan_is_the_one(planner, tmp_path):
    make_plans(tmp_path).find(SETTING, None)
    make_plans(tmp_path).find(SETTING, lambda setting: None)
    assert (planner.asked, planner.asked_late) == ([0, 0], [])


def test_that_there_is_no_plan_at_all_is_an_error(monkeypatch, tmp_path):
    def refuse(ranks, **_):
        raise PlanError("no plan")

    monkeypatch.setattr(budget_plans, "plan_for_budget", refuse)
    with pytest.raises(PlanError, match="no plan"):
        make_plans(tmp_path).find(SETTING, take(0))
