"""Trains each kind of layer in one process with and without offload of every tag of its model, and compares bitwise."""

import pytest
import torch
from support.attention import reference_attention
from support.matrix import ALL_TO_ALL, DENSE, MIXED, MOE, SHARED, Row, check_row
from support.pipeline import train

from fgoffload.integrations.megatron.patching.imports import ignore_expected_warnings
from fgoffload.trainer.arguments import parse_arguments
from fgoffload.trainer.data import Microbatch, TextData
from fgoffload.trainer.forward_step import ForwardStep, find_packed_bounds
from fgoffload.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("parallel")

LATENT = "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 12"
ROWS = {
    "dense": Row(DENSE),
    "moe_top_2": Row(MOE),
    "shared_experts": Row(f"{MOE} {SHARED}"),
    "shared_experts_all_to_all": Row(f"{MOE} {SHARED} {ALL_TO_ALL} --moe-shared-expert-overlap"),
    "mixed_dense_and_moe": Row(MIXED),
    "grouped_queries": Row(f"{MIXED} --group-query-attention --num-query-groups 2"),
    "multi_token_prediction": Row(f"{MIXED} --mtp-num-layers 2"),
    "multi_token_prediction_dense": Row(f"{DENSE} --mtp-num-layers 1"),
    "latent_attention": Row(f"{MIXED} {LATENT}", has_reference_attention=True),
    "packed_sequences": Row(f"{MIXED} --packed-sequences", has_reference_attention=True),
    "packed_latent_attention": Row(f"{MIXED} {LATENT} --packed-sequences", has_reference_attention=True),
    "bf16": Row(f"{MIXED} {SHARED} --bf16"),
    "bf16_with_fp32_gradients": Row(f"{MIXED} --bf16 --accumulate-allreduce-grads-in-fp32"),
    "dropout": Row(f"{MIXED} --hidden-dropout 0.1 --attention-dropout 0.1"),
    "biases_layer_norm_learned_positions": Row(
        DENSE.replace("--disable-bias-linear", "").replace("rope", "learned_absolute").replace("RMSNorm", "LayerNorm")
    ),
    "expert_bias": Row(f"{MIXED} --moe-router-enable-expert-bias --moe-router-score-function sigmoid"),
    "loss_over_all_tokens": Row(f"{MIXED} --calculate-per-token-loss"),
    "variable_lengths": Row(f"{MIXED} {ALL_TO_ALL} --variable-seq-lengths", steps=3),
    "evaluations": Row(f"{MIXED} --hidden-dropout 0.1", steps=3, evaluates_before=(0, 1, 2)),
    "batch_ramp_up": Row(f"{MIXED} --rampup-batch-size 1 1 3", steps=4),
}


@pytest.fixture(scope="module")
def text() -> TextData:
    return TextData.load()


@pytest.mark.parametrize("name", ROWS)
def test_training_with_offload_is_bitwise_identical_in_one_process(name, text):
    without, with_offload = (train(training, text=text) for training in ROWS[name].list_trainings())
    check_row(ROWS[name], [without], [with_offload])
    assert all(without.losses)
    if name == "batch_ramp_up":
        # START 1, INCREMENT 1, SAMPLES 3, up to 4: one more sequence per sample seen, and the full batch after the third.
        assert [len(losses) for losses in without.losses] == [1, 2, 4, 4]


def test_packed_sequences_do_not_attend_to_each_other(text):
    arguments = parse_arguments(f"{DENSE} --packed-sequences".split(), source="test")
    assert find_packed_bounds(32) == [0, 16, 24, 32]
    tokens = torch.arange(32)[None]
    other = tokens.clone()
    other[0, :16] = 99
    with reference_attention():
        trainer = Trainer(arguments, text, offload=None)
        try:
            step = ForwardStep(arguments, torch.device("cpu"))
            losses = []
            for batch in (tokens, other):
                microbatch = Microbatch(batch, tokens, torch.ones(1, 32), tokens)
                with ignore_expected_warnings(), torch.no_grad():
                    losses.append(step(iter([step.prepare(microbatch)]), trainer.chunks[0])[0])
        finally:
            trainer.close()
    assert torch.equal(losses[0][0, 16:], losses[1][0, 16:])
    assert not torch.equal(losses[0][0, :16], losses[1][0, :16])
