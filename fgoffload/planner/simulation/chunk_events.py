"""Events of a simulated pass through a model chunk under a plan.

`chunk_compiler` builds them once for all microbatches. It merges adjacent compute into one event, except for timelines.
"""

import dataclasses
import enum
from typing import Any, NamedTuple

from fgoffload.plan import Action


class EventKind(enum.Enum):
    """Kinds of events. Each value names the `RankRun` method that simulates the event; its comment describes the argument."""

    COMPUTE = "compute"  # a `Compute`
    HOST_WAIT = "wait_for_host"  # the `HostWait` of the segment
    OPEN = "open_site"  # no argument: forward reaches a site
    SUBMIT = "submit"  # index of the offloaded group in the chunk
    READ = "read"  # submitted bundles that forward reads here for the last time
    TAKE = "take"  # a `Take`
    RELEASE = "release"  # sizes of the resident tensors that backward uses, in order; 0 for repeated uses
    FREE = "free"  # bundles that backward no longer needs
    POLL = "poll"  # no argument: the engine polls for finished copies
    PASSED = "pass_layer"  # no argument: backward has passed an MLP or a layer whose ops the engine does not watch
    TURN = "turn"  # maximum bytes in flight at the loss; None if the plan sets no limit
    RETAIN = "retain"  # chunk and layer of a token dispatcher, and the bytes that it keeps alive
    DISPATCH = "dispatch"  # chunk and layer of a token dispatcher that frees the tensors it kept

    __hash__ = object.__hash__
    """Identity hash. Members are singletons, and `Enum`'s own hash is several times slower."""


Events = tuple[tuple[EventKind, Any], ...]
"""Events of a pass, each with its argument."""


class Compute(NamedTuple):
    """Compute of one segment or several adjacent segments."""

    seconds: float  # duration without concurrent copies
    net_bytes: int  # change in device bytes
    rise_bytes: int  # peak device bytes, relative to those at the start of the compute
    label: str  # segment in which memory peaks, such as `layers.12.expert_fc1`
    host_s: float  # seconds that the host takes to launch the compute


class Take(NamedTuple):
    """Tensors of one site that backward needs."""

    group: int | None  # index of the site's group in the chunk; None if the site is not offloaded
    bundles: tuple[int, ...]  # needed bundles; empty if all tensors of the group stayed on the GPU


class TrafficKey(NamedTuple):
    """Key of a set of traffic counters: a tag and its action, in layers of one kind."""

    kind: str
    tag: str  # tag of the group that offloads the tensors
    action: Action


class Bundle(NamedTuple):
    """Tensors of a layer that are offloaded, reloaded and freed together."""

    size_bytes: int  # total size
    device_bytes: int  # device bytes while resident, excluding tensors in staging slots, which are static memory
    label: str  # label of the reload in timelines, such as `reload of layers.12.core_attn`
    traffic_key: TrafficKey  # counters for its copies
    is_read_later: bool  # whether forward still reads it after its copy is submitted


class PlacedGroup(NamedTuple):
    """A group of tensors that are offloaded together, with its position in the chunk."""

    label: str  # label in timelines, such as `layers.12.core_attn`
    bundles: tuple[int, ...]  # bundles that it offloads
    members: tuple[int, ...]  # offloaded bundles that its site saves, including those that another group offloads
    end_position: int  # number of groups in the chunk that start before this group ends, including itself
    tensors: int  # number of tensors that it offloads


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CompiledChunk:
    """Events and sizes of a chunk under a plan."""

    forward: Events
    backward: Events
    groups: tuple[PlacedGroup, ...]  # in forward order
    bundles: tuple[Bundle, ...]
    base_bytes: int
    """Device bytes that a microbatch holds from the start of its forward to the end of its backward, under any plan."""
    staged_bytes: int  # size of a staging slot; all layers share the slots, so the largest layer sets the size
    recompute_s: float  # seconds of recompute in backward
