"""Estimates the memory savings of offload from one forward, without copies to the host."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch

from fgoffload.engine import Device, Group, HostSlab, KeptReason, Lane, OffloadEngine
from fgoffload.engine.device import Stream
from fgoffload.engine.handles import Handle, KeptHandle, WrappedHandle
from fgoffload.engine.identity import StorageRef, get_key, has_bytes
from fgoffload.errors import ConfigError
from fgoffload.integrations.pytorch.block import SavedTensors
from fgoffload.integrations.pytorch.devices import DeviceChoice, make_device
from fgoffload.integrations.pytorch.model import ModelOffload
from fgoffload.integrations.pytorch.patterns import Patterns, check_model, find_sites
from fgoffload.integrations.pytorch.tensors import check_config
from fgoffload.memory_tiers import SavedState
from fgoffload.transfer_config import TransferConfig
from fgoffload.units import format_bytes

OUTSIDE = "saved outside all regions"
"""Reason that is reported for tensors saved outside regions, which stay on the device."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavingsEstimate:
    """Bytes that autograd saves in one forward, and how many of them would be offloaded.

    Each storage counts once, at its full size. Parameters are excluded.

    Args:
        saved_bytes: Bytes that autograd saves.
        leaving_bytes: Bytes that would be copied to the host. A backward that starts immediately cancels the last copies.
        staying_bytes: Bytes that would stay on the GPU, keyed by reason. If one tensor stays, so does its whole storage.
        host_bytes: Required host memory in bytes, including alignment.
    """

    saved_bytes: int
    leaving_bytes: int
    staying_bytes: dict[str, int]
    host_bytes: int

    @property
    def freed_bytes(self) -> int:
        """Bytes that would be freed on the GPU. This exceeds the copied bytes if autograd saves only part of a storage."""
        return self.saved_bytes - sum(self.staying_bytes.values())

    @property
    def percent(self) -> float:
        """Percentage of the saved bytes that would be freed on the GPU."""
        return 100 * self.freed_bytes / self.saved_bytes if self.saved_bytes else 0.0

    def __str__(self) -> str:
        """Return the estimate as text, with one line per reason why bytes stay on the GPU."""
        lines = [
            f"{format_bytes(self.saved_bytes)} saved, {format_bytes(self.freed_bytes)} would be offloaded "
            f"({self.percent:.1f}%), {format_bytes(self.host_bytes)} of host memory needed"
        ]
        if self.leaving_bytes != self.freed_bytes:
            lines.append(f"{format_bytes(self.leaving_bytes)} would be copied to the host")
        lines += [
            f"{format_bytes(size_bytes)} would stay on the device: {reason}"
            for reason, size_bytes in self.staying_bytes.items()
        ]
        return "\n".join(lines)


def estimate_savings(
    forward: Callable[[], Any],
    model: torch.nn.Module | None = None,
    modules: Patterns = (),
    config: TransferConfig | None = None,
    *,
    device: DeviceChoice = None,
) -> SavingsEstimate:
    """Estimate how much memory offload would save. Runs `forward` once, without host memory or copies to the host.

        estimate = fgoffload.estimate_savings(lambda: model(batch), model, {"layers.*.mlp": "mlp"})

    Args:
        forward: Function that runs one forward and returns its output. It needs as much GPU memory as without offload.
        model: As for `offload`. None estimates the savings of a `saved_tensors` block around `forward`.
        modules: As for `offload`.
        config: As for `offload`.
        device: As for `offload`.

    Raises:
        ConfigError: `forward` is not callable, `modules` are passed without a model, or `offload` would reject the arguments.
    """
    if not callable(forward):
        raise ConfigError(
            f"forward is a {type(forward).__name__}, which is not callable. Pass a function, for example lambda: model(batch)."
        )
    if model is not None:
        check_model(model)
    elif modules != ():
        raise ConfigError(f"modules {modules!r} are passed without a model. Pass the model too, or omit them.")
    tensors = None if model is None else [*model.parameters(), *model.buffers()]
    config = dataclasses.replace(check_config(config) or TransferConfig(), enabled=True)
    stand_in = _make_hostless(make_device(device, tensors=tensors, host_memory=config.host_memory))
    if model is None:
        block = SavedTensors(config, group_bytes=None, device=stand_in, tag="saved")
        block.engine_type = _CountingEngine
        with block:
            output = forward()
        engine = block.get_engine()
    else:
        handle = ModelOffload(model, find_sites(model, modules), config, device=stand_in)
        handle.engine_type = _CountingEngine
        try:
            output = forward()
        finally:
            handle.restore_forwards()
        engine = handle.get_engine()
    estimate = cast("_CountingEngine", engine).estimate()
    del output
    return estimate


