"""Megatron's own call sites, answered by our engine.

Megatron-Core 0.16.1 marks its sites with `FineGrainedActivationOffloadingInterface`: a context around what saves, and
`group_commit` where the tensors may leave. Many modules import that class by name, some inside functions. So the class stays
and its methods are replaced: whoever has imported it, or will, calls ours.
"""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

import torch

from fgoffload.engine import Region, Saving
from fgoffload.errors import IntegrationError
from fgoffload.integrations.megatron.imports import load_module
from fgoffload.integrations.megatron.offload import MegatronOffload
from fgoffload.integrations.megatron.patches import Patches

INTERFACE = "megatron.core.pipeline_parallel.fine_grained_activation_offload:FineGrainedActivationOffloadingInterface"


class _Site:
    """What a call site holds between entering and leaving its context."""

    __slots__ = ("region", "saving", "tensor")

    def __init__(self, region: Region | None, tensor: torch.Tensor) -> None:
        self.region = region
        self.tensor = tensor
        self.saving: Saving | None = None


def replace_interface(patches: Patches, get_offload: Callable[[], MegatronOffload]) -> None:
    """Replace the methods of Megatron's interface class.

    Args:
        patches: Puts them back later.
        get_offload: Returns what answers the calls; it exists only after everything is replaced.

    Raises:
        IntegrationError: The class lacks one of them.
    """
    _replace_context(patches, get_offload)
    _replace_statics(patches, get_offload)


def _replace_context(patches: Patches, get_offload: Callable[[], MegatronOffload]) -> None:
    """Replace what `with interface(flag, tensor, name) as tensor:` calls."""

    def initialize(self: Any, offload: Any, tensor: torch.Tensor, name: str) -> None:
        self.site = _Site(get_offload().open_region(name) if offload else None, tensor)

    def enter(self: Any) -> torch.Tensor:
        site: _Site = self.site
        if site.region is not None:
            site.region.enter(site.tensor)
            site.saving = site.region.saving()
            site.saving.__enter__()
        return site.tensor

    def leave(self: Any, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        site: _Site = self.site
        if site.saving is not None:
            site.saving.__exit__(kind, error, trace)

    for name, value in (("__init__", initialize), ("__enter__", enter), ("__exit__", leave)):
        patches.replace(INTERFACE, name, value)


def _replace_statics(patches: Patches, get_offload: Callable[[], MegatronOffload]) -> None:
    """Replace what is called on the class."""

    def init_chunk_handler(vp_size: int | None, vp_stage: int | None, min_offloaded_tensor_size: int) -> None:
        get_offload().begin_microbatch(vp_stage or 0)

    def group_commit(
        tensor: Any, name: str, forced_released_tensors: list[torch.Tensor] | None = None, delay_offload: Any = None
    ) -> Any:
        if delay_offload:
            _refuse_graphs()
        # `forced_released_tensors` are storages that Megatron's own engine empties by force. Ours never resizes what somebody
        # else may hold: the memory goes when the last holder lets go, and what is held elsewhere is counted.
        get_offload().end_region(name)
        return tensor

    def mark_not_offloadable(tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            get_offload().engine.keep([tensor])

    def get_context(flag: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    replacements: dict[str, Any] = {
        "init_chunk_handler": init_chunk_handler,
        "group_commit": group_commit,
        "mark_not_offloadable": mark_not_offloadable,
        "get_context": get_context,
        "forward_record": _refuse_graphs,
        "reset": lambda: get_offload().finish_step(),
        "reset_instance": lambda: None,  # there is no instance: the integration holds its engine
    }
    for name, value in replacements.items():
        patches.replace(INTERFACE, name, staticmethod(value))


def is_replaced() -> bool:
    """Return whether Megatron's interface class has methods of ours at present."""
    module_name, _, class_name = INTERFACE.partition(":")
    methods = vars(getattr(load_module(module_name), class_name))
    return bool(methods["__init__"].__module__ == __name__)


def _refuse_graphs(*args: Any) -> NoReturn:
    raise IntegrationError(
        "CUDA graphs together with activation offload are not built yet in this version. Leave one of them out."
    )
