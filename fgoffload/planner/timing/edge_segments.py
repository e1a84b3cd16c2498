"""Segments before and after the layers: embedding, output layer and loss."""

import dataclasses

from fgoffload.planner.memory.temporaries import ExtraBytes
from fgoffload.planner.operations.ops import (
    BF16,
    FP32,
    Execution,
    Linear,
    PassWork,
    Pattern,
    SegmentWork,
    Traffic,
    make_moves,
)
from fgoffload.planner.ranks.layer_model import Segment
from fgoffload.planner.timing.efficiency import Efficiency, Network
from fgoffload.planner.timing.hardware import Hardware
from fgoffload.planner.timing.op_times import DEFAULT_EFFICIENCY, DEFAULT_EXECUTION, DEFAULT_NETWORK, Clock

_NO_BYTES = ExtraBytes()

_LOSS_BYTES = 10 * FP32
_LOSS_GRADIENT_BYTES = 3 * FP32 + BF16
"""Bytes that the loss reads and writes for each logit without `--cross-entropy-loss-fusion`: forward converts to fp32, finds
the maximum, subtracts it, and computes exponential, sum and quotient; backward scales and converts to bf16. Source:
`VocabParallelCrossEntropy` of megatron/core/tensor_parallel/cross_entropy.py, megatron-core 0.16.1."""

_LOSS_KERNELS = 15


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EdgeShape:
    """Shapes of embedding and output layer on one rank."""

    tokens: int  # tokens of a microbatch, on all ranks together that share the vocabulary
    hidden_size: int  # hidden size
    vocab_size: int  # rows of the embedding over all ranks, padded as in Megatron
    tensor_parallel_size: int = 1  # ranks that share the vocabulary
    has_sequence_parallel: bool = True  # whether those ranks share the sequence between embedding and output layer

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a rank's hidden states between embedding and output layer."""
        return self.gathered_bytes // (self.tensor_parallel_size if self.has_sequence_parallel else 1)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the hidden states of all tokens."""
        return BF16 * self.tokens * self.hidden_size


def make_first_segments(
    edge: EdgeShape,
    hardware: Hardware,
    *,
    efficiency: Efficiency = DEFAULT_EFFICIENCY,
    network: Network = DEFAULT_NETWORK,
    extra: ExtraBytes = _NO_BYTES,
) -> tuple[Segment, ...]:
    """Return the segment before the first layer: the embedding."""
    rows = edge.gathered_bytes
    weights = edge.vocab_size // edge.tensor_parallel_size * edge.hidden_size
    ring = _list_ring_pass(edge)
    # Each rank looks up the rows that it has. They are summed and scattered, and the gradient is gathered; where ranks do not
    # share the sequence they are summed, and all have the gradient.
    summed, gather = (ring, ring) if edge.has_sequence_parallel else (2 * ring, ())
    # Forward reads and writes rows. Backward clears a gradient of all weights, adds rows, and adds it to the fp32 sum.
    forward = PassWork(works=(make_moves(2 * rows, kernels=3),), traffic=summed)
    added = make_moves(weights * (2 * BF16 + 2 * FP32) + 3 * rows, kernels=5)
    work = SegmentWork(name="embedding", forward=forward, backward=PassWork(works=(added,), traffic=gather))
    clock = Clock(hardware=hardware, efficiency=efficiency, network=network)
    return clock.time_segments((work,), {"embedding": extra})


def make_last_segments(
    edge: EdgeShape,
    hardware: Hardware,
    *,
    efficiency: Efficiency = DEFAULT_EFFICIENCY,
    network: Network = DEFAULT_NETWORK,
    execution: Execution = DEFAULT_EXECUTION,
    extra: ExtraBytes = _NO_BYTES,
) -> tuple[Segment, ...]:
    """Return the segments after the last layer: final norm, output layer and loss."""
    hidden, share = edge.hidden_bytes, edge.vocab_size // edge.tensor_parallel_size
    linear = Linear(rows=edge.tokens, inputs=edge.hidden_size, outputs=share)
    ring, logits = _list_ring_pass(edge), edge.tokens * share
    norm = SegmentWork(
        name="final_norm",
        forward=PassWork(works=(make_moves(2 * hidden),)),
        backward=PassWork(works=(make_moves(3 * hidden, kernels=2),)),
    )
    loss, gradient = (
        make_moves(logits * _LOSS_BYTES, kernels=_LOSS_KERNELS),
        make_moves(logits * _LOSS_GRADIENT_BYTES, kernels=4),
    )
    output = SegmentWork(
        name="output_layer",
        forward=PassWork(works=(*linear.list_forward(), loss), traffic=ring if edge.has_sequence_parallel else ()),
        backward=PassWork(works=(gradient, *linear.list_backward(execution)), beside=2 * ring),
    )
    clock = Clock(hardware=hardware, efficiency=efficiency, network=network)
    # Input and output of the norm; backward has a gradient of each.
    extras = {"final_norm": ExtraBytes(forward=2 * hidden, backward=2 * hidden), "output_layer": extra}
    return clock.time_segments((norm, output), extras)


def _list_ring_pass(edge: EdgeShape) -> tuple[Traffic, ...]:
    """Return an all-gather or reduce-scatter of hidden states, or both for an all-reduce; None with one rank."""
    ranks = edge.tensor_parallel_size
    if ranks == 1:
        return ()
    sent_bytes = edge.gathered_bytes // ranks * (ranks - 1)
    return (Traffic(pattern=Pattern.RING, sent_bytes=sent_bytes, ranks=ranks, span=ranks),)
