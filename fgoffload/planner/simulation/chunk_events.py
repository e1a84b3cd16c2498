"""What a rank does in one pass through a model chunk under a plan, event by event.

`chunk_compiler` makes it, once for all microbatches. Compute with nothing in between is one event, unless a timeline is wanted.
"""

import dataclasses
import enum
from typing import Any, NamedTuple

from fgoffload.plan import Action


class EventKind(enum.Enum):
    """What happens, and what the event has as argument."""

    COMPUTE = "compute runs"  # a `Compute`
    HOST_WAIT = "the host waits for a few bytes"  # the `HostWait` of the segment
    OPEN = "forward reaches a site"  # None; the engine looks for storages that something else references
    SUBMIT = "a group is offloaded"  # its number in the chunk
    READ = "forward reads tensors for the last time"  # the parcels, which were submitted before
    TAKE = "backward asks for tensors"  # a `Take`
    LET_GO = "backward takes tensors that stayed"  # their sizes in bytes, in order; 0 of one that was taken before
    FREE = "backward no longer wants tensors"  # the parcels
    POLL = "the engine looks for finished copies"  # None
    PASSED = "backward has passed a layer, or its MLP"  # None; nothing there tells the engine where backward is
    TURN = "backward comes next"  # the most bytes under way where a plan says so, or None
    RETAIN = "a token dispatcher keeps tensors"  # the dispatcher, by chunk and layer, and the bytes
    DISPATCH = "a token dispatcher gets other tokens"  # the dispatcher, which frees what it kept

    __hash__ = object.__hash__
    """Members are themselves alone. The hash of `Enum` is Python, and takes several times as long."""


Events = tuple[tuple[EventKind, Any], ...]
"""Of a pass, each with its argument."""


class Compute(NamedTuple):
    """Compute without anything in between."""

    seconds: float
    """With nothing beside it."""
    net_bytes: int
    """Device bytes that are there at its end, and were not before."""
    rise_bytes: int
    """The most device bytes in it beyond those before it."""
    label: str
    """Where that is, for people: `layers.12.expert_fc1`."""
    host_s: float
    """Seconds of the host."""


class Take(NamedTuple):
    """Backward asks for tensors."""

    group: int | None
    """The group of the site that asks, in the chunk. None where that site stays."""
    parcels: tuple[int, ...]
    """What it asks for. Empty where all that the group saved stayed."""


class Mover(NamedTuple):
    """What copies are counted for: a tag, in layers of a kind that do the same about it."""

    kind: str
    """Of layer."""
    tag: str
    """Of the site that tensors leave with."""
    action: Action
    """What is done about the tag."""


class Parcel(NamedTuple):
    """Tensors of a layer that leave, return and go together."""

    size_bytes: int
    """Of all."""
    device_bytes: int
    """Of them, what is on the device beside static memory while they are there: all or, through staging slots, nothing."""
    label: str
    """For people: `reload of layers.12.core_attn`, the site that it leaves with."""
    mover: Mover
    """Of that site."""
    is_read_later: bool
    """Forward still reads it when it is submitted."""


class PlacedGroup(NamedTuple):
    """A group among those of a chunk."""

    label: str
    """For people: `layers.12.core_attn`."""
    mover: Mover
    """What its copies are counted for."""
    parcels: tuple[int, ...]
    """What leaves with it."""
    members: tuple[int, ...]
    """What it saved and some group offloads: its own, and what it shares with others."""
    end_position: int
    """How many groups of the chunk began before it ended."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CompiledChunk:
    """What a chunk does under a plan."""

    forward: Events
    """Of a microbatch."""
    backward: Events
    """Of a microbatch."""
    groups: tuple[PlacedGroup, ...]
    """In the order in which forward reaches their sites."""
    parcels: tuple[Parcel, ...]
    """What leaves."""
    base_bytes: int
    """Device bytes of a microbatch from the start of its forward to the end of its backward, whatever the plan says."""
    staged_bytes: int
    """Of the layer that has the most of them: what leaves through a staging slot, which all layers share."""
    recompute_s: float
    """Seconds of compute that backward has more than without a plan."""
