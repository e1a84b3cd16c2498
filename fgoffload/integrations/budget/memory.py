"""Parses memory budgets, and measures the peak memory of a step with the allocator or, on a CPU, with a ledger."""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from fgoffload.engine import ActivationLedger, OffloadEngine
from fgoffload.errors import ConfigError
from fgoffload.units import check_bytes, parse_bytes

Memory: TypeAlias = "str | int | None"
"""Budget or reserve as the user passes it: a size such as `60GiB`, a number of bytes, `auto`, or None."""

DEFAULT_RESERVE = "2GiB"
"""Memory that `memory="auto"` reserves for the CUDA context, NCCL and fragmentation."""


class PeakMeter:
    """Measures peak allocated memory. Each reading resets `torch.cuda.max_memory_allocated`."""

    def __init__(self) -> None:
        self._peak_bytes = 0

    def watch(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager in which the model's forward must run."""
        return contextlib.nullcontext()

    def read(self) -> tuple[int, int]:
        """Return the allocated bytes, and their peak since the last call."""
        allocated_bytes, peak_bytes = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        return allocated_bytes, peak_bytes

    def pop_peak(self) -> int:
        """Return the peak bytes since the last call to `pop_peak`, even if `read` was called in between."""
        self.read()
        peak_bytes, self._peak_bytes = self._peak_bytes, 0
        return peak_bytes

    @torch.no_grad()
    def count_new_gradients(self, module: torch.nn.Module) -> int:
        """Return the bytes of the gradients that a backward of `module` would allocate in this process."""
        missing = [one for one in module.parameters() if one.requires_grad and one.grad is None]
        local = [one.to_local() if isinstance(one, DTensor) else one for one in missing]
        return sum(one.numel() * one.element_size() for one in local)

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the peak within the `with` block from `pop_peak`."""
        peak_bytes = self.pop_peak()
        yield
        self.read()
        self._peak_bytes = peak_bytes


class _LedgerMeter(PeakMeter):
    """Adds up the bytes of parameters, their gradients, and the activations that a ledger counts."""

    def __init__(self, model: torch.nn.Module, engine: OffloadEngine) -> None:
        super().__init__()
        self._engine = engine
        self._parameters = [one for one in model.parameters() if not one.is_meta]
        self._ledger = ActivationLedger(parameters=self._parameters)

    def watch(self) -> contextlib.AbstractContextManager[object]:
        self._ledger = ActivationLedger(parameters=self._parameters)
        self._engine.observers.append(self._ledger)
        return self._ledger.watch()

    def read(self) -> tuple[int, int]:
        return 0, 0

    def count_new_gradients(self, module: torch.nn.Module) -> int:
        return 0  # `pop_peak` counts all gradients as static

    def pop_peak(self) -> int:
        if self._ledger in self._engine.observers:
            self._engine.observers.remove(self._ledger)
        static_bytes = sum((1 + one.requires_grad) * one.numel() * one.element_size() for one in self._parameters)
        return static_bytes + self._ledger.peak_bytes

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        yield  # a trial has its own hooks, so the ledger does not count its tensors


def find_meter(engine: OffloadEngine, model: torch.nn.Module) -> PeakMeter:
    """Return the meter for the device of `engine`."""
    return PeakMeter() if engine.device.type == "cuda" else _LedgerMeter(model, engine)


def read_size(value: Any, *, name: str) -> int:
    """Return the number of bytes in `value`, a size such as `60GiB` or an int. Raise `ConfigError` if it is not above 0."""
    size_bytes = parse_bytes(value, name=name, needs_unit=True) if isinstance(value, str) else check_bytes(value, name=name)
    if size_bytes <= 0:
        raise ConfigError(f"{name} {value!r} is not above 0. Pass a size, for example '60GiB'.")
    return size_bytes


def check_memory(memory: Any, *, reserve: Any, device: Any = None) -> int:
    """Return the reserve in bytes. Raise `ConfigError` unless `memory` is a size, or `auto` on a GPU."""
    if memory == "auto":
        device_type = "cpu" if not torch.cuda.is_available() else "cuda" if device is None else str(device).partition(":")[0]
        find_budget(memory, reserve_bytes=0, device_type=device_type)
        return read_size(DEFAULT_RESERVE if reserve is None else reserve, name="memory_reserve")
    if reserve is not None:
        raise ConfigError(f"memory_reserve {reserve!r} has no effect with memory {memory!r}. Omit it, or use memory='auto'.")
    read_size(memory, name="memory")
    return 0


def find_budget(memory: Any, *, reserve_bytes: int, device_type: str) -> int:
    """Return the budget in bytes. For `auto`, it is the device's memory minus the reserve."""
    if memory != "auto":
        return read_size(memory, name="memory")
    if device_type != "cuda":
        raise ConfigError(f"memory 'auto' needs a CUDA GPU, but the device is {device_type}. Pass a size such as '60GiB'.")
    return int(torch.cuda.mem_get_info()[1]) - reserve_bytes
