"""What runs again through Megatron's checkpoints without output: what it keeps, and leaves, is off the device after forward."""

import importlib.util
import json

import pytest
import torch
from support.processes import run_processes

from fgoffload import Action, OffloadPlan, Site

HIDDEN, SEQ, BATCH, TOPK, EXPERT = 1024, 1024, 2, 2, 512
TOKENS = SEQ * BATCH
FFN, CHANNELS = 1024, 64 * 4
COMMON = (
    f"--num-layers 3 --hidden-size {HIDDEN} --num-attention-heads 4 --kv-channels 64 --seq-length {SEQ} "
    f"--micro-batch-size {BATCH} --global-batch-size {BATCH} --ffn-hidden-size {FFN} --swiglu --disable-bias-linear --bf16 "
    "--normalization RMSNorm --transformer-impl transformer_engine --no-gradient-accumulation-fusion "
    f"--num-experts 4 --moe-router-topk {TOPK} --moe-ffn-hidden-size {EXPERT} --moe-grouped-gemm --moe-aux-loss-coeff 1e-2 "
    "--moe-token-dispatcher-type alltoall --position-embedding-type rope "
)
FLAGS = (
    COMMON
    # With latent attention the norm before it is a module of its own, and has a site.
    + "--multi-latent-attention --q-lora-rank 96 --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64"
)
INPUT_BYTES = {
    "attn_norm": TOKENS * HIDDEN * 2,
    "mlp_norm": TOKENS * HIDDEN * 2,
    "moe_act": TOKENS * TOPK * 2 * EXPERT * 2,  # gate and up; the probabilities on top are a thousandth of it
}
"""Of what each unit runs again from, in bf16."""
LAYERS = (0, 1)
"""Not the last one: what backward asks for next may stay."""


# First linears: what they hand on, and with a norm in them its output and statistics.
NORMED_BYTES = TOKENS * (HIDDEN * 2 + 4)
FIRST_FLAGS = f"{COMMON} --moe-layer-freq [0]*1+[1]*2"
FIRST_BYTES = {
    "qkv_linear": (0, NORMED_BYTES + TOKENS * 3 * CHANNELS * 2),
    "mlp_fc1": (0, NORMED_BYTES + TOKENS * 3 * FFN * 2),  # gate and up, and their product
    "expert_fc1": (1, TOKENS * TOPK * 3 * EXPERT * 2),
}
"""By unit: a layer that has it, and what it frees there."""


def run_plans(tmp_path_factory, flags, plans):
    if not torch.cuda.is_available():  # asked here too: this fixture comes before the one of the folder
        pytest.skip("needs a CUDA GPU")
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine: pip install transformer-engine[pytorch]")
    folder = tmp_path_factory.mktemp("memory")
    request = {"flags": flags, "plans": {name: OffloadPlan(actions=actions).to_json() for name, actions in plans.items()}}
    (folder / "request.json").write_text(json.dumps(request))
    script = __file__.replace("test_recompute_memory", "measure_recompute_memory")
    run_processes(script, folder, processes=1, timeout_seconds=300)
    return json.loads((folder / "result-0.json").read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    plans = {
        f"{tag} {action.value}": {Site(chunk=0, layer=layer, tag=tag): action for layer in LAYERS}
        for tag in INPUT_BYTES
        for action in (Action.RECOMPUTE, Action.RECOMPUTE_AND_OFFLOAD)
    }
    return run_plans(tmp_path_factory, FLAGS, plans)


@pytest.fixture(scope="module")
def first_linears(tmp_path_factory):
    plans = {unit: {Site(chunk=0, layer=layer, tag=unit): Action.RECOMPUTE} for unit, (layer, _) in FIRST_BYTES.items()}
    return run_plans(tmp_path_factory, FIRST_FLAGS, {"nothing": {}, **plans})


@pytest.mark.timeout(320)
@pytest.mark.parametrize("unit", FIRST_BYTES)
def test_first_linears_that_run_again_free_what_they_hand_on(unit, first_linears):
    without, again = first_linears["nothing"], first_linears[unit]
    assert (without["losses"], without["digests"]) == (again["losses"], again["digests"])
    assert without["allocated_bytes"] - again["allocated_bytes"] == pytest.approx(FIRST_BYTES[unit][1], abs=2 << 20)


@pytest.mark.timeout(320)
@pytest.mark.parametrize("tag", INPUT_BYTES)
def test_what_a_unit_runs_again_from_is_off_the_device_after_forward_where_it_leaves(tag, measured):
    stays, leaves = measured[f"{tag} recompute"], measured[f"{tag} recompute+offload"]
    assert (stays["losses"], stays["digests"]) == (leaves["losses"], leaves["digests"])
    expected = len(LAYERS) * INPUT_BYTES[tag]
    assert (stays["d2h_bytes"], leaves["held_elsewhere_bytes"]) == (0, 0)
    assert leaves["d2h_bytes"] == pytest.approx(expected, rel=0.01)
    # The allocator gives a piece that is up to 1 MiB larger than what was asked for, and one input has 4 MiB or more.
    assert stays["allocated_bytes"] - leaves["allocated_bytes"] == pytest.approx(expected, abs=2 << 20)
