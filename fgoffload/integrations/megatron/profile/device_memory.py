"""Counts device bytes from the allocator, or from parameters on devices without one."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from fgoffload.errors import PlanError
from fgoffload.integrations.collectives import gather
from fgoffload.units import format_bytes


class MemoryReading(NamedTuple):
    """Device bytes at one time."""

    allocated_bytes: int
    """Bytes allocated now."""
    peak_bytes: int
    """Peak bytes since the previous reading."""


class DeviceMemory:
    """Counts the bytes that PyTorch's allocator hands out on the current CUDA device, and resets its peak.

    The host does not block.
    """

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._peak_bytes = 0

    def count_allocated(self) -> int:
        """Return the allocated bytes."""
        return int(torch.cuda.memory_allocated(self._device))

    def count_peak(self) -> int:
        """Return the peak bytes since the last `read`."""
        return int(torch.cuda.max_memory_allocated(self._device))

    def read(self) -> MemoryReading:
        """Return current bytes, and peak bytes since the last call."""
        counted = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
        torch.cuda.reset_peak_memory_stats(self._device)
        reading = MemoryReading(allocated_bytes=int(counted["current"]), peak_bytes=int(counted["peak"]))
        self._peak_bytes = max(self._peak_bytes, reading.peak_bytes)
        return reading

    def take_peak(self) -> int:
        """Return the highest peak of all readings since the last call."""
        peak_bytes, self._peak_bytes = max(self._peak_bytes, self.read().peak_bytes), 0
        return peak_bytes


def find_device_memory(device_type: str) -> DeviceMemory | None:
    """Return the byte counter for devices of this type, or None if there is none, as on a CPU."""
    return DeviceMemory() if device_type == "cuda" else None


def check_static(static_bytes: int, *, budget_bytes: int) -> None:
    """Raise if static memory before the first step reaches the budget. All processes call this, and raise together.

    `static_bytes` are weights, gradients and everything else on the device of this process.

    Raises:
        PlanError: The budget is too small. Names both sizes and the fix.
    """
    largest_bytes = max(gather(static_bytes))
    if largest_bytes >= budget_bytes:
        raise PlanError(
            f"--offload-memory-budget {format_bytes(budget_bytes)} is not above the static memory of a rank (weights and "
            f"gradients), {format_bytes(largest_bytes)} before the first step. Give a larger budget, or spread the model over "
            "more ranks."
        )


def count_parameter_bytes(models: Iterable[torch.nn.Module]) -> int:
    """Return the bytes of all parameters and gradients of `models`, each storage once.

    Estimates static memory on devices that count no bytes. Optimizer state is not included.
    """
    found: dict[int, int] = {}
    for model in models:
        for parameter in model.parameters():
            for tensor in (parameter, parameter.grad, getattr(parameter, "main_grad", None)):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
