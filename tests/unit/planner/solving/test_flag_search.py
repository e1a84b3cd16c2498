"""The flags of Megatron's own that come nearest to a plan, against lists of all that there are."""

import dataclasses
import itertools
import multiprocessing
from pathlib import Path

import pytest
from support.deepseek_ranks import make_ranks

from fgoffload import OffloadPlan
from fgoffload.integrations.megatron.argument_files import read_argument_file
from fgoffload.integrations.megatron.model_shapes import read_model
from fgoffload.planner import Assumptions, build_ranks, get_hardware
from fgoffload.planner.memory.static_memory import NO_OPTIMIZER
from fgoffload.planner.simulation.simulation_result import StepResult
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving import flag_search, rank_searches
from fgoffload.planner.solving.flag_search import find_nearest_flags
from fgoffload.planner.solving.megatron_flags import MegatronFlags, SelectiveRecompute, baselines
from fgoffload.planner.solving.search_limits import SearchLimits
from fgoffload.planner.solving.solver import solve
from fgoffload.planner.worker_processes import share_work
from fgoffload.units import GIB

ARGUMENTS = Path(__file__).parents[4] / "arguments"
RECOMPUTES = (None, *(SelectiveRecompute(modules=names) for names in (("layernorm",), ("moe_act",), ("layernorm", "moe_act"))))


@pytest.fixture(scope="module")
def w2():
    """Return W2 without fused activation on an H100, and what all sets of five tags beside four recomputes come to."""
    flags = (
        *read_argument_file(ARGUMENTS / "w2_moe.sh", variables={}),
        "--no-bias-swiglu-fusion",
        "--grad-reduce-in-bf16",
        "--moe-router-force-load-balancing",
    )
    model, parallelism = read_model(flags, source="w2_moe.sh", num_gpus=1)
    ranks = build_ranks(model, parallelism, get_hardware("h100"), assumptions=Assumptions(state=NO_OPTIMIZER, reserve_bytes=0))
    found = []
    for recompute, count in itertools.product(RECOMPUTES, range(6)):
        for tags in itertools.combinations(("qkv_linear", "core_attn", "mlp_norm", "expert_fc1", "moe_act"), count):
            names = (*tags, "attn_proj") if "core_attn" in tags else tags
            one = MegatronFlags(offload_modules=names, recompute=recompute)
            found.append(simulate(one.adapt(ranks), one.make_plan(ranks)))
    return ranks, found


@pytest.mark.parametrize("part", [0.05, 0.12, 0.3, 0.5, 0.7, 0.9])
def test_no_setting_of_a_list_of_all_is_faster_than_the_nearest_flags_and_none_than_the_plan(w2, part):
    ranks, found = w2
    peaks = sorted(result.peak_bytes for result in found)
    budget_bytes = round(peaks[0] + part * (peaks[-1] - peaks[0]))
    fastest_s = min(result.step_s for result in found if result.peak_bytes <= budget_bytes)
    solution = solve(ranks, budget_bytes=budget_bytes)
    assert solution.nearest.result.peak_bytes <= budget_bytes
    assert solution.nearest.result.step_s <= fastest_s * 1.0001
    assert solution.result.step_s <= fastest_s


@pytest.mark.parametrize("budget_gib", [45, 55])
def test_the_nearest_flags_keep_to_the_budget_and_lose_no_more_than_full_recompute(budget_gib):
    ranks = make_ranks(stages=4, layers=16, microbatches=8)
    flags = find_nearest_flags(ranks, budget_bytes=budget_gib * GIB)
    result = simulate(ranks, flags.make_plan(ranks))
    plans = baselines(ranks)
    assert result.peak_bytes <= budget_gib * GIB
    assert result.step_s <= simulate(ranks, plans["full recompute"]).step_s
    assert result.step_s >= solve(ranks, budget_bytes=budget_gib * GIB).result.step_s


MEGATRONS = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")


@pytest.mark.parametrize("budget_gib", [37, 40, 45, 55])
def test_the_nearest_flags_have_megatrons_own_tags_alone_and_all_of_them_are_no_faster(budget_gib):
    ranks = make_ranks(stages=4, layers=16, microbatches=8)
    flags = find_nearest_flags(ranks, budget_bytes=budget_gib * GIB)
    assert set(flags.offload_modules) <= set(MEGATRONS)
    # Megatron 0.16.1 has no fraction.
    assert flags.activation_offload_fraction == 1
    result = simulate(ranks, flags.make_plan(ranks))
    recomputes = (None, SelectiveRecompute(modules=("layernorm", "moe_act")), SelectiveRecompute(modules=("moe",)))
    for recompute in recomputes:
        other = MegatronFlags(offload_modules=MEGATRONS, recompute=recompute).make_plan(ranks)
        compared = simulate(ranks, other)
        if compared.peak_bytes <= budget_gib * GIB:
            assert result.step_s <= compared.step_s


