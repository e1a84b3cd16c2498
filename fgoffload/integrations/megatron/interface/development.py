"""Interface of 0.19 and of the development branch (0.20), in which the context object also ends its group.

CUDA graphs need three things. Their warm-up runs between `disable_offload` and `enable_offload`, where nothing may be
offloaded. Around a replay, between `enter_replay` and `exit_replay`, modules outside of the graph delay their groups until
`flush_delayed_groups`, which is called once the graph is launched. Megatron's own engine captures copies of modules inside the
graph, and orders them with `forward_record`, `backward_record`, `cuda_graph_stream` and `cuda_graph_event`. Ours captures none,
see [Note: Staging] in `fgoffload/engine/staging.py`. So these do nothing, and graphs run on the current stream.
"""

import contextlib
from typing import Any

import torch

from fgoffload.integrations.megatron.interface.calls import Calls, CallSite, make_context_methods


def make_development_methods(calls: Calls) -> dict[str, Any]:
    """Return methods of the interface class that pass its calls to `calls`."""

    def group_offload(
        self: Any, tensor: Any, forced_released_tensors: list[torch.Tensor] | None = None, delay_offload: Any = None
    ) -> Any:
        # `forced_released_tensors`: see `group_commit` in released.py.
        site: CallSite = self.site
        site.end(may_wait=bool(delay_offload))
        return tensor

    statics = _make_step_methods(calls) | _make_graph_methods(calls)
    methods: dict[str, Any] = {name: staticmethod(method) for name, method in statics.items()}
    # The object that opened a region ends it, so the region need not be found by name.
    context = make_context_methods(calls, lambda name: calls.offload.find_region(name))
    return context | methods | {"group_offload": group_offload}


def _make_step_methods(calls: Calls) -> dict[str, Any]:
    def init_chunk_handler(
        pp_rank: int,
        vp_size: int | None,
        vp_stage: int | None,
        min_offloaded_tensor_size: int,
        delta_offload_bytes_across_pp_ranks: int,
        activation_offload_fraction: float,
        max_inflight_offloads: int | None = None,
    ) -> None:
        calls.begin_microbatch(
            vp_stage,
            min_offloaded_tensor_size=min_offloaded_tensor_size,
            delta_offload_bytes_across_pp_ranks=delta_offload_bytes_across_pp_ranks,
            activation_offload_fraction=activation_offload_fraction,
            max_inflight_offloads=max_inflight_offloads,
        )

    def reset(process_group: Any = None) -> None:
        # Megatron's engine prints a table over these ranks, which exclude the pipeline. All ranks have to agree on which tags
        # had no effect, since a stage without experts has none of their sites.
        calls.finish_step()

    def reset_instance() -> None:
        """Do nothing, since the integration holds its engine and there is no instance."""

    def get_context(flag: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # no module calls it

    return {
        "init_chunk_handler": init_chunk_handler,
        "mark_not_offload": lambda tensor: calls.keep(tensor),
        "get_context": get_context,
        "reset": reset,
        "reset_instance": reset_instance,
    }


def _make_graph_methods(calls: Calls) -> dict[str, Any]:
    def disable_offload() -> None:
        calls.disable()

    def enable_offload() -> None:
        calls.enable()

    def enter_replay() -> None:
        calls.offload.graphs.is_replaying = True

    def exit_replay() -> None:
        calls.offload.graphs.is_replaying = False

    def flush_delayed_groups() -> None:
        calls.offload.flush_delayed()

    return {
        "disable_offload": disable_offload,
        "enable_offload": enable_offload,
        "enter_replay": enter_replay,
        "exit_replay": exit_replay,
        "flush_delayed_groups": flush_delayed_groups,
        "forward_record": lambda: None,
        "backward_record": lambda tensor: tensor,
        "cuda_graph_stream": lambda: torch.cuda.current_stream(),
        "cuda_graph_event": lambda: None,
    }
