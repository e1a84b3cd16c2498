"""Embedding, output layer and loss: what they take, worked out by hand."""

import dataclasses

import pytest
from support.layer_times import COMPUTING, FAST, IDEAL, MOVING

from fgoffload import ConfigError
from fgoffload.planner.memory.temporaries import ExtraBytes
from fgoffload.planner.operations.ops import Execution
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


def test_gradients_of_the_output_layer_may_be_added_by_a_kernel_of_their_own():
    fused = make_last_segments(EDGE, MOVING, efficiency=IDEAL)[1]
    late = make_last_segments(EDGE, MOVING, efficiency=IDEAL, execution=Execution(has_fused_gradient_accumulation=False))[1]
    assert late.backward_s - fused.backward_s == pytest.approx((2 + 10 - 8) * 32 * 1000 / 1e9)


def test_the_embedding_reads_rows_and_adds_a_gradient_of_all_weights():
    (embedding,) = make_first_segments(EDGE, MOVING, efficiency=IDEAL)
    hidden = 2 * 128 * 32
    assert embedding.name == "embedding"
    assert embedding.forward_s == pytest.approx(2 * hidden / 1e9)
    # Cleared and read in bf16, the sum read and written in fp32.
    assert embedding.backward_s == pytest.approx((12 * 32 * 1000 + 3 * hidden) / 1e9)


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


def test_ranks_that_do_not_share_the_sequence_sum_hidden_states_in_one_pass_and_their_gradients_in_the_other():
    shared = EdgeShape(tokens=128, hidden_size=32, vocab_size=1000, tensor_parallel_size=2)
    whole = dataclasses.replace(shared, has_sequence_parallel=False)
    slow = Network(nvlink_bytes_per_s=1e6)
    norm, output = make_last_segments(whole, COMPUTING, efficiency=IDEAL, network=slow)
    # An all-reduce is a reduce-scatter and an all-gather.
    assert output.forward_s == pytest.approx(2 * 128 * 32 * 500 / 1e12)
    assert output.backward_s == pytest.approx(2 * 2 * 64 * 32 / 1e6)
    (embedding,) = make_first_segments(whole, COMPUTING, efficiency=IDEAL, network=slow)
    assert embedding.forward_s == pytest.approx(2 * 2 * 64 * 32 / 1e6)
    assert embedding.backward_s < 1e-3 * embedding.forward_s
    # Each has the norm of all tokens.
    assert norm.forward_extra_bytes == 2 * 2 * 128 * 32
    assert make_last_segments(shared, COMPUTING, efficiency=IDEAL, network=slow)[0].forward_extra_bytes == 2 * 2 * 64 * 32


def test_temporaries_are_those_that_were_given():
    extra = ExtraBytes(forward=7, backward=9)
    norm, output = make_last_segments(EDGE, COMPUTING, extra=extra)
    assert (output.forward_extra_bytes, output.backward_extra_bytes) == (7, 9)
    # Input and output, and their gradients.
    assert (norm.forward_extra_bytes, norm.backward_extra_bytes) == (2 * 2 * 128 * 32, 2 * 2 * 128 * 32)
    (embedding,) = make_first_segments(EDGE, COMPUTING, extra=extra)
    assert (embedding.forward_extra_bytes, embedding.backward_extra_bytes) == (7, 9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 0}, r"vocab_size 0 is below 1"),
        ({"tokens": 1.5}, r"tokens 1.5 is no whole number"),
        ({"tensor_parallel_size": 3}, r"tensor_parallel_size 3 does not divide vocab_size 1000. Give the padded size."),
    ],
)
def test_sizes_that_no_model_has_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        EdgeShape(**{"tokens": 1, "hidden_size": 1, "vocab_size": 1000, **fields})
