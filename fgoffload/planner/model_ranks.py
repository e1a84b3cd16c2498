"""Builds the models of all pipeline ranks from a model shape, parallel sizes and a device."""

import dataclasses
import logging
from collections.abc import Sequence

from fgoffload.cuda_graphs import FULL_ITERATION, NO_CAPTURE, Graphs
from fgoffload.defaults import DEFAULT_MIN_OFFLOADED_TENSOR_SIZE
from fgoffload.planner.memory.saved_bytes import list_untagged_tensors
from fgoffload.planner.memory.static_memory import (
    ADAM,
    DEFAULT_RESERVE_BYTES,
    ParameterState,
    StaticMemory,
    count_output_bytes,
    list_static_memory,
)
from fgoffload.planner.memory.temporaries import ExtraBytes
from fgoffload.planner.model.layer_shape import LayerShape
from fgoffload.planner.model.model_shape import ModelShape
from fgoffload.planner.model.parallelism import Parallelism, StageChunk, list_chunks
from fgoffload.planner.model.parameters import RankParameters, count_rank_parameters
from fgoffload.planner.model.rank_layer import make_layer_shape
from fgoffload.planner.operations.ops import Execution, Pattern, Traffic
from fgoffload.planner.ranks.layer_model import LayerModel, Segment
from fgoffload.planner.ranks.rank_model import ChunkModel, HostPace, NumberedLayer, RankModel, find_host_pace
from fgoffload.planner.ranks.schedule import find_turning_chunk, list_passes
from fgoffload.planner.timing.edge_segments import EdgeShape, make_first_segments, make_last_segments
from fgoffload.planner.timing.efficiency import Efficiency
from fgoffload.planner.timing.hardware import Hardware, check_for_times
from fgoffload.planner.timing.link_rates import make_link_model
from fgoffload.planner.timing.network_rates import describe_assumed_rates
from fgoffload.planner.timing.op_times import Clock, make_layer_model
from fgoffload.transfer_schedule import TransferPolicy

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Assumptions of a prediction beyond the model, its parallel sizes and the device."""

    efficiency: Efficiency = dataclasses.field(default_factory=Efficiency)  # fractions of the device's peak rates
    state: ParameterState = ADAM  # gradient and optimizer bytes per parameter
    reserve_bytes: int = DEFAULT_RESERVE_BYTES  # memory for the CUDA context, NCCL and fragmentation, in bytes
    policy: TransferPolicy = dataclasses.field(default_factory=TransferPolicy)  # the engine's window and prefetch
    min_offloaded_numel: int = DEFAULT_MIN_OFFLOADED_TENSOR_SIZE
    """A storage stays on the GPU if its group saves fewer than this many of the storage's elements."""
    execution: Execution = dataclasses.field(default_factory=Execution)
    """Execution options of layers. `build_ranks` overrides the context parallel size, expert overlap and attention window."""
    graphs: Graphs = NO_CAPTURE  # modules that CUDA graphs capture


def build_ranks(
    model: ModelShape, parallelism: Parallelism, hardware: Hardware, *, assumptions: Assumptions | None = None
) -> tuple[RankModel, ...]:
    """Return the model of each pipeline rank for one step.

    Args:
        model: The whole model.
        parallelism: Parallel sizes, and the number of microbatches per step.
        hardware: Device of each rank.
        assumptions: Assumptions of the prediction. None means the defaults.

    Raises:
        ConfigError: The parallel sizes do not fit the model, or the device lacks a rate that the prediction needs.
    """
    assumptions = assumptions or Assumptions()
    is_captured = assumptions.graphs.impl == FULL_ITERATION
    if is_captured:  # the host launches one graph per step
        efficiency = dataclasses.replace(assumptions.efficiency, host_s_per_launch=0.0)
        assumptions = dataclasses.replace(assumptions, efficiency=efficiency)
    check_for_times(hardware)
    if line := describe_assumed_rates(hardware, ranks=parallelism.world_size):
        logger.warning(line)
    layers = _LayerModels(model, parallelism, hardware, assumptions)
    link = make_link_model(hardware)
    ranks = []
    for rank, chunks in enumerate(list_chunks(model, parallelism)):
        static = list_rank_memory(model, parallelism, rank, assumptions=assumptions)
        models = tuple(_build_chunk(chunk, layers) for chunk in chunks)
        ranks.append(
            RankModel(
                rank=rank,
                static_bytes=static.total_bytes,
                chunks=models,
                passes=list_passes(parallelism.pipeline, rank=rank),
                link=link,
                policy=assumptions.policy,
                min_offloaded_numel=assumptions.min_offloaded_numel,
                step_end_s=_count_update_s(static, layers.clock)
                + _count_exchange_s(count_rank_parameters(model, parallelism, rank), models, layers),
                host_pace=HostPace.STEP_AHEAD if is_captured else find_host_pace(models, parallelism.pipeline),
                turning_chunk=find_turning_chunk(parallelism.pipeline, rank=rank),
            )
        )
    return tuple(ranks)


def list_rank_memory(
    model: ModelShape, parallelism: Parallelism, rank: int, *, assumptions: Assumptions | None = None
) -> StaticMemory:
    """Return the static memory of pipeline rank `rank` under `assumptions`."""
    assumptions = assumptions or Assumptions()
    return list_static_memory(model, parallelism, rank, state=assumptions.state, reserve_bytes=assumptions.reserve_bytes)


