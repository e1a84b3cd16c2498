"""Estimates the memory that offload would save, by one forward without copies to the host."""

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
from fgoffload.integrations.pytorch.devices import DeviceChoice, check_device, make_device
from fgoffload.integrations.pytorch.model import ModelOffload
from fgoffload.integrations.pytorch.patterns import Patterns, check_model, find_sites
from fgoffload.integrations.pytorch.tensors import check_config
from fgoffload.transfer_config import TransferConfig
from fgoffload.transfer_schedule import SavedState
from fgoffload.units import format_bytes

OUTSIDE = "saved outside of every region"
"""Reason for bytes saved outside of all regions."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavingsEstimate:
    """Bytes that one forward saves, and how many of them would be offloaded.

    Each storage counts once, with its full size. Parameters do not count.

    Args:
        saved_bytes: Bytes that autograd saves in the forward.
        leaving_bytes: Bytes that would be copied to the host. If backward begins at once, it cancels the offload of the last
            groups.
        staying_bytes: Bytes that would stay on the GPU, by reason. A whole storage stays if one of its tensors does.
        host_bytes: Bytes of host memory needed, alignment included.
    """

    saved_bytes: int
    leaving_bytes: int
    staying_bytes: dict[str, int]
    host_bytes: int

    @property
    def freed_bytes(self) -> int:
        """Bytes that would be freed on the GPU. They exceed the copied bytes if autograd needs only part of a storage."""
        return self.saved_bytes - sum(self.staying_bytes.values())

    @property
    def percent(self) -> float:
        """Percentage of the saved bytes that would be freed on the GPU."""
        return 100 * self.freed_bytes / self.saved_bytes if self.saved_bytes else 0.0

    def __str__(self) -> str:
        """Return the estimate as text, with one line per reason."""
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
    """Estimate the memory that offload would save, by running `forward` once without copies to the host or host memory.

        estimate = fgoffload.estimate_savings(lambda: model(batch), model, {"layers.*.mlp": "mlp"})

    Args:
        forward: Runs one forward and returns an output with its graph. It needs the memory of a forward without offload.
        model: As for `offload`. None estimates `saved_tensors` around `forward`.
        modules: As for `offload`.
        config: As for `offload`.
        device: As for `offload`.

    Raises:
        ConfigError: As for `offload`. Also if `forward` is not callable, or `modules` are named without a model.
    """
    if not callable(forward):
        kind = type(forward).__name__
        raise ConfigError(f"forward is a {kind}, which is not callable. Give a function, as in lambda: model(batch).")
    if model is not None:
        check_model(model)
    elif modules != ():
        raise ConfigError(f"modules {modules!r} are named without a model. Give the model too, or leave them out.")
    check_device(device)
    tensors = None if model is None else [*model.parameters(), *model.buffers()]
    config = dataclasses.replace(check_config(config) or TransferConfig(), enabled=True)
    stand_in = _make_hostless(make_device(device, tensors=tensors, host_memory=config.host_memory))
    if model is None:
        block = SavedTensors(config, group_bytes=None, device=stand_in, tag="saved")
        block.engine_type = _FollowingEngine
        with block:
            output = forward()
        engine = block.get_engine()
    else:
        handle = ModelOffload(model, find_sites(model, modules), config, device=stand_in)
        handle.engine_type = _FollowingEngine
        try:
            output = forward()
        finally:
            handle.put_back()
        engine = handle.get_engine()
    estimate = cast("_FollowingEngine", engine).estimate()
    del output
    return estimate


def _make_hostless(device: Device) -> Device:
    """Return a copy of `device` without host memory. Offloaded bytes stay where they are, and a reload copies them there.

    So the engine's statistics and results are as usual, and nothing crosses the link.
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
    """Return the key of a host block: its slab, and its offset in the slab."""
    return get_key(host), int(host.storage_offset()) * host.element_size()


@dataclasses.dataclass(slots=True)
class _Fate:
    """Outcome of one storage that autograd saves: offloaded or kept."""

    storage: StorageRef
    """Weak reference that keeps the key in use, so that no other storage gets it."""
    nbytes: int
    has_left: bool = False
    kept_reason: str | None = None
    """Reason why one of the storage's tensors, and so the storage, stays on the device."""
    last_reason: str | None = None
    """Reason why the storage was not offloaded at the end of its region. A later region may have offloaded it."""


class _FollowingEngine(OffloadEngine):
    """Engine that tracks each storage that autograd saves, even if it is freed before the end."""

    def __init__(self, *, min_offloaded_bytes: int, **options: Any) -> None:
        super().__init__(min_offloaded_bytes=min_offloaded_bytes, **options)
        self._smallest_bytes = min_offloaded_bytes
        self._fates: dict[int, _Fate] = {}
        self.is_always_too_small = lambda tensor: False  # kept storages are tracked too

    def save(self, tensor: torch.Tensor, *, lane: Lane, group: Group | None) -> Handle | KeptHandle | WrappedHandle:
        """Save the tensor, and record whether its storage stays on the device."""
        before = {} if group is None else dict(group.stats.kept_bytes)
        handle = super().save(tensor, lane=lane, group=group)
        base = tensor._base  # noqa: SLF001 - no public name
        if isinstance(tensor, torch.nn.Parameter) or isinstance(base, torch.nn.Parameter) or not has_bytes(tensor):
            return handle
        key = get_key(tensor)
        if key not in self._fates:
            self._fates[key] = _Fate(StorageRef(tensor), tensor.untyped_storage().nbytes())
        if isinstance(handle, KeptHandle) and tensor.numel():  # an empty tensor holds no storage
            kept = {} if group is None else group.stats.kept_bytes
            reasons = (reason for reason, size_bytes in kept.items() if size_bytes != before.get(reason, 0))
            fate = self._fates[key]
            fate.kept_reason = next(reasons, fate.kept_reason or OUTSIDE)
        return handle

    def end(self, lane: Lane, group: Group, *, is_held: bool = False) -> None:
        """End the group, and record which storages were offloaded, and why others were not."""
        waiting = group.list_saved(SavedState.RESIDENT)
        super().end(lane, group, is_held=is_held)
        for saved in waiting:
            fate = self._fates[saved.storage.key]
            if saved.has_left:
                fate.has_left = True
            else:
                is_small = saved.covered_bytes < self._smallest_bytes
                fate.last_reason = (KeptReason.TOO_SMALL if is_small else KeptReason.HOST_BUDGET).value

    def estimate(self) -> SavingsEstimate:
        """Return the estimate for the storages saved so far."""
        stats = self.finish_step()
        staying: dict[str, int] = {}
        for fate in self._fates.values():
            reason = fate.kept_reason or (None if fate.has_left else fate.last_reason or OUTSIDE)
            if reason is not None:
                staying[reason] = staying.get(reason, 0) + fate.nbytes
        return SavingsEstimate(
            saved_bytes=sum(fate.nbytes for fate in self._fates.values()),
            leaving_bytes=stats.d2h_bytes,
            staying_bytes=staying,
            host_bytes=stats.host_peak_bytes,
        )
