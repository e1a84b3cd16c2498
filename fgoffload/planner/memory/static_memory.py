"""Counts a rank's static memory (weights, gradients, optimizer, buffers and a reserve) and the memory of the loss.

With Adam, fp32 gradients and the distributed optimizer over d ranks, each parameter takes:

    2 bytes of weight + 4 of gradient + (4 of main parameter + 8 of moments) / d

where d is data times context parallel size or, for experts, the copies of each expert. Without a distributed optimizer, d is 1.

Source: `compute_weight_and_optimizer_memory` of Megatron-LM's training/theoretical_memory_usage.py for the bytes per parameter,
and the code of megatron-core 0.16.1 for the rest. docs/reference/static_memory.md has measurements.
"""

import dataclasses

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import check_count
from fgoffload.planner.model.model_shape import ModelShape
from fgoffload.planner.model.parallelism import Parallelism, list_chunks
from fgoffload.planner.model.parameters import RankParameters, count_rank_parameters
from fgoffload.planner.operations.ops import BF16, FP32, INT64
from fgoffload.units import GIB, MIB

WORKSPACE_BYTES = 6 * 32 * MIB
"""Bytes of persistent cuBLAS workspaces: one of torch, one of Transformer Engine, and four for grouped matrix products. Source:
`get_cublas_workspace_size_bytes` of Transformer Engine and torch's notes on cuBLAS, for Hopper."""

DEFAULT_RESERVE_BYTES = 4 * GIB
"""Estimate of the device memory used in addition to the run's tensors; not measured. The CUDA context and loaded kernels take
up to 1 GiB. NCCL buffers, 4 MiB per channel (`NCCL_BUFFSIZE`), take up to 1 GiB more if a rank is in many process groups. The
rest is fragmentation of the caching allocator."""

