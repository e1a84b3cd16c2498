"""Small layers and devices for times computed by hand."""

import dataclasses

from fgoffload.planner.model.layer_shape import ExpertsShape, LatentShape, LayerShape
from fgoffload.planner.timing.efficiency import Efficiency
from fgoffload.planner.timing.hardware import Hardware
from fgoffload.planner.timing.op_times import make_layer_model

FAST = 1e40
"""A practically infinite rate."""

COMPUTING = Hardware(
    name="computes",
    device_memory_bytes=1,
    device_memory_bytes_per_s=FAST,
    bf16_flop_per_s=1e12,
    fp8_flop_per_s=4e12,
    gpus_per_node=8,
    source="made up",
)
"""A device limited by compute, with infinitely fast memory."""

IDEAL = Efficiency(
    **dict.fromkeys(
        ("matmul", "grouped_matmul", "fp8_matmul", "grouped_fp8_matmul", "attention_forward", "attention_backward", "memory"),
        1.0,
    ),
    **dict.fromkeys(("narrow_attention", "nvlink"), 1.0),
    **dict.fromkeys(("grouped_rows", "rerun_extra", "kernel_start_s", "host_s_per_launch", "collective_start_s"), 0.0),
    **dict.fromkeys(("attention_row_s", "sink_row_s"), 0.0),
)

# 2 sequences of 64 tokens, hidden 32, 4 heads of 8 in 2 groups, an MLP of 48: 128 rows.
ATTENTION = {
    "micro_batch_size": 2,
    "seq_length": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "qk_channels": 8,
    "v_channels": 8,
}
DENSE = LayerShape(**ATTENTION, ffn_hidden_size=48)
EXPERTS = ExpertsShape(num_experts=8, topk=2, ffn_hidden_size=16)
MOE = LayerShape(**ATTENTION, experts=EXPERTS)
# Heads of 8 + 4 channels for query and key, and of 8 for values.
MLA = dataclasses.replace(
    DENSE, num_query_groups=4, qk_channels=12, latent=LatentShape(q_lora_rank=10, kv_lora_rank=6, qk_pos_emb_head_dim=4)
)


def change_experts(shape=MOE, **fields):
    """Return `shape` with other fields of its experts."""
    return dataclasses.replace(shape, experts=dataclasses.replace(shape.experts, **fields))


def run(shape, hardware=COMPUTING, **settings):
    """Return the segments of a layer by name, on a device that reaches its peak rates."""
    settings = {"efficiency": IDEAL, **settings}
    return {one.name: one for one in make_layer_model(shape, hardware, kind="any", **settings).segments}
