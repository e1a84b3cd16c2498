"""What each tag saves, against tensors written down by hand: of layers that were measured, and of layers that two ranks share.

A tensor is its shape and type. Those of the measured layers are what Transformer Engine 2.20.2 and megatron-core 0.16.1 saved
with torch 2.11 on an H200.
"""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fgoffload import ConfigError
from fgoffload.planner.memory.saved_bytes import count_bytes, count_tag_bytes, list_saved_tensors
from fgoffload.planner.model.layer_shape import DEFAULT_IMBALANCE, ExpertsShape, LatentShape, LayerShape, RouterShape

pytestmark = pytest.mark.quick

ITEM_BYTES = {"bool": 1, "fp8": 1, "bf16": 2, "fp32": 4, "int32": 4, "int64": 8}


def sum_bytes(*tensors):
    return sum(math.prod(tensor[:-1]) * ITEM_BYTES[tensor[-1]] for tensor in tensors)


# Measured: s 256, b 2, h 256, 4 heads of 64 channels, MLP of 512, 8 experts of 256, 2 a token, shared experts of 256.

ATTENTION = {
    "micro_batch_size": 2,
    "seq_length": 256,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "qk_channels": 64,
    "v_channels": 64,
    "rotary_channels": 64,
}
EXPERTS = ExpertsShape(num_experts=8, topk=2, ffn_hidden_size=256, router=RouterShape(balancing="aux_loss"))
DENSE = LayerShape(**ATTENTION, ffn_hidden_size=512)
MOE = LayerShape(**ATTENTION, experts=EXPERTS, is_deterministic=True)
FUSED = dataclasses.replace(MOE, is_deterministic=False, experts=dataclasses.replace(EXPERTS, has_fused_permutation=True))
SHARED = dataclasses.replace(
    MOE, num_query_groups=2, is_deterministic=False, experts=dataclasses.replace(EXPERTS, shared_ffn_hidden_size=256)
)
MLA = dataclasses.replace(MOE, qk_channels=64 + 32, latent=LatentShape(q_lora_rank=64, kv_lora_rank=64, qk_pos_emb_head_dim=32))

HIDDEN, ROWS = (512, 256, "bf16"), (512, "fp32")
HEADS, LSE = (256, 2, 4, 64, "bf16"), (2, 4, 256, 1, "fp32")
SMALL = ((3, "int32"), (2, "int64"))  # sequence lengths and random state
NORMED = {"qkv_linear": (HIDDEN, HIDDEN, ROWS), "layer_input": (HIDDEN, (256, 1, 1, 64, "fp32"))}
GROUPED = {**NORMED, "core_attn": (HEADS, HEADS, HEADS, HEADS, LSE, *SMALL), "attn_proj": (HEADS,)}
CHOSEN = ((512, 2, "int64"), (512, 2, "fp32"), (512, 8, "fp32"), (8, "int64"), (1, "fp32"))
EXPERT_TENSORS = {
    "mlp_norm": (HIDDEN, ROWS),
    "expert_fc1": ((1024, 256, "bf16"),),
    "moe_act": ((1024, 512, "bf16"), (1024, 1, "bf16")),
    "expert_fc2": ((1024, 256, "bf16"),),
}
DETERMINISTIC = {
    **EXPERT_TENSORS,
    "router": (HIDDEN, *CHOSEN, (512, 1, "int64")),
    "moe_combine": ((1024, "int64"), (1024, 256, "bf16")),
}
MEASURED = {
    "dense": (
        DENSE,
        {
            **GROUPED,
            "mlp_fc1": (HIDDEN, HIDDEN, ROWS),
            "mlp_act": ((512, 1024, "bf16"),),
            "mlp_fc2": ((256, 2, 512, "bf16"),),
        },
    ),
    "experts": (MOE, {**GROUPED, **DETERMINISTIC}),
    "fused_permutation": (
        FUSED,
        {
            **GROUPED,
            **EXPERT_TENSORS,
            "router": (HIDDEN, *CHOSEN),
            "moe_combine": ((1024, "int32"), (512, 17, "int32")),
        },
    ),
    "shared_experts_and_query_groups": (
        SHARED,
        {
            **NORMED,
            **EXPERT_TENSORS,
            "core_attn": (HEADS, (256, 2, 2, 64, "bf16"), (256, 2, 2, 64, "bf16"), HEADS, LSE, *SMALL),
            "attn_proj": (HEADS,),
            "shared_expert": (HIDDEN, (512, 512, "bf16"), (256, 2, 256, "bf16")),
            "router": (HIDDEN, *CHOSEN),
            "moe_combine": ((1024, "int64"),),
        },
    ),
    "latent_attention": (
        MLA,
        {
            **DETERMINISTIC,
            "layer_input": (HIDDEN,),
            "attn_norm": (HIDDEN, ROWS),
            "qkv_linear": (HIDDEN, *2 * ((256, 2, 64, "bf16"),), *4 * ((256, 1, 1, 32, "bf16"),)),
            "core_attn": (*2 * ((256, 2, 4, 96, "bf16"),), HEADS, HEADS, LSE, *SMALL),
            "attn_proj": (HEADS,),
        },
    ),
}
# As the engine counted them, in one layer and microbatch: to see that the tensors above are those.
COUNTED = {
    "dense": {"qkv_linear": 526336, "core_attn": 1056796, "attn_proj": 262144, "mlp_fc1": 526336, "mlp_act": 1048576},
    "experts": {"mlp_norm": 264192, "router": 294980, "expert_fc1": 524288, "moe_act": 1050624, "moe_combine": 532480},
    "fused_permutation": {"router": 290884, "expert_fc2": 524288, "moe_combine": 38912, "layer_input": 327680},
    "shared_experts_and_query_groups": {"core_attn": 794652, "shared_expert": 1048576, "router": 290884, "moe_combine": 8192},
    "latent_attention": {"attn_norm": 264192, "qkv_linear": 458752, "core_attn": 1318940, "attn_proj": 262144},
}


