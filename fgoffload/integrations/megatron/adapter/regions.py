"""Adds sites around methods and linears that have no call site in Megatron-Core."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fgoffload.engine import CapturedRegion, Region, Saving
from fgoffload.integrations.megatron.adapter.offload import MegatronOffload
from fgoffload.integrations.megatron.patching.methods import wrap_method
from fgoffload.integrations.megatron.patching.patches import Patches

GetOffload = Callable[[], MegatronOffload]
SiteRegion = Region | CapturedRegion


def add_region(patches: Patches, get_offload: GetOffload, target: Any, methods: Sequence[str], tag: str) -> None:
    """Add one site around `methods` of `target`. A forward must call each of them once, in this order.

    The region opens before the first method and ends after the last. It does not cover saves between the methods.
    """
    opened: SiteRegion | None = None

    def run_method(original: Any, *args: Any, is_first: bool, is_last: bool, **kwargs: Any) -> Any:
        nonlocal opened
        if is_first:
            opened = _enter(get_offload(), tag, find_tensor(args, kwargs))
        region = opened
        if region is None:
            return original(*args, **kwargs)
        with region.saving():
            result = original(*args, **kwargs)
        if is_last:
            opened = None
            get_offload().end(region)
        return result

    for name in methods:
        around = functools.partial(run_method, is_first=name == methods[0], is_last=name == methods[-1])
        wrap_method(patches, target, name, around)


class LinearTags(NamedTuple):
    """Tags for two linears and the activation between them. None adds no site."""

    fc1: str | None = None
    act: str | None = None
    fc2: str | None = None

    def select(self, tags: Sequence[str]) -> "LinearTags":
        """Return a copy with only the tags in `tags`."""
        return LinearTags(*(tag if tag in tags else None for tag in self))


def add_linear_sites(patches: Patches, get_offload: GetOffload, owner: Any, pairs: Sequence[Any], tags: LinearTags) -> None:
    """Add sites around pairs of linears and around the activations between them, until `patches` are removed.

    Each of `pairs` is a module with `linear_fc1` and `linear_fc2`. The forward of `owner` calls all pairs. All first linears
    share one group, because the experts' inputs are views of one storage. The other tags have one group per pair.
    """
    if not any(tags):
        return
    sites = _LinearSites(get_offload, tags)
    wrap_method(patches, owner, "forward", sites.run_owner)
    for pair in pairs:
        wrap_method(patches, pair.linear_fc1, "forward", sites.run_fc1)
        wrap_method(patches, pair.linear_fc2, "forward", sites.run_fc2)


class _LinearSites:
    """Opens and ends the regions of one module's linears. These modules do not nest, so only one forward runs at a time."""

    def __init__(self, get_offload: GetOffload, tags: LinearTags) -> None:
        self._get_offload = get_offload
        self._tags = tags
        self._is_inside = False
        self._fc1: SiteRegion | None = None
        self._act: SiteRegion | None = None
        self._fc2: SiteRegion | None = None
        self._saving: Saving | CapturedRegion | None = None

    def run_owner(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        self._is_inside = True
        try:
            self._fc1 = _enter(self._get_offload(), self._tags.fc1, find_tensor(args, kwargs))
            result = original(module, *args, **kwargs)
            self._end(self._fc1)
            return result
        finally:
            self._is_inside = False
            self._switch_saving(None)
            self._fc1 = self._act = self._fc2 = None

    def run_fc1(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_inside:
            return original(module, *args, **kwargs)
        self._switch_saving(self._fc1)
        result = original(module, *args, **kwargs)
        self._act = self._begin(self._tags.act, result[0])
        return result

    def run_fc2(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_inside:
            return original(module, *args, **kwargs)
        self._fc2 = self._begin(self._tags.fc2, find_tensor(args, kwargs))
        result = original(module, *args, **kwargs)
        self._switch_saving(None)
        # Forward no longer needs this pair's saved tensors.
        self._end(self._act)
        self._end(self._fc2)
        self._act = self._fc2 = None
        return result

    def _begin(self, tag: str | None, tensor: torch.Tensor) -> SiteRegion | None:
        self._switch_saving(None)
        region = _enter(self._get_offload(), tag, tensor)
        self._switch_saving(region)
        return region

    def _end(self, region: SiteRegion | None) -> None:
        if region is not None:
            self._get_offload().end(region)

    def _switch_saving(self, region: SiteRegion | None) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.__exit__(None, None, None)
        if region is not None:
            self._saving = region.saving()
            self._saving.__enter__()


def run_in_site(offload: MegatronOffload, tag: str | None, tensor: torch.Tensor, run: Callable[[], Any]) -> Any:
    """Call `run` and return its result. Offload its saves if the site of `tag` is offloaded in the current layer.

    `tensor` is the input of the site. Forward must not use the saved tensors after `run` returns.
    """
    region = _enter(offload, tag, tensor)
    if region is None:
        return run()
    with region.saving():
        result = run()
    offload.end(region)
    return result


def _enter(offload: MegatronOffload, tag: str | None, tensor: torch.Tensor) -> SiteRegion | None:
    region = None if tag is None else offload.find_region(tag)
    if region is not None:
        region.enter(tensor)
    return region


def find_tensor(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return a call's first tensor argument (in Megatron's modules, the hidden states), or an empty tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    return torch.empty(0)
