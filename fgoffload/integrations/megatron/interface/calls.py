"""Translates calls of Megatron's interface for the integration, for both generations of the interface."""

import functools
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from fgoffload.defaults import DEFAULT_MIN_OFFLOADED_TENSOR_SIZE
from fgoffload.engine import CapturedRegion, Region, Saving
from fgoffload.integrations.megatron.adapter.offload import MegatronOffload
from fgoffload.integrations.megatron.graphs.graphed_layers import is_capturing

logger = logging.getLogger(__name__)

_MEGATRON_DEFAULTS: dict[str, float] = {
    "min_offloaded_tensor_size": DEFAULT_MIN_OFFLOADED_TENSOR_SIZE,
    "activation_offload_fraction": 1.0,
    "delta_offload_bytes_across_pp_ranks": 0,
}
"""Defaults of `TransformerConfig` in both generations."""


class Calls:
    """Serves the calls of Megatron's interface. Only the replaced methods hold it."""

    def __init__(self, get_offload: Callable[[], MegatronOffload]) -> None:
        self._get_offload = get_offload
        self.is_enabled = True
        """Whether sites save for us; false between `disable_offload` and `enable_offload`."""
        self._begun: dict[int, int] = {}
        """Number of begun microbatches by chunk when offload was disabled."""
        self._warned: set[str] = set()

    @property
    def offload(self) -> MegatronOffload:
        """Integration that serves the calls."""
        return self._get_offload()

    def begin_microbatch(self, vp_stage: int | None, max_inflight_offloads: int | None, **settings: float | None) -> None:
        """Begin a forward of the model chunk `vp_stage`; None is the only chunk.

        At most `max_inflight_offloads` groups of each tag may be in flight to the host before compute waits. `settings` are
        values of Megatron's config, by the name of their field. Our own config takes precedence.
        """
        for name, given in settings.items():
            ours = getattr(self.offload.config, name)
            if given not in (ours, _MEGATRON_DEFAULTS.get(name)) and name not in self._warned:
                self._warned.add(name)
                logger.warning("%s=%s of Megatron's config has no effect: offload is applied with %s.", name, given, ours)
        self.offload.begin_microbatch(vp_stage or 0, most_in_flight=max_inflight_offloads)

    def disable(self) -> None:
        """Stop offload for the warm-up of a CUDA graph, which does not belong to a step.

        The warm-up of a layer's graph only counts later offloads: see [Note: Captured layers] in `fgoffload/engine/capture.py`.
        """
        if self.is_enabled:
            self._begun = dict(self.offload.microbatches_begun)
        self.is_enabled = False

    def enable(self) -> None:
        """Resume offload after the warm-up."""
        if not self.is_enabled:
            self.offload.microbatches_begun = dict(self._begun)
        self.is_enabled = True

    def keep(self, tensor: torch.Tensor | None) -> None:
        """Never offload `tensor`. Megatron passes None if a module has no such parameter."""
        if tensor is not None:
            self.offload.engine.keep([tensor])


class CallSite:
    """One execution of a call site, behind an object of Megatron's interface class.

    `open_region` returns its region, or None if its tensors stay on the GPU; it is itself None if the site is off.
    """

    __slots__ = ("_calls", "_open_region", "_region", "_saving", "_tensor")

    def __init__(
        self, calls: Calls, tensor: torch.Tensor, open_region: Callable[[], Region | CapturedRegion | None] | None
    ) -> None:
        self._calls = calls
        self._open_region = open_region
        self._tensor: torch.Tensor | None = tensor
        self._region: Region | CapturedRegion | None = None
        self._saving: Saving | CapturedRegion | None = None

    def enter(self) -> torch.Tensor | None:
        """Start saving, and return the input of the site.

        Saving does not start earlier: if a checkpoint replaces the site, Megatron makes the object too, and never enters it.
        """
        # Not kept: newer call sites hold this object until the group is offloaded, and would hold the input too.
        tensor, self._tensor = self._tensor, None
        if self._open_region is None or not (self._calls.is_enabled or is_capturing()) or tensor is None:
            return tensor
        self._region = self._open_region()
        if self._region is not None:
            self._region.enter(tensor)
            self._saving = self._region.saving()
            self._saving.__enter__()
        return tensor

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop saving."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.__exit__(kind, error, trace)

    def end(self, *, may_wait: bool) -> None:
        """End the group so that it is offloaded. Does nothing without a group, or while offload is disabled."""
        region, self._region = self._region, None
        if region is not None and self._calls.is_enabled:
            self._calls.offload.end(region, may_wait=may_wait)


def make_context_methods(calls: Calls, open_region: Callable[[str], Region | CapturedRegion | None]) -> dict[str, Any]:
    """Return the methods that make the interface class a context: `with interface(flag, tensor, name) as tensor:`.

    `open_region` returns the region of a tag in the current layer.
    """

    def initialize(self: Any, offload: Any, tensor: torch.Tensor, name: str) -> None:
        self.site = CallSite(calls, tensor, functools.partial(open_region, name) if offload else None)

    def enter(self: Any) -> torch.Tensor | None:
        site: CallSite = self.site
        return site.enter()

    def leave(self: Any, *args: Any) -> None:
        site: CallSite = self.site
        site.leave(*args)

    return {"__init__": initialize, "__enter__": enter, "__exit__": leave}