@pytest.mark.parametrize("name", MEASURED)
def test_each_tag_saves_what_was_measured(name):
    shape, tensors = MEASURED[name]
    assert count_tag_bytes(shape) == {tag: sum_bytes(*found) for tag, found in tensors.items()}
    assert count_tag_bytes(shape).items() >= COUNTED[name].items()


# Two ranks, and no size a multiple of another by chance: s 48, b 3, so 72 tokens a rank; h 40, 8 heads, 4 groups, q and k of 6
# channels, v of 10.

UNEQUAL = {
    "micro_batch_size": 3,
    "seq_length": 48,
    "hidden_size": 40,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "qk_channels": 6,
    "v_channels": 10,
    "tensor_parallel_size": 2,
    "rotary_channels": 6,
}
UNEQUAL_EXPERTS = ExpertsShape(num_experts=12, topk=5, ffn_hidden_size=14, shared_ffn_hidden_size=22)
PART, PART_ROWS, PERMUTED = (24, 3, 40, "bf16"), (72, "fp32"), 72 * 5


def test_ranks_of_a_dense_layer_keep_parts_of_each_sequence_and_of_the_heads():
    shape = LayerShape(**UNEQUAL, ffn_hidden_size=26)
    output = (48, 3, 4, 10, "bf16")
    tensors = {
        "layer_input": (PART, (48, 6, "fp32")),
        "qkv_linear": (PART, PART, PART_ROWS),
        "core_attn": (
            (48, 3, 4, 6, "bf16"),  # of 4 heads a rank
            (48, 3, 2, 6, "bf16"),  # of 2 groups a rank
            (48, 3, 2, 10, "bf16"),
            output,
            (3, 4, 48, "fp32"),
            (4, "int32"),
            (2, "int64"),
        ),
        "attn_proj": (output,),
        "mlp_fc1": (PART, PART, PART_ROWS),
        "mlp_act": ((48, 3, 26, "bf16"),),  # gate and up of 13
        "mlp_fc2": ((48, 3, 13, "bf16"),),
    }
    assert count_tag_bytes(shape) == {tag: sum_bytes(*found) for tag, found in tensors.items()}


def test_ranks_of_a_layer_with_experts_keep_the_tokens_of_their_part_of_each_sequence():
    shape = LayerShape(**UNEQUAL, experts=UNEQUAL_EXPERTS)
    tensors = {
        "mlp_norm": (PART, PART_ROWS),
        "shared_expert": (PART, (48, 3, 22, "bf16"), (48, 3, 11, "bf16")),
        "router": (PART, (72, 5, "int64"), (72, 5, "fp32")),
        "expert_fc1": ((PERMUTED, 40, "bf16"),),
        "moe_act": ((PERMUTED, 28, "bf16"), (PERMUTED, "bf16")),
        "expert_fc2": ((PERMUTED, 14, "bf16"),),
        "moe_combine": ((PERMUTED, "int64"),),
    }
    found = count_tag_bytes(shape)
    assert {tag: found[tag] for tag in tensors} == {tag: sum_bytes(*saved) for tag, saved in tensors.items()}


