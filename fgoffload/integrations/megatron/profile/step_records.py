"""The records of a measured step: segments with their times, storages that were saved, and modules that could run again."""

import dataclasses

import torch

from fgoffload.engine.device import Event
from fgoffload.engine.geometry import View, choose_gathered, get_gathered_bytes
from fgoffload.engine.identity import StorageRef


class SegmentRecord:
    """A segment of one microbatch's forward, and its backward."""

    __slots__ = (
        "backward",
        "backward_extra_bytes",
        "born_bytes",
        "forward",
        "forward_extra_bytes",
        "is_sampled",
        "name",
        "tag",
    )

    def __init__(self, name: str, *, tag: str | None, is_sampled: bool) -> None:
        self.name = name
        self.is_sampled = is_sampled
        """Whether device bytes are read when it begins and ends."""
        self.tag = tag
        """None between the regions."""
        self.forward: list[tuple[Event, Event]] = []
        """Start and end, each time that forward was here."""
        self.backward: list[tuple[Event, Event]] = []
        """The same of backward."""
        self.born_bytes = 0
        """Of storages that were saved here first, until backward has left."""
        self.forward_extra_bytes = 0
        """Device bytes at peak, beside what was there all the time and what was saved. 0 where they were not measured."""
        self.backward_extra_bytes = 0
        """The same of backward."""


class SavedRecord:
    """One storage that autograd saved in a layer, or in a model outside of its layers."""

    __slots__ = ("element_bytes", "is_held", "modules", "segments", "size_bytes", "storage", "tags", "views")

    def __init__(self, storage: StorageRef, size_bytes: int, element_bytes: int, modules: frozenset[str]) -> None:
        self.storage = storage
        """Not its memory. As long as it is referred to, no other storage has its key."""
        self.is_held = False
        """Whether something else holds it until backward, as the schedule does with what came from another pipeline rank."""
        self.size_bytes = size_bytes
        self.element_bytes = element_bytes
        """Of the first save, by which the engine's minimum size counts."""
        self.tags: dict[str, None] = {}
        """Those that save it, in the order of forward."""
        self.segments: dict[str, None] = {}
        """The same, with what is between the regions."""
        self.modules = modules
        """The watched modules that all its saves are inside."""
        self.views: set[View] = set()
        """Storages that it saves."""

    def count_gathered_bytes(self) -> int:
        """Return the device bytes in which the engine packs what leaves of the storage; 0 where it leaves as it lies."""
        size_bytes = max(view.end for view in self.views) - min(view.start for view in self.views)
        return get_gathered_bytes(choose_gathered(self.views, size_bytes=size_bytes))


@dataclasses.dataclass(slots=True)
class ModuleRecord:
    """One execution of a module that could be recomputed."""

    inputs: frozenset[int] = frozenset()
    """Keys of the storages of its input tensors."""
    input_bytes: dict[int, int] = dataclasses.field(default_factory=dict)
    """By key, of those that need a gradient: a checkpoint keeps the whole of what its arguments are views of."""
    tensor_bytes: frozenset[int] = frozenset()
    """Of these tensors themselves: copies of views have as many."""
    outputs: frozenset[int] = frozenset()
    """Keys of the storages of its output tensors."""
    segments: dict[str, None] = dataclasses.field(default_factory=dict)
    """Names of those that began inside, in the order of forward."""
    input_edges: int = 0
    """How often the graph inside reaches the input."""


class Run:
    """One microbatch through one layer, or through what a model chunk has outside of its layers."""

    __slots__ = (
        "chunk",
        "current",
        "input_bytes",
        "input_key",
        "input_keys",
        "is_leaving",
        "is_sampled",
        "microbatch",
        "modules",
        "number",
        "open_modules",
        "saved",
        "segments",
        "storages",
    )

    def __init__(self, *, chunk: int, microbatch: int, number: int, is_sampled: bool) -> None:
        self.chunk = chunk
        self.microbatch = microbatch
        self.number = number
        """Of the layer in the whole model, from 0; -1 outside of layers."""
        self.is_sampled = is_sampled
        """Whether device bytes are read when its segments begin and end."""
        self.is_leaving = False
        """Whether the engine offloads a layer while it is recorded: its times are longer than those of compute."""
        self.input_key: int | None = None
        """Of the storage of a layer's input."""
        self.input_bytes = 0
        """Of the same."""
        self.input_keys: dict[str, int] = {}
        """By tag, of the storage that its site was given."""
        self.segments: dict[str, SegmentRecord] = {}
        """By name, in the order of forward."""
        self.saved: dict[int, SavedRecord] = {}
        """By key of the storage, in the order of forward."""
        self.modules: dict[str, ModuleRecord] = {}
        """By the unit that would run the module again."""
        self.current: SegmentRecord | None = None
        """The segment that forward came to last."""
        self.open_modules: frozenset[str] = frozenset()
        """Those that forward is in."""
        self.storages: dict[int, StorageRef] = {}
        """By key, those that `name_storage` named."""

    def name_storage(self, tensor: torch.Tensor) -> int:
        """Return the key of the storage of `tensor`, which no other storage gets as long as the run is there.

        A key is an address. What nobody saves is freed while forward goes on, and the next storage is often made in its place.
        """
        storage = StorageRef(tensor)
        return self.storages.setdefault(storage.key, storage).key

    def get_segment(self, name: str, *, tag: str | None = None) -> SegmentRecord:
        """Return the segment called `name`, which begins now if it is new."""
        segment = self.segments.get(name)
        if segment is None:
            segment = self.segments[name] = SegmentRecord(name, tag=tag, is_sampled=self.is_sampled)
        for unit in self.open_modules:
            self.modules[unit].segments[name] = None
        self.current = segment
        return segment
