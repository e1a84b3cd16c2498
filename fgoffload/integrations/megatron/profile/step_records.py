"""Defines the records of a measured step: timed segments, saved storages, and modules that can be recomputed."""

import dataclasses

import torch

from fgoffload.engine.device import Event
from fgoffload.engine.geometry import View, choose_gathered, get_gathered_bytes
from fgoffload.engine.identity import StorageRef

Span = tuple[Event, Event]
"""Events at the start and end of a time span on the device."""


@dataclasses.dataclass(slots=True, eq=False)
class SegmentRecord:
    """Times and bytes of one segment for one microbatch, in forward and backward."""

    name: str
    tag: str | None
    """Tag of the site whose region this segment is, or None between regions."""
    is_sampled: bool
    """Whether memory counters are read at the segment's start and end."""
    forward: list[Span] = dataclasses.field(default_factory=list)
    backward: list[Span] = dataclasses.field(default_factory=list)
    born_bytes: int = 0
    """Bytes of the storages first saved in this segment. Reset to 0 when backward leaves the segment."""
    forward_extra_bytes: int = 0
    backward_extra_bytes: int = 0
    """Peak device bytes beyond static and saved bytes, in forward and in backward, or 0 if not measured."""


@dataclasses.dataclass(slots=True, eq=False)
class SavedRecord:
    """A storage that autograd saved in a layer, or in the code of a model chunk outside its layers."""

    storage: StorageRef
    """Weak reference to the storage. While it exists, no other storage gets the same key."""
    size_bytes: int
    element_bytes: int
    """Element size of the first saved tensor, to compare the storage with the minimum size, which is in elements."""
    modules: frozenset[str]
    """Units of the watched modules in which every save of the storage occurred."""
    is_held: bool = False
    """Whether other code keeps it alive until backward. The schedule, for example, holds tensors from other pipeline ranks."""
    tags: dict[str, None] = dataclasses.field(default_factory=dict)
    """Tags in whose regions the storage was saved, in forward order."""
    segments: dict[str, None] = dataclasses.field(default_factory=dict)
    """Segments in which it was saved, including those between regions, in forward order."""
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
    """Storage bytes of inputs that require a gradient, keyed by storage key. A checkpoint keeps the whole storage of a view."""
    tensor_bytes: frozenset[int] = frozenset()
    """Sizes of the same input tensors, in bytes. A contiguous copy of an input has the same size."""
    outputs: frozenset[int] = frozenset()
    """Storage keys of the output tensors."""
    segments: dict[str, None] = dataclasses.field(default_factory=dict)
    """Segments that began inside the module, in forward order."""
    input_edges: int = 0
    """Maximum number of edges from the module's autograd graph to any one of the module's inputs."""


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Run:
    """Forward and backward of one microbatch through a layer, or through the code of a model chunk outside its layers."""

    chunk: int
    microbatch: int
    number: int
    """Number of the layer in the whole model, from 0, or -1 outside layers."""
    is_sampled: bool
    """Whether memory counters are read at the start and end of its segments."""
    is_offloaded: bool = False
    """Whether the engine offloads the recorded layer. Copies then affect its times."""
    input_key: int | None = None
    """Storage key of the layer's input."""
    input_bytes: int = 0
    input_keys: dict[str, int] = dataclasses.field(default_factory=dict)
    """Storage key of the input of each site, by tag."""
    segments: dict[str, SegmentRecord] = dataclasses.field(default_factory=dict)
    """Segments in forward order, keyed by name."""
    saved: dict[int, SavedRecord] = dataclasses.field(default_factory=dict)
    """Saved storages in forward order, keyed by storage key."""
    modules: dict[str, ModuleRecord] = dataclasses.field(default_factory=dict)
    """Executions of modules that can be recomputed, keyed by unit name."""
    current: SegmentRecord | None = None
    """Segment that forward entered most recently."""
    open_modules: frozenset[str] = frozenset()
    """Units of the modules whose forward is running."""
    storages: dict[int, StorageRef] = dataclasses.field(default_factory=dict)

    def name_storage(self, tensor: torch.Tensor) -> int:
        """Return the key of `tensor`'s storage, which is its address. A weak reference keeps the key from being reused."""
        storage = StorageRef(tensor)
        return self.storages.setdefault(storage.key, storage).key

    def get_segment(self, name: str, *, tag: str | None = None) -> SegmentRecord:
        """Return the segment called `name`, and make it current. Create it if necessary."""
        segment = self.segments.get(name)
        if segment is None:
            segment = self.segments[name] = SegmentRecord(name, tag, self.is_sampled)
        for unit in self.open_modules:
            self.modules[unit].segments[name] = None
        self.current = segment
        return segment
