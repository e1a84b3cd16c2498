"""Random walks over what the layers of a rank do: what they draw, what they expect of it, and where they lead."""

import dataclasses
import itertools

import pytest
from support.toy_ranks import draw_rank, make_toy_layer, make_toy_rank

from fgoffload import Action, OffloadPlan
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulation_result import Detail
from fgoffload.planner.simulation.simulator import simulate_rank
from fgoffload.planner.solving import search, single_ranks
from fgoffload.planner.solving.choices import list_configurations, list_modes
from fgoffload.planner.solving.frontier import measure_layer
from fgoffload.planner.solving.placement import keep_all, list_slots, make_plan
from fgoffload.planner.solving.search_limits import SearchLimits
from fgoffload.planner.solving.solver import find_least_budget, solve
from fgoffload.planner.solving.verdict import Verdict
from fgoffload.planner.solving.walks import Peak, PeakEstimate, Steps

LAYERS = 4
NO_MOVES = SearchLimits(exhaustive_plans=0, programs=1, simulations=0, ladder_passes=0, settling_passes=0, trimming_passes=0)
"""What users would choose, programs, and walks."""


def make_parts():
    """Return a rank of one stage, its slots, the points of its layers, and what a layer may do by its actions."""
    rank = make_toy_rank(layers=[[make_toy_layer()] * LAYERS], pipeline=Pipeline(microbatches=1))
    modes = list_modes(make_toy_layer(), min_offloaded_numel=1)
    points = {"toy": measure_layer(rank, make_toy_layer(), modes)}
    ways = {one.actions: one for one in list_configurations(modes)}
    return rank, list_slots(rank), points, ways, keep_all(list_slots(rank), {"toy": modes})


def judge_peaks(rank, slots, state):
    result = simulate_rank(rank, make_plan([(slots, state)]), detail=Detail.PEAKS)
    return Verdict(step_s=result.step_s, peak_bytes=result.peak_bytes, peaks=result.peaks)


def test_steps_are_the_same_whenever_they_are_drawn_and_change_runs_of_layers_too():
    _, slots, points, _, kept = make_parts()
    ways = {kind: [point.configuration for point in one.every] for kind, one in points.items()}
    walks = [[steps.take(kept) for _ in range(200)] for steps in (Steps(slots, ways), Steps(slots, ways))]
    assert walks[0] == walks[1]
    changed = {sum(one != other for one, other in zip(kept, state, strict=True)) for state in walks[0]}
    assert changed >= {1, LAYERS}


def test_the_peaks_that_are_noted_come_to_the_peak():
    rank, slots, _, ways, kept = make_parts()
    moved = ways[(("core_attn", Action.OFFLOAD),)]
    for state in (kept, (moved,) * LAYERS):
        verdict = judge_peaks(rank, slots, state)
        assert max(verdict.peaks.values()) == verdict.peak_bytes
        usual = simulate_rank(rank, make_plan([(slots, state)]), detail=Detail.DIGITS)
        assert (usual.step_s, usual.peak_bytes, usual.peaks) == (verdict.step_s, verdict.peak_bytes, None)


def test_a_layer_lowers_the_peaks_behind_it_and_those_of_its_own_backward():
    _, slots, points, ways, kept = make_parts()
    estimate = PeakEstimate(slots, points)
    again = ways[(("moe_act", Action.RECOMPUTE),)]
    following = (kept[0], again, *kept[2:])
    freed_bytes = -again.kept_bytes
    assert freed_bytes > 0

    def count(*, is_forward, place, in_flight=1):
        return estimate.count(kept, following, [Peak(is_forward, 0, place, 1000)], [in_flight])

    assert [count(is_forward=True, place=place) for place in range(4)] == [1000, 1000, 1000 - freed_bytes, 1000 - freed_bytes]
    assert count(is_forward=False, place=0) == 1000
    assert count(is_forward=False, place=2) == 1000 - freed_bytes
    # What runs again is there when its own layer is in backward.
    assert 1000 - freed_bytes < count(is_forward=False, place=1) <= 1000
    # Of the other microbatch in flight all is there.
    assert count(is_forward=True, place=0, in_flight=2) == 1000 - freed_bytes


def test_what_recompute_is_estimated_to_free_is_what_the_simulator_says():
    rank, slots, points, ways, kept = make_parts()
    estimate = PeakEstimate(slots, points)
    peaks = estimate.list_peaks(judge_peaks(rank, slots, kept))
    again = ways[(("moe_act", Action.RECOMPUTE),)]
    for chosen in itertools.product((kept[0], again), repeat=LAYERS):
        assert estimate.count(kept, chosen, peaks, [1]) == judge_peaks(rank, slots, chosen).peak_bytes


def list_drawn(monkeypatch, rank, budget_bytes):
    """Return what walks for a budget have simulated."""
    found = []

    class Noted(search.Walks):
        def run(self, *args, **kwargs):
            super().run(*args, **kwargs)
            found.append(list(self.known))

    with monkeypatch.context() as patch:
        patch.setattr(search, "Walks", Noted)
        solve([rank], budget_bytes=budget_bytes, limits=NO_MOVES)
    return found


def test_budgets_of_one_cell_have_the_same_plans_to_choose_from(monkeypatch):
    rank = dataclasses.replace(draw_rank(7), rank=0)
    monkeypatch.setattr(search, "_FEWEST_WALKED", 1)
    monkeypatch.setattr(search, "_CELLS", 4)
    monkeypatch.setattr(search, "_NEAR_PARTS", 0)  # however large the budget is
    least = find_least_budget([rank])
    walked = [list_drawn(monkeypatch, rank, budget_bytes) for budget_bytes in range(least + 2, least + 40, 4)]
    walked = [one for one in walked if one]
    assert 1 < len({str(one) for one in walked}) <= 4


@pytest.mark.parametrize("seed", [3, 7])
def test_walks_alone_make_no_larger_budget_slower(monkeypatch, seed):
    monkeypatch.setattr(search, "_NEAR_PARTS", 0)  # however large the budget is
    rank = dataclasses.replace(draw_rank(seed), rank=0)
    least = find_least_budget([rank])
    steps = [solve([rank], budget_bytes=least + more, limits=NO_MOVES).result.step_s for more in range(0, 60, 10)]
    assert all(later <= before + 1e-9 for before, later in itertools.pairwise(steps))


def test_walks_are_for_budgets_near_full_recompute_and_for_plans_far_above_their_bounds(monkeypatch):
    rank = dataclasses.replace(draw_rank(7), rank=0)
    least = find_least_budget([rank])
    kept = simulate_rank(rank, OffloadPlan(actions={})).peak_bytes
    assert list_drawn(monkeypatch, rank, least)
    found = solve([rank], budget_bytes=kept - 1, limits=NO_MOVES)
    assert found.gap is not None
    monkeypatch.setattr(single_ranks, "_FAR", found.gap + 0.001)
    assert not list_drawn(monkeypatch, rank, kept - 1)
    monkeypatch.setattr(single_ranks, "_FAR", -1.0)
    assert list_drawn(monkeypatch, rank, kept - 1)
