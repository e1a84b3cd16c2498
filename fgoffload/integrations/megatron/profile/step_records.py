"""Defines the records of a measured step: timed segments, saved storages, and modules that can be recomputed."""

import dataclasses

import torch

from fgoffload.engine.device import Event
from fgoffload.engine.geometry import View, choose_gathered, get_gathered_bytes
from fgoffload.engine.identity import StorageRef

Span = tuple[Event, Event]
"""Events at the start and the end of a period on the device."""


@dataclasses.dataclass(slots=True, eq=False)
class SegmentRecord:
    """Times and bytes of one segment for one microbatch, in forward and backward."""

    name: str
    tag: str | None
    """Tag of the segment, or None between regions."""
    is_sampled: bool
    """Whether device bytes are read at its start and end."""
    forward: list[Span] = dataclasses.field(default_factory=list)
    backward: list[Span] = dataclasses.field(default_factory=list)
    born_bytes: int = 0
    """Bytes of the storages first saved in this segment. Reset to 0 when backward leaves the segment."""
    forward_extra_bytes: int = 0
    backward_extra_bytes: int = 0
    """Peak device bytes in each pass beyond static and saved bytes, or 0 if not measured."""


@dataclasses.dataclass(slots=True, eq=False)
class SavedRecord:
    """A storage that autograd saved in a layer, or in a model outside its layers."""

    storage: StorageRef
    """Weak reference to the storage. While the reference exists, no other storage gets its key."""
    size_bytes: int
    element_bytes: int
    """Element size in bytes of the first saved tensor, for the engine's minimum size."""
    modules: frozenset[str]
    """Units of the watched modules that contain every save of the storage."""
    is_held: bool = False
    """Whether other code references it until backward. The schedule, for example, holds tensors from other pipeline ranks."""
    tags: dict[str, None] = dataclasses.field(default_factory=dict)
    """Tags whose regions save it, in forward order."""
    segments: dict[str, None] = dataclasses.field(default_factory=dict)
    """Segments that save it, including those between regions, in forward order."""
    views: set[View] = dataclasses.field(default_factory=set)

    def count_gathered_bytes(self) -> int:
        """Return the device bytes needed to pack its views before offload, or 0 if it is offloaded without packing."""
        size_bytes = max(view.end for view in self.views) - min(view.start for view in self.views)
        return get_gathered_bytes(choose_gathered(self.views, size_bytes=size_bytes))


@dataclasses.dataclass(slots=True)
class ModuleRecord:
    """One execution of a module that can be recomputed."""

    inputs: frozenset[int] = frozenset()
    """Storage keys of the input tensors."""
    input_bytes: dict[int, int] = dataclasses.field(default_factory=dict)
    """Storage bytes of inputs that require a gradient, by storage key. A checkpoint keeps the whole storage of a view."""
    tensor_bytes: frozenset[int] = frozenset()
    """Tensor sizes of the same inputs, in bytes. A contiguous copy of an input has the same size."""
    outputs: frozenset[int] = frozenset()
    """Storage keys of the output tensors."""
    segments: dict[str, None] = dataclasses.field(default_factory=dict)
    """Segments that began inside the module, in forward order."""
    input_edges: int = 0
    """Maximum number of edges from the module's autograd graph to any one of its inputs."""


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Run:
    """One microbatch's pass through a layer, or through the code of a model chunk outside its layers."""

    chunk: int
    microbatch: int
    number: int
    """Number of the layer in the whole model, from 0, or -1 outside layers."""
    is_sampled: bool
    """Whether device bytes are read at the start and end of its segments."""
    is_offloaded: bool = False
    """Whether the engine offloads the recorded layer. Its times then include waits for copies."""
    input_key: int | None = None
    """Storage key of the layer's input."""
    input_bytes: int = 0
    input_keys: dict[str, int] = dataclasses.field(default_factory=dict)
    """Storage keys of the sites' inputs, by tag."""
    segments: dict[str, SegmentRecord] = dataclasses.field(default_factory=dict)
    """Segments by name, in forward order."""
    saved: dict[int, SavedRecord] = dataclasses.field(default_factory=dict)
    """Saved storages by key, in forward order."""
    modules: dict[str, ModuleRecord] = dataclasses.field(default_factory=dict)
    """Modules that can be recomputed, by the name of their unit."""
    current: SegmentRecord | None = None
    """Segment that forward entered most recently."""
    open_modules: frozenset[str] = frozenset()
    """Units of the modules that forward is in."""
    storages: dict[int, StorageRef] = dataclasses.field(default_factory=dict)

    def name_storage(self, tensor: torch.Tensor) -> int:
        """Return the address of `tensor`'s storage as its key. A weak reference keeps other storages from getting the key."""
        storage = StorageRef(tensor)
        return self.storages.setdefault(storage.key, storage).key

    def get_segment(self, name: str, *, tag: str | None = None) -> SegmentRecord:
        """Return the segment called `name`. Create it if necessary."""
        segment = self.segments.get(name)
        if segment is None:
            segment = self.segments[name] = SegmentRecord(name, tag, self.is_sampled)
        for unit in self.open_modules:
            self.modules[unit].segments[name] = None
        self.current = segment
        return segment
