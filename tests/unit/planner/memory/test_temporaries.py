"""Device bytes that are there while a stretch runs, added up by hand, tensor by tensor."""

import dataclasses

from support.layer_times import DENSE, MLA, MOE, change_experts, run

from fgoffload.planner.model.layer_shape import RouterShape
from fgoffload.planner.operations.ops import Execution


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


def test_gathered_tensors_and_late_gradients_of_weights_are_there_too():
    shared = dataclasses.replace(DENSE, tensor_parallel_size=2)
    hidden, inner = 64 * 32 * 2, 64 * 48 * 2
    late = run(shared, execution=Execution(has_fused_gradient_accumulation=False))["mlp_fc1"]
    # The input and its gradient, of the whole sequence, and a gradient in bf16 of this rank's half of the weights.
    assert late.backward_extra_bytes == hidden + 2 * inner + 2 * (2 * hidden) + 2 * hidden + 2 * 32 * 48
    assert late.forward_extra_bytes == 2 * hidden + 2 * hidden + 2 * inner
    experts = run(MOE, execution=Execution(has_fused_gradient_accumulation=False))
    gate_and_up = 2 * 8 * 32 * 2 * 16
    assert experts["expert_fc1"].backward_extra_bytes - run(MOE)["expert_fc1"].backward_extra_bytes == gate_and_up
    assert experts["expert_fc2"].backward_extra_bytes - run(MOE)["expert_fc2"].backward_extra_bytes == gate_and_up // 2


def test_a_router_in_fp32_copies_its_input():
    copied = run(change_experts(router=RouterShape(dtype_bytes=4)))["router"].forward_extra_bytes
    assert copied - run(MOE)["router"].forward_extra_bytes == 4 * 128 * 32


def test_an_unfused_activation_makes_its_factors_on_the_way():
    fused, unfused = run(DENSE), run(dataclasses.replace(DENSE, has_fused_activation=False))
    inner, hidden = 2 * 128 * 48, 2 * 128 * 32
    assert unfused["mlp_act"].forward_extra_bytes - fused["mlp_act"].forward_extra_bytes == 2 * inner
    # A gradient of the output and of both factors, or of both halves and what they come from; as much as with fusion.
    assert unfused["mlp_act"].backward_extra_bytes == hidden + 3 * inner
    shape = change_experts(shared_ffn_hidden_size=24)
    segments = run(dataclasses.replace(shape, has_fused_activation=False))
    assert segments["shared_expert"].forward_extra_bytes - run(shape)["shared_expert"].forward_extra_bytes == 2 * 2 * 128 * 24


def test_an_unfused_activation_of_experts_has_a_product_with_the_probabilities_in_their_type():
    inner, hidden, held = 2 * 256 * 16, 2 * 128 * 32, 2 * 256 * 32 + 2 * 128 * 32  # tokens as permuted; the shared experts'
    shape = dataclasses.replace(change_experts(shared_ffn_hidden_size=24), has_fused_activation=False)
    found = run(shape)["moe_act"]
    # Gate and up, two factors, their product, and that times the probabilities.
    assert (found.forward_extra_bytes, found.backward_extra_bytes) == (held + 6 * inner, hidden + 3 * inner)
    found = run(change_experts(shape, router=RouterShape(dtype_bytes=4)))["moe_act"]
    # The last is twice as large, and there is a copy of it in bf16; in backward three tensors are twice as large.
    assert (found.forward_extra_bytes, found.backward_extra_bytes) == (held + 8 * inner, hidden + 6 * inner)


def test_biases_of_experts_are_added_behind_their_second_linears():
    inner, hidden, held, arrived = 2 * 256 * 16, 2 * 128 * 32, 2 * 256 * 32, 2 * 256 * 32
    shape = dataclasses.replace(MOE, has_linear_bias=True)
    found = run(shape)["expert_fc2"]
    # What the linears returned, the sums of each expert, and all side by side; in backward the gradients of the last two.
    assert (found.forward_extra_bytes, found.backward_extra_bytes) == (held + inner + 3 * arrived, hidden + 2 * arrived)
    found = run(change_experts(shape, router=RouterShape(dtype_bytes=4)))["expert_fc2"]
    # Sums have the type of the probabilities.
    assert (found.forward_extra_bytes, found.backward_extra_bytes) == (held + inner + 5 * arrived, hidden + 3 * arrived)
    # Weights whose gradients wait are more here than a gradient beside its copy.
    late = Execution(has_fused_gradient_accumulation=False)
    assert run(shape, execution=late)["expert_fc2"].backward_extra_bytes == hidden + arrived + inner + 2 * 8 * 32 * 16
    assert run(dataclasses.replace(DENSE, has_linear_bias=True)) == run(DENSE)


def test_ranks_that_share_experts_hold_what_they_gathered():
    segments = run(change_experts(expert_parallel_size=4, expert_tensor_parallel_size=2))
    permuted = 2 * 256 * 32
    # As permuted, as they arrived, gathered from two ranks, and sorted by the two experts of this one.
    assert segments["dispatch"].forward_extra_bytes == permuted + permuted + 2 * permuted + 2 * permuted
    alone = run(change_experts(expert_parallel_size=8, expert_tensor_parallel_size=1))
    assert alone["dispatch"].forward_extra_bytes == 2 * permuted


def test_multi_token_prediction_has_temporaries_of_its_own():
    segments, hidden = run(dataclasses.replace(DENSE, has_mtp_projection=True)), 2 * 128 * 32
    assert segments["mtp_projection"].forward_extra_bytes == 7 * hidden
    assert segments["mtp_norm"].backward_extra_bytes == 2 * hidden
