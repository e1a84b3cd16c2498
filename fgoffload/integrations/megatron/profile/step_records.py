"""Records of a measured step: timed segments, saved storages, and modules that could be recomputed."""

import dataclasses

import torch

from fgoffload.engine.device import Event
from fgoffload.engine.geometry import View, choose_gathered, get_gathered_bytes
from fgoffload.engine.identity import StorageRef

Span = tuple[Event, Event]
"""Start and end of work on the device."""


@dataclasses.dataclass(slots=True, eq=False)
class SegmentRecord:
    """A segment of one microbatch, in forward and backward."""

    name: str
    tag: str | None
    """Tag of the segment; None between regions."""
    is_sampled: bool
    """Whether device bytes are read at its begin and end."""
    forward: list[Span] = dataclasses.field(default_factory=list)
    backward: list[Span] = dataclasses.field(default_factory=list)
    born_bytes: int = 0
    """Bytes of storages that are first saved here, until backward has left the segment."""
    forward_extra_bytes: int = 0
    backward_extra_bytes: int = 0
    """Peak device bytes of each pass beyond static and saved bytes; 0 if not measured."""


@dataclasses.dataclass(slots=True, eq=False)
class SavedRecord:
    """A storage that autograd saved in a layer, or in a model outside of its layers."""

    storage: StorageRef
    """Weak reference to the storage. While it exists, no other storage gets its key."""
    size_bytes: int
    element_bytes: int
    """Element size of the first save in bytes, for the engine's minimum size."""
    modules: frozenset[str]
    """Watched modules that contain all its saves."""
    is_held: bool = False
    """Whether something else references it until backward, as the schedule does with tensors of another pipeline rank."""
    tags: dict[str, None] = dataclasses.field(default_factory=dict)
    """Tags that save it, in the order of forward."""
    segments: dict[str, None] = dataclasses.field(default_factory=dict)
    """Segments that save it, also between regions, in the order of forward."""
    views: set[View] = dataclasses.field(default_factory=set)

    def count_gathered_bytes(self) -> int:
        """Return the device bytes for packing its views before offload; 0 if it is offloaded without packing."""
        size_bytes = max(view.end for view in self.views) - min(view.start for view in self.views)
        return get_gathered_bytes(choose_gathered(self.views, size_bytes=size_bytes))


@dataclasses.dataclass(slots=True)
class ModuleRecord:
    """One execution of a module that could be recomputed."""

    inputs: frozenset[int] = frozenset()
    """Storage keys of the input tensors."""
    input_bytes: dict[int, int] = dataclasses.field(default_factory=dict)
    """Storage bytes of inputs that need a gradient, by key. A checkpoint keeps the whole storage of a view."""
    tensor_bytes: frozenset[int] = frozenset()
    """Bytes of the same tensors without the rest of their storages, which are also the sizes of copies."""
    outputs: frozenset[int] = frozenset()
    """Storage keys of the output tensors."""
    segments: dict[str, None] = dataclasses.field(default_factory=dict)
    """Segments that began inside the module, in the order of forward."""
    input_edges: int = 0
    """How often the graph of the module reaches its input."""


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Run:
    """One microbatch through one layer, or through the code of a model chunk outside of its layers."""

    chunk: int
    microbatch: int
    number: int
    """Number of the layer in the whole model, from 0; -1 outside of layers."""
    is_sampled: bool
    """Whether device bytes are read when its segments begin and end."""
    is_offloaded: bool = False
    """Whether the engine offloads the recorded layer, so that its times include waits for copies."""
    input_key: int | None = None
    """Storage key of the layer's input."""
    input_bytes: int = 0
    input_keys: dict[str, int] = dataclasses.field(default_factory=dict)
    """Storage key of each site's input, by tag."""
    segments: dict[str, SegmentRecord] = dataclasses.field(default_factory=dict)
    """Segments by name, in the order of forward."""
    saved: dict[int, SavedRecord] = dataclasses.field(default_factory=dict)
    """Saved storages by key, in the order of forward."""
    modules: dict[str, ModuleRecord] = dataclasses.field(default_factory=dict)
    """Modules that can be recomputed, by unit."""
    current: SegmentRecord | None = None
    """Latest segment that forward entered."""
    open_modules: frozenset[str] = frozenset()
    """Units of the modules whose forward is in progress."""
    storages: dict[int, StorageRef] = dataclasses.field(default_factory=dict)

    def name_storage(self, tensor: torch.Tensor) -> int:
        """Return the storage key of `tensor`, which is unique while the run exists.

        A key is an address, and the kept reference prevents a later storage from reusing it.
        """
        storage = StorageRef(tensor)
        return self.storages.setdefault(storage.key, storage).key

    def get_segment(self, name: str, *, tag: str | None = None) -> SegmentRecord:
        """Return the segment called `name`, or begin a new one."""
        segment = self.segments.get(name)
        if segment is None:
            segment = self.segments[name] = SegmentRecord(name, tag, self.is_sampled)
        for unit in self.open_modules:
            self.modules[unit].segments[name] = None
        self.current = segment
        return segment
