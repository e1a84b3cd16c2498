"""Chooses the device of an engine."""

import contextlib
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

from fgoffload.engine import Device, find_device
from fgoffload.errors import ConfigError
from fgoffload.transfer_config import HostMemory

DeviceChoice: TypeAlias = "Device | torch.device | str | None"
"""Engine's device or torch device. None takes the device of the tensors."""


def check_device(choice: Any) -> None:
    """Reject a value that is not a device. First use checks whether the device exists.

    Raises:
        ConfigError: `choice` is not a device.
    """
    if choice is not None and not isinstance(choice, Device):
        _read_choice(choice)


def make_device(choice: DeviceChoice, *, tensors: Iterable[torch.Tensor] | None, host_memory: HostMemory) -> Device:
    """Return the device for an engine.

    Args:
        choice: The user's choice, or None.
        tensors: Tensors that give the device without a choice: the accelerator of one of them, else the CPU. Meta tensors are
            ignored. None takes the accelerator that torch finds, else the CPU.
        host_memory: Kind of an accelerator's host memory.

    Raises:
        ConfigError: `choice` is not a device, or its index does not exist.
        StateError: There is no such device.
    """
    if isinstance(choice, Device):
        return choice
    device = _read_choice(choice) if choice is not None else _find_default(tensors)
    _check_index(device)
    with _use_index(device):
        return find_device(device.type, host_memory=host_memory)


def _read_choice(choice: Any) -> torch.device:
    try:
        return torch.device(choice)  # torch raises its own errors
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {choice!r} is not a device. Give one as for torch: 'cuda', 'cuda:1', 'cpu'.") from error


def _check_index(device: torch.device) -> None:
    # Without an accelerator, `find_device` raises.
    if device.type == "cpu" or device.index is None or not torch.accelerator.is_available():
        return
    count = torch.accelerator.device_count()
    if device.index >= count:
        raise ConfigError(f"device '{device}' does not exist: there are {count}, counted from 0. Give one of them.")


def _find_default(tensors: Iterable[torch.Tensor] | None) -> torch.device:
    cpu = torch.device("cpu")
    if tensors is None:
        return (torch.accelerator.current_accelerator(check_available=True) or cpu) if torch.accelerator.is_available() else cpu
    # An accelerator is preferred: FSDP may keep parameters on the CPU between uses, and indices often come from the CPU.
    return next((tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")), cpu)


def _use_index(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the accelerator with the index of `device` is current, if it has an index."""
    if device.type == "cpu" or device.index is None or not torch.accelerator.is_available():
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)