def test_ranks_of_latent_attention_share_heads_and_not_the_rotary_tables():
    latent = LatentShape(q_lora_rank=18, kv_lora_rank=20, qk_pos_emb_head_dim=2)
    shape = LayerShape(**UNEQUAL | {"num_query_groups": 8}, ffn_hidden_size=26, latent=latent)
    compressed = ((24, 3, 18, "bf16"), (24, 3, 20, "bf16"))
    tables = 4 * ((48, 1, 1, 2, "bf16"),)
    found = count_tag_bytes(shape)
    assert found["layer_input"] == sum_bytes(PART)
    assert found["attn_norm"] == sum_bytes(PART, PART_ROWS)
    assert found["qkv_linear"] == sum_bytes(PART, *compressed, *tables)
    normed = dataclasses.replace(shape, latent=dataclasses.replace(latent, has_qk_norm=True))
    assert count_tag_bytes(normed)["qkv_linear"] == sum_bytes(PART, *2 * compressed, PART_ROWS, PART_ROWS, *tables)
    direct = dataclasses.replace(shape, latent=dataclasses.replace(latent, q_lora_rank=None))
    assert count_tag_bytes(direct)["qkv_linear"] == sum_bytes(PART, compressed[1], *tables)


@pytest.mark.parametrize(
    ("fields", "tag", "added"),
    [
        ({"is_deterministic": True}, "router", ((72, 1, "int64"),)),
        ({"is_deterministic": True}, "moe_combine", ((PERMUTED, 40, "bf16"),)),
        ({"normalization": "LayerNorm"}, "qkv_linear", (PART_ROWS,)),
        ({"has_attention_sinks": True}, "core_attn", ((1, 4, 1, 1, "fp32"),)),
        ({"normalization": "LayerNorm"}, "mlp_norm", (PART_ROWS,)),
        ({"rotary_channels": 9}, "layer_input", ((48, 3, "fp32"),)),
    ],
)
def test_what_an_option_of_the_training_adds(fields, tag, added):
    shape = LayerShape(**UNEQUAL, experts=UNEQUAL_EXPERTS)
    other = dataclasses.replace(shape, **fields)
    assert count_tag_bytes(other)[tag] - count_tag_bytes(shape)[tag] == sum_bytes(*added)


def test_norms_that_are_not_fused_save_with_their_own_tags():
    shape = LayerShape(**UNEQUAL, ffn_hidden_size=26, has_fused_norms=False)
    found = count_tag_bytes(shape)
    assert found["attn_norm"] == found["mlp_norm"] == sum_bytes(PART, PART_ROWS)
    assert found["qkv_linear"] == found["mlp_fc1"] == sum_bytes(PART)


@pytest.mark.parametrize(
    ("router", "tensors"),
    [
        ({"balancing": "aux_loss"}, ((72, 5, "fp32"), (72, 12, "fp32"), (12, "int64"), (1, "fp32"))),
        ({"balancing": "seq_aux_loss"}, ((72, 5, "fp32"), (72, 12, "fp32"), (3, 12, "int64"), (1, "fp32"))),
        ({"has_pre_softmax": True}, ((72, 12, "fp32"),)),
        ({"dtype_bytes": 4}, ((72, 5, "fp32"),)),
        ({"score_function": "sigmoid"}, ((72, 12, "fp32"), (72, 5, "bf16"), (72, 1, "bf16"))),
        (
            {"score_function": "sigmoid", "has_expert_bias": True},
            ((72, 12, "fp32"), (72, 12, "bf16"), (72, 5, "bf16"), (72, 1, "bf16")),
        ),
        (
            {"score_function": "sigmoid", "has_expert_bias": True, "dtype_bytes": 4},
            ((72, 12, "fp32"), (72, 5, "fp32"), (72, 1, "fp32")),
        ),
        (
            {"score_function": "sigmoid", "balancing": "seq_aux_loss"},
            (
                *((72, 12, "fp32"), (72, 5, "bf16"), (72, 1, "bf16")),
                *((72, 12, "bf16"), (72, 1, "bf16"), (3, 12, "int64"), (1, "bf16")),
            ),
        ),
    ],
    ids=str,
)
def test_what_the_router_saves_of_its_scores(router, tensors):
    experts = dataclasses.replace(UNEQUAL_EXPERTS, router=RouterShape(**router))
    shape = LayerShape(**UNEQUAL, experts=experts)
    assert count_tag_bytes(shape)["router"] == sum_bytes(PART, (72, 5, "int64"), *tensors)
    probabilities = (PERMUTED, "fp32" if router.get("dtype_bytes") == 4 else "bf16")
    assert count_tag_bytes(shape)["moe_act"] == sum_bytes((PERMUTED, 28, "bf16"), probabilities)


@pytest.mark.parametrize(("topk", "divided"), [(1, ()), (2, ((72, 2, "bf16"), (72, 1, "bf16")))])
def test_one_expert_a_token_has_no_sum_to_divide_its_score_by(topk, divided):
    router = RouterShape(score_function="sigmoid")
    shape = LayerShape(**UNEQUAL, experts=ExpertsShape(num_experts=12, topk=topk, ffn_hidden_size=14, router=router))
    assert count_tag_bytes(shape)["router"] == sum_bytes(PART, (72, topk, "int64"), (72, 12, "fp32"), *divided)


