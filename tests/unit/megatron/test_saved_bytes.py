"""Compares the planner's formulas with real Megatron code on the CPU, for tags of plain torch ops.

Tags of Transformer Engine's modules need a GPU: `tests/gpu/test_megatron_bytes.py`.
"""

import contextlib
import dataclasses

import pytest
import torch
from support.grouped_experts import make_experts
from support.trainings import make_config, make_trainer

from fgoffload.integrations.megatron.patching.cpu_support import apply_cpu_support, needs_cpu_support
from fgoffload.planner.memory.saved_bytes import count_bytes, count_tag_bytes
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


def measure(flags, *tags, is_deterministic):
    """Return the bytes per tag that one layer offloads, including storages that another tag offloaded first."""
    with make_trainer(flags, make_config(*tags, min_offloaded_tensor_size=1)) as trainer:
        torch.use_deterministic_algorithms(mode=is_deterministic, warn_only=True)
        trainer.run_step(with_digests=False)
        stats = trainer.integration.last_step.tags
    assert {found.groups for found in stats.values()} == {LAYERS}
    return {tag: (found.d2h_bytes + found.shared_bytes) / LAYERS for tag, found in stats.items()}


# Gated activations: Megatron's own code, with and without fusion.

DENSE = SHAPE.partition(" --num-experts")[0] + " --ffn-hidden-size 28"
DENSE_SHAPE = LayerShape(**ATTENTION, ffn_hidden_size=28)


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "unfused"])
def test_saved_bytes_of_dense_mlps_and_shared_experts_match_the_formulas(is_fused):
    fusion = "" if is_fused else "--no-bias-swiglu-fusion"
    expected = count_tag_bytes(dataclasses.replace(DENSE_SHAPE, has_fused_activation=is_fused))
    found = measure(f"{DENSE} {fusion}", "mlp_act", "mlp_fc2", is_deterministic=True)
    assert found == {tag: expected[tag] for tag in ("mlp_act", "mlp_fc2")}
    expected = count_tag_bytes(dataclasses.replace(DENSE_SHAPE, is_gated=False))
    found = measure(DENSE.replace("--swiglu", ""), "mlp_act", is_deterministic=True)
    assert found == {"mlp_act": expected["mlp_act"]}
    experts = ExpertsShape(num_experts=8, topk=3, ffn_hidden_size=20, shared_ffn_hidden_size=36)
    expected = count_tag_bytes(LayerShape(**ATTENTION, experts=experts, has_fused_activation=is_fused))
    found = measure(f"{SHAPE} --moe-shared-expert-intermediate-size 36 {fusion}", "shared_expert", is_deterministic=True)
    assert found == {"shared_expert": expected["shared_expert"]}


def run_experts(dtype, *, rows=240, channels=20, **options):
    """Return the bytes of each segment that Megatron's grouped experts save, and the gradients of their inputs."""
    grouped = pytest.importorskip("megatron.core.transformer.moe.experts").TEGroupedMLP
    generator = torch.Generator().manual_seed(1)
    leaves = (
        torch.randn(rows, 2 * channels, dtype=torch.bfloat16, generator=generator),
        torch.rand(rows, dtype=dtype, generator=generator),
    )
    first, probabilities = (leaf.requires_grad_() * 1 for leaf in leaves)
    segments, kept = {}, []

    def pack(tensor):
        kept.append(tensor)  # so that no other storage reuses its address
        end = tensor.storage_offset() + 1 + sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
        segment = (tensor.storage_offset() * tensor.itemsize, end * tensor.itemsize)
        key = tensor.untyped_storage().data_ptr()
        found = segments.setdefault(key, segment)
        segments[key] = (min(found[0], segment[0]), max(found[1], segment[1]))
        return tensor

    support = apply_cpu_support() if needs_cpu_support() else contextlib.nullcontext()
    # Compiling the fused kernels takes long, and saves the same tensors.
    with support, torch.compiler.set_stance("force_eager"):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output, _ = grouped.forward(
                make_experts(lambda *_: (first, None), **options), torch.empty(rows, 1), torch.tensor([rows]), probabilities
            )
        assert output.dtype is torch.bfloat16
        output.float().sum().backward()
    return [end - start for start, end in segments.values()], [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["fused", "unfused", "clamped"])
def test_grouped_expert_activations_match_the_formula_and_recompute_bitwise(dtype, kind):
    options = {"is_fused": kind != "unfused", "is_clamped": kind == "clamped"}
    offset = [2] if kind == "clamped" else []  # the gate's linear offset, a tensor with one element
    experts = ExpertsShape(num_experts=8, topk=3, ffn_hidden_size=20, router=RouterShape(dtype_bytes=dtype.itemsize))
    shape = LayerShape(
        **ATTENTION, experts=experts, has_fused_activation=options["is_fused"], has_clamped_gate=options["is_clamped"]
    )
    saved, expected = run_experts(dtype, **options)
    assert sum(saved) == count_bytes(shape, ("moe_act", "expert_fc2")) + sum(offset)
    saved, found = run_experts(dtype, **options, is_recomputed=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    # Gate and up, the probabilities, and the second linear's input, which is empty until backward.
    assert sorted(saved) == sorted([240 * 40 * 2, 240 * dtype.itemsize, 240 * 20 * 2])
