"""Offloads and reloads individual tensors."""

import dataclasses
from collections.abc import Iterable

import torch

from fgoffload.engine import Group, Lane, OffloadEngine
from fgoffload.engine.geometry import round_up
from fgoffload.engine.handles import Packed, keep_tensor
from fgoffload.errors import ConfigError
from fgoffload.integrations.pytorch.devices import DeviceChoice, check_device, make_device
from fgoffload.memory_tiers import SavedState
from fgoffload.plan import Site
from fgoffload.transfer_config import TransferConfig
from fgoffload.transfer_schedule import TransferPolicy

TAG = "by_hand"
"""Tag of manually offloaded tensors in the statistics."""


def check_config(config: object) -> TransferConfig | None:
    """Return `config`. Raise `ConfigError` if it is neither a `TransferConfig` nor None."""
    if config is None or isinstance(config, TransferConfig):
        return config
    raise ConfigError(f"config {config!r} is not a TransferConfig. Pass one, for example TransferConfig(), or None.")


def check_tensor(tensor: object) -> None:
    """Raise `ConfigError` unless `tensor` is a strided tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"offload_tensor got a {type(tensor).__name__}. Pass a tensor.")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise ConfigError(f"offload_tensor got a {kind} tensor. Pass its components, such as values() and indices().")


class OffloadedTensor:
    """Handle of one offloaded tensor. Returned by `offload_tensor`.

    As with saved tensors, the tensor stays on the GPU if it is a parameter, if it is below the minimum size, or if no host
    memory is left. `reload` works in all these cases.

    Lifetime:
        This object owns the host memory and releases it when it is deleted. The tensor's GPU memory is freed once the copy is
        done and you have dropped all references and views. The result of `reload` lives as long as you reference it or this
        object. Each call to `reload` returns the same memory.
    """

    __slots__ = ("_engine", "_group", "_handle", "_lane")

    def __init__(self, handle: Packed, engine: OffloadEngine | None, lane: Lane, group: Group | None) -> None:
        self._handle = handle
        self._engine = engine
        self._lane = lane
        self._group = group

    @property
    def is_on_host(self) -> bool:
        """Whether the host has a copy and the engine has released the original GPU memory. Reading this polls the copy."""
        if self._engine is None or self._group is None:
            return False
        self._engine.poll()
        return bool(self._group.list_saved(SavedState.OFFLOADED, SavedState.RELOADED))

    def prefetch(self) -> None:
        """Start the copy to the device early, before `reload`.

        Streams:
            The copy runs on the host-to-device stream. The host does not block.
        """
        if self._engine is not None and self._group is not None:
            self._engine.approach_backward(self._lane, self._group)

    def reload(self) -> torch.Tensor:
        """Return the tensor on its device with the same bytes, size, stride and dtype, but without gradient history.

        Streams:
            The current stream waits for the copy to the device. The host does not block.

        Raises:
            StateError: The tensor was modified before the copy to the host was done, or a reloaded tensor was modified.
        """
        tensor = self._handle.take()
        return tensor.detach() if tensor.requires_grad else tensor  # a parameter, which stays on the device


def offload_tensor(
    tensor: torch.Tensor, *, config: TransferConfig | None = None, device: DeviceChoice = None
) -> OffloadedTensor:
    """Offload one tensor, without a model.

    Each call creates an engine with pinned memory of the tensor's size, and pinning takes 0.3 s per GiB or more. To offload
    tensors in every step, use the `offload_tensor` method of a `saved_tensors` object or of the handle from `offload`.

    Args:
        tensor: Tensor to offload. Its device memory is freed once you drop your references.
        config: Offload options. None offloads tensors of any size.
        device: Device of the engine. None means the tensor's device.

    Raises:
        ConfigError: `tensor` is not a strided tensor, or `device` is not a valid device.
    """
    check_tensor(tensor)
    check_device(device)
    config = check_config(config) or TransferConfig(min_offloaded_bytes=0)
    if not config.enabled:
        return offload_with(None, tensor)
    needed_bytes = round_up(max(1, tensor.untyped_storage().nbytes()))
    # The arena reserves whole slabs within its budget, so this budget limits it to the size of the tensor.
    config = dataclasses.replace(config, host_budget_bytes=min(needed_bytes, config.host_budget_bytes or needed_bytes))
    return offload_with(make_engine(config, device, (tensor,), policy=config.derive_policy()), tensor)


def make_engine(
    config: TransferConfig,
    device: DeviceChoice,
    tensors: Iterable[torch.Tensor] | None,
    *,
    policy: TransferPolicy,
    engine_type: type[OffloadEngine] = OffloadEngine,
) -> OffloadEngine:
    """Return an engine with the options of `config`. For `device` and `tensors`, see `make_device`."""
    return engine_type(
        device=make_device(device, tensors=tensors, host_memory=config.host_memory),
        policy=policy,
        min_offloaded_bytes=config.min_offloaded_bytes,
        keep=config.keep,
        is_timed=config.is_timed,
        host_budget_bytes=config.host_budget_bytes,
    )


def offload_with(engine: OffloadEngine | None, tensor: torch.Tensor) -> OffloadedTensor:
    """Offload `tensor` with `engine`. If `engine` is None, the tensor stays on the device."""
    lane = Lane(chunk=0, microbatch=0)
    if engine is None:
        return OffloadedTensor(keep_tensor(tensor, lane.place), None, lane, None)
    group = engine.open_group(Site(chunk=0, layer=0, tag=TAG), lane)
    handle = engine.save(tensor, lane=lane, group=group)
    engine.end(lane, group)
    return OffloadedTensor(handle, engine, lane, group)