@pytest.mark.parametrize(("ranks", "order"), [(4, ((PERMUTED, "int32"),)), (12, ())])
def test_a_fused_permutation_orders_tokens_where_a_rank_has_several_experts(ranks, order):
    experts = dataclasses.replace(UNEQUAL_EXPERTS, has_fused_permutation=True, expert_parallel_size=ranks)
    shape = LayerShape(**UNEQUAL, experts=experts, is_deterministic=True)
    assert count_tag_bytes(shape)["moe_combine"] == sum_bytes((72, 25, "int32"), *order)


def test_shared_experts_that_overlap_keep_the_gathered_sequence_and_share_nothing():
    shape = LayerShape(**UNEQUAL, experts=dataclasses.replace(UNEQUAL_EXPERTS, has_shared_overlap=True))
    gathered = (48, 3, 40, "bf16")
    assert count_tag_bytes(shape)["shared_expert"] == sum_bytes(gathered, (48, 3, 22, "bf16"), (48, 3, 11, "bf16"))
    assert count_bytes(shape, ("shared_expert", "router")) == sum(
        count_tag_bytes(shape)[t] for t in ("shared_expert", "router")
    )


def test_one_rank_has_nothing_to_gather():
    experts = dataclasses.replace(SHARED.experts, has_shared_overlap=True)
    assert count_tag_bytes(dataclasses.replace(SHARED, experts=experts)) == count_tag_bytes(SHARED)


def test_norms_of_query_and_key_heads_keep_their_inputs_with_the_projection():
    shape = LayerShape(**UNEQUAL, ffn_hidden_size=26)
    query, key = (48, 3, 4, 6, "bf16"), (48, 3, 2, 6, "bf16")  # of 4 heads and 2 groups a rank
    rows = ((48, 3, 4, "fp32"), (48, 3, 2, "fp32"))
    normed = dataclasses.replace(shape, has_qk_norm=True)
    assert count_tag_bytes(normed)["qkv_linear"] - count_tag_bytes(shape)["qkv_linear"] == sum_bytes(query, key, *rows)
    means = dataclasses.replace(normed, normalization="LayerNorm")
    assert count_tag_bytes(means)["qkv_linear"] - count_tag_bytes(normed)["qkv_linear"] == sum_bytes(PART_ROWS, *rows)


def test_an_activation_without_a_gate_has_half_the_input():
    dense = LayerShape(**UNEQUAL, ffn_hidden_size=26, is_gated=False)
    assert count_tag_bytes(dense)["mlp_act"] == count_tag_bytes(dense)["mlp_fc2"] == sum_bytes((48, 3, 13, "bf16"))


def test_experts_without_a_gate_keep_what_they_multiply_by_the_probabilities_too():
    found = count_tag_bytes(LayerShape(**UNEQUAL, experts=UNEQUAL_EXPERTS, is_gated=False))
    assert found["moe_act"] == sum_bytes((PERMUTED, 14, "bf16"), (PERMUTED, 14, "bf16"), (PERMUTED, "bf16"))
    assert found["expert_fc2"] == sum_bytes((PERMUTED, 14, "bf16"))
    assert found["shared_expert"] == sum_bytes(PART, (48, 3, 11, "bf16"), (48, 3, 11, "bf16"))


# Gated activations whose operators are not fused.


def test_an_unfused_activation_keeps_its_gate_and_both_factors_of_its_product():
    dense = LayerShape(**UNEQUAL, ffn_hidden_size=26, has_fused_activation=False)
    fused = count_tag_bytes(dataclasses.replace(dense, has_fused_activation=True))
    # Of gate and up, [144, 26], silu saves the gate, a view from the first row to the middle of the last.
    gate, factor = (143 * 26 + 13, "bf16"), (48, 3, 13, "bf16")
    assert count_tag_bytes(dense) == fused | {"mlp_act": sum_bytes(gate, factor, factor)}


@pytest.mark.parametrize(("dtype_bytes", "dtype"), [(2, "bf16"), (4, "fp32")])
def test_unfused_experts_keep_what_they_multiply_by_the_probabilities_too(dtype_bytes, dtype):
    experts = dataclasses.replace(UNEQUAL_EXPERTS, router=RouterShape(dtype_bytes=dtype_bytes))
    shape = LayerShape(**UNEQUAL, experts=experts, has_fused_activation=False)
    fused = count_tag_bytes(dataclasses.replace(shape, has_fused_activation=True))
    gate, factor = ((PERMUTED - 1) * 28 + 14, "bf16"), (PERMUTED, 14, "bf16")
    shared_gate, shared_factor = (143 * 22 + 11, "bf16"), (48, 3, 11, "bf16")
    assert count_tag_bytes(shape) == fused | {
        # Whatever the type of the probabilities, the product keeps the rows in bf16, and casts keep nothing.
        "moe_act": sum_bytes(gate, factor, factor, factor, (PERMUTED, dtype)),
        # Shared experts have no probabilities.
        "shared_expert": sum_bytes(PART, shared_gate, shared_factor, shared_factor, shared_factor),
    }