_BOOL = 1  # bytes per element


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParameterState:
    """Bytes per parameter element in addition to its weight, and how they are stored."""

    gradient_bytes: int = FP32  # bytes in each rank's gradient buffer: 4, or 2 with `--grad-reduce-in-bf16`
    main_parameter_bytes: int = FP32
    """Bytes of the optimizer's main parameter; 2 if the precision-aware optimizer stores only the fp32 bits that bf16 lacks."""
    has_fp8_weights: bool = False  # whether fp8 linears store weights only in fp8: `--fp8-param-gather`
    shards_gradients: bool = False
    """Whether data-parallel ranks shard gradients: `--data-parallel-sharding-strategy optim_grads` of Megatron-FSDP."""
    shards_weights: bool = False
    """Whether data-parallel ranks also shard weights: `optim_grads_params`, or FSDP2. Two layers at a time are unsharded."""
    offloaded_part: float = 0.0
    """Fraction of the optimizer state on the host: `--optimizer-cpu-offload` with `--optimizer-offload-fraction`."""
    moment_bytes: int = 2 * FP32
    """Bytes of Adam's two moments. `--use-precision-aware-optimizer` allows fewer, for example with `--exp-avg-dtype`."""

    def __post_init__(self) -> None:
        for name in ("gradient_bytes", "main_parameter_bytes", "moment_bytes"):
            check_count(name, getattr(self, name), least=0)
        if not 0 <= self.offloaded_part <= 1:
            raise ConfigError(f"offloaded_part {self.offloaded_part} must be a number from 0 to 1.")

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state, which the distributed optimizer shards."""
        return self.main_parameter_bytes + self.moment_bytes


ADAM = ParameterState()
"""Adam with fp32 main parameters, moments and gradients, as in Megatron with `--bf16` and no other flag."""

NO_OPTIMIZER = ParameterState(main_parameter_bytes=0, moment_bytes=0)
"""Gradients accumulate in fp32, and no optimizer updates the weights."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StaticMemory:
    """Device bytes of one rank that are the same under every plan."""

    weight_bytes: int  # bytes of weights in the dtype of activations
    fp8_weight_bytes: int = 0
    """Bytes of the row-wise and column-wise fp8 copies of linear weights, kept for all microbatches of a step."""
    gradient_bytes: int
    optimizer_bytes: int  # bytes of main parameters and moments
    gather_buffer_bytes: int = 0
    """Bytes of the persistent buffer into which the output layer gathers the hidden states of whole sequences."""
    workspace_bytes: int = WORKSPACE_BYTES  # bytes of cuBLAS workspaces
    reserve_bytes: int = DEFAULT_RESERVE_BYTES  # memory for the CUDA context, NCCL and fragmentation

    @property
    def allocated_bytes(self) -> int:
        """Bytes without the reserve: the expected `torch.cuda.memory_allocated` between steps."""
        return self.total_bytes - self.reserve_bytes

    @property
    def total_bytes(self) -> int:
        """All static device bytes, including the reserve."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutputBytes:
    """Memory of the final norm, the output layer and the loss for one microbatch."""

    saved_bytes: int  # bytes saved from forward to backward, which follows immediately
    forward_extra_bytes: int  # additional bytes during forward: the logits
    backward_extra_bytes: int  # additional bytes during backward: gradients of the logits and of hidden states


def list_static_memory(
    model: ModelShape,
    parallelism: Parallelism,
    rank: int,
    *,
    state: ParameterState = ADAM,
    reserve_bytes: int = DEFAULT_RESERVE_BYTES,
) -> StaticMemory:
    """Return the device memory that a rank of pipeline stage `rank` uses throughout training."""
    parameters = count_rank_parameters(model, parallelism, rank)
    chunks = list_chunks(model, parallelism)[rank]
    has_output = any(chunk.has_output for chunk in chunks)
    sharded = _count_shard(parallelism, parameters)
    # Two layers are unsharded at a time: one computes while the other is gathered or reduced.
    whole = min(parameters.count, sharded + 2 * parameters.count // max(1, sum(len(chunk.layers) for chunk in chunks)))
    weight_bytes = model.activation_dtype_bytes * (whole if state.shards_weights else parameters.count)
    if state.has_fp8_weights and model.fp8_recipe is not None:
        weight_bytes = weight_bytes * (parameters.count - parameters.linear_count) // parameters.count
    fp8_weight_bytes = _count_fp8_weight_bytes(model, parameters)
    return StaticMemory(
        weight_bytes=weight_bytes,
        fp8_weight_bytes=fp8_weight_bytes * whole // parameters.count if state.shards_weights else fp8_weight_bytes,
        gradient_bytes=state.gradient_bytes * (whole if state.shards_gradients else parameters.count),
        optimizer_bytes=round(
            state.optimizer_bytes
            * (sharded if parallelism.has_distributed_optimizer else parameters.count)
            * (1 - state.offloaded_part)
        ),
        gather_buffer_bytes=_count_gather_bytes(model, parallelism) if has_output else 0,
        reserve_bytes=reserve_bytes,
    )


def count_output_bytes(model: ModelShape, parallelism: Parallelism) -> OutputBytes:
    """Return the memory of the final norm, the output layer and the loss for one microbatch.

    The loss converts the logits, 2sbV/t, to fp32, computes the softmax in place and saves it: 4sbV/t. In backward the gradient
    overwrites the softmax, and the output layer receives a bf16 copy. `--cross-entropy-loss-fusion` does not change this. Each
    layer of multi-token prediction has its own loss; all losses run forward before the first runs backward.

    Source: tensor_parallel/cross_entropy.py, fusions/fused_cross_entropy.py and models/gpt/gpt_model.py of megatron-core
    0.16.1; triton/cross_entropy.py of Transformer Engine 2.18, whose earlier versions overwrote the logits instead. Not
    measured on a GPU.
    """
    parallelism.check_model(model)
    tokens = model.seq_length // parallelism.context_parallel_size * parallelism.micro_batch_size
    part = tokens // parallelism.tensor_parallel_size if parallelism.has_sequence_parallel else tokens
    logits = tokens * model.vocab_size // parallelism.tensor_parallel_size
    hidden = BF16 * part * model.hidden_size
    losses = 1 + model.mtp_num_layers
    # Input and statistics of the final norm. Norms of multi-token prediction are counted in their layers.
    norm_bytes = hidden + (2 if model.normalization == "LayerNorm" else 1) * FP32 * part
    # Input of the output layer; the softmax; each token's target index, and a mask of targets that other ranks have.
    loss_bytes = hidden + FP32 * logits + (INT64 + _BOOL) * tokens
    gradient_bytes = BF16 * tokens * model.hidden_size
    return OutputBytes(
        saved_bytes=norm_bytes + losses * loss_bytes,
        forward_extra_bytes=BF16 * logits,
        backward_extra_bytes=BF16 * logits + gradient_bytes,
    )


def _count_shard(parallelism: Parallelism, parameters: RankParameters) -> int:
    dense_ranks = parallelism.data_parallel_size * parallelism.context_parallel_size
    experts_ranks = parallelism.expert_data_parallel_size
    return -(-parameters.dense_count // dense_ranks) + -(-parameters.expert_count // experts_ranks)


def _count_fp8_weight_bytes(model: ModelShape, parameters: RankParameters) -> int:
    """Return the bytes of two fp8 copies of all linear weights, and of their scales.

    The first microbatch of a step makes the copies. The result is an upper bound: on Blackwell, recipes with one scale per
    tensor need only one copy.

    Source: `Linear.get_weight_workspace` of Transformer Engine, with `is_first_microbatch` as Megatron sets it.
    """
    if model.fp8_recipe is None:
        return 0
    count = parameters.linear_count
    # One fp32 scale per 128 x 128 weights, or one byte per 32 weights.
    scales = {"blockwise": FP32 * count // (128 * 128), "mxfp8": count // 32}.get(model.fp8_recipe, 0)
    return 2 * (count + scales)


def _count_gather_bytes(model: ModelShape, parallelism: Parallelism) -> int:
    """Return the bytes of Megatron's buffer for gathered hidden states, [s, b, h], which only the output layer uses."""
    if parallelism.tensor_parallel_size == 1 or not parallelism.has_sequence_parallel:
        return 0
    tokens = model.seq_length // parallelism.context_parallel_size * parallelism.micro_batch_size
    return BF16 * tokens * model.hidden_size
