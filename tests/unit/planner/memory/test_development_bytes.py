"""The formulas of the tags that only the development branch has, against what was measured on an H200."""

import pytest

from fgoffload.planner.memory.development_bytes import (
    GatedDeltaProductShape,
    list_fused_experts_tensors,
    list_gated_delta_product_tensors,
)
from fgoffload.planner.model.layer_shape import ExpertsShape, LayerShape

PRODUCT = {
    "micro_batch_size": 2,
    "seq_length": 320,
    "mamba_num_heads": 8,
    "mamba_head_dim": 128,
    "mamba_num_groups": 2,
    "mamba_state_dim": 64,
    "gdp_num_householder": 2,
}
MEASURED_LAYERS = 3 * 2
"""Of docs/reference/tested.md: three layers, two microbatches."""


def make_layer(**options):
    experts = ExpertsShape(num_experts=4, topk=2, ffn_hidden_size=448, **options)
    return LayerShape(
        micro_batch_size=2,
        seq_length=320,
        hidden_size=384,
        num_attention_heads=4,
        num_query_groups=4,
        qk_channels=64,
        v_channels=64,
        experts=experts,
    )


@pytest.mark.parametrize(
    ("options", "measured_bytes"),
    [({}, 29755104), ({"mamba_num_groups": 8}, 47726304), ({"has_recomputed_qkv": True}, 26713824)],
)
def test_a_gated_delta_product_saves_what_was_measured(options, measured_bytes):
    tensors = list_gated_delta_product_tensors(GatedDeltaProductShape(**{**PRODUCT, **options}))
    assert MEASURED_LAYERS * sum(tensor.size_bytes for tensor in tensors) == measured_bytes


def test_fused_experts_save_rows_padded_to_256():
    tensors = list_fused_experts_tensors(make_layer(), rows=(1, 256, 257, 0))
    padded = 256 + 256 + 512
    # Tokens, gate and up, the activation's output, in bf16; a probability a row; the rows of each of four experts in int64.
    assert sum(tensor.size_bytes for tensor in tensors) == 2 * padded * (384 + 3 * 448) + 2 * padded + 8 * 4
    assert {tensor.tags for tensor in tensors} == {("fused_group_mlp",)}