def test_a_layer_of_w2_keeps_384_mib_more_without_fusion():
    # 32768 rows of 2048 channels: three tensors of 128 MiB, less half a row.
    sizes = ATTENTION | {"seq_length": 4096, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 32}
    fused = LayerShape(**sizes, experts=ExpertsShape(num_experts=16, topk=4, ffn_hidden_size=2048))
    found = [count_tag_bytes(dataclasses.replace(fused, has_fused_activation=is_fused)) for is_fused in (False, True)]
    assert sum(found[0].values()) - sum(found[1].values()) == 3 * 128 * 2**20 - 4096


@pytest.mark.parametrize("fields", [{"ffn_hidden_size": 26}, {"experts": EXPERTS}], ids=["dense", "experts"])
def test_an_activation_without_a_gate_keeps_the_same_without_fusion(fields):
    fused = LayerShape(**UNEQUAL, **fields, is_gated=False)
    assert list_saved_tensors(fused) == list_saved_tensors(dataclasses.replace(fused, has_fused_activation=False))


# Experts that several ranks share, and routing that is not balanced.


def test_ranks_that_share_an_expert_gather_their_rows_and_have_a_part_of_its_channels():
    experts = dataclasses.replace(UNEQUAL_EXPERTS, expert_tensor_parallel_size=2, has_fused_permutation=True)
    found = count_tag_bytes(LayerShape(**UNEQUAL, experts=experts))
    assert found["expert_fc1"] == sum_bytes((2 * PERMUTED, 40, "bf16"))
    assert found["moe_act"] == sum_bytes((2 * PERMUTED, 2 * 7, "bf16"), (2 * PERMUTED, "bf16"))
    assert found["expert_fc2"] == sum_bytes((2 * PERMUTED, 7, "bf16"))
    assert found["moe_combine"] == sum_bytes((72, 25, "int32"), (2 * PERMUTED, "int32"))


def test_the_rank_with_the_most_tokens_has_as_many_rows_more():
    experts = dataclasses.replace(UNEQUAL_EXPERTS, expert_parallel_size=4)  # 3 experts a rank
    skewed = dataclasses.replace(experts, imbalance=1.25)
    balanced, found = (count_tag_bytes(LayerShape(**UNEQUAL, experts=e, is_deterministic=True)) for e in (experts, skewed))
    rows = 450  # 1.25 of 72 tokens that go to 5 experts each
    assert found["expert_fc1"] == sum_bytes((rows, 40, "bf16"))
    assert found["moe_act"] == sum_bytes((rows, 28, "bf16"), (rows, "bf16"))
    assert found["expert_fc2"] == sum_bytes((rows, 14, "bf16"))
    # The router and the way back are of the rank's own tokens, wherever they went.
    own = ("router", "moe_combine", "shared_expert", "core_attn")
    assert {tag: found[tag] for tag in own} == {tag: balanced[tag] for tag in own}


def test_a_rank_with_all_experts_has_all_rows_however_they_are_routed():
    skewed = dataclasses.replace(UNEQUAL_EXPERTS, imbalance=2.0)
    assert count_tag_bytes(LayerShape(**UNEQUAL, experts=skewed)) == count_tag_bytes(
        LayerShape(**UNEQUAL, experts=UNEQUAL_EXPERTS)
    )


def test_a_rank_gets_each_token_once_for_each_of_its_experts_at_most():
    experts = dataclasses.replace(UNEQUAL_EXPERTS, expert_parallel_size=4, imbalance=100.0)
    # 4 ranks of 72 tokens, each of which could go to all 3 experts of the rank.
    assert count_tag_bytes(LayerShape(**UNEQUAL, experts=experts))["expert_fc1"] == sum_bytes((4 * 72 * 3, 40, "bf16"))


@settings(deadline=None, max_examples=60)
@given(
    first=st.floats(1, 8),
    second=st.floats(1, 8),
    ranks=st.sampled_from([1, 2, 3, 4, 6, 12]),
    recipe=st.sampled_from([None, "delayed", "blockwise", "mxfp8"]),
)
def test_more_imbalance_never_saves_less(first, second, ranks, recipe):
    found = []
    for imbalance in sorted([1.0, first, second]):
        experts = dataclasses.replace(UNEQUAL_EXPERTS, expert_parallel_size=ranks, imbalance=imbalance)
        shape = LayerShape(**UNEQUAL, experts=experts, fp8_recipe=recipe)
        found.append(count_bytes(shape, ("expert_fc1", "moe_act", "expert_fc2")))
    assert found == sorted(found)


