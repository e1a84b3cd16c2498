"""Methods of both generations of Megatron's interface class. They only pass the calls on.

| | ends a group by |
|---|---|
| 0.16.1 and the releases before 0.19 | `Interface.group_commit(tensor, name=...)`, on the class |
| 0.19 and the development branch (0.20) | `site.group_offload(tensor)`, on the object that was the context |

CUDA graphs need three things. Their warm-up runs between `disable_offload` and `enable_offload`, where nothing may be
offloaded. Around a replay, between `enter_replay` and `exit_replay`, modules outside of the graph delay their groups until
`flush_delayed_groups`, which is called once the graph is launched. Megatron's own engine captures copies of modules inside the
graph, and orders them with `forward_record`, `backward_record`, `cuda_graph_stream` and `cuda_graph_event`. Ours captures none,
see [Note: Staging] in `fgoffload/engine/staging.py`. So these do nothing, and graphs run on the current stream.

Megatron's own engine frees the storages in `forced_released_tensors` by force. Ours never resizes a storage that may be
referenced elsewhere: its memory is freed with the last reference, and counted until then.
"""

import contextlib
from typing import Any

import torch

from fgoffload.integrations.megatron.interface.calls import Calls, CallSite, make_context_methods


def make_released_methods(calls: Calls) -> dict[str, Any]:
    """Return methods of megatron-core 0.16.1 to 0.18, in which a call on the class ends a group, with the name of its tag."""

    def init_chunk_handler(
        vp_size: int | None, vp_stage: int | None, min_offloaded_tensor_size: int, max_inflight_offloads: int | None = None
    ) -> None:
        calls.begin_microbatch(vp_stage, max_inflight_offloads, min_offloaded_tensor_size=min_offloaded_tensor_size)

    def group_commit(tensor: Any, name: str, forced_released_tensors: Any = None, delay_offload: Any = None) -> Any:
        calls.offload.end_region(name, may_wait=bool(delay_offload))
        return tensor

    statics: dict[str, Any] = {
        "init_chunk_handler": init_chunk_handler,
        "group_commit": group_commit,
        "mark_not_offloadable": lambda tensor: calls.keep(tensor),
        "forward_record": lambda event: None,  # no module calls it
        "reset": lambda: calls.offload.finish_open_step(),
    }
    return _make_methods(statics, make_context_methods(calls, lambda name: calls.offload.open_region(name)))


def make_development_methods(calls: Calls) -> dict[str, Any]:
    """Return methods of 0.19 and of the development branch (0.20), in which the context object also ends its group."""

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
            max_inflight_offloads,
            min_offloaded_tensor_size=min_offloaded_tensor_size,
            delta_offload_bytes_across_pp_ranks=delta_offload_bytes_across_pp_ranks,
            activation_offload_fraction=activation_offload_fraction,
        )

    def group_offload(self: Any, tensor: Any, forced_released_tensors: Any = None, delay_offload: Any = None) -> Any:
        site: CallSite = self.site
        site.end(may_wait=bool(delay_offload))
        return tensor

    def reset(process_group: Any = None) -> None:
        # Megatron's engine prints a table over these ranks, which exclude the pipeline. All ranks have to agree on which tags
        # had no effect, since a stage without experts has none of their sites.
        calls.offload.finish_open_step()

    statics: dict[str, Any] = {
        "init_chunk_handler": init_chunk_handler,
        "mark_not_offload": lambda tensor: calls.keep(tensor),
        "reset": reset,
        "disable_offload": lambda: calls.disable(),
        "enable_offload": lambda: calls.enable(),
        "enter_replay": lambda: setattr(calls.offload.graphs, "is_replaying", True),
        "exit_replay": lambda: setattr(calls.offload.graphs, "is_replaying", False),
        "flush_delayed_groups": lambda: calls.offload.flush_delayed(),
        "forward_record": lambda: None,
        "backward_record": lambda tensor: tensor,
        "cuda_graph_stream": lambda: torch.cuda.current_stream(),
        "cuda_graph_event": lambda: None,
    }
    # The object that opened a region ends it, so the region need not be found by name.
    context = make_context_methods(calls, lambda name: calls.offload.find_region(name))
    return _make_methods(statics, context | {"group_offload": group_offload})


def _make_methods(statics: dict[str, Any], methods: dict[str, Any]) -> dict[str, Any]:
    statics |= {
        "get_context": lambda flag: contextlib.nullcontext(),  # no module calls it
        "reset_instance": lambda: None,  # the integration holds its engine: there is no instance
    }
    return methods | {name: staticmethod(method) for name, method in statics.items()}
