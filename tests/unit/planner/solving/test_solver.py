"""Tests the solver: plans within budgets, and errors if no plan fits."""

import dataclasses
import math
import pickle

import pytest
from support.toy_ranks import make_toy_layer, make_toy_rank

from fgoffload import BudgetError, ConfigError, OffloadPlan, PlanError
from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.megatron_flags import list_baselines
from fgoffload.planner.solving.rank_search import RankSearch
from fgoffload.planner.solving.solver import find_least_budget, solve, solve_leaving_free, sweep
from fgoffload.planner.solving.states import read_plan
from fgoffload.planner.solving.treatments import KEEP
from fgoffload.transfer_schedule import TransferPolicy


def test_the_solver_is_deterministic():
    rank = make_toy_rank()
    budget_bytes = simulate([rank], OffloadPlan(actions={})).peak_bytes - 10
    assert solve([rank], budget_bytes=budget_bytes).plan == solve([rank], budget_bytes=budget_bytes).plan


def test_the_least_budget_has_a_plan_and_one_byte_less_has_none():
    rank = make_toy_rank()
    least = find_least_budget([rank])
    assert solve([rank], budget_bytes=least).result.peak_bytes == least
    with pytest.raises(PlanError, match="exceeds the memory budget by 1 B "):
        solve([rank], budget_bytes=least - 1)


def test_a_larger_budget_is_never_slower():
    rank = make_toy_rank()
    least = find_least_budget([rank])
    solutions = list(sweep([rank], [least + 40, least, least + 10, least + 20]))
    assert all(one.result.peak_bytes <= one.budget_bytes for one in solutions)
    steps = [one.result.step_s for one in sorted(solutions, key=lambda one: one.budget_bytes)]
    assert steps == sorted(steps, reverse=True)


def test_everything_is_kept_if_it_fits_into_the_budget():
    rank = make_toy_rank()
    kept = simulate([rank], OffloadPlan(actions={}))
    everything = solve([rank], budget_bytes=kept.peak_bytes)
    assert (everything.plan.actions, everything.result) == ({}, kept)
    assert {decision.reason for decision in everything.decisions} == {"everything fits"}


@pytest.mark.parametrize(("rate", "slowest_s", "is_free"), [(1.0, 0.0, False), (1e9, 0.0, True), (1.0, 1e9, True)])
def test_flags_that_cost_nothing_need_no_sweep(rate, slowest_s, is_free):
    rank = make_toy_rank(link=LinkModel(d2h_bytes_per_s=rate, h2d_bytes_per_s=rate, duplex_bytes_per_s=rate))
    search = RankSearch(rank, loss_window_bytes=None)
    nearest = read_plan(list_baselines([rank])["offload everything"].make_plan([rank]), rank)
    found = search.find(search.kept.peak_bytes - 10, nearest=nearest, slowest_s=slowest_s)
    assert (found == nearest) == (len(search.known) == 2) == is_free  # 2: the baseline and the flags


def test_kept_bytes_are_counted_when_the_rank_keeps_most():
    rank = make_toy_rank(layers=[[make_toy_layer()]] * 2, pipeline=Pipeline(stages=2, chunks=2, microbatches=16))
    search = RankSearch(rank, loss_window_bytes=None)
    least = min(search.treatments[make_toy_layer()], key=lambda one: (one.moved_bytes, one.kept_bytes))
    states = ((least, KEEP), (KEEP, least), (least, least))
    others = {search.evaluate(state).peak_bytes - search.count_bytes(state) for state in states}
    assert others == {20}  # the peak also includes one recomputed layer


def test_an_infeasible_budget_is_reported_with_rank_bytes_op_and_fix():
    # One stage, one layer, no offload: 1 byte of input, and at least 20 bytes after forward, kept or recomputed.
    rank = make_toy_rank(layers=[[make_toy_layer()]], pipeline=Pipeline(microbatches=1), static_bytes=100)
    rank = dataclasses.replace(rank, min_offloaded_numel=99)
    with pytest.raises(PlanError) as caught:
        solve([rank], budget_bytes=110)
    where = "pipeline rank 0 exceeds the memory budget by 11 B at F0 layers.0.expert_fc2"
    assert all(part in str(caught.value) for part in ("budget of 110 B", where, "Use a budget of 121B or more"))
    with pytest.raises(PlanError, match="budget of 100 B is not above the static memory of pipeline rank 0: 100 B"):
        solve([rank], budget_bytes=100)


def test_the_error_names_the_least_budget_that_keeps_the_reserve_free():
    ranks, free_bytes = [make_toy_rank(static_bytes=10_000)], 70
    with pytest.raises(BudgetError, match=r"A plan may use 9.7\d KiB of a budget of 9.80 KiB\. ") as caught:
        solve_leaving_free(ranks, budget_bytes=10_040, free_bytes=free_bytes)
    least_bytes = pickle.loads(pickle.dumps(caught.value)).least_bytes
    assert f"Use a budget of {math.ceil(least_bytes / 10.24) / 100}KiB or more" in str(caught.value)
    found = solve_leaving_free(ranks, budget_bytes=least_bytes, free_bytes=free_bytes)
    assert found.result.peak_bytes == find_least_budget(ranks)
    with pytest.raises(BudgetError):
        solve_leaving_free(ranks, budget_bytes=least_bytes - 1, free_bytes=free_bytes)


def test_plans_respect_the_host_budget():
    # Nothing is recomputed. Two microbatches of 21 bytes are in flight, and the first one's 8 bytes of attention are offloaded
    # before the second ends: 8 host bytes for each, with no reload in flight.
    layer = dataclasses.replace(make_toy_layer(), units=())
    rank = make_toy_rank(layers=[[layer]], pipeline=Pipeline(stages=2, microbatches=3), policy=TransferPolicy(prefetch_bytes=0))
    kept_bytes = simulate([rank], OffloadPlan(actions={})).peak_bytes
    solution = solve([rank], budget_bytes=kept_bytes - 8, host_budget_bytes=16)
    assert 0 < solution.result.ranks[0].host_peak_bytes <= 16
    assert solution.result.ranks[0].kept_bytes == 0
    message = r"a memory budget of .* and a host budget of 1 B per rank\. .* by 8 B at .* a larger host budget may"
    with pytest.raises(PlanError, match=message):
        solve([rank], budget_bytes=kept_bytes - 8, host_budget_bytes=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget_bytes": -1}, "budget_bytes -1 is below 0 bytes"),
        ({"budget_bytes": "60GiB"}, "budget_bytes '60GiB' is not a whole number"),
        ({"host_budget_bytes": -5}, "host_budget_bytes -5 is below 0 bytes"),
        ({"ranks": []}, "ranks is empty"),
    ],
)
def test_invalid_budgets_and_ranks_are_rejected(changes, message):
    arguments = {"ranks": [make_toy_rank()], "budget_bytes": 100, **changes}
    with pytest.raises(ConfigError, match=message):
        solve(arguments.pop("ranks"), **arguments)