def test_a_plan_assumes_more_than_balanced_routing():
    assert 1 < DEFAULT_IMBALANCE < 2


# FP8, from the code of Transformer Engine. Two ranks, 96 tokens a rank and 192 of all sequences: h 160, 8 heads, 4 groups, q
# and k of 24 channels, v of 40.

FP8_SIZES = UNEQUAL | {"seq_length": 64, "hidden_size": 160, "qk_channels": 24, "v_channels": 40}
FP8_DENSE = LayerShape(**FP8_SIZES, ffn_hidden_size=416)
FP8_ROWS = (96, "fp32")
FP8_INPUT = (96, 160, "bf16")
SCALE = (1, "fp32")
# An input's channels, over all of its rows, and what scales it: in blocks of 128 rows, of 32 rows, or as a whole.
SCALES = {
    "delayed": {"h": (SCALE,), "proj": (SCALE,), "f": (SCALE,)},
    "tensorwise": {"h": (SCALE,), "proj": (SCALE,), "f": (SCALE,)},
    "blockwise": {"h": ((1, 160, "fp32"),), "proj": ((2, 160, "fp32"),), "f": ((2, 208, "fp32"),)},
    "mxfp8": {"h": ((4, 256, "fp8"),), "proj": ((8, 256, "fp8"),), "f": ((8, 256, "fp8"),)},
}


@pytest.mark.parametrize("recipe", SCALES)
def test_linears_of_a_dense_layer_keep_their_inputs_in_fp8(recipe):
    scales = SCALES[recipe]
    found = count_tag_bytes(dataclasses.replace(FP8_DENSE, fp8_recipe=recipe))
    before = count_tag_bytes(FP8_DENSE)
    assert found["qkv_linear"] == sum_bytes(FP8_INPUT, FP8_ROWS, (96, 160, "fp8"), *scales["h"])
    assert found["mlp_fc1"] == found["qkv_linear"]
    assert found["mlp_fc2"] == sum_bytes((192, 208, "fp8"), *scales["f"])
    unchanged = ("layer_input", "core_attn", "mlp_act")
    assert {tag: found[tag] for tag in unchanged} == {tag: before[tag] for tag in unchanged}


@pytest.mark.parametrize("recipe", SCALES)
def test_the_projection_behind_attention_shares_its_input_but_under_delayed_scaling(recipe):
    shape = dataclasses.replace(FP8_DENSE, fp8_recipe=recipe)
    output = (64, 3, 4, 40, "bf16")
    alone = count_tag_bytes(shape)
    together = count_bytes(shape, ("core_attn", "attn_proj"))
    if recipe == "delayed":
        assert alone["attn_proj"] == sum_bytes((192, 160, "fp8"), SCALE)
        assert together == alone["core_attn"] + alone["attn_proj"]
    else:
        assert alone["attn_proj"] == sum_bytes(output)
        assert together == alone["core_attn"]


@pytest.mark.parametrize("recipe", SCALES)
def test_the_two_linears_of_latent_attention_keep_a_copy_each(recipe):
    latent = LatentShape(q_lora_rank=96, kv_lora_rank=64, qk_pos_emb_head_dim=8)
    sizes = FP8_SIZES | {"num_query_groups": 8}
    shape = LayerShape(**sizes, ffn_hidden_size=416, latent=latent, fp8_recipe=recipe)
    ranks = {"delayed": 2 * (SCALE,), "tensorwise": 2 * (SCALE,)}
    ranks |= {"blockwise": ((1, 96, "fp32"), (1, 64, "fp32")), "mxfp8": ((4, 128, "fp8"), (4, 128, "fp8"))}
    tables = 4 * ((64, 8, "bf16"),)
    inputs = (*2 * ((96, 160, "fp8"), *SCALES[recipe]["h"]), (96, 96, "fp8"), (96, 64, "fp8"), *ranks[recipe])
    assert count_tag_bytes(shape)["qkv_linear"] == sum_bytes(*inputs, *tables)
    normed = dataclasses.replace(shape, latent=dataclasses.replace(latent, has_qk_norm=True))
    added = ((96, 96, "bf16"), (96, 64, "bf16"), FP8_ROWS, FP8_ROWS)
    assert count_tag_bytes(normed)["qkv_linear"] == sum_bytes(*inputs, *tables, *added)


