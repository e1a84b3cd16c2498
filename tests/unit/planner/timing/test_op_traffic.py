"""Compares communication between ranks, and the ops that wait for it, with numbers worked out by hand."""

import dataclasses

import pytest
from support.layer_times import COMPUTING, DENSE, FAST, IDEAL, run

from fgoffload.planner.operations.ops import Execution
from fgoffload.planner.timing.edge_segments import EdgeShape, make_first_segments, make_last_segments
from fgoffload.planner.timing.op_times import Clock


def test_context_parallel_ranks_send_keys_and_values_round_while_they_compute():
    slow = dataclasses.replace(COMPUTING, nvlink_bytes_per_s=1e6)
    core = run(DENSE, slow, execution=Execution(context_parallel_size=4))["core_attn"]
    # Three times the keys and values of 128 tokens, 2 groups of 8 + 8 channels, in bf16.
    assert core.forward_s == pytest.approx(3 * 128 * 2 * 16 * 2 / 1e6)


def test_tensor_parallel_ranks_gather_and_scatter_beside_what_they_share():
    fast = dataclasses.replace(COMPUTING, bf16_flop_per_s=FAST, nvlink_bytes_per_s=1e9)
    segments = run(dataclasses.replace(DENSE, tensor_parallel_size=2), fast)
    # The other half of the tokens, 64 of 32 channels.
    once = 2 * 64 * 32 / 1e9
    for name in ("qkv_linear", "attn_proj", "mlp_fc1", "mlp_fc2"):
        assert segments[name].forward_s == pytest.approx(once)
    # Backward of what gathered gathers again and scatters a gradient, and of what scattered gathers.
    for name, times in (("qkv_linear", 2), ("attn_proj", 1), ("mlp_fc1", 2), ("mlp_fc2", 1)):
        assert segments[name].backward_s == pytest.approx(times * once)
    assert segments["core_attn"].forward_s == pytest.approx(0, abs=1e-12)


def test_ranks_share_the_vocabulary_and_send_hidden_states():
    shared = EdgeShape(tokens=128, hidden_size=32, vocab_size=1000, tensor_parallel_size=2)

    def make_clock(nvlink):
        return Clock(hardware=dataclasses.replace(COMPUTING, nvlink_bytes_per_s=nvlink), efficiency=IDEAL)

    # All tokens, and half of the vocabulary.
    alone = make_last_segments(shared, make_clock(FAST))[1]
    assert alone.forward_s == pytest.approx(2 * 128 * 32 * 500 / 1e12)
    sent = make_last_segments(shared, make_clock(1e6))[1]
    assert sent.forward_s - alone.forward_s == pytest.approx(2 * 64 * 32 / 1e6)
    # Gathered again, and its gradient scattered, while the matrix products run.
    assert sent.backward_s == pytest.approx(2 * 2 * 64 * 32 / 1e6)
    (embedding,) = make_first_segments(shared, make_clock(1e6))
    assert embedding.forward_s == pytest.approx(2 * 64 * 32 / 1e6)
