"""What offload would save, measured by one forward in which nothing moves."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fgoffload.engine import ActivationLedger, Device, HostSlab
from fgoffload.engine.device import Event, Stream
from fgoffload.engine.hazards import Hazard
from fgoffload.engine.identity import StorageRef, get_key, has_bytes
from fgoffload.errors import ConfigError
from fgoffload.integrations.pytorch.block import SavedTensors
from fgoffload.integrations.pytorch.devices import DeviceChoice, check_device, make_device
from fgoffload.integrations.pytorch.model import ModelOffload
from fgoffload.integrations.pytorch.patterns import Patterns, check_model, find_sites
from fgoffload.integrations.pytorch.tensors import check_config
from fgoffload.transfer_config import TransferConfig
from fgoffload.units import format_bytes

OUTSIDE = "saved outside of every region"
"""The reason for what no region saves."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavingsEstimate:
    """What one forward saves, and what of it would leave. Storages are counted once; parameters are not."""

    saved_bytes: int
    """What autograd saves in the forward."""
    leaving_bytes: int
    """What would go to the host. The last groups of a forward are called back when backward begins at once."""
    staying_bytes: dict[str, int]
    """What would stay on the device, by the reason."""
    host_bytes: int
    """The host memory that it needs, alignment included."""

    @property
    def percent(self) -> float:
        """Of what is saved, how much would leave."""
        return 100 * self.leaving_bytes / self.saved_bytes if self.saved_bytes else 0.0

    def __str__(self) -> str:
        """Return it as text for people, one line for each reason."""
        lines = [
            f"{format_bytes(self.saved_bytes)} saved, {format_bytes(self.leaving_bytes)} would leave ({self.percent:.1f}%), "
            f"{format_bytes(self.host_bytes)} of host memory needed"
        ]
        lines += [f"{format_bytes(size_bytes)} would stay: {reason}" for reason, size_bytes in self.staying_bytes.items()]
        return "\n".join(lines)


def estimate_savings(
    forward: Callable[[], Any],
    model: torch.nn.Module | None = None,
    modules: Patterns = (),
    config: TransferConfig | None = None,
    *,
    device: DeviceChoice = None,
) -> SavingsEstimate:
    """Return what offload would move, by running `forward` once. Nothing is copied to the host, and no host memory is taken.

        estimate = fgoffload.estimate_savings(lambda: model(batch), model, {"layers.*.mlp": "mlp"})

    Args:
        forward: Runs one forward and returns what holds its graph. Needs the device memory of a forward without offload.
        model: As for `offload`. None measures what `saved_tensors` would do around `forward`.
        modules: As for `offload`.
        config: As for `offload`.
        device: As for `offload` or `saved_tensors`.

    Raises:
        ConfigError: As for `offload`; or `forward` cannot be called, or `modules` are named without a model.
    """
    if not callable(forward):
        raise ConfigError(
            f"forward is a {type(forward).__name__}, which cannot be called. Give a function, as in lambda: model(batch)."
        )
    if model is not None:
        check_model(model)
    elif modules != ():
        raise ConfigError(f"modules {modules!r} are named without a model. Give the model too, or leave them out.")
    check_device(device)
    tensors = None if model is None else [*model.parameters(), *model.buffers()]
    config = dataclasses.replace(check_config(config) or TransferConfig(), enabled=True)
    stand_in = HostlessDevice(make_device(device, tensors=tensors, host_memory=config.host_memory))
    ledger = _SaveLedger()
    if model is None:
        with SavedTensors(config, group_bytes=None, device=stand_in, tag="saved") as block, block.get_engine().observe(ledger):
            output = forward()
        stats = block.get_engine().finish_step()
    else:
        handle = ModelOffload(model, find_sites(model, modules), config, device=stand_in)
        try:
            with handle.get_engine().observe(ledger):
                output = forward()
            stats = handle.get_engine().finish_step()
        finally:
            handle.remove_hooks()
    staying: dict[str, int] = {}
    for tag in stats.tags.values():
        for reason, size_bytes in tag.kept_bytes.items():
            staying[reason] = staying.get(reason, 0) + size_bytes
    outside_bytes = ledger.saved_bytes - stats.d2h_bytes - sum(staying.values())
    if outside_bytes > 0:
        staying[OUTSIDE] = outside_bytes
    del output
    return SavingsEstimate(
        saved_bytes=ledger.saved_bytes,
        leaving_bytes=stats.d2h_bytes,
        staying_bytes=staying,
        host_bytes=stats.host_peak_bytes,
    )


