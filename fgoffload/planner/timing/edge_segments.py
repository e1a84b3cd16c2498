"""Builds the segments before and after the layers: embedding, final norm, output layer and loss."""

import dataclasses

from fgoffload.planner.memory.temporaries import ExtraBytes
from fgoffload.planner.operations.ops import BF16, FP32, Execution, Linear, PassWork, SegmentWork, list_ring_pass, make_moves
from fgoffload.planner.ranks.layer_model import Segment
from fgoffload.planner.timing.op_times import DEFAULT_EXECUTION, Clock

_NO_BYTES = ExtraBytes()

_LOSS_BYTES = 10 * FP32
_LOSS_GRADIENT_BYTES = 3 * FP32 + BF16
"""Bytes that the loss reads and writes for each logit without `--cross-entropy-loss-fusion`: forward converts to fp32, finds
the maximum, subtracts it, and computes exponential, sum and quotient; backward scales and converts to bf16. Source:
`VocabParallelCrossEntropy` in megatron/core/tensor_parallel/cross_entropy.py, megatron-core 0.16.1."""

_LOSS_KERNELS = 15


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EdgeShape:
    """Shapes of the embedding and the output layer on one rank."""

    tokens: int  # tokens of a microbatch over all ranks that shard the vocabulary
    hidden_size: int  # channels of the hidden states
    vocab_size: int  # rows of the embedding over all ranks, padded as in Megatron
    tensor_parallel_size: int = 1  # ranks that shard the vocabulary
    has_sequence_parallel: bool = True  # whether these ranks also shard the sequence, as with `--sequence-parallel`

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a rank's hidden states between the embedding and the output layer."""
        return self.gathered_bytes // (self.tensor_parallel_size if self.has_sequence_parallel else 1)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the hidden states of all tokens."""
        return BF16 * self.tokens * self.hidden_size


def make_first_segments(edge: EdgeShape, clock: Clock) -> tuple[Segment, ...]:
    """Return the segment before the first layer: the embedding."""
    rows = edge.gathered_bytes
    weights = edge.vocab_size // edge.tensor_parallel_size * edge.hidden_size
    ring = list_ring_pass(edge.gathered_bytes, edge.tensor_parallel_size)
    # Each rank looks up its own rows. With sequence parallelism, ranks reduce-scatter the rows and gather the gradient.
    # Otherwise, they all-reduce the rows, and every rank has the whole gradient.
    summed, gather = (ring, ring) if edge.has_sequence_parallel else (2 * ring, ())
    # Forward copies rows. Backward zeroes a gradient for all weights, adds the rows' gradients, and adds it to the fp32 sum.
    forward = PassWork((make_moves(2 * rows, kernels=3),), traffic=summed)
    added = make_moves(weights * (2 * BF16 + 2 * FP32) + 3 * rows, kernels=5)
    work = SegmentWork("embedding", forward, PassWork((added,), traffic=gather))
    return clock.time_segments((work,), {"embedding": _NO_BYTES})


def make_last_segments(
    edge: EdgeShape, clock: Clock, *, execution: Execution = DEFAULT_EXECUTION, extra: ExtraBytes = _NO_BYTES
) -> tuple[Segment, ...]:
    """Return the segments after the last layer: the final norm, and the output layer with the loss (temporaries: `extra`)."""
    hidden, share = edge.hidden_bytes, edge.vocab_size // edge.tensor_parallel_size
    linear = Linear(rows=edge.tokens, inputs=edge.hidden_size, outputs=share)
    ring, logits = list_ring_pass(edge.gathered_bytes, edge.tensor_parallel_size), edge.tokens * share
    norm = SegmentWork("final_norm", PassWork((make_moves(2 * hidden),)), PassWork((make_moves(3 * hidden, kernels=2),)))
    loss = make_moves(logits * _LOSS_BYTES, kernels=_LOSS_KERNELS)
    gradient = make_moves(logits * _LOSS_GRADIENT_BYTES, kernels=4)
    output = SegmentWork(
        "output_layer",
        PassWork((*linear.list_forward(), loss), traffic=ring if edge.has_sequence_parallel else ()),
        PassWork((gradient, *linear.list_backward(execution)), beside=2 * ring),
    )
    # Input and output of the norm in forward, and their gradients in backward.
    extras = {"final_norm": ExtraBytes(forward=2 * hidden, backward=2 * hidden), "output_layer": extra}
    return clock.time_segments((norm, output), extras)
