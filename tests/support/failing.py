"""A device on which one chosen call raises, to test the state after an interrupt or out-of-memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fgoffload import StateError
from support.sites import DelayedCpuDevice, count_holders

OPERATIONS = ("current_stream", "record_event", "wait_event", "is_done", "copy_bytes", "allocate_device", "allocate_host")
"""The methods that the engine calls in a step."""


class FailingCpuDevice(DelayedCpuDevice):
    """A device that raises at the start of one chosen call of the engine. Copies run as late as allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.lost_destinations = 0
        """Copies to freed memory, which the allocator could have given to a kernel."""
        self._make_error: Callable[[], BaseException] | None = None
        self._operation = ""
        self._calls_left = 0
        self._is_busy = False

    def fail(self, operation: str, *, call: int, make_error: Callable[[], BaseException]) -> None:
        """Raise the result of `make_error` in call number `call` of `operation`, counted from 1 and from now."""
        self._operation, self._calls_left, self._make_error = operation, call, make_error

    def stop_failing(self) -> bool:
        """Return whether the chosen call has raised, and let later calls succeed."""
        was_raised = self._make_error is None
        self._make_error = None
        return was_raised

    def copy_bytes(self, *, destination, source, stream):
        # Not the engine's own slice, which would keep its base tensor alive.
        bare = torch.empty(0, dtype=destination.dtype)
        bare.set_(destination.untyped_storage(), destination.storage_offset(), destination.size(), destination.stride())

        def look() -> None:
            self.lost_destinations += count_holders(bare) == self._count_of_one_holder

        self._queues[stream].append(look)
        super().copy_bytes(destination=bare, source=source, stream=stream)

    def finish_copies(self) -> None:
        """Run all queued copies."""
        for stream in (self.d2h_stream, self.h2d_stream):
            self.synchronize(self.record_event(stream))

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return functools.partial(self._call, name, value) if name in OPERATIONS else value

    def _call(self, name: str, operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self._is_busy:
            return operation(*args, **options)  # a call by the device itself
        if name == self._operation and self._make_error is not None:
            self._calls_left -= 1
            if self._calls_left == 0:
                make_error, self._make_error = self._make_error, None
                raise make_error()
        self._is_busy = True
        try:
            return operation(*args, **options)
        finally:
            self._is_busy = False


def make_out_of_memory_error() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def fail_to_pin() -> StateError:
    return StateError("CUDA could not pin 256.00 MiB of host memory.")
