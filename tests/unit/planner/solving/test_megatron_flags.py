"""Megatron's flags as plans, the settings to compare with, and the flags that come nearest to a plan."""

import dataclasses
import doctest
import multiprocessing

import pytest
from support.deepseek_ranks import make_ranks
from support.toy_ranks import make_toy_layer, make_toy_rank

from fgoffload import Action, ConfigError, OffloadPlan
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulation_result import StepResult
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving import megatron_flags, rank_searches
from fgoffload.planner.solving.megatron_flags import (
    FullMethod,
    FullRecompute,
    MegatronFlags,
    SelectiveRecompute,
    baselines,
    choose_usual_modules,
    find_nearest_flags,
)
from fgoffload.planner.solving.search_limits import SearchLimits
from fgoffload.planner.solving.solver import solve
from fgoffload.planner.worker_processes import share_work
from fgoffload.units import GIB


def write(plan):
    """Return the rows of a plan as text, those of one layer after the other."""
    return {f"{site}: {action.value}" for site, action in plan.actions.items()}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (MegatronFlags(), ""),
        (
            MegatronFlags(offload_modules=("core_attn", "attn_proj"), activation_offload_fraction=0.5),
            "--fine-grained-activation-offloading --offload-modules core_attn attn_proj --activation-offload-fraction 0.5",
        ),
        (
            MegatronFlags(recompute=SelectiveRecompute(modules=("layernorm", "moe_act"))),
            "--recompute-granularity selective --recompute-modules layernorm moe_act",
        ),
        (
            MegatronFlags(recompute=FullRecompute(method=FullMethod.BLOCK, layers=3)),
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
        ),
    ],
)
def test_flags_are_the_words_that_megatron_takes(flags, words):
    assert " ".join(flags.list_arguments()) == words


def test_a_fraction_takes_the_first_sites_of_each_chunk():
    # Two chunks of two layers with two of these sites each: three quarters of four are three, and the last site stays.
    rank = make_toy_rank(layers=[[make_toy_layer()] * 2] * 2, pipeline=Pipeline(stages=2, chunks=2, microbatches=2))
    flags = MegatronFlags(offload_modules=("core_attn", "moe_act"), activation_offload_fraction=0.75)
    assert write(flags.make_plan([rank])) == {
        "layers.0.core_attn: offload",
        "layers.0.moe_act: offload",
        "layers.1.core_attn: offload",
        "layers.2.core_attn: offload",
        "layers.2.moe_act: offload",
        "layers.3.core_attn: offload",
    }


def test_a_module_that_runs_again_and_whose_tag_leaves_has_both():
    rank = make_toy_rank(layers=[[make_toy_layer()]])
    flags = MegatronFlags(offload_modules=("moe_act", "expert_fc2"), recompute=SelectiveRecompute(modules=("moe_act",)))
    # What follows the activation saves nothing then.
    assert write(flags.make_plan([rank])) == {"layers.0.moe_act: recompute+offload"}


def test_blocks_are_the_first_layers_of_each_chunk_and_their_inputs_can_leave():
    rank = make_toy_rank(layers=[[make_toy_layer()] * 2] * 2, pipeline=Pipeline(stages=2, chunks=2, microbatches=2))
    flags = MegatronFlags(
        offload_modules=("layer_input", "expert_fc1"), recompute=FullRecompute(method=FullMethod.BLOCK, layers=1)
    )
    assert write(flags.make_plan([rank])) == {
        "layers.0.layer: recompute",
        "layers.0.layer_input: offload",
        "layers.1.expert_fc1: offload",
        "layers.2.layer: recompute",
        "layers.2.layer_input: offload",
        "layers.3.expert_fc1: offload",
    }


def test_the_baselines_of_a_model_with_latent_attention_and_experts():
    ranks = make_ranks(stages=2, chunks=1, layers=4, microbatches=2)
    plans = baselines(ranks)
    assert list(plans) == ["nothing", "full recompute", "selective recompute", "offload everything"]
    assert plans["nothing"].actions == {}
    assert write(plans["full recompute"]) == {f"layers.{layer}.layer: recompute" for layer in range(4)}
    units = {layer: {"attn_norm", "mla_up_proj"} for layer in range(4)}
    units[3] |= {"mlp_norm", "moe_act"}  # the first three layers are dense
    assert write(plans["selective recompute"]) == {
        f"layers.{layer}.{unit}: recompute" for layer in units for unit in units[layer]
    }
    assert {action for action in plans["offload everything"].actions.values()} == {Action.OFFLOAD}
    assert plans["offload everything"].list_layer(0, 3).keys() == {
        "attn_norm",
        "qkv_linear",
        "core_attn",
        "attn_proj",
        "mlp_norm",
        "shared_expert",
        "router",
        "expert_fc1",
        "moe_act",
        "expert_fc2",
        "moe_combine",
    }


def test_usual_modules_of_a_model_without_experts_are_megatrons_default():
    layer = make_toy_layer()
    dense = type(layer)(kind="dense", segments=layer.segments, tensors=layer.tensors, units=layer.units[:1])
    assert choose_usual_modules([make_toy_rank(layers=[[dense]])]) == ("core_attn",)
    assert choose_usual_modules([make_toy_rank()]) == ("layernorm", "moe_act")


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

    monkeypatch.setattr(megatron_flags, "simulate", simulate_with_more)
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
    expected = megatron_flags.find_nearest(ranks, budget_bytes=budget_bytes)
    looked = multiprocessing.get_context("fork").Value("i", 0)

    def count(*args, **options):
        with looked.get_lock():
            looked.value += 1
        return megatron_flags.find_nearest(*args, **options)

    monkeypatch.setattr(rank_searches, "find_nearest", count)
    with share_work(processes):
        solution = solve(ranks, budget_bytes=budget_bytes, limits=SearchLimits(exhaustive_plans=exhaustive_plans))
    assert solution.nearest == expected
    assert expected is not None
    assert looked.value == 1


def test_where_no_flags_fit_there_are_none():
    ranks = make_ranks(stages=2, chunks=1, layers=4, microbatches=2)
    assert find_nearest_flags(ranks, budget_bytes=30 * GIB) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SelectiveRecompute(modules=("nothing",)), "--recompute-modules 'nothing'"),
        (lambda: FullRecompute(method=FullMethod.UNIFORM, layers=2), "--recompute-num-layers 2 with uniform"),
        (lambda: FullRecompute(method=FullMethod.BLOCK, layers=0), "--recompute-num-layers 0 with block"),
    ],
)
def test_what_flags_cannot_say_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_example_runs():
    assert doctest.testmod(megatron_flags).failed == 0
