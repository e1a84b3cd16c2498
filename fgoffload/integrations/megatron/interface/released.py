"""Interface of megatron-core 0.16.1 to 0.18, in which a call on the class ends a group, with the name of its tag."""

import contextlib
from typing import Any

import torch

from fgoffload.integrations.megatron.interface.calls import Calls, make_context_methods


def make_released_methods(calls: Calls) -> dict[str, Any]:
    """Return methods of the interface class that pass its calls to `calls`."""

    def init_chunk_handler(
        vp_size: int | None, vp_stage: int | None, min_offloaded_tensor_size: int, max_inflight_offloads: int | None = None
    ) -> None:
        calls.begin_microbatch(
            vp_stage,
            min_offloaded_tensor_size=min_offloaded_tensor_size,
            max_inflight_offloads=max_inflight_offloads,  # since 0.18
        )

    def group_commit(
        tensor: Any, name: str, forced_released_tensors: list[torch.Tensor] | None = None, delay_offload: Any = None
    ) -> Any:
        # Megatron's own engine frees the storages in `forced_released_tensors` by force. Ours never resizes a storage that may
        # be referenced elsewhere: its memory is freed with the last reference, and counted until then.
        calls.offload.end_region(name, may_wait=bool(delay_offload))
        return tensor

    def get_context(flag: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # no module calls it

    def reset() -> None:
        calls.finish_step()

    def reset_instance() -> None:
        """Do nothing, since the integration holds its engine and there is no instance."""

    def forward_record(event: Any) -> None:
        """Do nothing, since no module calls it and our engine captures no copies."""

    statics: dict[str, Any] = {
        "init_chunk_handler": init_chunk_handler,
        "group_commit": group_commit,
        "mark_not_offloadable": lambda tensor: calls.keep(tensor),
        "get_context": get_context,
        "forward_record": forward_record,
        "reset": reset,
        "reset_instance": reset_instance,
    }
    context = make_context_methods(calls, lambda name: calls.offload.open_region(name))
    return context | {name: staticmethod(method) for name, method in statics.items()}
