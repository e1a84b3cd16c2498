"""Embedding, output layer and loss: what they take, worked out by hand."""

import pytest
from support.layer_times import COMPUTING, FAST, IDEAL, MOVING

from fgoffload.planner.timing.edge_segments import EdgeShape, make_first_segments, make_last_segments
from fgoffload.planner.timing.efficiency import Network

# 128 tokens of 32 channels, a vocabulary of 1000.
EDGE = EdgeShape(tokens=128, hidden_size=32, vocab_size=1000)


def test_the_output_layer_is_one_matrix_product_and_two_in_backward():
    norm, output = make_last_segments(EDGE, COMPUTING, efficiency=IDEAL)
    assert (norm.name, output.name) == ("final_norm", "output_layer")
    assert output.forward_s == pytest.approx(2 * 128 * 32 * 1000 / 1e12)
    assert output.backward_s == pytest.approx(2 * output.forward_s)


def test_the_loss_reads_and_writes_logits_in_fp32():
    norm, output = make_last_segments(EDGE, MOVING, efficiency=IDEAL)
    rows, weights, logits = 128 * 32, 1000 * 32, 128 * 1000
    # The product in bf16. Then fp32 is made of it (2 read, 4 written), the most is found (4), taken off (8), exponentials (8),
    # their sum (4) and the quotient (8): 38, and what reads single logits counts as 2.
    assert output.forward_s == pytest.approx((2 * (rows + weights + logits) + 40 * logits) / 1e9)
    # Scaled (8), and made bf16 (4 read, 2 written).
    products = 2 * (rows + weights + logits) + 2 * (rows + logits) + 8 * weights
    assert output.backward_s == pytest.approx((products + 14 * logits) / 1e9)
    assert (norm.forward_s, norm.backward_s) == pytest.approx((2 * 2 * rows / 1e9, 3 * 2 * rows / 1e9))


def test_ranks_share_the_vocabulary_and_send_hidden_states():
    shared = EdgeShape(tokens=128, hidden_size=32, vocab_size=1000, tensor_parallel_size=2)
    # All tokens, and half of the vocabulary.
    alone = make_last_segments(shared, COMPUTING, efficiency=IDEAL, network=Network(nvlink_bytes_per_s=FAST))[1]
    assert alone.forward_s == pytest.approx(2 * 128 * 32 * 500 / 1e12)
    sent = make_last_segments(shared, COMPUTING, efficiency=IDEAL, network=Network(nvlink_bytes_per_s=1e6))[1]
    assert sent.forward_s - alone.forward_s == pytest.approx(2 * 64 * 32 / 1e6)
    # Gathered again, and its gradient scattered, while the matrix products run.
    assert sent.backward_s == pytest.approx(2 * 2 * 64 * 32 / 1e6)
    (embedding,) = make_first_segments(shared, COMPUTING, efficiency=IDEAL, network=Network(nvlink_bytes_per_s=1e6))
    assert embedding.forward_s == pytest.approx(2 * 64 * 32 / 1e6)
