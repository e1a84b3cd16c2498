"""The operations of a model, counted by hand."""

from fgoffload.benchmark.model_flop import count_model_flop
from fgoffload.integrations.megatron.arguments import build_transformer_config, parse_arguments

SHAPE = "--num-layers 2 --hidden-size 8 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 3"
TOKENS = 3 * 16
VOCABULARY = "--vocab-size 300 --make-vocab-size-divisible-by 100"
HEAD = 2 * 8 * 300
"""Operations of a token in the output layer: hidden 8, vocabulary 300."""


def count(flags: str) -> int:
    arguments = parse_arguments(f"{SHAPE} {VOCABULARY} {flags}".split(), source="test")
    return count_model_flop(arguments, build_transformer_config(arguments, offload=None))


def test_a_dense_model():
    # Four heads of 2: query, key, value and output are 8 x 8 each. Scores and sums meet 8 of 16 tokens: 2 x 2 x 8 x 8.
    attention = 2 * 4 * 64 + 2 * 2 * 8 * 8
    mlp = 2 * (8 * 20 + 20 * 8)
    assert count("--ffn-hidden-size 20") == 3 * TOKENS * (2 * (attention + mlp) + HEAD)


def test_a_gated_mlp_has_a_third_linear():
    assert count("--ffn-hidden-size 20 --swiglu") - count("--ffn-hidden-size 20") == 3 * TOKENS * 2 * (2 * 8 * 20)


def test_groups_of_queries_share_keys_and_values():
    # Two groups of 2 channels: key and value are 8 x 4 each instead of 8 x 8.
    saved = 2 * 2 * (8 * 8 - 8 * 4)
    plain, grouped = count("--ffn-hidden-size 20"), count("--ffn-hidden-size 20 --group-query-attention --num-query-groups 2")
    assert plain - grouped == 3 * TOKENS * 2 * saved


def test_experts_count_as_often_as_a_token_takes_them():
    attention = 2 * 4 * 64 + 2 * 2 * 8 * 8
    expert, shared, router = 2 * 3 * 8 * 10, 2 * 3 * 8 * 6, 2 * 8 * 4
    flags = "--num-experts 4 --moe-router-topk 3 --moe-ffn-hidden-size 10 --moe-shared-expert-intermediate-size 6 --swiglu"
    assert count(flags) == 3 * TOKENS * (2 * (attention + router + 3 * expert + shared) + HEAD)


def test_a_pattern_says_which_layers_have_experts():
    dense, mixture = count("--ffn-hidden-size 20 --swiglu"), "--num-experts 4 --moe-ffn-hidden-size 10 --swiglu"
    both = count(f"--ffn-hidden-size 20 {mixture} --moe-layer-freq [0,1]")
    experts = count(f"--ffn-hidden-size 20 {mixture}")
    assert 2 * both == dense + experts


def test_latent_attention_goes_through_its_ranks():
    flags = "--ffn-hidden-size 20 --multi-latent-attention --q-lora-rank 6 --kv-lora-rank 5 --qk-head-dim 3"
    flags += " --qk-pos-emb-head-dim 2 --v-head-dim 4"
    # Down to 6 and 5 + 2, up to 4 heads of 3 + 2 and of 3 + 4, and 4 heads of 4 back to 8.
    projections = 8 * 6 + 6 * 4 * 5 + 8 * (5 + 2) + 5 * 4 * (3 + 4) + 4 * 4 * 8
    attention = 2 * projections + 2 * 4 * 5 * 8 + 2 * 4 * 4 * 8
    mlp = 2 * (8 * 20 + 20 * 8)
    assert count(flags) == 3 * TOKENS * (2 * (attention + mlp) + HEAD)


def test_a_layer_of_multi_token_prediction_has_a_projection_and_an_output_of_its_own():
    attention = 2 * 4 * 64 + 2 * 2 * 8 * 8
    mlp = 2 * (8 * 20 + 20 * 8)
    added = count("--ffn-hidden-size 20 --mtp-num-layers 1") - count("--ffn-hidden-size 20")
    assert added == 3 * TOKENS * (attention + mlp + 2 * 16 * 8 + HEAD)


def test_recompute_counts_nothing():
    flags = "--ffn-hidden-size 20 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert count(flags) == count("--ffn-hidden-size 20")


def test_attention_grows_with_the_square_of_the_sequence_and_all_else_with_the_tokens():
    longer = count("--ffn-hidden-size 20 --seq-length 32 --max-position-embeddings 32")
    # Scores and sums of two layers, 8 channels over all heads, with half of the sequence for each of its tokens.
    squares = 3 * 2 * (2 * 2 * 8)
    assert longer - 2 * count("--ffn-hidden-size 20") == squares * (3 * 32 * 16 - 2 * 3 * 16 * 8)
