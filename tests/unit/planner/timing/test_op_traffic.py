"""Compares the times of ops that communicate between ranks with numbers worked out by hand."""

import dataclasses

import pytest
from support.layer_times import COMPUTING, DENSE, FAST, IDEAL, run

from fgoffload.planner.operations.ops import Execution
from fgoffload.planner.timing.edge_segments import EdgeShape, make_first_segments, make_last_segments
from fgoffload.planner.timing.op_times import Clock


def test_context_parallel_attention_overlaps_the_ring_exchange_of_keys_and_values():
    slow = dataclasses.replace(COMPUTING, nvlink_bytes_per_s=1e6)
    core = run(DENSE, slow, execution=Execution(context_parallel_size=4))["core_attn"]
    # Three exchanges of the keys and values of 128 tokens, 2 groups of 8 + 8 channels, in bf16.
    assert core.forward_s == pytest.approx(3 * 128 * 2 * 16 * 2 / 1e6)


def test_tensor_parallel_linears_gather_and_scatter_hidden_states():
    fast = dataclasses.replace(COMPUTING, bf16_flop_per_s=FAST, nvlink_bytes_per_s=1e9)
    segments = run(dataclasses.replace(DENSE, tensor_parallel_size=2), fast)
    # The other rank's 64 tokens of 32 channels.
    once = 2 * 64 * 32 / 1e9
    for name in ("qkv_linear", "attn_proj", "mlp_fc1", "mlp_fc2"):
        assert segments[name].forward_s == pytest.approx(once)
    # Backward of a gathering linear gathers its input and scatters a gradient; backward of a scattering linear gathers.
    for name, times in (("qkv_linear", 2), ("attn_proj", 1), ("mlp_fc1", 2), ("mlp_fc2", 1)):
        assert segments[name].backward_s == pytest.approx(times * once)
    assert segments["core_attn"].forward_s == pytest.approx(0, abs=1e-12)


def test_tensor_parallel_output_splits_the_vocabulary_and_gathers_hidden_states():
    shared = EdgeShape(tokens=128, hidden_size=32, vocab_size=1000, tensor_parallel_size=2)

    def make_clock(nvlink):
        return Clock(hardware=dataclasses.replace(COMPUTING, nvlink_bytes_per_s=nvlink), efficiency=IDEAL)

    # All tokens and half of the vocabulary.
    alone = make_last_segments(shared, make_clock(FAST))[1]
    assert alone.forward_s == pytest.approx(2 * 128 * 32 * 500 / 1e12)
    sent = make_last_segments(shared, make_clock(1e6))[1]
    assert sent.forward_s - alone.forward_s == pytest.approx(2 * 64 * 32 / 1e6)
    # Backward gathers again and scatters the gradient, overlapping the matrix products.
    assert sent.backward_s == pytest.approx(2 * 2 * 64 * 32 / 1e6)
    (embedding,) = make_first_segments(shared, make_clock(1e6))
    assert embedding.forward_s == pytest.approx(2 * 64 * 32 / 1e6)
