"""Compares the saved bytes of each tag with tensors listed by hand, for measured layers and for two tensor parallel ranks.

A tensor is its shape and dtype. Those of the measured layers were saved by Transformer Engine 2.20.2 and megatron-core 0.16.1
with torch 2.11 on an H200.
"""

import dataclasses
import math

import pytest

from fgoffload import ConfigError
from fgoffload.planner.memory.saved_bytes import count_bytes, count_tag_bytes
from fgoffload.planner.model.layer_shape import ExpertsShape, LatentShape, LayerShape, RouterShape

pytestmark = pytest.mark.quick

ITEM_BYTES = {"bool": 1, "fp8": 1, "bf16": 2, "fp32": 4, "int32": 4, "int64": 8}


def sum_bytes(*tensors):
    return sum(math.prod(tensor[:-1]) * ITEM_BYTES[tensor[-1]] for tensor in tensors)


# Measured: s 256, b 2, h 256, 4 heads of 64 channels, MLP of 512, 8 experts of 256, 2 per token, shared experts of 256.

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
        {**GROUPED, "mlp_fc1": (HIDDEN, HIDDEN, ROWS), "mlp_act": ((512, 1024, "bf16"),), "mlp_fc2": ((256, 2, 512, "bf16"),)},
    ),
    "experts": (MOE, {**GROUPED, **DETERMINISTIC}),
    "fused_permutation": (
        FUSED,
        {**GROUPED, **EXPERT_TENSORS, "router": (HIDDEN, *CHOSEN), "moe_combine": ((1024, "int32"), (512, 17, "int32"))},
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
# The engine's counts for one layer and microbatch, which the tensors above must add up to.
COUNTED = {
    "dense": {"qkv_linear": 526336, "core_attn": 1056796, "attn_proj": 262144, "mlp_fc1": 526336, "mlp_act": 1048576},
    "experts": {"mlp_norm": 264192, "router": 294980, "expert_fc1": 524288, "moe_act": 1050624, "moe_combine": 532480},
    "fused_permutation": {"router": 290884, "expert_fc2": 524288, "moe_combine": 38912, "layer_input": 327680},
    "shared_experts_and_query_groups": {"core_attn": 794652, "shared_expert": 1048576, "router": 290884, "moe_combine": 8192},
    "latent_attention": {"attn_norm": 264192, "qkv_linear": 458752, "core_attn": 1318940, "attn_proj": 262144},
}


@pytest.mark.parametrize("name", MEASURED)
def test_saved_bytes_of_each_tag_match_the_measurement(name):
    shape, tensors = MEASURED[name]
    assert count_tag_bytes(shape) == {tag: sum_bytes(*found) for tag, found in tensors.items()}
    assert count_tag_bytes(shape).items() >= COUNTED[name].items()


# Two ranks, with sizes that are no multiples of each other: s 48, b 3, so 72 tokens a rank; h 40, 8 heads, 4 groups, q and k
# of 6 channels, v of 10.

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


def test_tensor_parallel_mla_splits_heads_but_not_rotary_tables():
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


def test_mla_without_query_compression_normalizes_hidden_states_in_its_query_linear():
    latent = LatentShape(q_lora_rank=None, kv_lora_rank=20, qk_pos_emb_head_dim=2, has_qk_norm=True)
    shape = LayerShape(**UNEQUAL | {"num_query_groups": 8}, ffn_hidden_size=26, latent=latent)
    compressed, rest = (24, 3, 20), (PART_ROWS, PART_ROWS, *4 * ((48, 1, 1, 2, "bf16"),))
    saved = (PART, PART, (*compressed, "bf16"), (*compressed, "bf16"), *rest)
    assert count_tag_bytes(shape)["qkv_linear"] == sum_bytes(*saved)
    # In fp8 the norms save their inputs in bf16, and the linears save three fp8 copies, each with a scale.
    in_fp8 = (*2 * ((*PART[:-1], "fp8"),), (*compressed, "fp8"), *3 * ((1, "fp32"),))
    quantized = dataclasses.replace(shape, fp8_recipe="tensorwise")
    assert count_tag_bytes(quantized)["qkv_linear"] == sum_bytes(PART, (*compressed, "bf16"), *in_fp8, *rest)


def test_small_deepseek_v2_lite_matches_the_bytes_saved_on_an_h100_with_megatron_0_19():
    """Two layers with 384 tokens of 320 channels save 494592 bytes more than without the query's norm."""
    latent = LatentShape(q_lora_rank=None, kv_lora_rank=128, qk_pos_emb_head_dim=32, has_qk_norm=True)
    shape = dataclasses.replace(MLA, seq_length=192, hidden_size=320, latent=latent)
    without = ((384, 320, "bf16"), *2 * ((384, 128, "bf16"),), (384, "fp32"), *4 * ((192, 1, 1, 32, "bf16"),))
    assert 2 * (count_tag_bytes(shape)["qkv_linear"] - sum_bytes(*without)) == 494592


@pytest.mark.parametrize(
    ("router", "tensors"),
    [
        ({"dtype_bytes": 4}, ((72, 5, "fp32"),)),
        ({"score_function": "sigmoid", "has_expert_bias": True}, ((72, 12, "fp32"), (72, 5, "fp32"), (72, 1, "fp32"))),
        (
            {"score_function": "sigmoid", "balancing": "seq_aux_loss"},
            (
                *((72, 12, "fp32"), (72, 5, "fp32"), (72, 1, "fp32")),
                *((72, 12, "fp32"), (72, 1, "fp32"), (3, 12, "int64"), (1, "fp32")),
            ),
        ),
    ],
    ids=str,
)
def test_router_bytes_depend_on_its_score_function_and_balancing(router, tensors):
    experts = dataclasses.replace(UNEQUAL_EXPERTS, router=RouterShape(**router))
    shape = LayerShape(**UNEQUAL, experts=experts)
    assert count_tag_bytes(shape)["router"] == sum_bytes(PART, (72, 5, "int64"), *tensors)
    probabilities = (PERMUTED, "fp32" if router.get("dtype_bytes") == 4 else "bf16")
    assert count_tag_bytes(shape)["moe_act"] == sum_bytes((PERMUTED, 28, "bf16"), probabilities)


def test_overlapped_shared_experts_save_the_gathered_sequence_in_their_own_storage():
    shape = LayerShape(**UNEQUAL, experts=dataclasses.replace(UNEQUAL_EXPERTS, has_shared_overlap=True))
    gathered = (48, 3, 40, "bf16")
    assert count_tag_bytes(shape)["shared_expert"] == sum_bytes(gathered, (48, 3, 22, "bf16"), (48, 3, 11, "bf16"))
    assert count_bytes(shape, ("shared_expert", "router")) == sum(
        count_tag_bytes(shape)[t] for t in ("shared_expert", "router")
    )


# Expert parallelism with imbalanced routing.


def test_imbalance_adds_rows_to_the_experts_of_the_busiest_rank():
    experts = dataclasses.replace(UNEQUAL_EXPERTS, expert_parallel_size=4)  # 3 experts a rank
    skewed = dataclasses.replace(experts, imbalance=1.25)
    balanced, found = (count_tag_bytes(LayerShape(**UNEQUAL, experts=e, is_deterministic=True)) for e in (experts, skewed))
    rows = 450  # 1.25 x 72 tokens x 5 experts per token
    assert found["expert_fc1"] == sum_bytes((rows, 40, "bf16"))
    assert found["moe_act"] == sum_bytes((rows, 28, "bf16"), (rows, "bf16"))
    assert found["expert_fc2"] == sum_bytes((rows, 14, "bf16"))
    # The router and the combine work on the rank's own tokens, whichever experts those use.
    own = ("router", "moe_combine", "shared_expert", "core_attn")
    assert {tag: found[tag] for tag in own} == {tag: balanced[tag] for tag in own}


# FP8, from the code of Transformer Engine. Two ranks, 96 tokens a rank and 192 in total: h 160, 8 heads, 4 groups, q and k of
# 24 channels, v of 40.

FP8_SIZES = UNEQUAL | {"seq_length": 64, "hidden_size": 160, "qk_channels": 24, "v_channels": 40}
FP8_DENSE = LayerShape(**FP8_SIZES, ffn_hidden_size=416)
FP8_ROWS = (96, "fp32")
FP8_INPUT = (96, 160, "bf16")
SCALE = (1, "fp32")
# Scales of the inputs: one per block of 128 rows, one per block of 32 rows, or one per tensor.
SCALES = {
    "delayed": {"h": (SCALE,), "proj": (SCALE,), "f": (SCALE,)},
    "tensorwise": {"h": (SCALE,), "proj": (SCALE,), "f": (SCALE,)},
    "blockwise": {"h": ((1, 160, "fp32"),), "proj": ((2, 160, "fp32"),), "f": ((2, 208, "fp32"),)},
    "mxfp8": {"h": ((4, 256, "fp8"),), "proj": ((8, 256, "fp8"),), "f": ((8, 256, "fp8"),)},
}


@pytest.mark.parametrize("recipe", SCALES)
def test_linears_of_a_dense_layer_save_their_inputs_in_fp8(recipe):
    scales = SCALES[recipe]
    found = count_tag_bytes(dataclasses.replace(FP8_DENSE, fp8_recipe=recipe))
    before = count_tag_bytes(FP8_DENSE)
    assert found["qkv_linear"] == sum_bytes(FP8_INPUT, FP8_ROWS, (96, 160, "fp8"), *scales["h"])
    assert found["mlp_fc1"] == found["qkv_linear"]
    assert found["mlp_fc2"] == sum_bytes((192, 208, "fp8"), *scales["f"])
    unchanged = ("layer_input", "core_attn", "mlp_act")
    assert {tag: found[tag] for tag in unchanged} == {tag: before[tag] for tag in unchanged}


@pytest.mark.parametrize(
    ("recipe", "each", "inputs"),
    [
        # 480 rows over 4 experts are 120 each, padded to a multiple of 16 or 32.
        ("delayed", 128, (SCALE,)),
        ("tensorwise", 128, (SCALE,)),
        ("blockwise", 128, ((1, 160, "fp32"),)),
        ("mxfp8", 128, ((4, 256, "fp8"),)),
    ],
)
def test_fp8_experts_pad_and_scale_their_rows_separately(recipe, each, inputs):
    experts = ExpertsShape(num_experts=4, topk=2, ffn_hidden_size=48)
    shape = LayerShape(**FP8_SIZES | {"seq_length": 160}, experts=experts, fp8_recipe=recipe)  # 240 tokens a rank
    found = count_tag_bytes(shape)
    assert found["expert_fc1"] == 4 * sum_bytes((each, 160, "fp8"), *inputs)
    assert found["moe_act"] == 4 * sum_bytes((each, 96, "bf16"), (each, "bf16"))
    narrow = {"blockwise": ((1, 48, "fp32"),), "mxfp8": ((4, 128, "fp8"),)}.get(recipe, (SCALE,))
    assert found["expert_fc2"] == 4 * sum_bytes((each, 48, "fp8"), *narrow)
    assert found["router"] == count_tag_bytes(dataclasses.replace(shape, fp8_recipe=None))["router"]


@pytest.mark.parametrize(
    ("shape", "tags", "shared"),
    [
        (DENSE, ("core_attn", "attn_proj"), (HEADS,)),
        (SHARED, ("shared_expert", "router"), (HIDDEN,)),
        (MLA, ("layer_input", "attn_norm"), (HIDDEN,)),
        (MOE, ("router", "mlp_norm"), ()),
    ],
    ids=str,
)
def test_a_storage_saved_under_two_tags_is_counted_once(shape, tags, shared):
    alone = count_tag_bytes(shape)
    assert count_bytes(shape, tags) == sum(alone[tag] for tag in tags) - sum_bytes(*shared)


def test_an_unknown_tag_is_rejected():
    with pytest.raises(ConfigError, match=r"'core_atn' is not a tag\. Did you mean 'core_attn'"):
        count_bytes(DENSE, ("core_atn",))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topk": 9}, "topk 9 is above num_experts 8. Use 8 or less."),
        ({"expert_parallel_size": 3}, "expert_parallel_size 3 does not divide num_experts 8."),
        ({"imbalance": 0.9}, "imbalance 0.9 must be finite and at least 1. Use 1 for"),
    ],
)
def test_invalid_experts_are_rejected(fields, message):
    with pytest.raises(ConfigError) as refused:
        dataclasses.replace(EXPERTS, **fields)
    assert str(refused.value).startswith(message)
