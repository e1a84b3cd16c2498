"""The planner's formulas against what Transformer Engine's layers really save, tag by tag and to the byte.

No size is another's by chance: the heads together are not as wide as the hidden states, nor is an expert. A step is one
microbatch: what all layers share is known to stay alive after it, and stays on the device from then on.
"""

import dataclasses
import importlib.util
import json

import pytest
import torch
from support.processes import run_processes

from fgoffload.planner.memory.saved_bytes import count_tag_bytes
from fgoffload.planner.model.layer_shape import ExpertsShape, LatentShape, LayerShape, RouterShape

LAYERS = 3
SHAPE = (
    f"--num-layers {LAYERS} --hidden-size 384 --num-attention-heads 4 --kv-channels 64 --seq-length 192 --micro-batch-size 2 "
    "--global-batch-size 2 --ffn-hidden-size 640 --swiglu --disable-bias-linear --bf16 "
    "--transformer-impl transformer_engine --no-gradient-accumulation-fusion"
)
EXPERTS = (
    "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 320 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2 "
    "--moe-token-dispatcher-type alltoall"
)
ROPE, RMSNORM = "--position-embedding-type rope", "--normalization RMSNorm"
DENSE = f"{SHAPE} {ROPE} {RMSNORM}"
MOE = f"{DENSE} {EXPERTS}"
MIXED = f"{MOE} --moe-shared-expert-intermediate-size 192 --moe-layer-freq [0]*1+[1]*2"
MLA = "--multi-latent-attention --q-lora-rank 96 --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64"
SIGMOID = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type seq_aux_loss"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TENSOR_PARALLEL = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"

DENSE_SHAPE = LayerShape(
    micro_batch_size=2,
    seq_length=192,
    hidden_size=384,
    num_attention_heads=4,
    num_query_groups=4,
    qk_channels=64,
    v_channels=64,
    ffn_hidden_size=640,
    rotary_channels=64,
)
EXPERTS_SHAPE = ExpertsShape(num_experts=8, topk=3, ffn_hidden_size=320, router=RouterShape(balancing="aux_loss"))
MOE_SHAPE = dataclasses.replace(DENSE_SHAPE, ffn_hidden_size=0, experts=EXPERTS_SHAPE)
LATENT_SHAPE = LatentShape(q_lora_rank=96, kv_lora_rank=128, qk_pos_emb_head_dim=32)


def with_experts(**fields):
    return dataclasses.replace(MOE_SHAPE, experts=dataclasses.replace(EXPERTS_SHAPE, **fields))


def with_latent(**fields):
    return dataclasses.replace(MOE_SHAPE, qk_channels=64 + 32, latent=dataclasses.replace(LATENT_SHAPE, **fields))


def with_groups(shape):
    return dataclasses.replace(shape, num_query_groups=2)


SIGMOID_ROUTER = RouterShape(score_function="sigmoid", has_expert_bias=True, balancing="seq_aux_loss", dtype_bytes=4)
SHARED_SHAPE = with_experts(shared_ffn_hidden_size=192)
OVERLAP_SHAPE = with_experts(shared_ffn_hidden_size=192, has_shared_overlap=True)

TRAININGS = {
    "dense": (DENSE, [DENSE_SHAPE] * LAYERS),
    "layer norm": (
        DENSE.replace(RMSNORM, "--normalization LayerNorm"),
        [dataclasses.replace(DENSE_SHAPE, normalization="LayerNorm")] * LAYERS,
    ),
    "experts": (MOE, [MOE_SHAPE] * LAYERS),
    "layer norm, experts": (
        MOE.replace(RMSNORM, "--normalization LayerNorm"),
        [dataclasses.replace(MOE_SHAPE, normalization="LayerNorm")] * LAYERS,
    ),
    "fused permutation": (f"{MOE} --moe-permute-fusion", [with_experts(has_fused_permutation=True)] * LAYERS),
    "no activation fusion": (
        f"{MIXED} --no-bias-swiglu-fusion",
        [dataclasses.replace(shape, has_fused_activation=False) for shape in (DENSE_SHAPE, SHARED_SHAPE, SHARED_SHAPE)],
    ),
    "no activation fusion, router in fp32": (
        f"{MOE} --moe-router-dtype fp32 --no-bias-swiglu-fusion",
        [dataclasses.replace(with_experts(router=RouterShape(balancing="aux_loss", dtype_bytes=4)), has_fused_activation=False)]
        * LAYERS,
    ),
    "no balancing": (
        MOE.replace("--moe-aux-loss-coeff 1e-2", ""),
        [with_experts(router=RouterShape())] * LAYERS,
    ),
    "router in fp32, sigmoid, bias, balanced sequences": (f"{MOE} {SIGMOID}", [with_experts(router=SIGMOID_ROUTER)] * LAYERS),
    "dense and shared experts, query groups": (
        f"{MIXED} --group-query-attention --num-query-groups 2",
        [with_groups(shape) for shape in (DENSE_SHAPE, SHARED_SHAPE, SHARED_SHAPE)],
    ),
    "shared experts overlapped": (f"{MIXED} --moe-shared-expert-overlap", [DENSE_SHAPE, OVERLAP_SHAPE, OVERLAP_SHAPE]),
    "latent attention": (f"{MOE} {MLA}", [with_latent()] * LAYERS),
    "latent attention with norms": (f"{MOE} {MLA} --qk-layernorm", [with_latent(has_qk_norm=True)] * LAYERS),
    "full recompute": (f"{MIXED} {FULL}", [DENSE_SHAPE, SHARED_SHAPE, SHARED_SHAPE]),
    "full recompute, learned positions": (
        f"{MOE} {FULL}".replace(ROPE, "--position-embedding-type learned_absolute"),
        [dataclasses.replace(MOE_SHAPE, rotary_channels=0)] * LAYERS,
    ),
}


def count_step(name, **fields):
    """Return the bytes that the formulas say for one step of a training, by tag; `fields` hold for every layer."""
    flags, layers = TRAININGS[name]
    found = {}
    for shape in layers:
        for tag, size_bytes in count_tag_bytes(dataclasses.replace(shape, **fields)).items():
            if (tag == "layer_input") == (FULL in flags):
                found[tag] = found.get(tag, 0) + size_bytes
    return found


@pytest.fixture(scope="module", params=[(1, True), (1, False), (2, False)], ids=str)
def measured(request, tmp_path_factory):
    """Return what all trainings saved on each rank, and the fields of a layer that hold for all of them."""
    ranks, is_deterministic = request.param
    # Asked here too: this fixture comes before the one of the folder.
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA GPU(s), and there are {torch.cuda.device_count()}")
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine: pip install transformer-engine[pytorch]")
    parallel = TENSOR_PARALLEL if ranks > 1 else ""
    trainings = {
        name: {"flags": f"{flags} {parallel}", "tags": list(count_step(name))} for name, (flags, _) in TRAININGS.items()
    }
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "request.json").write_text(json.dumps({"trainings": trainings, "is_deterministic": is_deterministic}))
    script = __file__.replace("test_megatron_bytes", "measure_megatron_bytes")
    run_processes(script, folder, processes=ranks, timeout_seconds=400)
    results = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(ranks)]
    return results, {"is_deterministic": is_deterministic, "tensor_parallel_size": ranks}


@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", TRAININGS)
def test_each_tag_saves_the_bytes_of_its_formula(name, measured):
    results, fields = measured
    expected = count_step(name, **fields)
    assert [found[name] for found in results] == [expected] * len(results)