@pytest.mark.parametrize(
    ("recipe", "each", "inputs"),
    [
        # 480 rows of 4 experts are 120 each: up to a multiple of 16 or 32.
        ("delayed", 128, (SCALE,)),
        ("tensorwise", 128, (SCALE,)),
        ("blockwise", 128, ((1, 160, "fp32"),)),
        ("mxfp8", 128, ((4, 256, "fp8"),)),
    ],
)
def test_each_expert_pads_its_rows_and_scales_them_by_itself(recipe, each, inputs):
    experts = ExpertsShape(num_experts=4, topk=2, ffn_hidden_size=48)
    shape = LayerShape(**FP8_SIZES | {"seq_length": 160}, experts=experts, fp8_recipe=recipe)  # 240 tokens a rank
    found = count_tag_bytes(shape)
    assert found["expert_fc1"] == 4 * sum_bytes((each, 160, "fp8"), *inputs)
    assert found["moe_act"] == 4 * sum_bytes((each, 96, "bf16"), (each, "bf16"))
    narrow = {"blockwise": ((1, 48, "fp32"),), "mxfp8": ((4, 128, "fp8"),)}.get(recipe, (SCALE,))
    assert found["expert_fc2"] == 4 * sum_bytes((each, 48, "fp8"), *narrow)
    assert found["router"] == count_tag_bytes(dataclasses.replace(shape, fp8_recipe=None))["router"]


@pytest.mark.parametrize(("recipe", "each"), [("delayed", 112), ("mxfp8", 128)])
def test_rows_are_padded_to_what_the_recipe_multiplies(recipe, each):
    experts = ExpertsShape(num_experts=4, topk=2, ffn_hidden_size=48)
    shape = LayerShape(**FP8_SIZES | {"seq_length": 144}, experts=experts, fp8_recipe=recipe)  # 432 rows: 108 each
    assert count_tag_bytes(shape)["moe_act"] == 4 * sum_bytes((each, 96, "bf16"), (each, "bf16"))


@pytest.mark.parametrize("recipe", SCALES)
@pytest.mark.parametrize("has_overlap", [True, False])
def test_shared_experts_keep_what_they_were_given_but_under_delayed_scaling(recipe, has_overlap):
    experts = ExpertsShape(num_experts=4, topk=2, ffn_hidden_size=48, shared_ffn_hidden_size=64, has_shared_overlap=has_overlap)
    shape = LayerShape(**FP8_SIZES, experts=experts, fp8_recipe=recipe)
    inside = ((192, 64, "bf16"), (192, 32, "fp8"))
    narrow = {"blockwise": ((2, 32, "fp32"),), "mxfp8": ((8, 128, "fp8"),)}.get(recipe, (SCALE,))
    rows = 192 if has_overlap else 96
    given = ((rows, 160, "fp8"), SCALE) if recipe == "delayed" else ((rows, 160, "bf16"),)
    alone = count_tag_bytes(shape)
    assert alone["shared_expert"] == sum_bytes(*given, *inside, *narrow)
    shared = 0 if has_overlap or recipe == "delayed" else sum_bytes(FP8_INPUT)
    assert count_bytes(shape, ("shared_expert", "router")) == alone["shared_expert"] + alone["router"] - shared


# Together.


@pytest.mark.parametrize(
    ("shape", "tags", "shared"),
    [
        (DENSE, ("core_attn", "attn_proj"), (HEADS,)),
        (SHARED, ("shared_expert", "router"), (HIDDEN,)),
        (MLA, ("layer_input", "attn_norm"), (HIDDEN,)),
        (DENSE, ("layer_input", "qkv_linear"), (HIDDEN,)),
        (MOE, ("router", "mlp_norm"), ()),
        (MOE, ("expert_fc1", "moe_act", "expert_fc2"), ()),
    ],
    ids=str,
)
def test_what_two_tags_save_counts_once(shape, tags, shared):
    alone = count_tag_bytes(shape)
    assert count_bytes(shape, tags) == sum(alone[tag] for tag in tags) - sum_bytes(*shared)


def test_tags_that_the_layer_does_not_have_save_nothing():
    assert count_bytes(DENSE, ("router", "mlp_act")) == count_tag_bytes(DENSE)["mlp_act"]
    assert count_bytes(MOE, ("mlp_act", "shared_expert")) == 0


def test_a_tag_that_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match=r"'core_atn' is not a tag\. Did you mean 'core_attn'"):
        count_bytes(DENSE, ("core_atn",))


def test_all_layers_save_the_same_sequence_lengths_and_rotary_embedding():
    found = {tensor.name: tensor.size_bytes for tensor in list_saved_tensors(DENSE) if tensor.is_same_in_all_layers}
    assert found == {"sequence lengths": sum_bytes((3, "int32")), "rotary embedding": sum_bytes((256, 1, 1, 64, "fp32"))}


@pytest.mark.parametrize("shape", [shape for shape, _ in MEASURED.values()], ids=list(MEASURED))
def test_each_tensor_has_a_name_of_its_own(shape):
    names = [tensor.name for tensor in list_saved_tensors(shape)]
    assert len(set(names)) == len(names)


