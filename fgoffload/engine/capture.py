"""Offloads tensors of layers captured in CUDA graphs, through staging slots.

[Note: Captured layers]
The layer runs twice: the warm-up only counts the bytes to stage, and the capture stages the tensors. Hooks cover the whole
layer, because an op outside the regions may save a view of a region's tensor. A region only sets the current tag. After forward
has returned, the engine stages each storage that a region saved and that only this capture references. Static inputs and
outputs of the graph stay on the device.
"""

import dataclasses
from collections.abc import Iterable
from types import TracebackType

import torch

from fgoffload.engine.device import Device
from fgoffload.engine.geometry import View, get_view, round_up
from fgoffload.engine.handles import KeptHandle, find_local_tensor, keep_tensor
from fgoffload.engine.identity import Contents, count_tensors, get_key, identify
from fgoffload.engine.keep_rules import KeepRules
from fgoffload.engine.place import Place
from fgoffload.engine.saved import SavedStorage
from fgoffload.engine.saved_registry import SavedRegistry
from fgoffload.engine.staging import CapturedForward, StagedPart, Staging
from fgoffload.engine.stats import KeptReason, TagStats
from fgoffload.engine.torch_internals import pop_hooks, push_hooks


@dataclasses.dataclass(slots=True, eq=False)
class CapturedHandle:
    """Handle of a tensor saved during a capture."""

    part: StagedPart
    view: View
    place: Place

    def take(self) -> torch.Tensor:
        """Return the saved tensor. In a captured backward, it is at the address that replays read."""
        return self.part.take(self.view)


class Capture:
    """Context manager and pack hook for one forward of a layer, during warm-up or capture."""

    def __init__(self, device: Device, staging: Staging, registry: SavedRegistry, rules: KeepRules, place: Place) -> None:
        self._device = device
        self._staging = staging
        self._registry = registry
        self._rules = rules
        self._place = place
        self._stream = device.current_stream()
        self._parts: dict[tuple[int, Contents], StagedPart] = {}
        self.stats: TagStats | None = None
        """Statistics of the current region's tag; None between regions."""

    def __call__(self, tensor: torch.Tensor) -> CapturedHandle | KeptHandle:
        """Pack hook: return a handle for `tensor`."""
        if find_local_tensor(tensor) is not None or self._registry.find_reason_to_keep(tensor) is not None:
            return keep_tensor(tensor, self._place)
        if self._device.current_stream() != self._stream:
            return keep_tensor(tensor, self._place)  # the capture cannot order its copies after work on another stream
        key, contents = identify(tensor)
        part = self._parts.get((key, contents))
        if part is None:
            part = self._parts[key, contents] = StagedPart(self._registry.make(tensor, contents, self._place))
        view = get_view(tensor)
        part.saved.add(tensor.detach(), view)  # a new object, so that `count_tensors` also counts a live `tensor`
        if self.stats is not None:
            part.stats = part.stats or self.stats
        return CapturedHandle(part, view, self._place)

    def unpack(self, handle: CapturedHandle | KeptHandle) -> torch.Tensor:
        """Unpack hook: return the tensor of `handle`."""
        return handle.take()

    def __enter__(self) -> "Capture":
        push_hooks(self, self.unpack)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Remove the hooks, even after an exception."""
        pop_hooks()

    def finish(self, static: Iterable[torch.Tensor]) -> CapturedForward | None:
        """Stage the tensors that regions saved. Call this after forward has returned, when its local variables are freed.

        `static` contains the graph's inputs and outputs. The result is None during warm-up, or if nothing is staged.
        """
        keys = {get_key(tensor) for tensor in static}
        parts = []
        for part in self._parts.values():
            if part.stats is None:
                continue
            reason = self._find_reason(part.saved, keys)
            if reason is None:
                parts.append(part)
            else:
                part.stats.add_kept(reason, part.saved.size_bytes)
        if not self._device.is_capturing():
            self._staging.reserve(sum(round_up(part.saved.size_bytes) for part in parts))
            return None
        return self._staging.stage(parts)

    def _find_reason(self, saved: SavedStorage, static: set[int]) -> KeptReason | None:
        if saved.find_change("it was staged") is not None:
            return KeptReason.CHANGED
        if saved.storage.key in static or count_tensors(saved.get_any_alias()) > len(saved.views):
            return KeptReason.REFERENCED
        return KeptReason.TOO_SMALL if self._rules.is_too_small(saved) else None


@dataclasses.dataclass(slots=True, eq=False)
class CapturedRegion:
    """Region of a captured layer. It has the methods of `Region`, but only sets the current tag."""

    capture: Capture
    stats: TagStats
    _before: TagStats | None = None

    def enter(self, tensor: torch.Tensor) -> None:
        """Do nothing, because the engine does not track the position of a captured backward."""

    def saving(self) -> "CapturedRegion":
        """Return a context manager. Tensors saved inside it belong to the region."""
        return self

    def __enter__(self) -> None:
        self._before, self.capture.stats = self.capture.stats, self.stats

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.capture.stats = self._before

    def end(self, tensor: torch.Tensor | None = None, *, is_held: bool = False) -> None:
        """Do nothing, because `Capture.finish` handles the whole layer."""
