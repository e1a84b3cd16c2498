"""Models one pipeline rank and its device for the simulator and the solver."""

import dataclasses
import enum
from collections.abc import Callable, Iterable
from typing import NamedTuple

from fgoffload.defaults import DEFAULT_MIN_OFFLOADED_TENSOR_SIZE
from fgoffload.planner.ranks.layer_model import LayerModel, Segment
from fgoffload.planner.ranks.schedule import Pass, Pipeline
from fgoffload.transfer_schedule import TransferPolicy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """The link between a rank's device and its host, with one FIFO queue per direction."""

    d2h_bytes_per_s: float  # rate to the host while no copies to the device run
    h2d_bytes_per_s: float  # rate to the device while no copies to the host run
    duplex_bytes_per_s: float  # rate per direction while both are busy
    copy_latency_s: float = 0.0  # seconds before the first byte of each copy moves
    compute_slowdown: float = 0.0  # fraction by which copies slow compute: 0.06 for 6%


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NumberedLayer:
    """A layer of a chunk, with its number in the model."""

    number: int  # number in the whole model, from 0, as in plans
    model: LayerModel  # shared by layers of one kind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkModel:
    """A model chunk: its layers, and the segments before and after them."""

    layers: tuple[NumberedLayer, ...]  # layers in forward order; empty in a chunk that has only an embedding
    first: tuple[Segment, ...] = ()  # segments before the layers: the embedding, in the first chunk of the model
    last: tuple[Segment, ...] = ()  # segments after the layers: final norm, output layer and loss, in the last chunk
    saved_bytes: int = 0
    """Bytes that a microbatch saves outside the tagged modules. They always stay on the GPU."""

    def replace_models(self, change: Callable[[LayerModel], LayerModel]) -> "ChunkModel":
        """Return the chunk with `change` applied to the model of each layer."""
        layers = tuple(dataclasses.replace(layer, model=change(layer.model)) for layer in self.layers)
        return dataclasses.replace(self, layers=layers)


class HostPace(enum.Enum):
    """How far ahead of compute the host runs. The engine polls for finished copies as the host launches ops.

    Source: on an H200, predicted peaks of Llama 3 8B (`STEP_AHEAD`) and the workload W2 (`LAYER_AHEAD`) are within 0.8% of
    measured peaks (docs/results/predictions.md). With `BESIDE`, they would be up to 2.6% too low.
    """

    BESIDE = "beside compute"  # the host is also the device, as on a CPU
    LAYER_AHEAD = "a layer ahead"  # the host synchronizes in each layer's forward, for example in token dispatchers
    PASS_AHEAD = "a pass ahead"  # 1F1B without waits in layers; the host waits for each exchange between stages
    STEP_AHEAD = "a step ahead"  # the host launches the whole step before the first copy is done


class LateCosts(NamedTuple):
    """Delays that offload adds to compute in a launch-bound step."""

    group_s: float = 0.0  # seconds per offloaded group
    tensor_s: float = 0.0  # seconds per offloaded tensor

    def find(self, groups: int, tensors: int) -> float:
        """Return the seconds of delay if `groups` groups offload a total of `tensors` tensors."""
        return groups * self.group_s + tensors * self.tensor_s


NOT_LATE = LateCosts()


class Turn(enum.Enum):
    """Handling of copies that are still in flight to the host when a microbatch turns from forward to backward."""

    CANCEL = "cancel all copies in flight"  # used if modules are selected without a plan
    PLAN = "cancel copies that are far from done"  # used during planning; the plan records how many bytes may be in flight


HOST_LAYER_S = 4.5e-3
"""Host seconds for the forward or the backward of an MoE layer, spread evenly over its segments. Source: fitted to the peaks of
13 settings of the workload W2 on an H200. With tracing, which slows the host, forward takes 5.5 ms and backward 6 ms."""


def find_host_pace(chunks: Iterable[ChunkModel], pipeline: Pipeline) -> HostPace:
    """Return how far ahead of the device the host runs on a rank with these chunks.

    Under the interleaved schedule, Megatron overlaps the exchanges between stages, so the host does not wait for them.
    """
    if any(segment.host_wait is not None for chunk in chunks for layer in chunk.layers for segment in layer.model.segments):
        return HostPace.LAYER_AHEAD
    return HostPace.PASS_AHEAD if pipeline.stages > 1 and pipeline.chunks == 1 else HostPace.STEP_AHEAD


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """Model of one pipeline rank during a step."""

    rank: int  # pipeline rank, from 0
    static_bytes: int  # device bytes held for the whole step: weights, gradients, optimizer state, buffers, reserve
    chunks: tuple[ChunkModel, ...]  # model chunks, in order of their numbers
    passes: tuple[Pass, ...]  # passes in order, from `fgoffload.planner.ranks.schedule.list_passes`
    link: LinkModel
    policy: TransferPolicy  # the engine's window and prefetch
    min_offloaded_numel: int = DEFAULT_MIN_OFFLOADED_TENSOR_SIZE
    """Minimum number of elements of an offloaded storage. Smaller storages stay on the GPU."""
    step_end_s: float = 0.0
    """Seconds after the last pass: gradient reduction, optimizer, and host delays outside passes."""
    host_budget_bytes: int | None = None  # host memory limit of this rank, in bytes; None for no limit
    host_pace: HostPace = HostPace.BESIDE  # how far ahead of compute the host runs
    turning_chunk: int | None = None
    """Chunk with the loss, where each microbatch's backward directly follows its forward; None on other ranks."""
    turn: Turn = Turn.PLAN  # handling of copies in flight at the loss, unless the plan sets a number of bytes
    late: LateCosts = NOT_LATE
    has_engine: bool = True
    """Whether the run uses this package. Without it, token dispatchers keep the input of a recompute. See [Note: Tensors that
    dispatchers keep] in `layer_compiler`."""