# What no layer is.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size 0 is below 1. Give 1 or more."),
        ({"hidden_size": 2.5}, "hidden_size 2.5 is no whole number. Give an int."),
        (
            {"num_query_groups": 3},
            "num_query_groups 3 does not divide num_attention_heads 4. Give sizes that ranks and heads can",
        ),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 does not divide seq_length 256."),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size 0 without experts: a layer is dense or a mixture."),
        ({"experts": EXPERTS}, "ffn_hidden_size 512 with experts: a layer is dense or a mixture."),
        ({"normalization": "L2Norm"}, "normalization 'L2Norm' is not known. Give one of: 'RMSNorm', 'LayerNorm'."),
        (
            {"latent": MLA.latent, "num_query_groups": 2},
            "num_query_groups 2 differs from num_attention_heads 4, and latent attention has no groups. Give num_query_groups",
        ),
        (
            {"latent": MLA.latent, "has_qk_norm": True},
            "has_qk_norm is of attention in groups, and attention is latent. Give it in latent.",
        ),
        ({"latent": MLA.latent, "has_fused_rotary": True}, "has_fused_rotary with latent attention: what its fused"),
        ({"fp8_recipe": "fp8"}, "fp8_recipe 'fp8' is not known. Give one of: None, 'delayed', 'tensorwise', 'blockwise',"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ConfigError) as refused:
        dataclasses.replace(DENSE, **fields)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (MOE, "Megatron-Core trains no experts so"),
        (dataclasses.replace(MLA, experts=None, ffn_hidden_size=512), "what latent attention saves is not known then"),
        (dataclasses.replace(DENSE, has_mtp_projection=True), "what multi-token prediction saves is not known then"),
    ],
    ids=["experts", "latent attention", "multi-token prediction"],
)
def test_ranks_that_share_no_sequence_are_refused_where_nobody_knows_what_they_save(shape, reason):
    dataclasses.replace(shape, has_sequence_parallel=False)  # one rank has all of it anyway
    with pytest.raises(
        ConfigError, match=f"^tensor_parallel_size 2 without has_sequence_parallel: {reason}. Give --sequence-p"
    ):
        dataclasses.replace(shape, has_sequence_parallel=False, tensor_parallel_size=2)


def test_ranks_that_share_no_sequence_share_heads_and_channels_alone():
    alone, shared = count_tag_bytes(DENSE), count_tag_bytes(dataclasses.replace(DENSE, tensor_parallel_size=2))
    whole = count_tag_bytes(dataclasses.replace(DENSE, tensor_parallel_size=2, has_sequence_parallel=False))
    ends = {tag for tag in whole if whole[tag] == alone[tag]}
    assert ends == {"layer_input", "qkv_linear", "mlp_fc1"}  # the norms are fused
    assert {tag: whole[tag] for tag in whole.keys() - ends} == {tag: shared[tag] for tag in whole.keys() - ends}
    assert all(shared[tag] < alone[tag] for tag in shared)


def test_shared_experts_that_ranks_cannot_share_are_refused():
    experts = dataclasses.replace(EXPERTS, shared_ffn_hidden_size=255)
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 does not divide shared_ffn_hidden_size 255"):
        dataclasses.replace(MOE, experts=experts, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topk": 9}, "topk 9 is above num_experts 8. Give 8 or less."),
        ({"expert_parallel_size": 3}, "expert_parallel_size 3 does not divide num_experts 8."),
        ({"expert_tensor_parallel_size": 3}, "expert_tensor_parallel_size 3 does not divide ffn_hidden_size 256."),
        ({"imbalance": 0.9}, "imbalance 0.9 is not from 1 up and finite, and no mean is above the most. Give 1 for"),
        ({"imbalance": math.inf}, "imbalance inf is not from 1 up and finite"),
        ({"shared_ffn_hidden_size": -1}, "shared_ffn_hidden_size -1 is below 0."),
        ({"has_shared_overlap": True}, "has_shared_overlap is on and shared_ffn_hidden_size is 0: nothing overlaps."),
    ],
)
def test_experts_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ConfigError) as refused:
        dataclasses.replace(EXPERTS, **fields)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"score_function": "tanh"}, "score_function 'tanh' is not known. Give one of: 'softmax', 'sigmoid'."),
        ({"dtype_bytes": 8}, "dtype_bytes 8 is not known. Give one of: 2, 4."),
        ({"has_expert_bias": True}, "has_expert_bias goes with score_function 'sigmoid' alone, and it is 'softmax'."),
        (
            {"has_pre_softmax": True, "score_function": "sigmoid"},
            "has_pre_softmax goes with score_function 'softmax' alone, and it is 'sigmoid'.",
        ),
    ],
)
def test_a_router_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ConfigError) as refused:
        RouterShape(**fields)
    assert str(refused.value).startswith(message)
