"""Events of one pass through a model chunk under a plan.

`chunk_compiler` makes it, once for all microbatches. Compute with nothing in between is one event, unless a timeline is wanted.
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
    READ = "read"  # parcels that forward reads for the last time, and that were submitted before
    TAKE = "take"  # a `Take`
    LET_GO = "let_go"  # sizes in bytes of tensors that stayed and backward takes, in order; 0 of one that was taken before
    FREE = "free"  # parcels that backward no longer wants
    POLL = "poll"  # None. The engine looks for finished copies
    PASSED = "pass_layer"  # None. Backward has passed a layer, or its MLP, that tells the engine nothing of that
    TURN = "turn"  # the most bytes under way when backward comes next, where a plan says so, or None
    RETAIN = "retain"  # a token dispatcher, by chunk and layer, and the bytes that it keeps
    DISPATCH = "dispatch"  # a token dispatcher, which frees what it kept

    __hash__ = object.__hash__
    """Members are themselves alone. The hash of `Enum` is Python, and takes several times as long."""


Events = tuple[tuple[EventKind, Any], ...]
"""Of a pass, each with its argument."""


class Compute(NamedTuple):
    """Compute without anything in between."""

    seconds: float  # with nothing beside it
    net_bytes: int  # device bytes that are there at its end, and were not before
    rise_bytes: int  # the most device bytes in it beyond those before it
    label: str  # where that is, for people: `layers.12.expert_fc1`
    host_s: float  # seconds of the host


class Take(NamedTuple):
    """Backward asks for tensors."""

    group: int | None  # the group of the site that asks, in the chunk. None where that site stays.
    parcels: tuple[int, ...]  # what it asks for. Empty where all that the group saved stayed.


class Mover(NamedTuple):
    """Key by which copies are counted: a tag, in layers of a kind with the same action."""

    kind: str  # of layer
    tag: str  # of the site that tensors leave with
    action: Action


class Parcel(NamedTuple):
    """Tensors of a layer that leave, return and go together."""

    size_bytes: int  # of all
    device_bytes: int
    """Of them, what is on the device beside static memory while they are there: all or, through staging slots, nothing."""
    label: str  # for people: `reload of layers.12.core_attn`, the site that it leaves with
    mover: Mover  # of that site
    is_read_later: bool  # forward still reads it when it is submitted


class PlacedGroup(NamedTuple):
    """A group among those of a chunk."""

    label: str  # for people: `layers.12.core_attn`
    parcels: tuple[int, ...]  # what leaves with it
    members: tuple[int, ...]  # what it saved and some group offloads: its own, and what it shares with others
    end_position: int  # how many groups of the chunk began before it ended


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CompiledChunk:
    """A chunk under a plan."""

    forward: Events
    backward: Events
    groups: tuple[PlacedGroup, ...]  # in the order in which forward reaches their sites
    parcels: tuple[Parcel, ...]
    base_bytes: int
    """Device bytes of a microbatch from the start of its forward to the end of its backward, whatever the plan says."""
    staged_bytes: int  # of the layer that has the most of them: what leaves through a staging slot, which all layers share
    recompute_s: float  # seconds of compute that backward has more than without a plan