class HostlessDevice(Device):
    """A device without host memory: what would leave is remembered where it is, and what comes back is copied from there.

    So an engine counts as always, results stay right, and nothing crosses the link.

    Args:
        device: The real one.
    """

    def __init__(self, device: Device) -> None:
        self._real = device
        self.type = device.type
        self.d2h_stream = device.d2h_stream
        self.h2d_stream = device.h2d_stream
        self._sources: dict[tuple[int, int], torch.Tensor] = {}

    def owns(self, tensor: torch.Tensor) -> bool:  # noqa: D102
        return self._real.owns(tensor)

    def current_stream(self) -> Stream:  # noqa: D102
        return self._real.current_stream()

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[object]:  # noqa: D102
        return self._real.on(stream)

    def record_event(self, stream: Stream, *, is_timed: bool = False) -> Event:  # noqa: D102
        return self._real.record_event(stream, is_timed=is_timed)

    def wait_event(self, stream: Stream, event: Event, hazard: Hazard) -> None:  # noqa: D102
        self._real.wait_event(stream, event, hazard)

    def is_done(self, event: Event) -> bool:  # noqa: D102
        return self._real.is_done(event)

    def synchronize(self, event: Event) -> None:  # noqa: D102
        self._real.synchronize(event)

    def measure_seconds(self, start: Event, end: Event) -> float:  # noqa: D102
        return self._real.measure_seconds(start, end)

    def copy_bytes(self, *, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:  # noqa: D102
        if destination.is_meta:
            self._sources[_place(destination)] = source
        else:
            self._real.copy_bytes(destination=destination, source=self._sources[_place(source)], stream=stream)

    def allocate_device(self, size_bytes: int) -> torch.Tensor:  # noqa: D102
        return self._real.allocate_device(size_bytes)

    def allocate_host(self, size_bytes: int) -> HostSlab:  # noqa: D102
        return HostSlab(torch.empty(size_bytes, dtype=torch.uint8, device="meta"), free=lambda: None)


def _place(host: torch.Tensor) -> tuple[int, int]:
    """Return what names a block of host memory: its slab, and where in the slab it begins."""
    return get_key(host), int(host.storage_offset())


class _SaveLedger(ActivationLedger):
    """Bytes of every storage that autograd saves, each counted once, whether it is still alive or not."""

    def __init__(self) -> None:
        super().__init__(parameters=())
        self._storages: dict[int, StorageRef] = {}
        self.saved_bytes = 0

    def count_save(self, tensor: torch.Tensor, *, place: object = "") -> None:
        """Autograd has saved `tensor`."""
        base = tensor._base  # noqa: SLF001 - no public name
        if isinstance(tensor, torch.nn.Parameter) or isinstance(base, torch.nn.Parameter) or not has_bytes(tensor):
            return
        key = get_key(tensor)
        if key not in self._storages:
            self._storages[key] = StorageRef(tensor)  # so that no other storage gets this key
            self.saved_bytes += tensor.untyped_storage().nbytes()

    def count_take(self, *, place: object = "") -> None:
        """Autograd has taken a tensor back, which says nothing here."""

    def observe(self, tensor: torch.Tensor) -> None:
        """The engine has made a buffer, which autograd did not save."""
