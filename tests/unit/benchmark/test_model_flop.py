"""The operations of a model, counted by hand."""

from fgoffload.benchmark.model_flop import count_model_flop
from fgoffload.trainer.arguments import build_transformer_config, parse_arguments

SHAPE = "--num-layers 2 --hidden-size 8 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 3"
TOKENS = 3 * 16
VOCABULARY = "--vocab-size 300 --make-vocab-size-divisible-by 100"
HEAD = 2 * 8 * 300
"""Operations of a token in the output layer: hidden 8, vocabulary 300."""


def count(flags: str) -> int:
    arguments = parse_arguments(f"{SHAPE} {VOCABULARY} {flags}".split(), source="test")
    return count_model_flop(arguments, build_transformer_config(arguments, offload=None))


def test_experts_count_as_often_as_a_token_takes_them():
    attention = 2 * 4 * 64 + 2 * 2 * 8 * 8
    expert, shared, router = 2 * 3 * 8 * 10, 2 * 3 * 8 * 6, 2 * 8 * 4
    flags = "--num-experts 4 --moe-router-topk 3 --moe-ffn-hidden-size 10 --moe-shared-expert-intermediate-size 6 --swiglu"
    assert count(flags) == 3 * TOKENS * (2 * (attention + router + 3 * expert + shared) + HEAD)


def test_latent_attention_goes_through_its_ranks():
    flags = "--ffn-hidden-size 20 --multi-latent-attention --q-lora-rank 6 --kv-lora-rank 5 --qk-head-dim 3"
    flags += " --qk-pos-emb-head-dim 2 --v-head-dim 4"
    # Down to 6 and 5 + 2, up to 4 heads of 3 + 2 and of 3 + 4, and 4 heads of 4 back to 8.
    projections = 8 * 6 + 6 * 4 * 5 + 8 * (5 + 2) + 5 * 4 * (3 + 4) + 4 * 4 * 8
    attention = 2 * projections + 2 * 4 * 5 * 8 + 2 * 4 * 4 * 8
    mlp = 2 * (8 * 20 + 20 * 8)
    assert count(flags) == 3 * TOKENS * (2 * (attention + mlp) + HEAD)
