"""Operations of a segment: compute, memory traffic, and bytes sent to other ranks.

`attention_ops` and `mlp_ops` derive them from a layer's shape, and `op_times` computes their times.
"""

import dataclasses
import enum

FP8, BF16, FP32, INT32, INT64 = 1, 2, 4, 4, 8
"""Bytes per element."""

_MAIN_GRADIENT_BYTES = 2 * FP32  # bytes moved per weight if the matrix product itself adds the gradient to the sum

_UNFUSED_GRADIENT_BYTES = BF16 + 2 * FP32
"""Bytes moved per weight if a separate kernel accumulates gradients: it reads the gradient, and reads and writes the sum."""

_QUANTIZED_BYTES = BF16 + 2 * FP8
"""Bytes moved per element to quantize the input of an fp8 linear: a kernel reads bf16 and writes fp8, row-wise and column-wise.
Weights are also quantized, once per step for all microbatches."""


FULL_HEAD_CHANNELS = 128
"""Minimum channels per head at which attention reaches the fraction of peak in `Efficiency`."""


class Limit(enum.Enum):
    """Kind of kernel. Each value names the `Efficiency` field with the fraction of the device's peak that it reaches."""

    MATMUL = "matmul"  # one matrix product, in bf16
    GROUPED_MATMUL = "grouped_matmul"  # one matrix product per expert, in bf16
    FP8_MATMUL = "fp8_matmul"  # one matrix product, in fp8
    GROUPED_FP8_MATMUL = "grouped_fp8_matmul"  # one matrix product per expert, in fp8
    ATTENTION_FORWARD = "attention_forward"  # fused attention
    ATTENTION_BACKWARD = "attention_backward"  # backward of fused attention, which is less efficient
    MEMORY = "memory"  # memory-bound kernel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kernel, or several of the same kind."""

    limit: Limit
    flop: float = 0.0  # total floating-point operations
    moved_bytes: float = 0.0  # total bytes read from and written to device memory
    strided_bytes: float = 0.0
    """Part of `moved_bytes` that element-wise kernels access without vectorization, such as half of a tensor's columns."""
    kernels: int = 1
    expert_rows: int | None = None  # rows of each expert's matrix product, or None for a single product
    head_channels: int = FULL_HEAD_CHANNELS  # channels of an attention head
    attention_rows: int = 0  # query rows of all heads, in backward attention
    sink_rows: int = 0  # query rows of all heads with learned sinks, in backward attention


class Pattern(enum.Enum):
    """Pattern of an exchange between ranks."""

    RING = "ring"  # each rank sends to its neighbor, so the slowest hop sets the time
    ALL_TO_ALL = "all_to_all"  # each rank sends equal amounts to all others
    NODES = "nodes"  # all-to-all that sends data for several ranks of a node across the network only once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that a rank sends to the other ranks of a group."""

    pattern: Pattern
    sent_bytes: float
    ranks: int
    span: int  # number of ranks from the group's first to its last; decides whether the group is inside an NVLink domain
    calls: int = 1  # number of collectives
    copies: int = 1  # copies of each token in `sent_bytes`: one per target expert
    limited_groups: tuple[int, int] | None = None
    """Number of expert groups to which a token may be sent, and total number of groups. None if there is no limit."""

    def count_nodes(self, nodes: int) -> float:
        """Return how many of `nodes` nodes a token reaches on average, including its own, if routing is uniform."""
        most = float(nodes)
        if self.limited_groups is not None:
            chosen, groups = self.limited_groups
            most = max(1.0, chosen * nodes / groups)
        return most * (1 - (1 - 1 / most) ** self.copies)


