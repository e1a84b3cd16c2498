"""What ranks send to each other, and what waits for it: bytes and rates worked out by hand."""

import dataclasses

import pytest
from support.layer_times import COMPUTING, DENSE, FAST, IDEAL, MLA, MOE, change_experts, run

from fgoffload.planner.operations.ops import Execution
from fgoffload.planner.timing.efficiency import Network


def test_context_parallel_ranks_send_keys_and_values_round_while_they_compute():
    slow = Network(nvlink_bytes_per_s=1e6)
    core = run(DENSE, network=slow, execution=Execution(context_parallel_size=4))["core_attn"]
    # Three times the keys and values of 128 tokens, 2 groups of 8 + 8 channels, in bf16.
    assert core.forward_s == pytest.approx(3 * 128 * 2 * 16 * 2 / 1e6)


def test_tensor_parallel_ranks_gather_and_scatter_beside_what_they_share():
    slow = Network(nvlink_bytes_per_s=1e9)
    fast = dataclasses.replace(COMPUTING, bf16_flop_per_s=FAST)
    segments = run(dataclasses.replace(DENSE, tensor_parallel_size=2), fast, network=slow)
    # The other half of the tokens, 64 of 32 channels.
    once = 2 * 64 * 32 / 1e9
    for name in ("qkv_linear", "attn_proj", "mlp_fc1", "mlp_fc2"):
        assert segments[name].forward_s == pytest.approx(once)
    # Backward of what gathered gathers again and scatters a gradient, and of what scattered gathers.
    for name, times in (("qkv_linear", 2), ("attn_proj", 1), ("mlp_fc1", 2), ("mlp_fc2", 1)):
        assert segments[name].backward_s == pytest.approx(times * once)
    assert segments["core_attn"].forward_s == pytest.approx(0, abs=1e-12)


def test_ranks_that_share_no_sequence_sum_what_they_return_forward_and_gradients_of_what_they_are_given_backward():
    slow = Network(nvlink_bytes_per_s=1e9)
    fast = dataclasses.replace(COMPUTING, bf16_flop_per_s=FAST)
    segments = run(dataclasses.replace(DENSE, tensor_parallel_size=2, has_sequence_parallel=False), fast, network=slow)
    # An all-reduce sends what a reduce-scatter and an all-gather send.
    twice = 2 * 2 * 64 * 32 / 1e9
    for name, forward_s, backward_s in (
        ("qkv_linear", 0, twice),
        ("core_attn", 0, 0),
        ("attn_proj", twice, 0),
        ("mlp_fc1", 0, twice),
        ("mlp_fc2", twice, 0),
    ):
        assert segments[name].forward_s == pytest.approx(forward_s, abs=1e-12)
        assert segments[name].backward_s == pytest.approx(backward_s, abs=1e-12)


def test_tensor_parallel_backward_hides_what_is_shorter_than_its_matrix_products():
    shape = dataclasses.replace(DENSE, tensor_parallel_size=2)
    alone, beside = run(shape, network=Network(nvlink_bytes_per_s=FAST)), run(shape, network=Network(nvlink_bytes_per_s=1e12))
    assert beside["mlp_fc1"].backward_s == alone["mlp_fc1"].backward_s
    assert beside["mlp_fc1"].forward_s > alone["mlp_fc1"].forward_s


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [
        (4, 3 / 4 * 16384 / 1e9),  # all within the node: three quarters leave the rank
        (8, 7 / 8 * 16384 / 1e9),
        (16, 8 / 16 * 16384 / 1e6),  # 8 of 16 ranks are in the other node, behind the slower network
    ],
)
def test_tokens_are_exchanged_within_the_node_and_beyond_it(ranks, seconds):
    network = Network(nvlink_bytes_per_s=1e9, network_bytes_per_s=1e6)
    fast = dataclasses.replace(COMPUTING, bf16_flop_per_s=FAST)
    segments = run(change_experts(num_experts=16, expert_parallel_size=ranks), fast, network=network)
    for name in ("dispatch", "moe_combine"):
        assert (segments[name].forward_s, segments[name].backward_s) == pytest.approx((seconds, seconds))


def test_nvlink_may_reach_beyond_the_node():
    network = Network(nvlink_bytes_per_s=1e9, network_bytes_per_s=1e6, nvlink_ranks=72)
    segments = run(change_experts(num_experts=16, expert_parallel_size=16), network=network)
    assert segments["dispatch"].forward_s == pytest.approx(15 / 16 * 16384 / 1e9)