class _LayerModels:
    """Cache of layer models. Equal layers share one object, so the solver treats them as one kind."""

    def __init__(self, model: ModelShape, parallelism: Parallelism, hardware: Hardware, assumptions: Assumptions) -> None:
        self.model = model
        self.parallelism = parallelism
        self.assumptions = assumptions
        self.clock = Clock(hardware=hardware, efficiency=assumptions.efficiency)
        self._models: dict[tuple[LayerShape, Execution], LayerModel] = {}

    def get_shape(self, number: int) -> LayerShape:
        """Return the shape of layer `number`."""
        return make_layer_shape(self.model, self.parallelism, number)

    def get_model(self, number: int) -> LayerModel:
        """Return the model of layer `number`."""
        shape, has_window, kind = self.get_shape(number), self.model.has_window(number), self.model.get_kind(number)
        execution = dataclasses.replace(
            self.assumptions.execution,
            context_parallel_size=self.parallelism.context_parallel_size,
            has_expert_overlap=self.parallelism.has_expert_overlap,
            window_tokens=self.model.window_tokens if has_window else None,
        )
        if (shape, execution) not in self._models:
            self._models[shape, execution] = make_layer_model(
                shape,
                self.clock.hardware,
                kind=f"{kind}, window" if has_window else kind,
                efficiency=self.clock.efficiency,
                execution=execution,
                graphs=self.assumptions.graphs,
            )
        return self._models[shape, execution]


def _build_chunk(chunk: StageChunk, layers: _LayerModels) -> ChunkModel:
    model, parallelism = layers.model, layers.parallelism
    edge = EdgeShape(
        tokens=model.seq_length // parallelism.context_parallel_size * parallelism.micro_batch_size,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        tensor_parallel_size=parallelism.tensor_parallel_size,
        has_sequence_parallel=parallelism.has_sequence_parallel,
    )
    untagged = [tensor for number in chunk.layers for tensor in list_untagged_tensors(layers.get_shape(number))]
    # Count shared storages once, not once per layer.
    own_bytes = sum(tensor.size_bytes for tensor in untagged if not tensor.is_same_in_all_layers)
    own_bytes += sum({tensor.name: tensor.size_bytes for tensor in untagged if tensor.is_same_in_all_layers}.values())
    last: tuple[Segment, ...] = ()
    if chunk.has_output:
        output = count_output_bytes(model, parallelism)
        # The backward of the loss directly follows its forward, so its saved tensors are temporaries.
        extra = ExtraBytes(
            forward=output.saved_bytes + output.forward_extra_bytes, backward=output.saved_bytes + output.backward_extra_bytes
        )
        last = make_last_segments(edge, layers.clock, execution=layers.assumptions.execution, extra=extra)
    return ChunkModel(
        layers=tuple(NumberedLayer(number=number, model=layers.get_model(number)) for number in chunk.layers),
        first=make_first_segments(edge, layers.clock) if chunk.has_embedding else (),
        last=last,
        saved_bytes=own_bytes,
    )


def _count_update_s(static: StaticMemory, clock: Clock) -> float:
    """Return the seconds the optimizer needs to read the gradients, and to read and write its state and the weights."""
    if not static.optimizer_bytes:
        return 0.0
    return (static.gradient_bytes + 2 * (static.optimizer_bytes + static.weight_bytes)) / clock.memory_bytes_per_s


def _count_exchange_s(parameters: RankParameters, chunks: Sequence[ChunkModel], layers: _LayerModels) -> float:
    """Return the seconds of gradient reduction and weight gathering among data-parallel ranks that compute does not hide.

    With `--overlap-grad-reduce` and `--overlap-param-gather`, a rank's last backward and first forward hide the rest.
    """
    sizes = layers.parallelism
    segments = [one for chunk in chunks for layer in chunk.layers for one in layer.model.segments]
    span = sizes.world_size // sizes.pipeline_parallel_size
    dense = (parameters.dense_count, sizes.data_parallel_size * sizes.context_parallel_size)
    groups = (dense, (parameters.expert_count, sizes.expert_data_parallel_size))

    def time_ring(item_bytes: int) -> float:
        rings = [(item_bytes * count * (ranks - 1) / ranks, ranks) for count, ranks in groups if ranks > 1]
        return sum(
            layers.clock.time_traffic(Traffic(pattern=Pattern.RING, sent_bytes=sent_bytes, ranks=ranks, span=span))
            for sent_bytes, ranks in rings
        )

    reduced_s = time_ring(layers.assumptions.state.gradient_bytes) - sum(one.backward_s for one in segments)
    gathered_s = time_ring(layers.model.activation_dtype_bytes) - sum(one.forward_s for one in segments)
    return max(0.0, reduced_s) + max(0.0, gathered_s)


def count_ranks_per_node(hardware: Hardware, world_size: int) -> int:
    """Return the number of ranks that share a node's host memory: one per device, or all ranks if there are fewer."""
    return min(hardware.gpus_per_node, world_size)


def count_host_bytes_per_node(host_peaks_bytes: Sequence[int], *, hardware: Hardware, world_size: int) -> int:
    """Return the highest peak of host bytes among nodes. A node's peak is the sum of its ranks' peaks.

    The ranks of a node are numbered consecutively, and so are the ranks of a pipeline stage.

    Source: `initialize_model_parallel` of megatron-core 0.16.1, with its default order tp-cp-ep-dp-pp.
    """
    per_stage = world_size // max(1, len(host_peaks_bytes))
    peaks_bytes = [peak_bytes for peak_bytes in host_peaks_bytes for _ in range(per_stage)]
    per_node = count_ranks_per_node(hardware, world_size)
    return max((sum(peaks_bytes[first : first + per_node]) for first in range(0, len(peaks_bytes), per_node)), default=0)
