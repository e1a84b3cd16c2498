"""The model of one pipeline rank and its device: input of the simulator and the solver."""

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable

from fgoffload.defaults import DEFAULT_MIN_OFFLOADED_TENSOR_SIZE
from fgoffload.errors import ConfigError
from fgoffload.planner.checks import check_rate
from fgoffload.planner.ranks.layer_model import LayerModel, Segment
from fgoffload.planner.ranks.schedule import Pass, Pipeline
from fgoffload.transfer_schedule import TransferPolicy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """The link between a rank's device and its host: one first-in, first-out queue for each direction."""

    d2h_bytes_per_s: float  # rate to the host alone
    h2d_bytes_per_s: float  # rate to the device alone
    duplex_bytes_per_s: float  # rate of each direction while both run
    copy_latency_s: float = 0.0  # seconds before the first byte of each copy moves
    compute_slowdown: float = 0.0  # slowdown of compute beside copies, as a part: 0.06 for 6%

    def __post_init__(self) -> None:
        """Refuse impossible rates."""
        for name in ("d2h_bytes_per_s", "h2d_bytes_per_s", "duplex_bytes_per_s"):
            rate = getattr(self, name)
            check_rate(name, rate)
            if rate is None:
                raise ConfigError(f"{name} is not known, and copies cannot be simulated without it. Give a number like 50e9.")
        for name in ("copy_latency_s", "compute_slowdown"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} {getattr(self, name)} is not from 0 and finite. Give such a number.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NumberedLayer:
    """A layer and its number."""

    number: int  # number in the whole model, from 0, as in plans
    model: LayerModel  # kind of the layer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkModel:
    """A model chunk: its layers, and the segments before and after them."""

    layers: tuple[NumberedLayer, ...]  # layers in forward order; none in a chunk with an embedding alone
    first: tuple[Segment, ...] = ()  # segments before the layers: the embedding, on the first chunk of the model
    last: tuple[Segment, ...] = ()  # segments after the layers: final norm, output layer and loss, on the last chunk
    saved_bytes: int = 0
    """Bytes that a microbatch saves outside of the layers and of all tags. They stay whatever the plan says."""

    def replace_models(self, change: Callable[[LayerModel], LayerModel]) -> "ChunkModel":
        """Return the chunk with `change` applied to the model of each layer."""
        layers = tuple(dataclasses.replace(layer, model=change(layer.model)) for layer in self.layers)
        return dataclasses.replace(self, layers=layers)


class HostPace(enum.Enum):
    """How far ahead of compute the host runs. The engine sees finished copies only at the host's place.

    Source: docs/results/predictions.md. On an H200 the layers of llama3_8b_layers never
    make the host wait: three peaks were 1.6% to 2.6%, a window each, above a simulation with the host beside compute, and are
    within 0.3% with the host a step ahead. The dispatchers of w2_moe make it wait in each forward: six peaks under plans were
    0.2% to 2.2% above, and are within 0.4% with a host that waits there and nowhere else.
    """

    BESIDE = "beside compute"  # the device is the host
    LAYER_AHEAD = "a layer ahead"  # the forward of a layer makes it wait, as token dispatchers do
    PASS_AHEAD = "a pass ahead"  # 1F1B without waits in layers: it waits for each exchange between stages
    STEP_AHEAD = "a step ahead"  # it has launched the whole step before the first copy is done


class Turn(enum.Enum):
    """Treatment of copies in flight to the host when forward of a microbatch turns to its backward."""

    CALL_BACK = "the last groups stay"  # modules are named, without a plan
    PLAN = "those stay that are far from done"  # while a plan is made, which then says their bytes


HOST_LAYER_S = 4.5e-3
"""Host seconds for the forward or the backward of a layer with experts, spread evenly over its segments. Source: a trace of
w2_moe on an H200, which slows the host a little: 5.5 ms from one dispatcher's wait to the next, and about 6 ms for the backward
of a layer. With 4.5 the peaks of 13 settings agree best."""


def find_host_pace(chunks: Iterable[ChunkModel], pipeline: Pipeline) -> HostPace:
    """Return how far the host runs ahead on a rank with these chunks, on a device that is not the host.

    The interleaved schedule counts as one without waits: Megatron overlaps its exchanges there (`overlap_p2p_comm`).
    """
    if any(segment.host_wait is not None for chunk in chunks for layer in chunk.layers for segment in layer.model.segments):
        return HostPace.LAYER_AHEAD
    return HostPace.PASS_AHEAD if pipeline.stages > 1 and pipeline.chunks == 1 else HostPace.STEP_AHEAD


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """One pipeline rank in a step."""

    rank: int  # pipeline rank, from 0
    static_bytes: int  # device bytes of weights, gradients, optimizer, buffers and reserve, which stay all the time
    chunks: tuple[ChunkModel, ...]  # model chunks, by number
    passes: tuple[Pass, ...]  # passes in order: `fgoffload.planner.ranks.schedule.list_passes`
    link: LinkModel  # link to the host
    policy: TransferPolicy  # window and prefetch of the engine
    min_offloaded_numel: int = DEFAULT_MIN_OFFLOADED_TENSOR_SIZE
    """Minimum elements that a group saves of a storage to offload it. Smaller ones stay on the GPU."""
    step_end_s: float = 0.0
    """Seconds after the last pass: gradient reduction, optimizer, and delays of the host outside of passes."""
    host_budget_bytes: int | None = None  # host bytes of this rank; None for no limit
    host_pace: HostPace = HostPace.BESIDE  # how far ahead of compute the host looks for finished copies
    turning_chunk: int | None = None
    """Chunk with the loss, where each microbatch's backward follows its forward at once; None on other ranks."""
    turn: Turn = Turn.PLAN  # treatment of copies in flight at the loss, unless the plan gives a number of bytes
    late_group_s: float = 0.0  # delay of a launch-bound host for each offloaded group, in seconds
    has_engine: bool = True
    """Whether the training runs this package. Without it, token dispatchers hold the input of a recompute:
    [Note: What dispatchers hold] in `layer_compiler`."""
