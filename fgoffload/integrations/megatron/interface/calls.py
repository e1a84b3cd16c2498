"""Translates Megatron's calls for the integration: one core for both generations of their interface."""

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
"""Defaults of `TransformerConfig`, in both generations."""


class Calls:
    """Answers the calls on Megatron's interface. It lives as long as the replaced methods, which alone hold it."""

    def __init__(self, get_offload: Callable[[], MegatronOffload]) -> None:
        self._get_offload = get_offload
        self.is_enabled = True
        """Whether sites save for us; off between `disable_offload` and `enable_offload`."""
        self._begun: dict[int, int] = {}
        """Microbatches, by chunk, when offload was disabled."""
        self._warned: set[str] = set()

    @property
    def offload(self) -> MegatronOffload:
        """The integration."""
        return self._get_offload()

    def begin_microbatch(
        self, vp_stage: int | None, *, max_inflight_offloads: int | None = None, **settings: float | None
    ) -> None:
        """A forward of the model chunk `vp_stage` begins; None is the only one.

        Args:
            vp_stage: The virtual pipeline stage.
            max_inflight_offloads: How many groups of each tag may be on their way to the host before compute waits.
            settings: What Megatron's config says, by the name of its field. Ours says what counts.
        """
        self._warn_of_settings(settings)
        self.offload.begin_microbatch(vp_stage or 0, most_in_flight=max_inflight_offloads)

    def finish_step(self) -> None:
        """A schedule has run all its microbatches.

        From 0.18 on Megatron says so after an evaluation too, and around the capture of CUDA graphs. Without a forward that
        saves since the last time that is no step.

        Raises:
            IntegrationError: A selected tag saved nothing on any rank.
            PlanError: The plan names a site that no rank has.
        """
        self.offload.finish_open_step()

    def disable(self) -> None:
        """What comes now is the warm-up of a CUDA graph: nothing leaves, and it is no part of a step.

        Of a layer's graph it is only counted what will leave: see [Note: Captured layers] in `fgoffload/engine/capture.py`.
        """
        if self.is_enabled:
            self._begun = self.offload.count_microbatches()
        self.is_enabled = False

    def enable(self) -> None:
        """The warm-up is over."""
        if not self.is_enabled:
            self.offload.leave_out_microbatches(self._begun)
        self.is_enabled = True

    def keep(self, tensor: torch.Tensor | None) -> None:
        """Never move `tensor`; Megatron passes None where a module has no such parameter."""
        if tensor is not None:
            self.offload.engine.keep([tensor])

    def _warn_of_settings(self, settings: dict[str, float | None]) -> None:
        for name, given in settings.items():
            ours = getattr(self.offload.config, name)
            if given in (ours, _MEGATRON_DEFAULTS.get(name)) or name in self._warned:
                continue
            self._warned.add(name)
            logger.warning("%s=%s of Megatron's config has no effect: offload is applied with %s.", name, given, ours)


class CallSite:
    """One execution of a call site: what an object of Megatron's interface class stands for.

    Args:
        calls: Answers.
        tensor: The input of the site.
        open_region: Returns its region, or None where its tensors stay; None itself where the site is off.
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
        """Begin to save, and return the input of the site.

        Not before: Megatron makes the object also where a checkpoint runs in place of the site, and then never enters it.
        """
        # Handed over and not kept: the newer call sites hold the object until the group leaves, and would hold its input too.
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
        """Save no more."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.__exit__(kind, error, trace)

    def end(self, *, may_wait: bool) -> None:
        """Let the group leave. Without one, or while offload is disabled, nothing happens."""
        region, self._region = self._region, None
        if region is not None and self._calls.is_enabled:
            self._calls.offload.end(region, may_wait=may_wait)


def make_context_methods(calls: Calls, open_region: Callable[[str], Region | CapturedRegion | None]) -> dict[str, Any]:
    """Return what makes an object of the interface class a context: `with interface(flag, tensor, name) as tensor:`.

    Args:
        calls: Answers.
        open_region: Returns the region of a tag where forward is.
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
