"""What a plan's actions cost: against whole steps, simulated with them and without."""

import dataclasses

import pytest
from support.deepseek_ranks import make_ranks
from support.toy_ranks import draw_rank, make_toy_rank

from fgoffload import Action, OffloadPlan, Site
from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.known_passes import KnownSteps
from fgoffload.planner.simulation.rank_run import RankRun
from fgoffload.planner.simulation.simulator import Detail, simulate
from fgoffload.planner.solving import prices
from fgoffload.planner.solving.prices import Price, price_decisions
from fgoffload.planner.solving.reasons import Decision
from fgoffload.planner.solving.search_limits import SearchLimits
from fgoffload.planner.solving.solver import find_least_budget, solve
from fgoffload.units import GIB

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


@pytest.mark.parametrize(("cost_s", "is_said"), [(-1.0, True), (-5e-5, True), (-4e-5, False), (0.0, False), (1.0, False)])
@pytest.mark.parametrize("lacking_bytes", [0, 1])
def test_a_cost_below_nothing_says_that_the_rest_takes_longer_without_it(cost_s, is_said, lacking_bytes):
    said = Price(cost_s=cost_s, rank=0, peak_bytes=1, lacking_bytes=lacking_bytes).describe()
    assert said.endswith(", and what else the plan does takes longer") == is_said


def test_what_needs_the_action_goes_with_it_and_is_named():
    rank, rows = make_rank(bytes_per_s=100.0), {(0, "layer"): R, (0, "layer_input"): O}
    found = price(rank, rows, decide("layer", R, 0))
    kept = simulate([rank], OffloadPlan(actions={}))
    assert (found.taken_along, found.peak_bytes) == (("layer_input",), kept.peak_bytes)
    assert found.cost_s == simulate([rank], make_plan(rows)).step_s - kept.step_s
    assert found.describe() == "the budget holds without it (and layer_input, which needs it) too"


def draw_problem(seed):
    """Return a rank, and a budget halfway between the least and that of keeping all."""
    ranks = [dataclasses.replace(draw_rank(seed), rank=0)]
    kept = simulate(ranks, OffloadPlan(actions={}))
    return ranks, (kept.peak_bytes + find_least_budget(ranks)) // 2


@pytest.mark.parametrize("seed", range(8))
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


def test_prices_in_a_pipeline_are_those_of_steps_of_which_each_pass_is_simulated(monkeypatch):
    # Ranks and chunks that do the same share what passes come to, with a row and without.
    ranks = make_ranks(stages=4, layers=8, microbatches=16)
    solution = solve(ranks, budget_bytes=36 * GIB)
    whole = simulate(ranks, solution.plan, detail=Detail.TIMELINE)
    rows = {}
    for decision in solution.decisions:
        if decision.action is not Action.KEEP:
            rows.setdefault((decision.kind, decision.tag, decision.action), []).append(decision)
    assert len(rows) > 2
    known = KnownSteps()
    simulate(ranks, solution.plan, known=known)
    run_pass, run = RankRun.run_pass, []

    def count_run(known, *rows):
        """Return the prices of rows, and how many passes were run step by step for them."""
        with monkeypatch.context() as patches:
            patches.setattr(RankRun, "run_pass", lambda *args, **fields: run.append(args) or run_pass(*args, **fields))
            run.clear()
            result, budget_bytes = solution.result, solution.budget_bytes
            found = [price_decisions(ranks, solution.plan, result, row, budget_bytes=budget_bytes, known=known) for row in rows]
            return found, len(run)

    every, fewer = count_run(known, *rows.values())
    # No price is of what another one has found out: processes that share them take them in any order.
    assert count_run(known, *reversed(rows.values())) == (every[::-1], fewer)
    assert fewer < count_run(None, *rows.values())[1]
    for decisions, found in zip(rows.values(), every, strict=True):
        left_out = {(one.chunk, layer, one.tag) for one in decisions for layer in one.layers}
        along = {(one.chunk, layer, tag) for one in decisions for layer in one.layers for tag in found.taken_along}
        rest = {
            site: action
            for site, action in solution.plan.actions.items()
            if (site.chunk, site.layer, site.tag) not in left_out | along
        }
        without = simulate(ranks, dataclasses.replace(solution.plan, actions=rest), detail=Detail.TIMELINE)
        assert found.cost_s == pytest.approx(whole.step_s - without.step_s, abs=1e-9)
        assert (found.rank, found.peak_bytes) == (without.worst_rank.rank, without.peak_bytes)


@pytest.mark.parametrize("seed", range(24))
def test_no_row_takes_time_that_the_budget_holds_without(seed):
    ranks, budget_bytes = draw_problem(seed)
    # As where there are so many layers that moves come to few of them.
    limits = SearchLimits(exhaustive_plans=0, simulations=0, programs=1)
    solution = solve(ranks, budget_bytes=budget_bytes, limits=limits)
    rows = {}
    for decision in solution.decisions:
        if decision.action is not Action.KEEP:
            rows.setdefault((decision.kind, decision.tag, decision.action), []).append(decision)
    for decisions in rows.values():
        found = price_decisions(ranks, solution.plan, solution.result, decisions, budget_bytes=budget_bytes)
        assert found is None or found.lacking_bytes or found.cost_s < 1e-9


def test_what_is_left_waits_before_the_loss_as_the_plan_says(monkeypatch):
    rank, seen = make_rank(bytes_per_s=8.0), []
    plan = dataclasses.replace(make_plan({(0, "core_attn"): O, (1, "core_attn"): O}), loss_window_bytes=3)
    result = simulate([rank], plan)
    monkeypatch.setattr(prices, "simulate", lambda ranks, one, **_: seen.append(one.loss_window_bytes) or simulate(ranks, one))
    price_decisions([rank], plan, result, [decide("core_attn", O, 0)], budget_bytes=10**9)
    assert seen == [3]
