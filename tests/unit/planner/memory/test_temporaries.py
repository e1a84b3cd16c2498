"""Device bytes that are there while a stretch runs, added up by hand, tensor by tensor."""

import dataclasses

from support.layer_times import DENSE, MLA, change_experts, run


def test_temporaries_of_a_dense_layer():
    segments = run(DENSE)
    hidden, query_key_value, inner = 2 * 128 * 32, 2 * 128 * 64, 2 * 128 * 48
    rows = 4 * 128 * 4
    assert {name: one.forward_extra_bytes for name, one in segments.items()} == {
        "qkv_linear": 2 * hidden + query_key_value,  # given, normed, returned
        "core_attn": query_key_value + hidden + rows,  # given, returned (as large as hidden states), log-sum-exp
        "attn_proj": 2 * hidden,  # the product, and the sum with the residual
        "mlp_fc1": 2 * hidden + 2 * inner,
        "mlp_act": 2 * inner + inner,
        "mlp_fc2": inner + 2 * hidden,
    }
    assert {name: one.backward_extra_bytes for name, one in segments.items()} == {
        # The residual's gradient everywhere. The gradients of query, key and value as parts and as one; that is more than one
        # and the gradients of the norm's output and input.
        "qkv_linear": hidden + 2 * query_key_value,
        # A gradient of the output and of each of the three, the query's once more in fp32, and a number a row and head.
        "core_attn": hidden + hidden + query_key_value + 4 * 128 * 32 + rows,
        "attn_proj": hidden + hidden,
        "mlp_fc1": hidden + 2 * inner + 2 * hidden,
        "mlp_act": hidden + inner + 2 * inner,
        "mlp_fc2": hidden + inner,
    }


def test_temporaries_of_experts():
    segments = run(change_experts(expert_parallel_size=4, shared_ffn_hidden_size=16))
    hidden, permuted, inner, tables = 2 * 128 * 32, 2 * 256 * 32, 2 * 256 * 16, 4 * 128 * 8
    shared_inner = 2 * 128 * 16
    # What the shared experts returned waits until combine. Tokens are there as permuted, as they arrived, and sorted.
    assert {name: one.forward_extra_bytes for name, one in list(segments.items())[3:]} == {
        "mlp_norm": 2 * hidden,
        "shared_expert": 2 * hidden + 3 * shared_inner,
        "router": hidden + hidden + 3 * tables,
        "dispatch": hidden + 3 * permuted,
        "expert_fc1": hidden + 2 * permuted + permuted + 2 * inner,
        "moe_act": hidden + 2 * permuted + 3 * inner,
        "expert_fc2": hidden + 2 * permuted + inner + permuted,
        "moe_combine": hidden + 2 * permuted + 2 * permuted,
    }
    assert {name: one.backward_extra_bytes for name, one in list(segments.items())[3:]} == {
        "mlp_norm": 3 * hidden,
        "shared_expert": 2 * hidden + 2 * shared_inner + hidden,
        "router": 3 * hidden + 2 * tables,
        "dispatch": hidden + 2 * permuted,
        "expert_fc1": hidden + 2 * inner + permuted,
        "moe_act": hidden + 3 * inner,
        "expert_fc2": hidden + permuted + inner,
        "moe_combine": hidden + 2 * permuted,
    }


def test_temporaries_of_latent_attention():
    segments = run(MLA)
    hidden, compressed, query_key_value = 2 * 128 * 32, 2 * 128 * (10 + 6 + 4), 2 * 128 * 4 * (12 + 12 + 8)
    assert segments["qkv_down"].forward_extra_bytes == hidden + compressed
    assert segments["qkv_down"].backward_extra_bytes == 3 * hidden + 2 * compressed
    assert segments["qkv_linear"].forward_extra_bytes == hidden + compressed + 2 * query_key_value
    assert segments["qkv_linear"].backward_extra_bytes == hidden + 2 * query_key_value + compressed
    # A query in one go has a norm of the hidden states.
    whole = dataclasses.replace(MLA, latent=dataclasses.replace(MLA.latent, q_lora_rank=None, has_qk_norm=True))
    compressed = 2 * 128 * (6 + 4)
    found = run(whole)["qkv_linear"].forward_extra_bytes
    assert found == hidden + compressed + (compressed + hidden) + 2 * query_key_value


def test_ranks_that_share_experts_hold_what_they_gathered():
    segments = run(change_experts(expert_parallel_size=4, expert_tensor_parallel_size=2))
    permuted = 2 * 256 * 32
    # As permuted, as they arrived, gathered from two ranks, and sorted by the two experts of this one.
    assert segments["dispatch"].forward_extra_bytes == permuted + permuted + 2 * permuted + 2 * permuted
    alone = run(change_experts(expert_parallel_size=8, expert_tensor_parallel_size=1))
    assert alone["dispatch"].forward_extra_bytes == 2 * permuted
