"""Compares untagged tensors with lists written by hand, and with Megatron's functions on the CPU."""

import dataclasses
import math

import pytest
import torch

from fgoffload.integrations.megatron.adapter.dispatchers import permutes_by_mask
from fgoffload.planner.memory.saved_bytes import count_tag_bytes, list_untagged_tensors
from fgoffload.planner.model.layer_shape import ExpertsShape, LayerShape, RouterShape

ITEM_BYTES = {"bool": 1, "fp8": 1, "bf16": 2, "fp32": 4, "int32": 4, "int64": 8}
# Two ranks: s 48, b 3, so 72 tokens a rank; 12 experts, 5 per token.
SIZES = {
    "micro_batch_size": 3,
    "seq_length": 48,
    "hidden_size": 40,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "qk_channels": 6,
    "v_channels": 10,
    "tensor_parallel_size": 2,
}
EXPERTS = ExpertsShape(num_experts=12, topk=5, ffn_hidden_size=14)
DENSE = LayerShape(**SIZES, ffn_hidden_size=26)
MOE = LayerShape(**SIZES, experts=EXPERTS)


def sum_bytes(*tensors):
    return sum(math.prod(tensor[:-1]) * ITEM_BYTES[tensor[-1]] for tensor in tensors)


def count_untagged(shape):
    return sum(tensor.size_bytes for tensor in list_untagged_tensors(shape))


def with_experts(**fields):
    return dataclasses.replace(MOE, experts=dataclasses.replace(EXPERTS, **fields))


def with_biases(**fields):
    return dataclasses.replace(with_experts(**fields), has_linear_bias=True)


@pytest.mark.parametrize(
    ("shape", "tensors"),
    [
        (dataclasses.replace(DENSE, rotary_channels=6), 4 * ((48, 1, 1, 6, "bf16"),)),
        (dataclasses.replace(DENSE, rotary_channels=6, has_fused_rotary=True), ((48, 1, 1, 6, "fp32"),)),
        (dataclasses.replace(DENSE, has_hidden_dropout=True), 2 * ((24, 3, 40, "bool"),)),
        (MOE, ((12, 72, "int64"),)),
        (with_experts(has_fused_permutation=True, expert_parallel_size=4, imbalance=1.5), ((540, "int32"),)),
        (with_biases(router=RouterShape(dtype_bytes=4)), ((12, 72, "int64"), (360, 1, "fp32"))),
        (dataclasses.replace(DENSE, has_mtp_projection=True), (*3 * ((24, 3, 40, "bf16"), (72, "fp32")), (24, 3, 80, "bf16"))),
    ],
    ids=range(7),
)
def test_untagged_tensors_match_lists_by_hand(shape, tensors):
    assert count_untagged(shape) == sum_bytes(*tensors)


def test_fused_rotary_saves_one_embedding_for_all_layers():
    shape = dataclasses.replace(DENSE, rotary_channels=6, has_fused_rotary=True)
    assert [tensor.is_same_in_all_layers for tensor in list_untagged_tensors(shape)] == [True]
    unfused = dataclasses.replace(shape, has_fused_rotary=False)
    assert [tensor.is_same_in_all_layers for tensor in list_untagged_tensors(unfused)] == [False]


def count_saved_bytes(function):
    """Return the bytes that `function` saves for backward, counting each storage once."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    assert any(tensor.requires_grad for tensor in result if tensor is not None)
    return sum(storage.nbytes() for storage in storages.values())


def test_bytes_saved_by_megatrons_rotary_embedding_match_the_formula():
    rope = pytest.importorskip("megatron.core.models.common.embeddings.rope_utils")
    embedding = torch.rand(48, 1, 1, 6)

    def rotate():
        # Query and key of a rank's 4 heads and 2 groups.
        heads = [torch.rand(48, 3, count, 8, dtype=torch.bfloat16, requires_grad=True) for count in (4, 2)]
        return [rope._apply_rotary_pos_emb_bshd(head, embedding) for head in heads]

    assert count_saved_bytes(rotate) == count_untagged(dataclasses.replace(DENSE, rotary_channels=6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_saved_by_megatrons_permutation_match_the_formula(dtype):
    utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    if permutes_by_mask():
        pytest.skip("the formula is for megatron-core 0.17 and newer")
    chosen = torch.rand(72, 12).topk(5, dim=1).indices
    routing_map = torch.zeros(72, 12, dtype=torch.bool).scatter(1, chosen, value=True)

    def permute():
        tokens = torch.rand(72, 40, dtype=torch.bfloat16, requires_grad=True)
        probabilities = torch.rand(72, 12, dtype=dtype, requires_grad=True)
        return utils.permute(tokens, routing_map, probs=probabilities, num_out_tokens=360)

    indices = count_tag_bytes(MOE)["moe_combine"]  # the unpermutation saves them too, under a tag
    assert count_saved_bytes(permute) - indices == count_untagged(MOE)
