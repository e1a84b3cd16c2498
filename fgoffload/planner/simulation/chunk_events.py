"""Events of one pass through a model chunk under a plan.

`chunk_compiler` makes them once for all microbatches. Adjacent compute is one event, unless a timeline is wanted.
"""

import dataclasses
import enum
from typing import Any, NamedTuple

from fgoffload.plan import Action


class EventKind(enum.Enum):
    """Kinds of events: the method of `RankRun` that simulates it, and its argument."""

    COMPUTE = "compute"  # a `Compute`
    HOST_WAIT = "wait_for_host"  # the `HostWait` of the segment
    OPEN = "open_site"  # None. Forward reaches a site
    SUBMIT = "submit"  # the number of a group in the chunk, which is offloaded
    READ = "read"  # submitted parcels that forward reads for the last time
    TAKE = "take"  # a `Take`
    RELEASE = "release"  # bytes of resident tensors that backward uses, in order; 0 if used before
    FREE = "free"  # parcels that backward no longer needs
    POLL = "poll"  # None. The engine looks for finished copies
    PASSED = "pass_layer"  # None. Backward has passed an unwatched layer or its MLP
    TURN = "turn"  # maximum bytes in flight before backward, if a plan sets it, or None
    RETAIN = "retain"  # chunk and layer of a token dispatcher, and the bytes that it keeps
    DISPATCH = "dispatch"  # chunk and layer of a token dispatcher, which frees the tensors that it kept

    __hash__ = object.__hash__
    """Members are singletons. The hash of `Enum` is in Python and several times slower."""


Events = tuple[tuple[EventKind, Any], ...]
"""Events of a pass, each with its argument."""


class Compute(NamedTuple):
    """Uninterrupted compute."""

    seconds: float  # seconds without concurrent copies
    net_bytes: int  # change of device bytes
    rise_bytes: int  # peak device bytes beyond those before it
    label: str  # place, for tables: `layers.12.expert_fc1`
    host_s: float  # host seconds


class Take(NamedTuple):
    """Backward needs tensors."""

    group: int | None  # group of the asking site, by number in the chunk; None if that site stays on the device
    parcels: tuple[int, ...]  # needed parcels; empty if all tensors of the group stayed on the GPU


class Mover(NamedTuple):
    """Key for traffic: a tag in layers of one kind with the same action."""

    kind: str  # kind of the layer
    tag: str  # tag of the group that offloads the tensors
    action: Action


class Parcel(NamedTuple):
    """Tensors of a layer that are offloaded, reloaded and freed together."""

    size_bytes: int  # bytes of all
    device_bytes: int  # device bytes beside static memory while they are resident: all or, through staging slots, none
    label: str  # for timelines: `reload of layers.12.core_attn`, with the site that offloads it
    mover: Mover  # key of that site
    is_read_later: bool  # whether forward still reads it when it is submitted


class PlacedGroup(NamedTuple):
    """A group of a chunk."""

    label: str  # for timelines: `layers.12.core_attn`
    parcels: tuple[int, ...]  # offloaded with it
    members: tuple[int, ...]  # parcels that it saves and any group offloads: its own and shared ones
    end_position: int  # number of groups of the chunk that began before it ended


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CompiledChunk:
    """A chunk under a plan."""

    forward: Events
    backward: Events
    groups: tuple[PlacedGroup, ...]  # in forward order
    parcels: tuple[Parcel, ...]
    base_bytes: int
    """Device bytes of a microbatch from the start of its forward to the end of its backward that no plan changes."""
    staged_bytes: int  # bytes of a staging slot, which all layers share: as many as the largest layer needs
    recompute_s: float  # seconds of recompute in backward
