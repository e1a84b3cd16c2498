"""What autograd saves in a layer that a CUDA graph captures, and which of it leaves through the staging slots.

[Note: Captured layers]
The layer runs twice: once to warm up, where nothing leaves and the bytes that will are counted, and once for the graph. Hooks
are around all of it. A region only says whose tag is saved now: an op outside of every region may save a view of what a region
saves, and would hold its memory. At the end of forward, when all frames of the layer are gone, a storage leaves if a region
saved it and nothing but this capture looks at it. Static inputs and outputs of the graph stay.
"""

from collections.abc import Iterable
from types import TracebackType
from typing import Protocol

import torch

from fgoffload.engine.device import Device
from fgoffload.engine.geometry import View, get_view, round_up
from fgoffload.engine.handles import KeptHandle, find_local_tensor, keep_tensor
from fgoffload.engine.identity import Contents, count_tensors, get_key, identify
from fgoffload.engine.place import Place
from fgoffload.engine.saved import SavedStorage
from fgoffload.engine.staging import CapturedForward, StagedPart, Staging
from fgoffload.engine.stats import KeptReason, TagStats
from fgoffload.engine.torch_internals import pop_hooks, push_hooks


class StagingEngine(Protocol):
    """What a capture asks of the engine that it is for."""

    device: Device
    staging: Staging

    def find_reason_to_stay(self, tensor: torch.Tensor) -> KeptReason | None:
        """Return why `tensor` stays for what it is, or None where it may leave."""

    def is_too_small(self, saved: SavedStorage) -> bool:
        """Return whether `saved` stays since all that was saved of it is too small to leave."""

    def make_saved(self, tensor: torch.Tensor, contents: Contents, place: Place) -> SavedStorage:
        """Return a saved storage that no group has."""


class CapturedHandle:
    """What a saved tensor is packed into while its layer is captured."""

    __slots__ = ("_part", "_view", "place")

    def __init__(self, part: StagedPart, view: View, place: Place) -> None:
        self._part = part
        self._view = view
        self.place = place
        """Where the tensor was saved."""

    def take(self) -> torch.Tensor:
        """Return the tensor for autograd: in a captured backward, where the bytes will lie when that is replayed."""
        return self._part.take(self._view)


class Capture:
    """One forward of a layer that is captured, or warms up for that. It is the pack hook of all of it too.

    Args:
        engine: Knows what may leave, and stages it.
        place: The layer and microbatch.
    """

    def __init__(self, engine: StagingEngine, place: Place) -> None:
        self._engine = engine
        self._place = place
        self._stream = engine.device.current_stream()
        self._parts: dict[tuple[int, Contents], StagedPart] = {}
        self.stats: TagStats | None = None
        """Of the tag whose region forward is in; None between the regions."""

    def __call__(self, tensor: torch.Tensor) -> CapturedHandle | KeptHandle:
        """Return the handle from which autograd gets the tensor back."""
        engine = self._engine
        if find_local_tensor(tensor) is not None or engine.find_reason_to_stay(tensor) is not None:
            return keep_tensor(tensor, self._place)
        if engine.device.current_stream() != self._stream:
            return keep_tensor(tensor, self._place)  # a branch of the graph, which nothing here orders
        key, contents = identify(tensor)
        part = self._parts.get((key, contents))
        if part is None:
            part = self._parts[key, contents] = StagedPart(engine.make_saved(tensor, contents, self._place))
        view = get_view(tensor)
        part.saved.add(tensor.detach(), view)  # an object of its own: whoever else holds `tensor` is counted apart
        if self.stats is not None:
            part.stats = part.stats or self.stats
        return CapturedHandle(part, view, self._place)

    def take_back(self, handle: CapturedHandle | KeptHandle) -> torch.Tensor:
        """Return the tensor of `handle`: the unpack hook."""
        return handle.take()

    def __enter__(self) -> "Capture":
        """Begin to save."""
        push_hooks(self, self.take_back)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop, on an exception too."""
        pop_hooks()

    def finish(self, static: Iterable[torch.Tensor]) -> CapturedForward | None:
        """Let what regions saved leave, now that the frames of the forward are gone.

        Args:
            static: Inputs and outputs of the graph.

        Returns:
            What was staged, for replays; None while the layer warms up, and where nothing leaves.
        """
        staging, is_capturing = self._engine.staging, self._engine.device.is_capturing()
        keys = {get_key(tensor) for tensor in static}
        parts = [part for part in self._parts.values() if part.stats is not None and self._may_leave(part, keys)]
        if not is_capturing:
            staging.reserve(sum(round_up(part.saved.size_bytes) for part in parts))
            return None
        return staging.stage(parts)

    def _may_leave(self, part: StagedPart, static: set[int]) -> bool:
        reason = self._find_reason(part.saved, static)
        if reason is not None and part.stats is not None:
            part.stats.add_kept(reason, part.saved.size_bytes)
        return reason is None

    def _find_reason(self, saved: SavedStorage, static: set[int]) -> KeptReason | None:
        if saved.find_change("it was staged") is not None:
            return KeptReason.CHANGED
        if saved.storage.key in static or count_tensors(saved.get_any_alias()) > len(saved.views):
            return KeptReason.REFERENCED
        return KeptReason.TOO_SMALL if self._engine.is_too_small(saved) else None


class CapturedRegion:
    """A region inside of a captured layer: says whose tag is saved. It has the methods of `Region`."""

    __slots__ = ("_before", "_capture", "_stats")

    def __init__(self, capture: Capture, stats: TagStats) -> None:
        self._capture = capture
        self._stats = stats
        self._before: TagStats | None = None

    def enter(self, tensor: torch.Tensor) -> None:
        """Do nothing: no backward of a graph asks where it is."""

    def saving(self) -> "CapturedRegion":
        """Return the context in which what autograd saves is the region's."""
        return self

    def __enter__(self) -> None:
        """Begin to save."""
        self._before, self._capture.stats = self._capture.stats, self._stats

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop."""
        self._capture.stats = self._before

    def end(self, tensor: torch.Tensor | None = None, *, is_held: bool = False) -> None:
        """Do nothing: all of the layer leaves together."""
