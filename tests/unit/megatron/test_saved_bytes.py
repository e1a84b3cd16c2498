"""The planner's formulas against real Megatron code on the CPU, for the tags whose operators are plain torch everywhere.

Those of Transformer Engine's modules need a GPU: `tests/gpu/test_megatron_bytes.py`.
"""

import pytest
import torch
from support.trainings import make_config, make_trainer

from fgoffload.planner.memory.saved_bytes import count_tag_bytes
from fgoffload.planner.model.layer_shape import ExpertsShape, LayerShape, RouterShape

pytestmark = pytest.mark.usefixtures("parallel")

SHAPE = (
    "--num-layers 2 --hidden-size 48 --num-attention-heads 4 --seq-length 40 --micro-batch-size 2 --global-batch-size 2 "
    "--swiglu --disable-bias-linear --position-embedding-type rope --normalization RMSNorm --bf16 --num-experts 8 "
    "--moe-router-topk 3 --moe-ffn-hidden-size 20 --moe-token-dispatcher-type alltoall"
)
ATTENTION = {
    "micro_batch_size": 2,
    "seq_length": 40,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "qk_channels": 12,
    "v_channels": 12,
    "rotary_channels": 12,
}
LAYERS = 2
SIGMOID = "--moe-router-score-function sigmoid"
LARGE = (
    f"{SIGMOID} --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 4 "
    "--moe-router-group-topk 2 --moe-router-dtype fp32 --moe-aux-loss-coeff 1e-4 --moe-router-load-balancing-type seq_aux_loss"
)


def make_shape(*, is_deterministic, topk=3, **router):
    experts = ExpertsShape(num_experts=8, topk=topk, ffn_hidden_size=20, router=RouterShape(**router))
    return LayerShape(**ATTENTION, experts=experts, is_deterministic=is_deterministic)


def measure(flags, *tags, is_deterministic):
    """Return the bytes that left and those that others had taken away, by tag, of one layer."""
    with make_trainer(flags, make_config(*tags, min_offloaded_tensor_size=1)) as trainer:
        torch.use_deterministic_algorithms(mode=is_deterministic, warn_only=True)
        trainer.run_step(with_digests=False)
        stats = trainer.integration.last_step.tags
    assert {found.groups for found in stats.values()} == {LAYERS}
    return {tag: (found.d2h_bytes + found.shared_bytes) / LAYERS for tag, found in stats.items()}


@pytest.mark.parametrize("is_deterministic", [True, False])
@pytest.mark.parametrize(
    ("flags", "router"),
    [
        ("", {}),
        ("--moe-aux-loss-coeff 1e-2", {"balancing": "aux_loss"}),
        ("--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type seq_aux_loss", {"balancing": "seq_aux_loss"}),
        ("--moe-aux-loss-coeff 1e-2 --moe-router-dtype fp32", {"balancing": "aux_loss", "dtype_bytes": 4}),
        ("--moe-router-pre-softmax --moe-aux-loss-coeff 1e-2", {"has_pre_softmax": True, "balancing": "aux_loss"}),
        (SIGMOID, {"score_function": "sigmoid"}),
        (f"{SIGMOID} --moe-aux-loss-coeff 1e-2", {"score_function": "sigmoid", "balancing": "aux_loss"}),
        (f"{SIGMOID} --moe-router-enable-expert-bias", {"score_function": "sigmoid", "has_expert_bias": True}),
        (
            LARGE,
            {"score_function": "sigmoid", "has_expert_bias": True, "balancing": "seq_aux_loss", "dtype_bytes": 4},
        ),
        (f"{SIGMOID} --moe-router-topk 1", {"score_function": "sigmoid", "topk": 1}),
    ],
    ids=str,
)
def test_router_and_combine_save_the_bytes_of_the_formulas(flags, router, is_deterministic):
    expected = count_tag_bytes(make_shape(is_deterministic=is_deterministic, **router))
    found = measure(f"{SHAPE} {flags}", "router", "moe_combine", is_deterministic=is_deterministic)
    assert found == {tag: expected[tag] for tag in ("router", "moe_combine")}


@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_a_layer_that_is_recomputed_keeps_the_bytes_of_the_formula(positions):
    flags = (
        SHAPE.replace("rope", positions) + " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )
    sizes = ATTENTION if positions == "rope" else ATTENTION | {"rotary_channels": 0}
    experts = ExpertsShape(num_experts=8, topk=3, ffn_hidden_size=20)
    expected = count_tag_bytes(LayerShape(**sizes, experts=experts))["layer_input"]
    assert measure(flags, "layer_input", is_deterministic=True) == {"layer_input": expected}
