"""What runs again through Megatron's checkpoints without output: what it keeps, and leaves, is off the device after forward."""

import importlib.util
import json

import pytest
import torch
from support.processes import run_processes

from fgoffload import Action, OffloadPlan, Site

HIDDEN, SEQ, BATCH, TOPK, EXPERT = 1024, 1024, 2, 2, 512
TOKENS = SEQ * BATCH
FLAGS = (
    f"--num-layers 3 --hidden-size {HIDDEN} --num-attention-heads 4 --kv-channels 64 --seq-length {SEQ} "
    f"--micro-batch-size {BATCH} --global-batch-size {BATCH} --ffn-hidden-size 1024 --swiglu --disable-bias-linear --bf16 "
    "--normalization RMSNorm --transformer-impl transformer_engine --no-gradient-accumulation-fusion "
    f"--num-experts 4 --moe-router-topk {TOPK} --moe-ffn-hidden-size {EXPERT} --moe-grouped-gemm --moe-aux-loss-coeff 1e-2 "
    "--moe-token-dispatcher-type alltoall --position-embedding-type rope "
    # With latent attention the norm before it is a module of its own, and has a site.
    "--multi-latent-attention --q-lora-rank 96 --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64"
)
INPUT_BYTES = {
    "attn_norm": TOKENS * HIDDEN * 2,
    "mlp_norm": TOKENS * HIDDEN * 2,
    "moe_act": TOKENS * TOPK * 2 * EXPERT * 2,  # gate and up; the probabilities on top are a thousandth of it
}
"""Of what each unit runs again from, in bf16."""
LAYERS = (0, 1)
"""Not the last one: what backward asks for next may stay."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    if not torch.cuda.is_available():  # asked here too: this fixture comes before the one of the folder
        pytest.skip("needs a CUDA GPU")
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine: pip install transformer-engine[pytorch]")
    plans = {
        f"{tag} {action.value}": OffloadPlan(
            actions={Site(chunk=0, layer=layer, tag=tag): action for layer in LAYERS}
        ).to_json()
        for tag in INPUT_BYTES
        for action in (Action.RECOMPUTE, Action.RECOMPUTE_AND_OFFLOAD)
    }
    folder = tmp_path_factory.mktemp("memory")
    (folder / "request.json").write_text(json.dumps({"flags": FLAGS, "plans": plans}))
    script = __file__.replace("test_recompute_memory", "measure_recompute_memory")
    run_processes(script, folder, processes=1, timeout_seconds=300)
    return json.loads((folder / "result-0.json").read_text())


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
