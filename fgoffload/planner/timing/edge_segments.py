"""Segments before and after the layers: embedding, output layer and loss."""

import dataclasses

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import check_count
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
"""Of each logit that the loss reads and writes, without `--cross-entropy-loss-fusion`: forward makes fp32 of it, finds the
largest, takes that off, and the exponential, the sum and the quotient; backward scales, and makes bf16 of it. Source:
`VocabParallelCrossEntropy` of megatron/core/tensor_parallel/cross_entropy.py, megatron-core 0.16.1."""

_LOSS_KERNELS = 15


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EdgeShape:
    """Shapes of embedding and output layer on one rank."""

    tokens: int
    """Of a microbatch, on all ranks that share the vocabulary together."""
    hidden_size: int
    """Channels between layers."""
    vocab_size: int
    """Rows of the embedding over all ranks, padded as Megatron pads them."""
    tensor_parallel_size: int = 1
    """Ranks that share the vocabulary."""
    has_sequence_parallel: bool = True
    """They share the sequence behind the embedding and before the output layer."""

    def __post_init__(self) -> None:
        """Refuse sizes that no model has.

        Raises:
            ConfigError: With the field, the value and the fix.
        """
        for name in ("tokens", "hidden_size", "vocab_size", "tensor_parallel_size"):
            check_count(name, getattr(self, name))
        if self.vocab_size % self.tensor_parallel_size:
            raise ConfigError(
                f"tensor_parallel_size {self.tensor_parallel_size} does not divide vocab_size {self.vocab_size}. "
                "Give the padded size."
            )

    @property
    def hidden_bytes(self) -> int:
        """Of a tensor of hidden states, as a rank has it between embedding and output layer."""
        return self.gathered_bytes // (self.tensor_parallel_size if self.has_sequence_parallel else 1)

    @property
    def gathered_bytes(self) -> int:
        """Of the same, of all tokens."""
        return BF16 * self.tokens * self.hidden_size


def make_first_segments(
    edge: EdgeShape,
    hardware: Hardware,
    *,
    efficiency: Efficiency = DEFAULT_EFFICIENCY,
    network: Network = DEFAULT_NETWORK,
    extra: ExtraBytes = _NO_BYTES,
) -> tuple[Segment, ...]:
    """Return what runs before the first layer: the embedding.

    Args:
        edge: Its sizes.
        hardware: What it runs on.
        efficiency: What kernels reach of the device's peaks.
        network: Between ranks.
        extra: Its temporaries.

    Raises:
        ConfigError: Of the device something is not known that the times need.
    """
    rows = edge.gathered_bytes
    weights = edge.vocab_size // edge.tensor_parallel_size * edge.hidden_size
    ring = _list_ring_pass(edge)
    # Each rank looks up the rows that it has. They are summed and scattered, and the gradient is gathered; where ranks do not
    # share the sequence they are summed, and all have the gradient.
    summed, gather = (ring, ring) if edge.has_sequence_parallel else (2 * ring, ())
    # Rows are read and written. Backward clears a gradient of all weights, adds rows to it, and adds it to the sum in fp32.
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
    """Return what runs behind the last layer: the final norm, the output layer and the loss.

    Args:
        edge: Their sizes.
        hardware: What they run on.
        efficiency: What kernels reach of the device's peaks.
        network: Between ranks.
        execution: How gradients of weights are added.
        extra: Temporaries of output layer and loss: logits, and what the loss makes of them.

    Raises:
        ConfigError: Of the device something is not known that the times need.
    """
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
    # The norm's input and output; in backward a gradient of each.
    extras = {"final_norm": ExtraBytes(forward=2 * hidden, backward=2 * hidden), "output_layer": extra}
    return clock.time_segments((norm, output), extras)


def _list_ring_pass(edge: EdgeShape) -> tuple[Traffic, ...]:
    """Return an all-gather or a reduce-scatter of hidden states; an all-reduce is both. None with one rank."""
    ranks = edge.tensor_parallel_size
    if ranks == 1:
        return ()
    sent_bytes = edge.gathered_bytes // ranks * (ranks - 1)
    return (Traffic(pattern=Pattern.RING, sent_bytes=sent_bytes, ranks=ranks, span=ranks),)
