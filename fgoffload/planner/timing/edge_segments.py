"""What is before the layers of a model and behind them: the embedding, the output layer and the loss."""

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
    """What embedding and output layer are, as one rank runs them."""

    tokens: int
    """Of a microbatch, of the part that sequence parallelism leaves to this rank: `LayerShape.tokens`."""
    hidden_size: int
    """Channels between layers."""
    vocab_size: int
    """Rows of the embedding over all ranks, padded as Megatron pads them."""
    tensor_parallel_size: int = 1
    """Ranks that share the vocabulary."""

    def __post_init__(self) -> None:
        """Refuse sizes that no model has.

        Raises:
            ConfigError: With the field, the value and the fix.
        """
        for field in dataclasses.fields(self):
            check_count(field.name, getattr(self, field.name))
        if self.vocab_size % self.tensor_parallel_size:
            raise ConfigError(
                f"tensor_parallel_size {self.tensor_parallel_size} does not divide vocab_size {self.vocab_size}. "
                "Give the padded size."
            )


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
    hidden = BF16 * edge.tokens * edge.hidden_size
    rows = hidden * edge.tensor_parallel_size
    weights = edge.vocab_size // edge.tensor_parallel_size * edge.hidden_size
    scatter = _list_gather(edge)
    # Rows are read and written. Backward clears a gradient of all weights, adds rows to it, and adds it to the sum in fp32.
    forward = PassWork(works=(make_moves(2 * rows, kernels=3),), traffic=scatter)
    added = make_moves(weights * (2 * BF16 + 2 * FP32) + 3 * rows, kernels=5)
    work = SegmentWork(name="embedding", forward=forward, backward=PassWork(works=(added,), traffic=scatter))
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
    hidden = BF16 * edge.tokens * edge.hidden_size
    rows, share = edge.tokens * edge.tensor_parallel_size, edge.vocab_size // edge.tensor_parallel_size
    linear = Linear(rows=rows, inputs=edge.hidden_size, outputs=share)
    gather, logits = _list_gather(edge), rows * share
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
        forward=PassWork(works=(*linear.list_forward(), loss), traffic=gather),
        backward=PassWork(works=(gradient, *linear.list_backward(execution)), beside=2 * gather),
    )
    clock = Clock(hardware=hardware, efficiency=efficiency, network=network)
    # The norm's input and output; in backward a gradient of each.
    extras = {"final_norm": ExtraBytes(forward=2 * hidden, backward=2 * hidden), "output_layer": extra}
    return clock.time_segments((norm, output), extras)


def _list_gather(edge: EdgeShape) -> tuple[Traffic, ...]:
    ranks = edge.tensor_parallel_size
    if ranks == 1:
        return ()
    sent_bytes = BF16 * edge.tokens * edge.hidden_size * (ranks - 1)
    return (Traffic(pattern=Pattern.RING, sent_bytes=sent_bytes, ranks=ranks, span=ranks),)
