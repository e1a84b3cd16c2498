"""Which device an engine is made for."""

import contextlib
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

from fgoffload.engine import Device, find_device
from fgoffload.errors import ConfigError
from fgoffload.transfer_config import HostMemory

DeviceChoice: TypeAlias = "Device | torch.device | str | None"
"""An engine's device, or what names one for torch; None leaves the choice to where the tensors are."""


def check_device(choice: Any) -> None:
    """Refuse what names no device. Whether the device is here shows when it is first needed.

    Raises:
        ConfigError: `choice` names no device.
    """
    if choice is not None and not isinstance(choice, Device):
        _read_choice(choice)


def make_device(choice: DeviceChoice, *, tensors: Iterable[torch.Tensor] | None, host_memory: HostMemory) -> Device:
    """Return the device for an engine.

    Args:
        choice: The user's.
        tensors: Without a choice: the accelerator that one of these lies on, else the CPU. Meta tensors say nothing. None,
            where there is no tensor yet: the accelerator that torch finds, else the CPU.
        host_memory: What the host memory of an accelerator is.

    Raises:
        ConfigError: `choice` names no device, or one with an index that no device here has.
        StateError: No such device is here.
    """
    if isinstance(choice, Device):
        return choice
    device = _read_choice(choice) if choice is not None else _find_default(tensors)
    _check_index(device)
    with _use_index(device):
        return find_device(device.type, host_memory=host_memory)


def _read_choice(choice: Any) -> torch.device:
    try:
        return torch.device(choice)  # torch itself says what it takes
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {choice!r} is not a device. Give one as for torch: 'cuda', 'cuda:1', 'cpu'.") from error


def _check_index(device: torch.device) -> None:
    # Without an accelerator `find_device` says so.
    if device.type == "cpu" or device.index is None or not torch.accelerator.is_available():
        return
    count = torch.accelerator.device_count()
    if device.index >= count:
        raise ConfigError(f"device '{device}' is not here: there are {count}, counted from 0. Give one of them.")


def _find_default(tensors: Iterable[torch.Tensor] | None) -> torch.device:
    cpu = torch.device("cpu")
    if tensors is None:
        return (torch.accelerator.current_accelerator(check_available=True) or cpu) if torch.accelerator.is_available() else cpu
    # An accelerator wins: FSDP may hold the parameters on the CPU between their uses, and indices often come from there.
    return next((tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")), cpu)


def _use_index(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the engine's device becomes the accelerator with the index of `device`, if it has one."""
    if device.type == "cpu" or device.index is None or not torch.accelerator.is_available():
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)