def _make_hostless(device: Device) -> Device:
    """Return a copy of `device` that allocates no host memory.

    An offload only stores a reference to its source tensor, and a reload copies from that tensor. The engine's results and
    statistics are therefore the same as with real copies.
    """
    sources: dict[tuple[int, int], torch.Tensor] = {}

    def copy_bytes(*, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        if destination.is_meta:
            sources[_place(destination)] = source
        else:
            device.copy_bytes(destination=destination, source=sources[_place(source)], stream=stream)

    def allocate_host(size_bytes: int) -> HostSlab:
        return HostSlab(torch.empty(size_bytes, dtype=torch.uint8, device="meta"), free=lambda: None)

    stand_in = copy.copy(device)
    stand_in.copy_bytes, stand_in.allocate_host = copy_bytes, allocate_host  # type: ignore[method-assign]
    stand_in.has_blocking_copies = False
    return stand_in


def _place(host: torch.Tensor) -> tuple[int, int]:
    """Return a key for a block of host memory: the slab, and the offset in the slab."""
    return get_key(host), int(host.storage_offset()) * host.element_size()


@dataclasses.dataclass(slots=True)
class _SavedStorage:
    """Storage that autograd saves. `reason` says why it stays on the device, and is None if it is offloaded."""

    storage: StorageRef
    """Weak reference to the storage. While it exists, no other storage can have the same key."""
    nbytes: int
    reason: str | None = OUTSIDE
    is_kept: bool = False
    """Whether the storage must stay on the device because one of its tensors must."""


class _CountingEngine(OffloadEngine):
    """Engine that counts each storage that autograd saves, even one that is freed before the forward ends."""

    def __init__(self, *, min_offloaded_bytes: int, **options: Any) -> None:
        super().__init__(min_offloaded_bytes=min_offloaded_bytes, **options)
        self._smallest_bytes = min_offloaded_bytes
        self._storages: dict[int, _SavedStorage] = {}
        self.is_always_too_small = lambda tensor: False  # small storages are counted too

    def save(self, tensor: torch.Tensor, *, lane: Lane, group: Group | None) -> Handle | KeptHandle | WrappedHandle:
        """Save the tensor, and record whether its storage stays on the device."""
        before = {} if group is None else dict(group.stats.kept_bytes)
        handle = super().save(tensor, lane=lane, group=group)
        base = tensor._base  # noqa: SLF001 - no public name
        if isinstance(tensor, torch.nn.Parameter) or isinstance(base, torch.nn.Parameter) or not has_bytes(tensor):
            return handle
        key = get_key(tensor)
        if key not in self._storages:
            self._storages[key] = _SavedStorage(StorageRef(tensor), tensor.untyped_storage().nbytes())
        if isinstance(handle, KeptHandle) and tensor.numel():  # an empty tensor needs no storage
            kept = {} if group is None else group.stats.kept_bytes
            reasons = (reason for reason, size_bytes in kept.items() if size_bytes != before.get(reason, 0))
            found = self._storages[key]
            found.reason = next(reasons, found.reason if found.is_kept else OUTSIDE)
            found.is_kept = True
        return handle

    def end(self, lane: Lane, group: Group, *, is_held: bool = False) -> None:
        """End the group. Record which storages are offloaded, and why the others stay."""
        waiting = group.list_saved(SavedState.RESIDENT)
        super().end(lane, group, is_held=is_held)
        for saved in waiting:
            found = self._storages[saved.storage.key]
            if saved.was_offloaded and not found.is_kept:
                found.reason = None
            elif found.reason == OUTSIDE and not found.is_kept:
                is_small = saved.covered_bytes < self._smallest_bytes
                found.reason = (KeptReason.TOO_SMALL if is_small else KeptReason.HOST_BUDGET).value

    def estimate(self) -> SavingsEstimate:
        """Return the estimate for the storages saved so far."""
        stats = self.finish_step()
        staying: dict[str, int] = {}
        for found in self._storages.values():
            if found.reason is not None:
                staying[found.reason] = staying.get(found.reason, 0) + found.nbytes
        return SavingsEstimate(
            saved_bytes=sum(found.nbytes for found in self._storages.values()),
            leaving_bytes=stats.d2h_bytes,
            staying_bytes=staying,
            host_bytes=stats.host_peak_bytes,
        )
