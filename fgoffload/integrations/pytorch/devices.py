"""Chooses the device of an engine."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

from fgoffload.engine import Device, find_device
from fgoffload.errors import ConfigError
from fgoffload.transfer_config import HostMemory

DeviceChoice: TypeAlias = "Device | torch.device | str | None"
"""Device of an engine. None selects the device of the tensors."""


def check_device(choice: Any) -> None:
    """Raise `ConfigError` unless `choice` is a device or None. Whether the device exists is checked on first use."""
    if choice is not None and not isinstance(choice, Device):
        _read_choice(choice)


def make_device(choice: DeviceChoice, *, tensors: Iterable[torch.Tensor] | None, host_memory: HostMemory) -> Device:
    """Return the device for an engine: the user's `choice`, or else the accelerator of one of `tensors`, or else the CPU.

    Meta tensors are ignored. If `tensors` is None, return torch's current accelerator, or the CPU if there is none. Raises
    `ConfigError` or `StateError` if the device does not exist.
    """
    if isinstance(choice, Device):
        return choice
    if choice is not None:
        device = _read_choice(choice)
    elif tensors is not None:
        # Prefer an accelerator: FSDP may keep parameters on the CPU between uses, and indices are often on the CPU.
        device = next((one.device for one in tensors if one.device.type not in ("cpu", "meta")), torch.device("cpu"))
    else:
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type == "cpu" or device.index is None or not torch.accelerator.is_available():
        return find_device(device.type, host_memory=host_memory)  # raises if the accelerator is missing
    count = torch.accelerator.device_count()
    if device.index >= count:
        raise ConfigError(f"device '{device}' does not exist. Use an index from 0 to {count - 1}.")
    with torch.accelerator.device_index(device.index):
        return find_device(device.type, host_memory=host_memory)


def _read_choice(choice: Any) -> torch.device:
    try:
        return torch.device(choice)  # torch raises its own errors
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {choice!r} is not a valid device. Pass a torch device such as 'cuda:1'.") from error
