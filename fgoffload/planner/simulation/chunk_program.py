"""What a rank does in one pass through a model chunk under a plan, step by step.

`chunk_compiler` makes it, once for all microbatches. Stretches of compute without anything between them are one step; its parts
are looked at one by one only where the step may have the peak, or where a timeline is recorded.
"""

import dataclasses
from collections.abc import Hashable
from typing import NamedTuple

from fgoffload.plan import Action


class Mover(NamedTuple):
    """What copies are counted for: a tag, in layers of a kind that do the same about it."""

    kind: str
    """Of layer."""
    tag: str
    """Of the site that tensors leave with."""
    action: Action
    """What is done about the tag."""


class Part(NamedTuple):
    """One stretch of compute."""

    label: str
    """For people: `layers.12.expert_fc1`."""
    seconds: float
    """With nothing beside it."""
    extra_bytes: int
    """Device bytes while it runs."""
    net_bytes: int
    """Device bytes that are there when it is over, and were not before."""


class ComputeStep(NamedTuple):
    """Stretches of compute, one after the other, with nothing between them."""

    parts: tuple[Part, ...]
    """In order."""
    seconds: float
    """Of all."""
    net_bytes: int
    """Of all."""
    rise_bytes: int
    """The most device bytes in it beyond those before it."""
    peak_label: str
    """Where that is."""
    host_s: float
    """Of the host."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostWaitStep:
    """The host waits for a few bytes of the device."""

    takes_link: bool
    """Whether they take the copy engine to it: then compute has nothing to do until they are through."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpenStep:
    """Forward reaches a site of which something leaves: the engine looks if something was left behind."""


class SubmitStep(NamedTuple):
    """A group leaves."""

    group: int
    """In the chunk."""


class ReadStep(NamedTuple):
    """Forward has read, for the last time, tensors that have been submitted before."""

    parcels: tuple[int, ...]
    """Which."""


class TakeStep(NamedTuple):
    """Backward asks for tensors."""

    group: int | None
    """The group of the site that asks, in the chunk; None where that site stays."""
    parcels: tuple[int, ...]
    """What it asks for; nothing where all that the group saved stayed."""


class LetGoStep(NamedTuple):
    """Backward takes tensors that stayed of a layer of which others left: groups may come back in their place."""

    sizes_bytes: tuple[int, ...]
    """Of each, in order; 0 of one that was taken before."""


class FreeStep(NamedTuple):
    """Backward no longer wants tensors that left."""

    parcels: tuple[int, ...]
    """Which."""


@dataclasses.dataclass(frozen=True, slots=True)
class PollStep:
    """The engine looks for copies that are done: forward comes to a layer, or backward has left the first group's site."""


@dataclasses.dataclass(frozen=True, slots=True)
class PassedStep:
    """Backward has passed a layer of which nothing leaves, or its MLP: the engine looks, and what comes next may come back."""


@dataclasses.dataclass(frozen=True, slots=True)
class TurnStep:
    """Forward of the layers is over, and their backward comes next: see `Turn` for what becomes of copies under way."""

    window_bytes: int | None
    """The most that may be, where a plan says so."""


@dataclasses.dataclass(frozen=True, slots=True)
class HoldStep:
    """A layer's token dispatcher goes on holding what its recompute began with, which backward no longer wants."""

    dispatcher: tuple[int, int]
    """Whose: of a chunk, and the layer in it."""
    size_bytes: int
    """Of that."""


@dataclasses.dataclass(frozen=True, slots=True)
class DispatchStep:
    """A token dispatcher gets other tokens, and lets go of what it held."""

    dispatcher: tuple[int, int]
    """Whose: of a chunk, and the layer in it."""


Step = (
    ComputeStep
    | HostWaitStep
    | OpenStep
    | SubmitStep
    | ReadStep
    | TakeStep
    | LetGoStep
    | FreeStep
    | PollStep
    | PassedStep
    | TurnStep
    | HoldStep
    | DispatchStep
)


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


class GroupPlace(NamedTuple):
    """A group among those of a chunk."""

    label: str
    """For people: `layers.12.core_attn`."""
    mover: Mover
    """What its copies are counted for."""
    parcels: tuple[int, ...]
    """What leaves with it."""
    members: tuple[int, ...]
    """What it saved and somebody took away: its own, and what it shares with others."""
    end_position: int
    """How many groups of the chunk began before it ended."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkProgram:
    """What a chunk does under a plan."""

    forward: tuple[Step, ...]
    """Of a microbatch."""
    backward: tuple[Step, ...]
    """Of a microbatch."""
    groups: tuple[GroupPlace, ...]
    """In the order in which forward reaches their sites."""
    parcels: tuple[Parcel, ...]
    """What leaves."""
    base_bytes: int
    """Device bytes of a microbatch from the start of its forward to the end of its backward, whatever the plan says."""
    staged_bytes: int
    """Of the layer that has the most of them: what leaves through a staging slot, which all layers share."""
    recompute_s: float
    """Seconds of compute that backward has more than without a plan."""
    content: Hashable
    """Programs of which this is equal differ in nothing but the numbers of layers, in what people read."""

    def find_label(self, label: str, other: "ChunkProgram") -> str:
        """Return what this program calls what one with the same content calls `label`."""
        if other is self:
            return label
        pairs = zip(other.list_labels(), self.list_labels(), strict=True)
        return next((own for theirs, own in pairs if theirs == label), label)

    def list_labels(self) -> list[str]:
        """Return what a peak may be named by, in an order that is the same in programs with the same content."""
        steps = [step.peak_label for step in (*self.forward, *self.backward) if isinstance(step, ComputeStep)]
        return steps + [parcel.label for parcel in self.parcels]
