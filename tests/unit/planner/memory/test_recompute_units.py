"""What units save and what they drop, in bytes counted by hand: of a dense layer, of a mixture, and of latent attention."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layer_times import COMPUTING, DENSE, IDEAL, MLA, MOE, change_experts
from support.rank_models import make_chunk, make_rank

from fgoffload import InternalError
from fgoffload.plan import Action
from fgoffload.planner.memory.recompute_units import make_units
from fgoffload.planner.memory.saved_bytes import list_saved_tensors
from fgoffload.planner.model.layer_shape import LayerShape, RouterShape
from fgoffload.planner.ranks.output_copies import copy_outputs
from fgoffload.planner.simulation.layer_choice import resolve_layer
from fgoffload.planner.timing.op_times import make_layer_model
from fgoffload.tags import RECOMPUTE_UNITS, find_recompute_unit

# 128 tokens of 32 channels, 4 heads of 8 in 2 groups.
HIDDEN, ROWS = 2 * 128 * 32, 4 * 128
QUERY_KEY_VALUE, OUTPUT, LSE, RANDOM = 2 * 128 * (4 + 2 + 2) * 8, 2 * 128 * 32, 4 * 128 * 4, 16
# Without rotary embeddings the query is a tensor of its own, and key and value are views of what one linear returned. With them
# the value is.
QUERY, KEY, VALUE = 2 * 128 * 4 * 8, 2 * 128 * 2 * 8, 2 * 128 * 2 * 8
ROTARY = dataclasses.replace(DENSE, rotary_channels=8)
ATTENTION = HIDDEN + ROWS + HIDDEN + QUERY_KEY_VALUE + OUTPUT + LSE + RANDOM
WIDE, INNER = 2 * 128 * 96, 2 * 128 * 48
DENSE_BYTES = ATTENTION + HIDDEN + ROWS + HIDDEN + WIDE + INNER

# Experts of 16 channels, 2 of 8 a token, without a balancing loss; shared experts of 24.
MIXTURE = change_experts(shared_ffn_hidden_size=24)
ROUTED = 8 * 256 + 4 * 256  # the numbers of the chosen experts and their probabilities
PERMUTED, GATES, EXPERT_INNER = 2 * 256 * 32, 2 * 256 * 32, 2 * 256 * 16
PROBABILITIES, PLACES, SHARED = 2 * 256, 8 * 256, 2 * 128 * 3 * 24
EXPERT_BYTES = PERMUTED + GATES + PROBABILITIES + EXPERT_INNER + PLACES
MIXTURE_BYTES = ATTENTION + HIDDEN + ROWS + HIDDEN + SHARED + ROUTED + EXPERT_BYTES

# Heads of 8 + 4 and 8 channels, compressed to 10 and 6.
LATENT_QUERY_KEY_VALUE = 2 * 128 * 4 * (12 + 12 + 8)
COMPRESSED, TABLES, CHANNELS = 2 * 128 * (10 + 6), 8 * 64 * 4, 2 * 128 * 4
LATENT_BYTES = DENSE_BYTES - QUERY_KEY_VALUE + LATENT_QUERY_KEY_VALUE + COMPRESSED + TABLES

DENSE_UNITS = {
    "layer": (DENSE_BYTES, HIDDEN),
    "qkv_linear": (DENSE_BYTES, DENSE_BYTES - ROWS - HIDDEN - QUERY_KEY_VALUE),
    "core_attn": (DENSE_BYTES, DENSE_BYTES - LSE - RANDOM + QUERY),
    "mlp_fc1": (DENSE_BYTES, ATTENTION + HIDDEN),
    "mlp": (DENSE_BYTES, ATTENTION + HIDDEN),
}
MIXTURE_UNITS = {
    "layer": (MIXTURE_BYTES, HIDDEN),
    "qkv_linear": (MIXTURE_BYTES, MIXTURE_BYTES - ROWS - HIDDEN - QUERY_KEY_VALUE),
    "core_attn": (MIXTURE_BYTES, MIXTURE_BYTES - LSE - RANDOM + QUERY),
    "mlp_norm": (MIXTURE_BYTES, MIXTURE_BYTES - HIDDEN - ROWS),
    "moe": (MIXTURE_BYTES, ATTENTION + HIDDEN + ROWS + HIDDEN),
    "shared_expert": (MIXTURE_BYTES, MIXTURE_BYTES - SHARED),
    "expert_fc1": (MIXTURE_BYTES, MIXTURE_BYTES - GATES - EXPERT_INNER),
    "moe_act": (MIXTURE_BYTES, MIXTURE_BYTES - EXPERT_INNER),
    "dispatch": (MIXTURE_BYTES, MIXTURE_BYTES - PERMUTED),
}
MOE_UNITS = ["layer", "qkv_linear", "core_attn", "mlp_norm", "moe", "expert_fc1", "moe_act"]
"""Of a rank that has a part of the experts, or a part of each."""
LATENT_UNITS = {
    "layer": (LATENT_BYTES, HIDDEN),
    "attn_norm": (LATENT_BYTES, LATENT_BYTES - HIDDEN - ROWS),
    "mla_up_proj": (LATENT_BYTES, LATENT_BYTES - LATENT_QUERY_KEY_VALUE - TABLES + CHANNELS),
    "core_attn": (LATENT_BYTES, LATENT_BYTES - LSE - RANDOM),
    "mlp_fc1": (LATENT_BYTES, LATENT_BYTES - ROWS - HIDDEN - WIDE - INNER),
    "mlp": (LATENT_BYTES, LATENT_BYTES - ROWS - HIDDEN - WIDE - INNER),
}
ROTARY_UNITS = {"core_attn": (DENSE_BYTES, DENSE_BYTES - LSE - RANDOM + QUERY + KEY)}
BY_HAND = [
    (shape, unit, before, after)
    for shape, units in ((DENSE, DENSE_UNITS), (ROTARY, ROTARY_UNITS), (MIXTURE, MIXTURE_UNITS), (MLA, LATENT_UNITS))
    for unit, (before, after) in units.items()
]


def make_layer(shape):
    return make_layer_model(shape, COMPUTING, kind="any", efficiency=IDEAL)


def make_found(shape):
    return {unit.name: unit for unit in make_layer(shape).units}


def count_saved(layer, unit):
    """Return the bytes that a layer saves while `unit` has not run again yet."""
    kept = sum(one.size_bytes for one in layer.tensors if one.name not in unit.drops and not one.is_same_in_all_layers)
    return kept + sum(one.size_bytes for one in unit.keeps)


@pytest.mark.parametrize(("shape", "unit", "before", "after"), BY_HAND)
def test_a_layer_saves_what_was_counted_by_hand_with_the_unit_and_without(shape, unit, before, after):
    layer = make_layer(shape)
    assert layer.saved_bytes == before
    assert count_saved(layer, layer.find_unit(unit)) == after


@pytest.mark.parametrize("fields", [{"has_fused_activation": False}, {"is_gated": False}], ids=["unfused", "no gate"])
def test_an_activation_that_runs_again_saves_what_it_was_given_and_nothing_in_between(fields):
    layer = make_layer(dataclasses.replace(MIXTURE, **fields))
    kept = [one.name for one in layer.tensors if one.name not in layer.find_unit("moe_act").drops]
    assert {name for name in kept if name in {one.name for one in layer.tensors if one.tags == ("moe_act",)}} == {
        "first linears' output",
        "permuted probabilities",
    }
    assert "activation's output" not in kept


def test_an_unfused_activation_that_runs_again_saves_what_a_fused_one_does():
    unfused, fused = (make_layer(dataclasses.replace(MIXTURE, has_fused_activation=is_fused)) for is_fused in (False, True))
    # In the experts both factors and their product; of gate and up it is the gate, which lacks half a row at its end.
    expected = 4 * EXPERT_INNER
    dropped = unfused.saved_bytes - count_saved(unfused, unfused.find_unit("moe_act"))
    assert dropped == expected
    assert fused.saved_bytes - count_saved(fused, fused.find_unit("moe_act")) == EXPERT_INNER


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        (DENSE, list(DENSE_UNITS)),
        (MIXTURE, list(MIXTURE_UNITS)),
        (MLA, list(LATENT_UNITS)),
        (MOE, ["layer", "qkv_linear", "core_attn", "mlp_norm", "moe", "expert_fc1", "moe_act", "dispatch"]),
        # Tokens of other ranks would have to be sent again, and those of half an expert are gathered.
        *(
            (dataclasses.replace(MOE, experts=dataclasses.replace(MOE.experts, **{name: 2})), MOE_UNITS)
            for name in ("expert_parallel_size", "expert_tensor_parallel_size")
        ),
        (
            dataclasses.replace(DENSE, has_fused_norms=False),
            ["layer", "attn_norm", "qkv_linear", "core_attn", "mlp_norm", "mlp_fc1", "mlp"],
        ),
        # The dispatcher runs shared experts that overlap, and no checkpoint can be around them.
        (
            change_experts(shared_ffn_hidden_size=24, has_shared_overlap=True),
            [*MOE_UNITS, "dispatch"],
        ),
        # Linears cannot keep their input as it was given, which norms and activations that run again need.
        (dataclasses.replace(MIXTURE, fp8_recipe="delayed"), ["layer", "core_attn", "moe", "shared_expert"]),
        (dataclasses.replace(MLA, fp8_recipe="delayed"), ["layer", "mla_up_proj", "core_attn", "mlp"]),
        # What runs again for the first linear would be quantized again.
        (
            dataclasses.replace(MIXTURE, fp8_recipe="blockwise"),
            ["layer", "core_attn", "mlp_norm", "moe", "shared_expert", "moe_act"],
        ),
    ],
)
def test_a_layer_has_the_units_of_its_modules_in_the_order_of_the_registry(shape, names):
    assert list(make_found(shape)) == names


def test_each_unit_runs_its_stretches_again_where_megatron_asks_for_them():
    mixture = {name: (unit.segments, unit.before) for name, unit in make_found(MIXTURE).items()}
    experts = ("shared_expert", "router", "dispatch", "expert_fc1", "moe_act", "expert_fc2", "moe_combine")
    assert mixture == {
        "layer": (("qkv_linear", "core_attn", "attn_proj", "mlp_norm", *experts), "moe_combine"),
        "qkv_linear": (("qkv_linear",), "core_attn"),
        "core_attn": (("core_attn",), "core_attn"),
        # Its recompute hangs on the output of all experts, and not on the router, which is the first to need it.
        "mlp_norm": (("mlp_norm",), "moe_combine"),
        "moe": (experts, "moe_combine"),
        "shared_expert": (("shared_expert",), "shared_expert"),
        "expert_fc1": (("expert_fc1", "moe_act"), "expert_fc2"),
        "moe_act": (("moe_act",), "expert_fc2"),
        "dispatch": (("dispatch",), "expert_fc1"),
    }
    latent = {name: (unit.segments, unit.before) for name, unit in make_found(MLA).items()}
    assert latent["attn_norm"] == (("attn_norm",), "attn_proj")
    # What compresses does not run again.
    assert latent["mla_up_proj"] == (("qkv_linear",), "core_attn")
    assert latent["mlp_fc1"] == (("mlp_fc1", "mlp_act"), "mlp_fc2")
    assert latent["mlp"] == (("mlp_fc1", "mlp_act", "mlp_fc2"), "mlp_fc2")


def test_the_projection_keeps_the_output_of_attention_that_runs_again():
    layer = make_layer(DENSE)
    unit = layer.find_unit("core_attn")
    assert set(unit.drops) == {"log-sum-exp", "random state"}
    with_sinks = make_layer(dataclasses.replace(DENSE, has_attention_sinks=True)).find_unit("core_attn")
    assert set(with_sinks.drops) == {*unit.drops, "attention sinks"}
    # Key and value are copied again, and what they are views of is there until then.
    assert [(one.tags, one.size_bytes) for one in unit.keeps] == [(("core_attn",), QUERY)]
    assert unit.extra_bytes == KEY + VALUE


def test_attention_that_runs_again_keeps_all_that_its_value_is_a_view_of():
    unit = make_found(ROTARY)["core_attn"]
    assert [one.size_bytes for one in unit.keeps] == [QUERY + KEY]
    assert unit.extra_bytes == VALUE
    # Each of two ranks has half of the heads.
    unit = make_found(dataclasses.replace(ROTARY, tensor_parallel_size=2))["core_attn"]
    assert [one.size_bytes for one in unit.keeps] == [(QUERY + KEY) // 2]
    assert unit.extra_bytes == VALUE // 2


@pytest.mark.parametrize(
    "shape",
    [dataclasses.replace(MLA, rotary_channels=4), dataclasses.replace(DENSE, num_query_groups=4)],
    ids=["latent attention", "no group, and nothing turns"],
)
def test_attention_whose_input_is_saved_as_it_is_keeps_nothing_more(shape):
    unit = make_found(shape)["core_attn"]
    assert (unit.keeps, unit.extra_bytes) == ((), 0)


LLAMA = LayerShape(
    micro_batch_size=1,
    seq_length=8192,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    qk_channels=128,
    v_channels=128,
    ffn_hidden_size=14336,
    rotary_channels=128,
)


def test_recompute_of_attention_of_llama_3_8b_takes_79_mib_a_layer_more():
    layer = make_layer(LLAMA)
    # Query and key, 64 + 16 MiB, stay as the linear returned them, and 1 MiB of statistics goes. 28 layers: 2.16 GiB, where
    # 64.93 - 62.76 GiB were measured on an H200.
    assert count_saved(layer, layer.find_unit("core_attn")) - layer.saved_bytes == 79 * 2**20 - RANDOM


def test_what_attention_keeps_stays_while_the_projections_input_leaves():
    layer = make_layer(LLAMA)
    actions = {"core_attn": Action.RECOMPUTE, "qkv_linear": Action.OFFLOAD}
    resolved = resolve_layer(layer, actions, min_offloaded_numel=0)
    assert resolved.moved_bytes == 2 * 64 * 2**20 + 4 * 8192  # the norm's input and output, and its statistics
    kept = {one.tensor.name: one for one in resolved.kept}
    assert kept["rest of the projections' output"].tensor.size_bytes == 80 * 2**20
    # It is freed where query, key and value are: by the backward of attention.
    assert kept["rest of the projections' output"].freed_after == kept["query, key and value"].freed_after
    (rerun,) = resolved.reruns
    # The value's copy is there again, and the statistics.
    assert sum(one.tensor.size_bytes for one in rerun.made) == 16 * 2**20 + 2**20 + RANDOM


def test_with_delayed_scaling_the_projection_keeps_a_copy_in_fp8_and_the_output_is_dropped():
    assert "attention output" in make_found(dataclasses.replace(DENSE, fp8_recipe="delayed"))["core_attn"].drops


def test_the_rotary_channels_of_the_key_are_kept_with_the_compressed_tensors():
    (kept,) = make_found(MLA)["mla_up_proj"].keeps
    assert (kept.tags, kept.size_bytes) == (("qkv_linear",), CHANNELS)
    # Each of two ranks has them of the whole sequence, and in what the projection returned, between those compressed, of its
    # own half: up to the compressed key-value of the last token.
    kept = make_found(dataclasses.replace(MLA, tensor_parallel_size=2))["mla_up_proj"].keeps
    assert [one.size_bytes for one in kept] == [CHANNELS, CHANNELS // 2 - 2 * 4]
    assert {one.tags for one in kept} == {("qkv_linear",)}


def test_in_fp8_projections_that_run_again_keep_what_they_are_given_and_not_the_copies_that_linears_save():
    shape = dataclasses.replace(MLA, fp8_recipe="delayed")
    unit = make_found(shape)["mla_up_proj"]
    assert {"compressed query", "compressed key-value"} < set(unit.drops)
    assert sum(one.size_bytes for one in unit.keeps) == COMPRESSED + CHANNELS
    # Of copies of one byte an element and a scale each, that is more than what is dropped of them.
    layer = make_layer(shape)
    dropped = LATENT_QUERY_KEY_VALUE + TABLES + COMPRESSED // 2 + 2 * 4
    assert count_saved(layer, unit) == layer.saved_bytes - dropped + COMPRESSED + CHANNELS


def test_in_fp8_norms_save_the_compressed_tensors_in_bf16_whether_or_not_projections_run_again():
    normed = dataclasses.replace(MLA, latent=dataclasses.replace(MLA.latent, has_qk_norm=True), fp8_recipe="delayed")
    unit = make_found(normed)["mla_up_proj"]
    assert not {"compressed query", "compressed key-value"} & set(unit.drops)
    assert sum(one.size_bytes for one in unit.keeps) == CHANNELS


def test_normed_compressed_tensors_are_made_again_with_the_projections():
    normed = dataclasses.replace(MLA, latent=dataclasses.replace(MLA.latent, has_qk_norm=True))
    assert {"normed compressed query", "normed compressed key-value"} < set(make_found(normed)["mla_up_proj"].drops)


def test_a_dense_mlp_keeps_the_input_that_it_runs_again_from():
    assert "residual" not in make_found(DENSE)["mlp"].drops
    apart = make_found(dataclasses.replace(DENSE, has_fused_norms=False))["mlp"]
    assert set(apart.drops) == {"first linear's output", "activation's output"}


def test_first_linears_keep_the_input_that_they_run_again_from():
    dense, apart = make_found(DENSE), make_found(dataclasses.replace(DENSE, has_fused_norms=False))
    norm = "output of the norm before attention", "statistics of the norm before attention"
    assert set(dense["qkv_linear"].drops) == {*norm, "query, key and value"}
    assert set(apart["qkv_linear"].drops) == {"query, key and value"}
    assert "residual" not in dense["mlp_fc1"].drops
    assert set(apart["mlp_fc1"].drops) == {"first linear's output", "activation's output"}
    unfused = make_found(dataclasses.replace(MIXTURE, has_fused_activation=False))["expert_fc1"]
    assert {"first linears' output", "activated gate", "activation's output"} < set(unfused.drops)
    assert not {"permuted tokens", "permuted probabilities"} & set(unfused.drops)


def test_with_biases_there_are_only_the_units_that_layers_can_run_again():
    dense, mixture = (make_found(dataclasses.replace(shape, has_linear_bias=True)) for shape in (DENSE, MIXTURE))
    assert set(make_found(DENSE)) - set(dense) == {"mlp"}
    assert set(make_found(MIXTURE)) - set(mixture) == {"expert_fc1"}


def test_head_norms_run_again_with_the_projection():
    drops = make_found(dataclasses.replace(DENSE, has_qk_norm=True))["qkv_linear"].drops
    assert {"query before its norm", "statistics of the key's norm"} < set(drops)


def test_gathered_input_of_overlapped_shared_experts_is_dropped_with_all_experts():
    shape = dataclasses.replace(change_experts(shared_ffn_hidden_size=24, has_shared_overlap=True), tensor_parallel_size=2)
    dropped = make_found(shape)["moe"].drops
    assert "gathered input of the shared experts" in dropped
    assert "output of the norm before the MLP" not in dropped


def find_extras(shape):
    """Return by unit the seconds and bytes of copies within the device, 1e9 bytes a second."""
    units = make_units(shape, make_layer(shape).segments, list_saved_tensors(shape), copy_bytes_per_s=1e9)
    return {unit.name: (unit.extra_s, unit.extra_bytes) for unit in units}


def test_what_runs_again_is_not_copied():
    # What checkpoints return is there once more, until backward is through.
    assert find_extras(MIXTURE) == {
        "layer": (0, HIDDEN),
        "qkv_linear": (0, 0),
        "core_attn": (0, KEY + VALUE),
        "mlp_norm": (0, 0),
        "moe": (0, HIDDEN),
        "shared_expert": (0, HIDDEN),
        "expert_fc1": (0, 0),
        "moe_act": (0, 0),
        "dispatch": (0, 0),
    }
    held = [(unit.name, unit.held == unit.drops) for unit in make_found(MIXTURE).values() if unit.held]
    assert held == [("dispatch", True)]
    latent = find_extras(MLA)
    assert latent["attn_norm"] == latent["mla_up_proj"] == latent["mlp_fc1"] == (0, 0)


def test_by_megatrons_own_flags_it_is_copied_and_there_twice_and_nothing_else_changes():
    hardware = dataclasses.replace(COMPUTING, device_memory_bytes_per_s=1e9)
    layer = make_layer_model(MIXTURE, hardware, kind="moe", efficiency=dataclasses.replace(IDEAL, memory=0.5))
    rank = make_rank(make_chunk(layer, layer))
    by_flags = copy_outputs(rank)
    (own,) = {one.model for one in by_flags.chunks[0].layers}
    copied = {"mlp_norm": HIDDEN, "moe_act": EXPERT_INNER}
    for unit, before in zip(own.units, layer.units, strict=True):
        size_bytes = copied.get(unit.name, 0)
        assert unit.extra_s - before.extra_s == pytest.approx(2 * size_bytes / 0.5e9)
        assert unit.extra_bytes - before.extra_bytes == size_bytes
    # Simulations remember what they made of a layer: all that are alike are one.
    assert copy_outputs(rank).chunks[0].layers[1].model is by_flags.chunks[0].layers[0].model
    assert copy_outputs(by_flags) == by_flags
    assert dataclasses.replace(own, units=layer.units) == layer
    assert dataclasses.replace(by_flags, chunks=rank.chunks) == rank


def test_what_megatrons_checkpoints_fill_again_is_copied_and_there_twice():
    # Read and written.
    found = find_extras(dataclasses.replace(MIXTURE, fp8_recipe="blockwise"))
    assert found["mlp_norm"] == (pytest.approx(2 * HIDDEN / 1e9), HIDDEN)
    assert found["moe_act"] == (pytest.approx(2 * EXPERT_INNER / 1e9), EXPERT_INNER)
    latent = find_extras(dataclasses.replace(MLA, fp8_recipe="blockwise"))
    assert latent["attn_norm"] == (pytest.approx(2 * HIDDEN / 1e9), HIDDEN)
    assert latent["mla_up_proj"] == (pytest.approx(2 * LATENT_QUERY_KEY_VALUE / 1e9), LATENT_QUERY_KEY_VALUE)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        # The sort by expert reads and writes what was permuted: twice the tokens here, with two experts of each.
        ({}, 2 * 2 / (2 * 2 + 2 * 2)),
        ({"has_fused_permutation": True}, (1 + 2) / (1 + 2 + 2 * 2)),
        ({"num_experts": 1, "topk": 1}, 1),
    ],
)
def test_the_sort_by_expert_does_not_run_again(changes, part):
    shape = dataclasses.replace(MIXTURE, experts=dataclasses.replace(MIXTURE.experts, **changes))
    parts = {unit.name: unit.forward_part for unit in make_found(shape).values()}
    assert parts.pop("dispatch") == pytest.approx(part)
    assert set(parts.values()) == {1}


def test_copies_take_no_time_unless_their_rate_is_given():
    shape = dataclasses.replace(MLA, fp8_recipe="blockwise")
    assert all(unit.extra_s == 0 for unit in make_units(shape, make_layer(shape).segments, list_saved_tensors(shape)))


def test_a_layer_model_copies_at_the_rate_that_kernels_reach_of_memory():
    hardware = dataclasses.replace(COMPUTING, device_memory_bytes_per_s=1e9)
    shape = dataclasses.replace(MOE, fp8_recipe="blockwise")
    layer = make_layer_model(shape, hardware, kind="moe", efficiency=dataclasses.replace(IDEAL, memory=0.5))
    assert layer.find_unit("moe_act").extra_s == pytest.approx(2 * EXPERT_INNER / 0.5e9)


def test_what_multi_token_prediction_has_around_its_layer_does_not_run_again():
    plain, predicting = make_found(MIXTURE), make_found(dataclasses.replace(MIXTURE, has_mtp_projection=True))
    assert predicting == plain


def test_a_tensor_that_is_not_there_is_a_fault_of_ours():
    tensors = [one for one in list_saved_tensors(MOE) if one.name != "activation's output"]
    with pytest.raises(InternalError, match="saves no activation's output"):
        make_units(MOE, make_layer(MOE).segments, tensors)


SHAPES = st.builds(
    lambda shape, fused, ranks, overlap, recipe, router, expert_ranks: dataclasses.replace(
        shape,
        has_fused_norms=fused,
        tensor_parallel_size=ranks,
        fp8_recipe=recipe,
        experts=shape.experts
        and dataclasses.replace(
            shape.experts,
            router=router,
            expert_parallel_size=expert_ranks,
            has_shared_overlap=overlap and shape.experts.shared_ffn_hidden_size > 0,
        ),
    ),
    st.sampled_from((DENSE, MOE, MIXTURE, MLA, dataclasses.replace(MLA, ffn_hidden_size=0, experts=MIXTURE.experts))),
    st.booleans(),
    st.sampled_from((1, 2)),
    st.booleans(),
    st.sampled_from((None, "delayed", "tensorwise", "blockwise")),
    st.sampled_from((RouterShape(), RouterShape(balancing="aux_loss", dtype_bytes=4))),
    st.sampled_from((1, 8)),
)


@settings(deadline=None, max_examples=80)
@given(shape=SHAPES)
def test_whatever_the_layer_units_are_made_of_what_it_has(shape):
    layer = make_layer(shape)
    names = [segment.name for segment in layer.segments]
    saved = {tensor.name: tensor for tensor in layer.tensors}
    assert len(saved) == len(layer.tensors)
    for unit in layer.units:
        assert set(unit.drops) <= set(saved)
        assert len(set(unit.drops)) == len(unit.drops) > 0
        assert not any("layer_input" in saved[name].tags or saved[name].is_same_in_all_layers for name in unit.drops)
        places = [names.index(name) for name in unit.segments]
        assert places == sorted(places)
        assert names.index(unit.before) >= places[-1]
        # What it keeps instead is more for attention alone, and no plan gains by it.
        assert count_saved(layer, unit) < layer.saved_bytes or (unit.name == "core_attn" and unit.keeps)
        assert math.isfinite(unit.extra_s)


@settings(deadline=None, max_examples=80)
@given(shape=SHAPES)
def test_whatever_the_layer_a_unit_leaves_of_the_tags_that_it_covers_only_what_it_runs_again_from(shape):
    layer = make_layer(shape)
    inputs = {"residual", "output of the norm before the MLP", "query, key and value", "layer input", "permuted probabilities"}
    for unit in layer.units:
        covered = set(find_recompute_unit(unit.name).covers)
        left = {one.name for one in layer.tensors if one.tags and set(one.tags) <= covered and one.name not in unit.drops}
        # What all layers share stays.
        left -= {one.name for one in layer.tensors if one.is_same_in_all_layers}
        assert left <= inputs
        assert len(left) <= 1


def test_every_unit_of_the_registry_is_one_of_some_layer():
    found = {name for shape in (DENSE, MIXTURE, MLA) for name in make_found(shape)}
    assert found == {unit.name for unit in RECOMPUTE_UNITS}
