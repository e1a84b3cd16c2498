"""Plans by rule of thumb: how layers are split, and which rung is found."""

import pytest

from fgoffload.plan import Action
from fgoffload.planner import Assumptions, ExpertsShape, ModelShape, Parallelism, build_ranks, get_hardware
from fgoffload.planner.memory.static_memory import NO_OPTIMIZER
from fgoffload.planner.simulation.simulator import simulate_rank
from fgoffload.planner.solving.choices import list_modes
from fgoffload.planner.solving.ladders import count_rungs, find_lowest, list_ladders
from fgoffload.planner.solving.placement import list_slots, make_plan
from fgoffload.units import GIB

MODEL = ModelShape(
    name="six layers of 16 experts",
    num_layers=6,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=32,
    kv_channels=128,
    vocab_size=32000,
    seq_length=4096,
    experts=ExpertsShape(num_experts=16, topk=4, ffn_hidden_size=2048, has_fused_permutation=True),
)


def make_rank(**sizes):
    (rank,) = build_ranks(
        MODEL,
        Parallelism(micro_batch_size=2, microbatches=4, **sizes),
        get_hardware("h200"),
        assumptions=Assumptions(state=NO_OPTIMIZER, reserve_bytes=0),
    )
    return rank


@pytest.fixture(scope="module")
def rank():
    return make_rank()


@pytest.fixture(scope="module")
def ladders(rank):
    return make_ladders(rank)


def make_ladders(rank):
    slots = list_slots(rank)
    layer = slots[0].layer
    return list(list_ladders(slots, {layer.kind: list_modes(layer, min_offloaded_numel=rank.min_offloaded_numel)}))


def name_layers(state):
    return [dict(configuration.actions) for configuration in state]


def test_the_first_layers_free_more_and_the_others_less(ladders):
    for ladder in ladders:
        for rung in range(7):
            kept = [configuration.kept_bytes for configuration in ladder(rung)]
            assert len(kept) == 6
            assert kept == sorted(kept)
            assert len(set(kept)) <= 3


def test_the_first_ladder_runs_cheap_things_again(ladders):
    cheap = {"mlp_norm": Action.RECOMPUTE, "moe_act": Action.RECOMPUTE, "dispatch": Action.RECOMPUTE}
    assert name_layers(ladders[0](2)) == [cheap] * 2 + [{}] * 4
    assert name_layers(ladders[0](0)) == [{}] * 6


def test_one_ladder_lets_permuted_tokens_that_came_from_other_ranks_leave_beside_what_runs_again():
    ladders = make_ladders(make_rank(expert_parallel_size=2, data_parallel_size=2))
    cheap = {"mlp_norm": Action.RECOMPUTE, "moe_act": Action.RECOMPUTE}
    moving = {**cheap, "expert_fc1": Action.OFFLOAD}
    assert any(name_layers(ladder(3)) == [moving] * 3 + [cheap] * 3 for ladder in ladders)


def test_some_ladders_begin_with_layers_that_run_widely_again(ladders):
    states = [name_layers(ladder(4)) for ladder in ladders]
    assert any("moe" in state[0] and "moe" not in state[1] and state[1] != state[5] for state in states)


def test_the_lowest_rung_that_fits_is_found_by_halving():
    asked = []

    def fits(rung):
        asked.append(rung)
        return rung >= 5

    assert find_lowest(lambda rung: rung, 16, fits) == 5
    assert len(asked) <= 6
    assert find_lowest(lambda rung: rung, 4, fits) is None
    assert find_lowest(lambda rung: rung, 16, lambda rung: True) == 0


def test_a_rank_has_as_many_rungs_as_its_largest_chunk_has_layers():
    parallelism = Parallelism(pipeline_parallel_size=2, num_layers_in_first_pipeline_stage=4, microbatches=2)
    first, last = build_ranks(MODEL, parallelism, get_hardware("h200"))
    assert (count_rungs(list_slots(first)), count_rungs(list_slots(last))) == (4, 2)


def test_rules_of_thumb_free_two_gib_for_less_than_five_parts_in_a_hundred(rank, ladders):
    slots = list_slots(rank)
    nothing = simulate_rank(rank, make_plan([]))
    budget_bytes = nothing.peak_bytes - 2 * GIB

    def judge(state):
        return simulate_rank(rank, make_plan([(slots, state)]))

    found = [find_lowest(ladder, 6, lambda state: judge(state).peak_bytes <= budget_bytes) for ladder in ladders]
    steps = [judge(state).step_s for state in found if state is not None]
    assert nothing.step_s < min(steps) < 1.05 * nothing.step_s
