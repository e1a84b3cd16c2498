"""The model of one pipeline rank and its device: input of the simulator and the solver."""

import dataclasses
import enum
import math
from collections.abc import Iterable

from fgoffload.defaults import DEFAULT_MIN_OFFLOADED_TENSOR_SIZE
from fgoffload.errors import ConfigError
from fgoffload.planner.checks import check_rate
from fgoffload.planner.ranks.layer_model import LayerModel, Segment
from fgoffload.planner.ranks.schedule import Pass, Pipeline
from fgoffload.transfer_schedule import TransferPolicy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """Copies between a rank's device and its host: each way a queue, first in, first out."""

    d2h_bytes_per_s: float
    """To the host, with nothing the other way."""
    h2d_bytes_per_s: float
    """To the device, with nothing the other way."""
    duplex_bytes_per_s: float
    """Each way while both run."""
    copy_latency_s: float = 0.0
    """Before the bytes of each group's copy move."""
    compute_slowdown: float = 0.0
    """How much copies slow compute beside them: 0.06 for 6%."""

    def __post_init__(self) -> None:
        """Refuse what no link has.

        Raises:
            ConfigError: With the field, the value and the fix.
        """
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
    """A layer in its place."""

    number: int
    """In the whole model, from 0, as plans count."""
    model: LayerModel
    """Its kind."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkModel:
    """A model chunk: what is before its layers, the layers, and what is behind them."""

    layers: tuple[NumberedLayer, ...]
    """In the order of forward. It may have none: an embedding alone."""
    first: tuple[Segment, ...] = ()
    """Before the layers: the embedding, on the first chunk of the model."""
    last: tuple[Segment, ...] = ()
    """Behind them: the final norm, the output layer and the loss, on the last."""
    saved_bytes: int = 0
    """Of each microbatch, by what is before and behind the layers and by what no tag covers: stays whatever the plan says."""


class HostPace(enum.Enum):
    """How far ahead of compute the host runs: the engine sees a copy that is done only where the host is.

    Source: docs/results/predictions.md. Of llama3_8b_layers on an H200, whose layers never let the host wait, three
    peaks were 1.6% to 2.6% above what is simulated with a host beside compute, a window each time, and are within 0.3% of what
    is with one a step ahead. Of w2_moe, whose dispatchers let it wait in each forward, six peaks under plans were 0.2% to 2.2%
    above, and are within 0.4% of what is with one that waits there and nowhere else.
    """

    BESIDE = "beside compute"  # the device is the host
    LAYER_AHEAD = "a layer ahead"  # forward of a layer lets it wait, as token dispatchers do
    PASS_AHEAD = "a pass ahead"  # 1F1B where no layer lets it wait: it waits for each exchange between stages
    STEP_AHEAD = "a step ahead"  # it has launched all that follows before the first copy is done


class Turn(enum.Enum):
    """Treatment of copies in flight to the host when forward of a microbatch turns to its backward."""

    CALL_BACK = "the last groups stay"  # where modules are named, and nothing is planned
    PLAN = "those stay that are far from done"  # while a plan is made, which then says how many bytes these are


HOST_LAYER_S = 4.5e-3
"""Seconds that the host takes for the forward of a layer with experts, or its backward; each of its stretches the same part.
Source: a trace of w2_moe on an H200, in which the host is a bit slower than without: 5.5 ms from one dispatcher's wait to the
next, and about 6 ms for the backward of a layer. With 4.5 the peaks of 13 settings agree best."""


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

    rank: int
    """Of the pipeline, from 0."""
    static_bytes: int
    """Device bytes that are there all the time: weights, gradients, optimizer, buffers, and the reserve."""
    chunks: tuple[ChunkModel, ...]
    """By number of the chunk."""
    passes: tuple[Pass, ...]
    """In order: `fgoffload.planner.ranks.schedule.list_passes`."""
    link: LinkModel
    """To the host."""
    policy: TransferPolicy
    """Window and prefetch, as the engine has them."""
    min_offloaded_numel: int = DEFAULT_MIN_OFFLOADED_TENSOR_SIZE
    """Elements. What a group saves of one storage stays when it is smaller."""
    step_end_s: float = 0.0
    """After the last pass: the reduction of gradients, the optimizer, and time of a late host, which has no place in a pass."""
    host_budget_bytes: int | None = None
    """Of this rank, or None for no limit."""
    host_pace: HostPace = HostPace.BESIDE
    """Where the host is when it looks for copies that are done."""
    turning_chunk: int | None = None
    """The chunk that ends the model, where the backward of each microbatch comes right after its forward; None elsewhere."""
    turn: Turn = Turn.PLAN
    """Treatment of copies in flight there, unless the plan gives a number of bytes."""
    late_group_s: float = 0.0
    """Seconds by which a late host launches later what follows a group that leaves: it has that to do as well."""
    has_engine: bool = True
    """Whether this package runs in the training. Without it, token dispatchers hold what a recompute began with: see
    [Note: What dispatchers hold] in `layer_compiler`."""
