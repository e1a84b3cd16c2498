"""Operations of a segment: floating-point operations, memory traffic, and bytes to other ranks.

`attention_ops` and `mlp_ops` list it from the shape of a layer, and `op_times` says how long it takes.
"""

import dataclasses
import enum

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import check_count

FP8 = 1
BF16 = 2
FP32 = 4
"""Bytes of an element."""

_MAIN_GRADIENT_BYTES = 2 * FP32
"""Of each weight, where its gradient is added in the matrix product: the sum in fp32 is read and written."""

_LATE_GRADIENT_BYTES = BF16 + 2 * FP32
"""Of each weight, where a kernel of its own adds its gradient: that is read, and the sum is read and written."""

_QUANTIZED_BYTES = BF16 + 2 * FP8
"""Of each element that a linear in fp8 is given: it is read in bf16, and written in fp8 by rows and by columns. Weights are so
once a step, for all microbatches."""


FULL_HEAD_CHANNELS = 128
"""Channels of a head with which attention reaches what `Efficiency` has."""


class Limit(enum.Enum):
    """Kind of kernel: the field of `Efficiency` with its share of the device's peak."""

    MATMUL = "matmul"  # one matrix product, in bf16
    GROUPED_MATMUL = "grouped_matmul"  # one for each expert
    FP8_MATMUL = "fp8_matmul"  # one, in fp8
    GROUPED_FP8_MATMUL = "grouped_fp8_matmul"  # one for each expert, in fp8
    ATTENTION_FORWARD = "attention_forward"  # fused attention
    ATTENTION_BACKWARD = "attention_backward"  # its backward, which reaches less
    MEMORY = "memory"  # hardly computes: as fast as memory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kernel, or several alike."""

    limit: Limit
    """Its kind."""
    flop: float = 0.0
    """Floating-point operations, of all its kernels together."""
    moved_bytes: float = 0.0
    """Read from and written to device memory, of all its kernels together."""
    strided_bytes: float = 0.0
    """Of these, what element-wise kernels move that cannot read or write whole vectors, as on half of a tensor's columns."""
    kernels: int = 1
    """How many are launched."""
    expert_rows: int | None = None
    """Of each of several matrix products, where each expert has its own rows."""
    head_channels: int = FULL_HEAD_CHANNELS
    """Of a head of attention."""


class Pattern(enum.Enum):
    """Ranks that exchange."""

    RING = "ring"  # each to its neighbour: the slowest hop counts
    ALL_TO_ALL = "all_to_all"  # each to all others, as much to each
    NODES = "nodes"  # the same, but what goes to several ranks of a node crosses the network once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that a rank sends to others of its group."""

    pattern: Pattern
    """Ranks that exchange."""
    sent_bytes: float
    """By this rank, to all others together."""
    ranks: int
    """Of the group. An all-to-all is among neighbours of the node, as long as it has so many."""
    span: int
    """Ranks from the first of the group to its last: the group is in one node where the node has so many."""
    calls: int = 1
    """Collectives."""
    copies: int = 1
    """Of each token in `sent_bytes`: the experts that it goes to."""
    limited_groups: tuple[int, int] | None = None
    """Of how many groups of experts they come, and how many there are. None without limit."""

    def count_nodes(self, nodes: int) -> float:
        """Return to how many of `nodes` nodes a token goes on average, its own among them, where experts are drawn alike."""
        most = float(nodes)
        if self.limited_groups is not None:
            chosen, groups = self.limited_groups
            most = max(1.0, chosen * nodes / groups)
        return most * (1 - (1 - 1 / most) ** self.copies)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """Operations of a segment in one direction."""

    works: tuple[Work, ...]
    """Kernels, one after the other."""
    traffic: tuple[Traffic, ...] = ()
    """Exchanges before the kernels."""
    beside: tuple[Traffic, ...] = ()
    """Exchanges beside the kernels."""
    host_launches: int = 0
    """Launches that the host could make in the time of what else it does."""

    @property
    def kernels(self) -> int:
        """Number of launches."""
        calls = sum(one.calls for one in (*self.traffic, *self.beside))
        return sum(work.kernels for work in self.works) + calls + self.host_launches


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SegmentWork:
    """Operations of a segment in forward and backward."""

    name: str
    """As in `Segment`."""
    forward: PassWork
    """Through the layer."""
    backward: PassWork
    """Back, with nothing run again."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a layer is run, beside its shape. The defaults are those of Megatron's training script."""

    context_parallel_size: int = 1
    """Ranks that share a sequence, of which the shape has one rank's part."""
    window_tokens: int | None = None
    """Tokens that a query looks back at, with `--window-size`; None for all."""
    has_expert_overlap: bool = False
    """With `--overlap-moe-expert-parallel-comm`: tokens of one microbatch are on their way while another computes."""
    has_fused_dropout_add: bool = True
    """One kernel adds the residual; two with `--no-bias-dropout-fusion`."""
    has_fused_gradient_accumulation: bool = True
    """Matrix products add gradients of weights to their sum. With `--no-gradient-accumulation-fusion` another kernel does."""

    def __post_init__(self) -> None:
        """Refuse sizes below 1.

        Raises:
            ConfigError: With the field, the value and the fix.
        """
        check_count("context_parallel_size", self.context_parallel_size)
        if self.window_tokens is not None:
            check_count("window_tokens", self.window_tokens)
        for field in ("has_expert_overlap", "has_fused_dropout_add", "has_fused_gradient_accumulation"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(f"{field} {getattr(self, field)!r} is neither true nor false. Give True or False.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear layer, or one for each of several experts, as a rank has it."""

    rows: int
    """That it is applied to, of all experts together."""
    inputs: int
    """Channels of a row."""
    outputs: int
    """Channels of a row behind it."""
    experts: int = 0
    """How many there are, of which each has its own rows; 0 for a linear layer that has all rows."""
    quantizing_kernels: int = 0
    """Kernels that make fp8 of an input, of each expert where there are several; 0 where it works in bf16."""

    @property
    def weights(self) -> int:
        """Elements of the weights, of all experts together."""
        return self.inputs * self.outputs * max(self.experts, 1)

    def list_forward(self) -> tuple[Work, ...]:
        """Return the matrix product of forward, 2mnk operations, and what it takes to have its input in fp8."""
        moved_bytes = self._item_bytes * (self.rows * self.inputs + self.weights) + BF16 * self.rows * self.outputs
        return (*self._list_quantizing(self.inputs), self._make_product(moved_bytes))

    def list_backward(self, execution: Execution) -> tuple[Work, ...]:
        """Return the two of backward, for the gradients of input and weights, each of as many operations."""
        is_fused = execution.has_fused_gradient_accumulation
        gradient_bytes = self.weights * (_MAIN_GRADIENT_BYTES if is_fused else BF16)
        works = (
            *self._list_quantizing(self.outputs),
            self._make_product(self._item_bytes * (self.rows * self.outputs + self.weights) + BF16 * self.rows * self.inputs),
            self._make_product(self._item_bytes * self.rows * (self.inputs + self.outputs) + gradient_bytes),
        )
        if is_fused:
            return works
        return (*works, make_moves(self.weights * _LATE_GRADIENT_BYTES, kernels=max(self.experts, 1)))

    def count_gradient_bytes(self, execution: Execution) -> int:
        """Return the bytes of a gradient of the weights that waits to be added: none where the matrix product adds it."""
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
    """Return kernels that move bytes and hardly compute."""
    return Work(limit=Limit.MEMORY, moved_bytes=moved_bytes, strided_bytes=strided_bytes, kernels=kernels)