@dataclasses.dataclass(frozen=True, slots=True)
class PassWork:
    """Operations of a segment in forward or in backward."""

    works: tuple[Work, ...]  # kernels, in order
    traffic: tuple[Traffic, ...] = ()  # exchanges before the kernels
    beside: tuple[Traffic, ...] = ()  # exchanges that overlap with the kernels
    host_launches: int = 0  # other host work, as an equivalent number of kernel launches

    @property
    def kernels(self) -> int:
        """Number of launches, including collectives and other host work."""
        calls = sum(one.calls for one in (*self.traffic, *self.beside))
        return sum(work.kernels for work in self.works) + calls + self.host_launches


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentWork:
    """Operations of a segment in forward and backward."""

    name: str  # as in `Segment`
    forward: PassWork
    backward: PassWork  # without recompute


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Execution options of a layer, in addition to its shape. Defaults match Megatron's training script."""

    context_parallel_size: int = 1  # ranks that share a sequence; `LayerShape` has one rank's part
    window_tokens: int | None = None  # earlier tokens that a query attends to, as in `--window-size`; None for all
    has_expert_overlap: bool = False
    """Whether ranks exchange tokens of one microbatch while they compute another: `--overlap-moe-expert-parallel-comm`."""
    has_fused_dropout_add: bool = True  # whether dropout and residual add are fused; false with `--no-bias-dropout-fusion`
    has_fused_gradient_accumulation: bool = True
    """Whether matrix products accumulate weight gradients. With `--no-gradient-accumulation-fusion`, a separate kernel does."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear layer on one rank, or one linear layer for each of the rank's experts."""

    rows: int  # input rows, over all experts
    inputs: int  # channels of an input row
    outputs: int  # channels of an output row
    experts: int = 0  # number of experts, each with its own rows; 0 for a single linear layer
    quantizing_kernels: int = 0  # kernels that quantize an input to fp8, for each expert; 0 in bf16

    @property
    def weights(self) -> int:
        """Number of weights, over all experts."""
        return self.inputs * self.outputs * max(self.experts, 1)

    def list_forward(self) -> tuple[Work, ...]:
        """Return the kernels of forward: quantization of the input (only with fp8), and a matrix product of 2mnk operations."""
        moved_bytes = self._item_bytes * (self.rows * self.inputs + self.weights) + BF16 * self.rows * self.outputs
        return (*self._list_quantizing(self.inputs), self._make_product(moved_bytes))

    def list_backward(self, execution: Execution) -> tuple[Work, ...]:
        """Return the kernels of backward, with matrix products of 2mnk operations for the gradients of input and weights."""
        is_fused = execution.has_fused_gradient_accumulation
        gradient_bytes = self.weights * (_MAIN_GRADIENT_BYTES if is_fused else BF16)
        works = (
            *self._list_quantizing(self.outputs),
            self._make_product(self._item_bytes * (self.rows * self.outputs + self.weights) + BF16 * self.rows * self.inputs),
            self._make_product(self._item_bytes * self.rows * (self.inputs + self.outputs) + gradient_bytes),
        )
        if is_fused:
            return works
        return (*works, make_moves(self.weights * _UNFUSED_GRADIENT_BYTES, kernels=max(self.experts, 1)))

    def count_gradient_bytes(self, execution: Execution) -> int:
        """Return the bytes of a weight gradient before accumulation, or 0 if the matrix product accumulates it."""
        return 0 if execution.has_fused_gradient_accumulation else BF16 * self.weights

    @property
    def _item_bytes(self) -> int:
        return FP8 if self.quantizing_kernels else BF16

    def _list_quantizing(self, channels: int) -> tuple[Work, ...]:
        if not self.quantizing_kernels:
            return ()
        kernels = self.quantizing_kernels * max(self.experts, 1)
        return (make_moves(_QUANTIZED_BYTES * self.rows * channels, kernels=kernels),)

    def _make_product(self, moved_bytes: int) -> Work:
        one, many = Limit.MATMUL, Limit.GROUPED_MATMUL
        if self.quantizing_kernels:
            one, many = Limit.FP8_MATMUL, Limit.GROUPED_FP8_MATMUL
        return Work(
            limit=many if self.experts else one,
            flop=2 * self.rows * self.inputs * self.outputs,
            moved_bytes=moved_bytes,
            kernels=max(self.experts, 1),
            expert_rows=max(1, self.rows // self.experts) if self.experts else None,
        )


def make_moves(moved_bytes: float, *, strided_bytes: float = 0.0, kernels: int = 1) -> Work:
    """Return memory-bound kernels that move `moved_bytes` in total."""
    return Work(limit=Limit.MEMORY, moved_bytes=moved_bytes, strided_bytes=strided_bytes, kernels=kernels)


def list_ring_pass(gathered_bytes: int, ranks: int) -> tuple[Traffic, ...]:
    """Return the traffic of one all-gather or reduce-scatter, or none with one rank. An all-reduce costs one of each."""
    if ranks == 1:
        return ()
    # In a ring, each part of the tensor is sent ranks - 1 times.
    sent_bytes = gathered_bytes // ranks * (ranks - 1)
    return (Traffic(pattern=Pattern.RING, sent_bytes=sent_bytes, ranks=ranks, span=ranks),)