def test_ranks_send_at_the_rates_of_their_device():
    hardware = dataclasses.replace(
        COMPUTING, nvlink_bytes_per_s=2e9, nvlink_peer_bytes_per_s=1e9, nvlink_gpus=4, network_bytes_per_s=1e6
    )
    peaks = dataclasses.replace(IDEAL, nvlink=0.5, network=0.25)
    for ranks, seconds in (
        (2, 1 / 2 * 16384 / 0.5e9),  # one link between the two
        (4, 3 / 4 * 16384 / 1e9),
        (8, 4 / 8 * 16384 / 0.25e6),  # half of the others are beyond the four that are wired
    ):
        segments = run(change_experts(num_experts=8, expert_parallel_size=ranks), hardware, efficiency=peaks)
        assert segments["dispatch"].forward_s == pytest.approx(seconds, rel=1e-6), ranks


def test_ranks_that_share_experts_gather_tokens():
    fast = dataclasses.replace(COMPUTING, bf16_flop_per_s=FAST)
    segments = run(change_experts(expert_tensor_parallel_size=2), fast, network=Network(nvlink_bytes_per_s=1e9))
    assert segments["dispatch"].forward_s == pytest.approx(16384 / 1e9)


def test_overlapped_shared_experts_hide_behind_the_exchange_of_tokens():
    parts = {"shared_ffn_hidden_size": 64, "expert_parallel_size": 8, "has_fused_permutation": True}
    network = Network(nvlink_bytes_per_s=1e12)
    # 7/8 of 16384 bytes, to the experts and back.
    hidden_s = 2 * 7 / 8 * 16384 / 1e12
    plain = run(change_experts(**parts), network=network)["shared_expert"]
    beside = run(change_experts(**parts, has_shared_overlap=True), network=network)["shared_expert"]
    assert beside.forward_s == pytest.approx(plain.forward_s - hidden_s)
    assert beside.backward_s == pytest.approx(plain.backward_s - hidden_s)
    slow = run(change_experts(**parts, has_shared_overlap=True), network=Network(nvlink_bytes_per_s=1e3))["shared_expert"]
    assert (slow.forward_s, slow.backward_s) == (0, 0)


def test_tensor_parallel_ranks_gather_compressed_tensors():
    slow, fast = Network(nvlink_bytes_per_s=1e9), dataclasses.replace(COMPUTING, bf16_flop_per_s=FAST)
    segments = run(dataclasses.replace(MLA, tensor_parallel_size=2), fast, network=slow)
    # 64 tokens of 10 + 6 + 4 channels, and in backward again, and their gradient.
    once = 2 * 64 * 20 / 1e9
    assert (segments["qkv_linear"].forward_s, segments["qkv_linear"].backward_s) == pytest.approx((once, 2 * once))
    # Each rank compresses its own tokens.
    assert segments["qkv_down"].forward_s == pytest.approx(0, abs=1e-12)


def test_shared_experts_and_multi_token_prediction_gather_and_scatter_too():
    slow, fast = Network(nvlink_bytes_per_s=1e9), dataclasses.replace(COMPUTING, bf16_flop_per_s=FAST)
    once = 2 * 64 * 32 / 1e9
    shared = run(dataclasses.replace(change_experts(shared_ffn_hidden_size=16), tensor_parallel_size=2), fast, network=slow)
    assert (shared["shared_expert"].forward_s, shared["shared_expert"].backward_s) == pytest.approx((2 * once, 3 * once))
    predicting = run(dataclasses.replace(DENSE, has_mtp_projection=True, tensor_parallel_size=2), fast, network=slow)
    # What is projected has twice the channels.
    assert predicting["mtp_projection"].forward_s == pytest.approx(3 * once)


def test_one_rank_sends_nothing():
    never = Network(nvlink_bytes_per_s=1e-30, network_bytes_per_s=1e-30)
    for shape in (DENSE, MOE, MLA):
        assert all(one.forward_s + one.backward_s < 1 for one in run(shape, network=never).values())


def test_a_ring_that_leaves_the_node_has_the_rate_of_its_slowest_hop():
    network = Network(nvlink_bytes_per_s=1e9, network_bytes_per_s=1e6)
    hardware = dataclasses.replace(COMPUTING, gpus_per_node=2)
    core = run(DENSE, hardware, network=network, execution=Execution(context_parallel_size=4))["core_attn"]
    assert core.forward_s == pytest.approx(3 * 128 * 2 * 16 * 2 / 1e6)
