"""One layer as the simulator and the solver see it: stretches of compute, what they save, and what may run again.

`op_times` makes one from a shape and a device, and a profile makes one from measurements. All times are those of one microbatch
on one rank, with nothing else running.
"""

import dataclasses
import enum
import functools

from fgoffload.tags import find_recompute_unit


class HostWait(enum.Enum):
    """Synchronization of the host before a segment: it must read a few bytes of the device first.

    Source: docs/reference/tags.md, where the host waits.
    """

    KERNEL = "kernel"  # a kernel writes them to the host: the host waits for compute alone, and where it runs again for nothing
    HOLD = "hold"  # they take the copy engine, and groups of the layer that ended before are held until they are through
    COPY = "copy"  # they take the copy engine behind whatever is queued there, as without our remedies


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of a layer: what runs between two places where groups may end."""

    name: str
    """The tag whose module runs here, or what runs between them: `dispatch`. One of each name in a layer."""
    forward_s: float
    """Seconds of compute."""
    backward_s: float
    """Seconds of compute."""
    forward_extra_bytes: int = 0
    """Device bytes that are there while forward runs and gone when it is over, beside what is saved."""
    backward_extra_bytes: int = 0
    """Device bytes that are there while backward runs: gradients of activations, and what it computes with."""
    host_wait: HostWait | None = None
    """Synchronization of the host before it launches the forward, or None."""
    forward_host_s: float = 0.0
    """Seconds that a forward pass takes beside `forward_s`, since the host launches it later than what `forward_s` is of; below
    0 where it launches it earlier. Not where the stretch runs again."""

    @property
    def forward_pass_s(self) -> float:
        """Seconds of the stretch in a forward pass, as the host launches it there."""
        return self.forward_s + self.forward_host_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One storage that one or several tags of a layer save."""

    name: str
    """For people."""
    tags: tuple[str, ...]
    """Those that save it, in the order of forward; none in `untagged_bytes.list_untagged_tensors`."""
    size_bytes: int
    """On this rank, of one microbatch."""
    is_same_in_all_layers: bool = False
    """All layers save the same storage, which leaves once a microbatch."""
    element_bytes: int = 2
    """Of an element, by which the minimum size counts: 2 in bf16."""
    stays: bool = False
    """It stays on the device whatever a plan says."""

    def is_below(self, numel: int) -> bool:
        """Return whether it has fewer than `numel` elements."""
        return self.size_bytes < numel * self.element_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnitModel:
    """A part of a layer that can be recomputed by itself: the bytes it frees, and its cost."""

    name: str
    """As a plan names it: a unit of `fgoffload.tags.RECOMPUTE_UNITS`, or a name that the layer alone knows."""
    segments: tuple[str, ...]
    """Names of the stretches that run again, in the order of forward."""
    drops: tuple[str, ...]
    """Names of the saved tensors that are not saved then. While the unit has run again, they are there."""
    held: tuple[str, ...] = ()
    """Of these, what the layer's forward holds to its end all the same."""
    keeps: tuple[SavedTensor, ...] = ()
    """Inputs that the unit saves in exchange, to be recomputed from."""
    before: str
    """The unit runs again right before the backward of this stretch: where Megatron asks for what was dropped, which may be
    earlier than the first stretch that needs it."""
    forward_part: float = 1.0
    """Of the seconds of its stretches' forward, what runs again: 1 where all of it does."""
    extra_s: float = 0.0
    """Seconds of compute beside the forward of its stretches: what it takes longer than that, and copies of what ran again to
    where others look for it."""
    extra_bytes: int = 0
    """Device bytes beside what was dropped, from running again until the backward of all its stretches is over."""
    copy_s: float = 0.0
    """Seconds on top where Megatron's own checkpoint runs it again, which copies what that returns to where forward had it."""
    copy_bytes: int = 0
    """Device bytes on top there."""
    covers: tuple[str, ...] | None = None
    """Tags and units of the layer that are recomputed with it and save nothing then. None takes those of the unit's name in
    `fgoffload.tags`."""

    @property
    def covered(self) -> tuple[str, ...]:
        """Tags and units of the layer that are recomputed with it and save nothing then."""
        if self.covers is not None:
            return self.covers
        unit = find_recompute_unit(self.name)
        return () if unit is None else unit.covers

    @property
    def excluded(self) -> tuple[str, ...]:
        """Units of the layer that cannot be recomputed beside it."""
        unit = find_recompute_unit(self.name)
        return () if unit is None else unit.excludes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerModel:
    """A kind of layer: layers of one kind are alike, and the solver treats them as one. What it comes to is counted once."""

    kind: str
    """For people: `dense`, `moe`, `mtp`."""
    segments: tuple[Segment, ...]
    """In the order of forward. Backward goes the other way."""
    tensors: tuple[SavedTensor, ...]
    """Storages that it saves without recompute and offload, in forward order.

    A tensor is there from the end of the stretch of its first tag on, and backward asks for it at the stretch of its last tag;
    tags without a stretch of their name count as the first stretch. It leaves where any of its tags is offloaded, once, with
    the group of the first of those.
    """
    units: tuple[UnitModel, ...] = ()
    """Units that can be recomputed by themselves."""

    def __hash__(self) -> int:
        """Return what kinds that are equal have alike. To hash all fields, each time that one is looked up, takes too long."""
        return hash((self.kind, len(self.segments), len(self.tensors), len(self.units)))

    @functools.cached_property
    def forward_s(self) -> float:
        """Seconds of compute of the whole forward, without what it waits for launches."""
        return sum(segment.forward_s for segment in self.segments)

    @functools.cached_property
    def backward_s(self) -> float:
        """Seconds of compute of the whole backward, with nothing run again."""
        return sum(segment.backward_s for segment in self.segments)

    @functools.cached_property
    def saved_bytes(self) -> int:
        """Bytes of all tensors that it saves where nothing runs again, without those that all layers share."""
        return sum(tensor.size_bytes for tensor in self.tensors if not tensor.is_same_in_all_layers)

    @functools.cached_property
    def shares_router_input(self) -> bool:
        """Return whether shared experts save the hidden states that the router gets too."""
        return any("shared_expert" in tensor.tags for tensor in self.tensors)

    @functools.cached_property
    def offloadable_tags(self) -> frozenset[str]:
        """Return the tags that save something that may leave."""
        return frozenset(tag for tensor in self.tensors if self.may_leave(tensor) for tag in tensor.tags)

    def may_leave(self, tensor: SavedTensor) -> bool:
        """Return whether `tensor` may leave at all."""
        return not tensor.stays

    def is_staged(self, tensor: SavedTensor) -> bool:
        """Return whether `tensor` leaves through a staging slot, from inside of a CUDA graph."""
        return False

    def find_unit(self, name: str) -> UnitModel | None:
        """Return the unit called `name`, or None where the layer cannot run it again by itself."""
        return next((unit for unit in self.units if unit.name == name), None)
