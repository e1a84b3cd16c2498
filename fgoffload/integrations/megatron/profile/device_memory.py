"""Reads memory use from the allocator's counters, or counts parameter bytes on devices without counters."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from fgoffload.errors import PlanError
from fgoffload.integrations.collectives import gather
from fgoffload.units import format_bytes


class MemoryReading(NamedTuple):
    """Bytes allocated now, and peak bytes since the previous reading."""

    allocated_bytes: int
    peak_bytes: int


class DeviceMemory:
    """Reads and resets the counters of PyTorch's allocator on the current CUDA device, without synchronizing."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._peak_bytes = 0

    def count_allocated(self) -> int:
        """Return the currently allocated bytes."""
        return int(torch.cuda.memory_allocated(self._device))

    def count_peak(self) -> int:
        """Return the peak bytes since the last call of `read`."""
        return int(torch.cuda.max_memory_allocated(self._device))

    def read(self) -> MemoryReading:
        """Return the counters and reset the peak."""
        counted = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
        torch.cuda.reset_peak_memory_stats(self._device)
        reading = MemoryReading(allocated_bytes=int(counted["current"]), peak_bytes=int(counted["peak"]))
        self._peak_bytes = max(self._peak_bytes, reading.peak_bytes)
        return reading

    def take_peak(self) -> int:
        """Return the highest peak since the last call of this method."""
        peak_bytes, self._peak_bytes = max(self._peak_bytes, self.read().peak_bytes), 0
        return peak_bytes


def find_device_memory(device_type: str) -> DeviceMemory | None:
    """Return the allocator's counters, or None on devices without them, such as the CPU."""
    return DeviceMemory() if device_type == "cuda" else None


def check_static(static_bytes: int, *, budget_bytes: int) -> None:
    """Check, before the first step, that the budget exceeds the static memory of every rank. Call this on all ranks.

    `static_bytes` are this process's allocated bytes, such as weights and gradients. All ranks raise PlanError if any rank's
    bytes reach the budget.
    """
    largest_bytes = max(gather(static_bytes))
    if largest_bytes >= budget_bytes:
        raise PlanError(
            f"--offload-memory-budget {format_bytes(budget_bytes)} is not above the static memory of a rank (weights and "
            f"gradients), {format_bytes(largest_bytes)} before the first step. Use a larger budget, or spread the model over "
            "more ranks."
        )


def count_parameter_bytes(models: Iterable[torch.nn.Module]) -> int:
    """Return the bytes of all parameters and gradients of `models`. Each storage counts once. Optimizer state is excluded."""
    found: dict[int, int] = {}
    for model in models:
        for parameter in model.parameters():
            for tensor in (parameter, parameter.grad, getattr(parameter, "main_grad", None)):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
