"""What a plan's actions cost: against whole steps, simulated with them and without."""

import dataclasses

import pytest
from support.toy_ranks import draw_rank

from fgoffload import Action, OffloadPlan
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.prices import price_decisions
from fgoffload.planner.solving.solver import find_least_budget, solve


def draw_problem(seed):
    """Return a rank, and a budget halfway between the least and that of keeping all."""
    ranks = [dataclasses.replace(draw_rank(seed), rank=0)]
    kept = simulate(ranks, OffloadPlan(actions={}))
    return ranks, (kept.peak_bytes + find_least_budget(ranks)) // 2


@pytest.mark.parametrize("seed", [1, 4])
def test_prices_of_a_solution_are_the_differences_of_two_steps(seed):
    ranks, budget_bytes = draw_problem(seed)
    solution = solve(ranks, budget_bytes=budget_bytes)
    acting = [decision for decision in solution.decisions if decision.action is not Action.KEEP]
    assert acting
    for decision in acting:
        found = price_decisions(ranks, solution.plan, solution.result, [decision], budget_bytes=budget_bytes)
        names = {decision.tag, *(found.taken_along if found else ())}
        rest = {
            site: action
            for site, action in solution.plan.actions.items()
            if not (site.chunk == decision.chunk and site.layer in decision.layers and site.tag in names)
        }
        without = simulate(ranks, OffloadPlan(actions=rest))
        assert found.cost_s == solution.result.step_s - without.step_s
        assert found.lacking_bytes == max(0, without.peak_bytes - budget_bytes)
        assert ("lacks" in found.describe()) == (without.peak_bytes > budget_bytes)
