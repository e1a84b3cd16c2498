"""What a plan's actions cost: against whole steps, simulated with them and without."""

import dataclasses

import pytest
from support.toy_ranks import draw_rank, make_toy_rank

from fgoffload import Action, OffloadPlan, Site
from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.prices import price_decisions
from fgoffload.planner.solving.reasons import Decision
from fgoffload.planner.solving.solver import find_least_budget, solve

O, R = Action.OFFLOAD, Action.RECOMPUTE  # noqa: E741 - as in tables of plans


def make_plan(rows):
    """Return the plan of `{(layer, tag): action}`."""
    return OffloadPlan(actions={Site(chunk=0, layer=layer, tag=tag): action for (layer, tag), action in rows.items()})


def decide(tag, action, *layers):
    return Decision(
        rank=0,
        chunk=0,
        kind="toy",
        tag=tag,
        action=action,
        layers=layers,
        moved_bytes=0,
        freed_bytes=0,
        recompute_s=0.0,
        reason="",
    )


def price(rank, rows, *decisions, budget_bytes=10**9):
    plan = make_plan(rows)
    return price_decisions([rank], plan, simulate([rank], plan), decisions, budget_bytes=budget_bytes)


def make_rank(*, bytes_per_s, slowdown=0.0):
    link = LinkModel(
        d2h_bytes_per_s=bytes_per_s,
        h2d_bytes_per_s=bytes_per_s,
        duplex_bytes_per_s=bytes_per_s,
        compute_slowdown=slowdown,
    )
    return make_toy_rank(link=link, pipeline=Pipeline(stages=2, microbatches=3))


def test_copies_that_nobody_waits_for_cost_what_they_slow_compute_by():
    rows = {(0, "core_attn"): O}
    rank = make_rank(bytes_per_s=8.0, slowdown=0.5)
    (result,) = simulate([rank], make_plan(rows)).ranks
    assert result.waits.copies_s == 0
    # Three microbatches, a second out and one back of each; beside a second of copies there are two thirds of one of compute.
    assert result.slowed_s == pytest.approx(6 / 3)
    assert price(rank, rows, decide("core_attn", O, 0)).cost_s == pytest.approx(2)
    assert price(make_rank(bytes_per_s=8.0), rows, decide("core_attn", O, 0)).cost_s == 0


def test_recompute_costs_what_it_takes_and_not_what_a_link_would_take():
    for bytes_per_s in (0.01, 1e9):
        found = price(make_rank(bytes_per_s=bytes_per_s), {(0, "moe_act"): R, (1, "moe_act"): R}, decide("moe_act", R, 0))
        assert found.cost_s == pytest.approx(3)


def test_what_the_budget_needs_is_said_with_what_is_lacking():
    rank, rows = make_rank(bytes_per_s=100.0), {(0, "moe_act"): R, (1, "moe_act"): R}
    peak_bytes = simulate([rank], make_plan(rows)).peak_bytes
    without_bytes = simulate([rank], make_plan({(1, "moe_act"): R})).peak_bytes
    needed = price(rank, rows, decide("moe_act", R, 0), budget_bytes=peak_bytes)
    assert (needed.rank, needed.peak_bytes, needed.lacking_bytes) == (0, without_bytes, without_bytes - peak_bytes)
    assert needed.describe() == f"without it rank 0 lacks {without_bytes - peak_bytes} B"
    assert (
        price(rank, rows, decide("moe_act", R, 0), budget_bytes=without_bytes).describe() == "the budget holds without it too"
    )


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
