"""Models a layer for the simulator and the solver: compute segments, saved tensors and recompute units.

Times are for one microbatch on an otherwise idle rank.
"""

import dataclasses
import enum
import functools

from fgoffload.tags import find_recompute_unit


class HostWait(enum.Enum):
    """How the host synchronizes before a segment to read a few bytes from the device (see docs/reference/tags.md)."""

    KERNEL = "kernel"  # a kernel writes the bytes to the host, which waits only for compute; a recompute does not wait
    HOLD = "hold"  # the copy engine sends the bytes; until they arrive, the layer's finished groups are not offloaded
    COPY = "copy"  # the copy engine sends the bytes after all queued copies, as without this package


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A range of ops in a layer, between two points where groups can end."""

    name: str  # tag of the module, or a name for ops between modules, such as `dispatch`; unique in a layer
    forward_s: float  # seconds of forward compute
    backward_s: float  # seconds of backward compute
    forward_extra_bytes: int = 0  # temporary device bytes of forward, excluding saved tensors
    backward_extra_bytes: int = 0  # temporary device bytes of backward: activation gradients and workspaces
    host_wait: HostWait | None = None  # synchronization of the host before it launches the forward, or None
    forward_host_s: float = 0.0
    """Launch delay to add to `forward_s` in a forward pass, in seconds; negative if the host launches earlier than when
    `forward_s` was measured. A recompute does not have this delay."""

    @property
    def forward_pass_s(self) -> float:
        """Seconds of the segment in a forward pass, launch delay included."""
        return self.forward_s + self.forward_host_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A storage that a layer saves under one or more tags."""

    name: str  # name for tables and errors
    tags: tuple[str, ...]  # tags under which it is saved, in forward order; can be empty only in `UnitModel.keeps`
    size_bytes: int  # bytes on this rank for one microbatch
    is_same_in_all_layers: bool = False  # whether all layers share this storage, which then stays on the GPU
    element_bytes: int = 2  # bytes per element, to convert the minimum number of elements to bytes
    stays: bool = False  # whether the tensor stays on the GPU under any plan

    def is_below(self, numel: int) -> bool:
        """Return whether the tensor has fewer than `numel` elements."""
        return self.size_bytes < numel * self.element_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnitModel:
    """A recompute unit of a layer: the tensors that it frees, and its cost."""

    name: str  # name in a plan: a unit of `fgoffload.tags.RECOMPUTE_UNITS`, or a custom name
    segments: tuple[str, ...]  # names of the recomputed segments, in forward order
    drops: tuple[str, ...]  # names of tensors that are recomputed instead of saved
    held: tuple[str, ...] = ()  # tensors in `drops` that the layer references until its forward ends
    keeps: tuple[SavedTensor, ...] = ()  # inputs that are saved to recompute the unit
    before: str
    """The unit is recomputed before the backward of this segment, even if backward needs the tensors only later."""
    forward_part: float = 1.0  # fraction of its segments' forward time that the recompute takes
    extra_s: float = 0.0
    """Seconds of recompute beyond the forward of its segments, including copies of recomputed tensors."""
    extra_bytes: int = 0  # device bytes beyond the dropped tensors, from the recompute to the end of its segments' backward
    copy_s: float = 0.0  # seconds that Megatron's own checkpoint takes to copy recomputed outputs
    copy_bytes: int = 0  # device bytes of these copies
    covers: tuple[str, ...] | None = None
    """Tags and units inside this unit, whose tensors are not saved if it is recomputed. None: as in `fgoffload.tags`."""

    @property
    def covered(self) -> tuple[str, ...]:
        """Tags and units inside this unit, whose tensors are not saved if it is recomputed."""
        if self.covers is not None:
            return self.covers
        unit = find_recompute_unit(self.name)
        return () if unit is None else unit.covers

    @property
    def excluded(self) -> tuple[str, ...]:
        """Units that the layer cannot recompute together with this one."""
        unit = find_recompute_unit(self.name)
        return () if unit is None else unit.excludes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerModel:
    """A kind of layer. Layers of one kind are identical, so the solver computes their treatments and totals once."""

    kind: str  # name for tables: `dense`, `moe`, `mtp`
    segments: tuple[Segment, ...]  # segments in forward order; backward runs them in reverse
    tensors: tuple[SavedTensor, ...]
    """Storages that the layer saves without recompute and offload, in forward order.

    A tensor exists from the end of its first tag's segment. Backward first needs it at its last tag's segment. A tag without a
    segment belongs to the first segment. A tensor is offloaded once, with the first of its tags' groups to be submitted.
    """
    units: tuple[UnitModel, ...] = ()  # recompute units that the layer supports

    def __hash__(self) -> int:
        """Hash only a few fields, because hashing all of them at each lookup is too slow."""
        return hash((self.kind, len(self.segments), len(self.tensors), len(self.units)))

    @functools.cached_property
    def forward_s(self) -> float:
        """Seconds of forward compute, without launch delays."""
        return sum(segment.forward_s for segment in self.segments)

    @functools.cached_property
    def backward_s(self) -> float:
        """Seconds of backward compute, without recompute."""
        return sum(segment.backward_s for segment in self.segments)

    @functools.cached_property
    def saved_bytes(self) -> int:
        """Bytes of all saved tensors without recompute, except those that all layers share."""
        return sum(tensor.size_bytes for tensor in self.tensors if not tensor.is_same_in_all_layers)

    @functools.cached_property
    def shares_router_input(self) -> bool:
        """Whether the layer has shared experts, which may save the router's input too."""
        return any("shared_expert" in tensor.tags for tensor in self.tensors)

    @functools.cached_property
    def offloadable_tags(self) -> frozenset[str]:
        """Tags with at least one offloadable tensor."""
        return frozenset(tag for tensor in self.tensors if not tensor.stays for tag in tensor.tags)

    def is_staged(self, tensor: SavedTensor) -> bool:
        """Return whether `tensor` is offloaded through a staging slot, from inside a CUDA graph."""
        return False

    def find_unit(self, name: str) -> UnitModel | None:
        """Return the recompute unit `name`, or None if the layer does not support it."""
        return next((unit for unit in self.units if unit.name == name), None)
