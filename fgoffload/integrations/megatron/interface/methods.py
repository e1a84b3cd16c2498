"""Implements the methods of both generations of Megatron's interface class.

Megatron warms up CUDA graphs between `disable_offload` and `enable_offload`. Nothing may be offloaded during the warm-up.
Megatron replays a graph between `enter_replay` and `exit_replay`. Modules outside the graph then delay their groups until
Megatron calls `flush_delayed_groups` after the graph launch. Megatron's own engine captures its copies, and orders them with
`forward_record`, `backward_record`, `cuda_graph_stream` and `cuda_graph_event`. Our graphs contain no copies to or from the
host (see [Note: Staging] in `fgoffload/engine/staging.py`). So these methods do nothing, and graphs run on the current stream.

Megatron's own engine resizes the storages in `forced_released_tensors` to 0 bytes. Ours never resizes a storage that may still
be referenced elsewhere. The memory of such a storage is freed with its last reference.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from fgoffload.engine import CapturedRegion, Region
from fgoffload.integrations.megatron.adapter.offload import MegatronOffload
from fgoffload.integrations.megatron.graphs.graphed_layers import is_capturing


class Calls:
    """State shared by the methods that replace Megatron's. `get_offload` returns the integration."""

    def __init__(self, get_offload: Callable[[], MegatronOffload]) -> None:
        self.get_offload = get_offload
        self.is_enabled = True
        """Whether sites may be offloaded; False between `disable_offload` and `enable_offload`."""
        self._begun: dict[int, int] = {}
        """Number of microbatches that had begun when offload was disabled, by chunk."""

    def disable(self) -> None:
        """Disable offload during the warm-up of a CUDA graph. The warm-up does not belong to a step."""
        if self.is_enabled:
            self._begun = dict(self.get_offload().microbatches_begun)
        self.is_enabled = False

    def enable(self) -> None:
        """Enable offload after the warm-up, and discard the microbatches that the warm-up counted."""
        if not self.is_enabled:
            self.get_offload().microbatches_begun = dict(self._begun)
        self.is_enabled = True

    def keep(self, tensor: torch.Tensor | None) -> None:
        """Keep `tensor` on the GPU. Megatron passes None for a parameter that the module lacks."""
        if tensor is not None:
            self.get_offload().engine.keep([tensor])


def make_context_methods(calls: Calls, open_region: Callable[[str], Region | CapturedRegion | None]) -> dict[str, Any]:
    """Return the methods that make the class a context manager: `with interface(flag, tensor, name) as tensor:`.

    `open_region` returns the region of a tag in the current layer, or None if its tensors stay on the GPU.
    """

    def initialize(self: Any, offload: Any, tensor: torch.Tensor, name: str) -> None:
        self.tag = name if offload else None
        self.tensor = tensor
        self.region = self.saving = None

    def enter(self: Any) -> torch.Tensor | None:
        # The region opens here, because Megatron creates but never enters this object if a checkpoint replaces the site.
        # Newer call sites hold this object until the group is offloaded, so it must not hold the input.
        tensor: torch.Tensor | None = self.tensor
        self.tensor = None
        if self.tag is None or not (calls.is_enabled or is_capturing()) or tensor is None:
            return tensor
        self.region = open_region(self.tag)
        if self.region is not None:
            self.region.enter(tensor)
            self.saving = self.region.saving()
            self.saving.__enter__()
        return tensor

    def leave(self: Any, *args: Any) -> None:
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.__exit__(*args)

    return {"__init__": initialize, "__enter__": enter, "__exit__": leave}


def make_released_methods(calls: Calls) -> dict[str, Any]:
    """Return the methods of megatron-core 0.16.1 to 0.18, where a static method ends the group of a tag."""

    def init_chunk_handler(
        vp_size: int | None, vp_stage: int | None, min_offloaded_tensor_size: int, max_inflight_offloads: int | None = None
    ) -> None:
        calls.get_offload().begin_microbatch(vp_stage or 0, most_in_flight=max_inflight_offloads)

    def group_commit(tensor: Any, name: str, forced_released_tensors: Any = None, delay_offload: Any = None) -> Any:
        calls.get_offload().end_region(name, may_wait=bool(delay_offload))
        return tensor

    statics: dict[str, Any] = {
        "init_chunk_handler": init_chunk_handler,
        "group_commit": group_commit,
        "mark_not_offloadable": lambda tensor: calls.keep(tensor),
        "forward_record": lambda event: None,  # no module calls it
        "reset": lambda: calls.get_offload().finish_open_step(),
    }
    return _make_methods(statics, make_context_methods(calls, lambda name: calls.get_offload().open_region(name)))


def make_development_methods(calls: Calls) -> dict[str, Any]:
    """Return the methods of megatron-core 0.19 and 0.20 (the development branch), where the context object ends its group."""

    def init_chunk_handler(
        pp_rank: int,
        vp_size: int | None,
        vp_stage: int | None,
        min_offloaded_tensor_size: int,
        delta_offload_bytes_across_pp_ranks: int,
        activation_offload_fraction: float,
        max_inflight_offloads: int | None = None,
    ) -> None:
        calls.get_offload().begin_microbatch(vp_stage or 0, most_in_flight=max_inflight_offloads)

    def group_offload(self: Any, tensor: Any, forced_released_tensors: Any = None, delay_offload: Any = None) -> Any:
        region, self.region = self.region, None
        if region is not None and calls.is_enabled:
            calls.get_offload().end(region, may_wait=bool(delay_offload))
        return tensor

    def reset(process_group: Any = None) -> None:
        # The process group is ignored, because it excludes other pipeline stages and the check of tags needs all ranks.
        calls.get_offload().finish_open_step()

    statics: dict[str, Any] = {
        "init_chunk_handler": init_chunk_handler,
        "mark_not_offload": lambda tensor: calls.keep(tensor),
        "reset": reset,
        "disable_offload": lambda: calls.disable(),
        "enable_offload": lambda: calls.enable(),
        "enter_replay": lambda: setattr(calls.get_offload().graphs, "is_replaying", True),
        "exit_replay": lambda: setattr(calls.get_offload().graphs, "is_replaying", False),
        "flush_delayed_groups": lambda: calls.get_offload().flush_delayed(),
        "forward_record": lambda: None,
        "backward_record": lambda tensor: tensor,
        "cuda_graph_stream": lambda: torch.cuda.current_stream(),
        "cuda_graph_event": lambda: None,
    }
    context = make_context_methods(calls, lambda name: calls.get_offload().find_region(name))
    return _make_methods(statics, context | {"group_offload": group_offload})


def _make_methods(statics: dict[str, Any], methods: dict[str, Any]) -> dict[str, Any]:
    statics |= {
        "get_context": lambda flag: contextlib.nullcontext(),  # no module calls it
        "reset_instance": lambda: None,  # the integration owns the engine, so there is no instance to reset
    }
    return methods | {name: staticmethod(method) for name, method in statics.items()}
