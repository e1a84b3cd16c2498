"""Prevents copies to the host from prolonging Megatron's waits for the device.

The device is idle while the host waits for a few bytes, such as the token counts of the experts. Each direction has one copy
engine, which runs copies in order. So these bytes would wait for milliseconds behind the offloaded tensors of an attention
group. We avoid that in two ways: a kernel writes the bytes to the host without the copy engine, or groups that end in the layer
are held until the wait is over. docs/reference/tags.md lists all waits.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fgoffload.integrations.megatron.adapter.dispatchers import DISPATCHERS, permutes_by_mask
from fgoffload.integrations.megatron.adapter.regions import GetOffload
from fgoffload.integrations.megatron.graphs.graphed_layers import may_query
from fgoffload.integrations.megatron.host_waits.host_writes import HostPages, read_on_host
from fgoffload.integrations.megatron.host_waits.known_counts import KnownCounts
from fgoffload.integrations.megatron.host_waits.stage_exchanges import communicate, communicate_shapes
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.methods import wrap_symbol
from fgoffload.integrations.megatron.patching.patches import Patches, require_symbol


class HeldWait(NamedTuple):
    """Method of a token dispatcher in which the host waits for a copy that uses the copy engine."""

    dispatcher: str
    """Class name of the dispatcher."""
    method: str
    occurs: Callable[[Any], bool] = lambda config: True
    """Function that returns, for a model's config, whether the host waits in this method."""


_CHECKS = "megatron.core.rerun_state_machine:RerunStateMachine"
_EXCHANGES = "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator"
_ROTARY, _ROTARY_METHOD = "megatron.core.models.common.embeddings.rope_utils", "_apply_rotary_pos_emb_thd"

HELD_WAITS = (
    HeldWait(
        "MoEAlltoAllTokenDispatcher",
        "dispatch_preprocess",
        occurs=lambda config: not config.moe_permute_fusion and permutes_by_mask(),
    ),
    HeldWait("MoEAllGatherTokenDispatcher", "dispatch_postprocess"),
    HeldWait(  # since 0.19
        "MoEFlexTokenDispatcher",
        "dispatch_preprocess",
        occurs=lambda config: getattr(config, "moe_hybridep_pad_uneven_dispatch_inputs", False),
    ),
    HeldWait("MoEFlexTokenDispatcher", "dispatch_postprocess"),
)
"""Waits in forward order. Groups are held until the last wait is over."""


def wrap_waits(patches: Patches, get_offload: GetOffload) -> None:
    """Wrap each method in which the host waits, so that copies to the host do not prolong the wait."""
    for wait in HELD_WAITS:
        around = functools.partial(_run_held_wait, get_offload, wait)
        wrap_symbol(patches, f"{DISPATCHERS}:{wait.dispatcher}", wait.method, around)
    wrap_symbol(patches, _CHECKS, "validate_result", _validate_result)
    wrap_symbol(patches, _EXCHANGES, "_communicate", functools.partial(communicate, get_offload))
    wrap_symbol(patches, _EXCHANGES, "_communicate_shapes", communicate_shapes)
    require_symbol(_ROTARY, _ROTARY_METHOD)
    # The development branch uses the sequence lengths on the device. Its host waits only if no maximum length is passed.
    if "max_seqlen" not in inspect.signature(getattr(load_module(_ROTARY), _ROTARY_METHOD)).parameters:
        wrap_symbol(patches, _ROTARY, _ROTARY_METHOD, _apply_packed_rotary)
    wrap_symbol(patches, DISPATCHERS, "maybe_move_tensor_to_cpu", functools.partial(_move_to_cpu, get_offload, HostPages()))
    KnownCounts().wrap(patches)  # outermost, to store counts from both Megatron's copy and ours


def has_wait(layer: Any) -> bool:
    """Return whether each forward of `layer` synchronizes on token counts."""
    dispatcher = _find_dispatcher(layer)
    # With a fixed number of tokens per expert, the host already knows the counts.
    return dispatcher is not None and not layer.config.moe_pad_expert_input_to_capacity


def _find_dispatcher(layer: Any) -> Any:
    return getattr(getattr(layer, "mlp", None), "token_dispatcher", None)


def has_held_wait(layer: Any) -> bool:
    """Return whether the host waits in the forward of `layer` for a copy that uses the copy engine."""
    dispatcher = _find_dispatcher(layer)
    return dispatcher is not None and _find_last_held(dispatcher, layer.config) is not None


def _find_last_held(dispatcher: Any, config: Any) -> HeldWait | None:
    """Return the last of `HELD_WAITS` in a forward of `dispatcher`, or None."""
    return next((wait for wait in reversed(_list_held_of(dispatcher.__class__)) if wait.occurs(config)), None)


@functools.cache  # because each forward of a layer calls it
def _list_held_of(dispatcher: type) -> list[HeldWait]:
    module = load_module(DISPATCHERS)
    return [wait for wait in HELD_WAITS if issubclass(dispatcher, getattr(module, wait.dispatcher))]


def _run_held_wait(get_offload: GetOffload, wait: HeldWait, original: Any, dispatcher: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(dispatcher, *args, **kwargs)
    # Submit the groups only after the last wait, because earlier copies would prolong it.
    if not (offload := get_offload()).is_idle and _find_last_held(dispatcher, dispatcher.config) is wait:
        offload.holding.flush()
    return result


def _validate_result(original: Any, machine: Any, result: Any, rejection_func: Any, *args: Any, **kwargs: Any) -> Any:
    return original(machine, result, lambda value: _read_flag(rejection_func(value)), *args, **kwargs)


def _read_flag(flag: Any) -> Any:
    """Read a one-element CUDA tensor without the copy engine. Return any other flag unchanged."""
    if not (isinstance(flag, torch.Tensor) and flag.is_cuda and flag.numel() == 1):
        return flag
    return bool(read_on_host(flag.to(torch.int32)))


def _apply_packed_rotary(original: Any, t: Any, cu_seqlens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    # Only the host uses the lengths, for splits and look-ups, so a host copy suffices.
    return original(t, read_on_host(cu_seqlens), *args, **kwargs)


def _move_to_cpu(
    get_offload: GetOffload,
    pages: HostPages,
    original: Any,
    tensor: Any,
    as_numpy: bool = False,  # noqa: FBT001, FBT002 - Megatron's signature
    record_stream: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    if not may_query() or not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.int32, torch.int64):
        return original(tensor, as_numpy, record_stream)
    # If no copy to the host is running, nothing delays Megatron's own copy, which costs the host less.
    host = pages.write(tensor) if get_offload().engine.is_copying_out() else None
    if host is None:
        return original(tensor, as_numpy, record_stream)
    if record_stream:
        tensor.record_stream(torch.cuda.current_stream())
    return host.numpy() if as_numpy else host