@pytest.mark.parametrize("budget_gib", [37, 40, 45, 55])
def test_the_nearest_flags_have_no_tag_that_they_fit_without_and_that_takes_time(budget_gib):
    ranks = make_ranks(stages=4, layers=16, microbatches=8)
    flags = find_nearest_flags(ranks, budget_bytes=budget_gib * GIB)
    found = simulate(ranks, flags.make_plan(ranks))
    for tag in flags.offload_modules:
        fewer = tuple(other for other in flags.offload_modules if other != tag and (tag, other) != ("core_attn", "attn_proj"))
        result = simulate(ranks, dataclasses.replace(flags, offload_modules=fewer).make_plan(ranks))
        assert result.peak_bytes > budget_gib * GIB or result.step_s >= 0.9999 * found.step_s


def test_flags_keep_to_the_budget_where_ranks_take_more_beside_their_neighbours(monkeypatch):
    ranks = make_ranks(stages=2, chunks=1, layers=6, microbatches=4)
    budget_bytes = simulate(ranks, OffloadPlan(actions={})).peak_bytes - GIB // 2

    def simulate_with_more(ranks, plan):
        results = simulate(ranks, plan).ranks
        return StepResult(ranks=tuple(dataclasses.replace(one, peak_bytes=one.peak_bytes + GIB) for one in results))

    monkeypatch.setattr(flag_search, "simulate", simulate_with_more)
    flags = find_nearest_flags(ranks, budget_bytes=budget_bytes)
    result = simulate(ranks, flags.make_plan(ranks))
    assert result.peak_bytes + GIB <= budget_bytes
    assert result.step_s < simulate(ranks, baselines(ranks)["full recompute"]).step_s


def test_where_everything_fits_the_nearest_flags_are_none():
    ranks = make_ranks(stages=2, chunks=1, layers=4, microbatches=2)
    kept = simulate(ranks, OffloadPlan(actions={}))
    assert find_nearest_flags(ranks, budget_bytes=kept.peak_bytes) == MegatronFlags()


@pytest.mark.parametrize("exhaustive_plans", [0, 10**12])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_solution_has_the_flags_that_come_nearest_and_looks_for_them_once(monkeypatch, processes, exhaustive_plans):
    ranks = make_ranks(stages=2, chunks=1, layers=1, microbatches=5)
    budget_bytes = simulate(ranks, OffloadPlan(actions={})).peak_bytes - GIB
    expected = flag_search.find_nearest(ranks, budget_bytes=budget_bytes)
    looked = multiprocessing.get_context("fork").Value("i", 0)

    class CountedSearch(flag_search.FlagSearch):
        def __init__(self, *args):
            with looked.get_lock():
                looked.value += 1
            super().__init__(*args)

    monkeypatch.setattr(rank_searches, "FlagSearch", CountedSearch)
    with share_work(processes):
        solution = solve(ranks, budget_bytes=budget_bytes, limits=SearchLimits(exhaustive_plans=exhaustive_plans))
    assert solution.nearest == expected
    assert expected is not None
    assert looked.value == 1


def test_where_no_flags_fit_there_are_none():
    ranks = make_ranks(stages=2, chunks=1, layers=4, microbatches=2)
    assert find_nearest_flags(ranks, budget_bytes=30 * GIB) is None


@pytest.mark.parametrize("exhaustive_plans", [0, 10**12])
def test_flags_that_only_a_step_of_all_microbatches_shows_too_large_are_looked_for_again(monkeypatch, exhaustive_plans):
    ranks = make_ranks(stages=2, chunks=1, layers=1, microbatches=5)
    budget_bytes = simulate(ranks, OffloadPlan(actions={})).peak_bytes - GIB
    wrong = MegatronFlags()
    assert simulate(wrong.adapt(ranks), wrong.make_plan(ranks)).peak_bytes > budget_bytes
    expected = flag_search.find_nearest(ranks, budget_bytes=budget_bytes)

    class WrongSearch(flag_search.FlagSearch):
        def find(self):
            return wrong

    monkeypatch.setattr(rank_searches, "FlagSearch", WrongSearch)
    solution = solve(ranks, budget_bytes=budget_bytes, limits=SearchLimits(exhaustive_plans=exhaustive_plans))
    assert solution.nearest == expected
    assert solution.result.peak_bytes <= budget_bytes
