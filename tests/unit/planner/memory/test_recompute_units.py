"""Tests the bytes saved with and without each recompute unit, against hand counts, for dense, MoE and MLA layers."""

import dataclasses

import pytest
from support.layer_times import COMPUTING, DENSE, IDEAL, MLA, MOE, change_experts

from fgoffload.planner.timing.op_times import make_layer_model

# 128 tokens of 32 channels, 4 heads of 8 in 2 groups.
HIDDEN, ROWS = 2 * 128 * 32, 4 * 128
QUERY_KEY_VALUE, OUTPUT, LSE, RANDOM = 2 * 128 * (4 + 2 + 2) * 8, 2 * 128 * 32, 4 * 128 * 4, 16
# Without rotary embeddings the query has its own storage, and key and value are views of one linear's output. With them, only
# the value is.
QUERY, KEY, VALUE = 2 * 128 * 4 * 8, 2 * 128 * 2 * 8, 2 * 128 * 2 * 8
ROTARY = dataclasses.replace(DENSE, rotary_channels=8)
ATTENTION = HIDDEN + ROWS + HIDDEN + QUERY_KEY_VALUE + OUTPUT + LSE + RANDOM
WIDE, INNER = 2 * 128 * 96, 2 * 128 * 48
DENSE_BYTES = ATTENTION + HIDDEN + ROWS + HIDDEN + WIDE + INNER

# 8 experts of 16 channels, 2 per token, without a balancing loss; shared experts of 24 channels.
SHARED_MOE = change_experts(shared_ffn_hidden_size=24)
ROUTED = 8 * 256 + 4 * 256  # indices of the chosen experts and their probabilities
PERMUTED, GATES, EXPERT_INNER = 2 * 256 * 32, 2 * 256 * 32, 2 * 256 * 16
PROBABILITIES, PLACES, SHARED = 2 * 256, 8 * 256, 2 * 128 * 3 * 24
EXPERT_BYTES = PERMUTED + GATES + PROBABILITIES + EXPERT_INNER + PLACES
MIXTURE_BYTES = ATTENTION + HIDDEN + ROWS + HIDDEN + SHARED + ROUTED + EXPERT_BYTES

# Query and key heads of 8 + 4 channels and value heads of 8, compressed to 10 and 6.
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
"""Units of a rank with expert parallelism or expert tensor parallelism."""
LATENT_UNITS = {
    "layer": (LATENT_BYTES, HIDDEN),
    "attn_norm": (LATENT_BYTES, LATENT_BYTES - HIDDEN - ROWS),
    "mla_up_proj": (LATENT_BYTES, LATENT_BYTES - LATENT_QUERY_KEY_VALUE - TABLES + CHANNELS),
    "core_attn": (LATENT_BYTES, LATENT_BYTES - LSE - RANDOM),
    "mlp_fc1": (LATENT_BYTES, LATENT_BYTES - ROWS - HIDDEN - WIDE - INNER),
    "mlp": (LATENT_BYTES, LATENT_BYTES - ROWS - HIDDEN - WIDE - INNER),
}
ROTARY_UNITS = {"core_attn": (DENSE_BYTES, DENSE_BYTES - LSE - RANDOM + QUERY + KEY)}
HAND_COUNTS = [
    (shape, unit, before, after)
    for shape, units in ((DENSE, DENSE_UNITS), (ROTARY, ROTARY_UNITS), (SHARED_MOE, MIXTURE_UNITS), (MLA, LATENT_UNITS))
    for unit, (before, after) in units.items()
]


def make_layer(shape):
    return make_layer_model(shape, COMPUTING, kind="any", efficiency=IDEAL)


def find_units(shape):
    return {unit.name: unit for unit in make_layer(shape).units}


def count_bytes_before_recompute(layer, unit):
    """Return the bytes that a layer saves until `unit` is recomputed."""
    kept = sum(one.size_bytes for one in layer.tensors if one.name not in unit.drops and not one.is_same_in_all_layers)
    return kept + sum(one.size_bytes for one in unit.keeps)


@pytest.mark.parametrize(("shape", "unit", "before", "after"), HAND_COUNTS)
def test_saved_bytes_match_hand_counts_with_and_without_each_unit(shape, unit, before, after):
    layer = make_layer(shape)
    assert layer.saved_bytes == before
    assert count_bytes_before_recompute(layer, layer.find_unit(unit)) == after


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        (DENSE, list(DENSE_UNITS)),
        (SHARED_MOE, list(MIXTURE_UNITS)),
        (MLA, list(LATENT_UNITS)),
        *(
            (dataclasses.replace(MOE, experts=dataclasses.replace(MOE.experts, **{name: 2})), MOE_UNITS)
            for name in ("expert_parallel_size", "expert_tensor_parallel_size")
        ),
        (change_experts(has_grouped_linears=False), ["layer", "qkv_linear", "core_attn", "mlp_norm", "moe"]),
        (dataclasses.replace(SHARED_MOE, fp8_recipe="delayed"), ["layer", "core_attn", "moe", "shared_expert"]),
    ],
)
def test_a_layer_lists_the_units_of_its_modules_in_registry_order(shape, names):
    assert list(find_units(shape)) == names


def test_core_attention_on_views_of_one_storage_keeps_no_extra_copy():
    unit = find_units(dataclasses.replace(DENSE, num_query_groups=4))["core_attn"]
    assert (unit.keeps, unit.extra_bytes) == ((), 0)


def test_tensor_parallel_mla_keeps_the_gaps_between_rotary_channels():
    (unit,) = (one for one in make_layer(dataclasses.replace(MLA, tensor_parallel_size=2)).units if one.name == "mla_up_proj")
    kept = {one.name: one.size_bytes for one in unit.keeps}
    assert kept["rotary channels inside the compressed"] == 2 * 4 * (64 - 1)  # a rank has 64 tokens
