"""Provides the streams, events, copies and memory of a device.

The engine has one copy stream per direction, so that copies in one direction do not wait for copies in the other.

On the CPU, device and host memory are both RAM, copies are synchronous, and an event completes as soon as it is recorded. The
engine still copies each tensor to another buffer and frees the source, so that a bug shows up as a wrong gradient.
"""

import abc
import contextlib
import functools
import mmap
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from fgoffload.engine import cuda_copies
from fgoffload.engine.events import EventPool
from fgoffload.engine.geometry import View
from fgoffload.engine.hazards import Hazard
from fgoffload.engine.torch_internals import find_raw_stream_getter, get_stream, sleep_on_device
from fgoffload.errors import InternalError, StateError
from fgoffload.transfer_config import HostMemory
from fgoffload.units import MIB, format_bytes

Stream: TypeAlias = Any
"""Queue of device work: `torch.Stream`, or another device's equivalent. Hashable and comparable with `==`."""
Event: TypeAlias = Any
"""Point in a stream: `RecordedEvent`, or another device's equivalent."""

_COMPARED_BYTES = 16 * MIB
"""`is_equal` copies this many bytes from the host to the device at a time, to limit its use of device memory."""


class HostSlab:
    """Host memory for asynchronous copies.

    `buffer` is uint8 `[size_bytes]`, on the CPU. `free` releases the memory once the copies queued so far are done. `free` must
    not reference the slab.
    """

    def __init__(self, buffer: torch.Tensor, free: Callable[[], None]) -> None:
        self.buffer = buffer
        self._finalizer = weakref.finalize(self, free)
        self._finalizer.atexit = False  # CUDA may be shut down by then

    def close(self) -> None:
        """Release the memory without waiting for garbage collection. The host blocks until the copies are done."""
        self._finalizer()


class Device(abc.ABC):
    """Interface to the streams, events, copies and memory of a device."""

    type: str
    """Device type, as in `torch.device.type`."""
    d2h_stream: Stream
    """Stream for copies to the host, which run in order. They may overlap compute and copies to the device."""
    h2d_stream: Stream
    """Stream for copies to the device, which run in order. They may overlap compute and copies to the host."""

    has_blocking_copies = False
    """Whether a copy to the host is done when `copy_bytes` returns."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is in this device's memory."""
        return tensor.device.type == self.type

    def is_capturing(self) -> bool:
        """Return whether the calling thread is capturing a graph."""
        return False

    @abc.abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream on which the calling thread queues compute."""

    @abc.abstractmethod
    def on(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        """Return a context manager that makes `stream` the current stream."""

    @abc.abstractmethod
    def record_event(self, stream: Stream, *, is_timed: bool = False) -> Event:
        """Record an event that completes when all work queued on `stream` so far is done."""

    @abc.abstractmethod
    def wait_event(self, stream: Stream, event: Event, hazard: Hazard) -> None:
        """Make later work on `stream` wait for `event`, to prevent `hazard`. The host does not block."""

    def wait_stream(self, stream: Stream, other: Stream, hazard: Hazard) -> None:
        """Make later work on `stream` wait for all work queued on `other` so far. The host does not block."""
        self.wait_event(stream, self.record_event(other), hazard)

    @abc.abstractmethod
    def is_done(self, event: Event) -> bool:
        """Return whether `event` has completed, without blocking. Always false during graph capture."""

    @abc.abstractmethod
    def synchronize(self, event: Event) -> None:
        """Block the host until `event` has completed."""

    @abc.abstractmethod
    def measure_seconds(self, start: Event, end: Event) -> float:
        """Return the seconds between two timed events that have completed."""

    def stall(self, seconds: float) -> None:
        """Delay the current stream by about `seconds`, so that the CPU runs ahead. A `CpuDevice` does nothing."""
        return

    @abc.abstractmethod
    def copy_bytes(self, *, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Queue a copy on `stream`. Keep both tensors alive and unchanged until the copy is done.

        Both are contiguous and have the same type and size. The type is not bool, because a copy of bools may change bits.
        Call this within `copying_on(stream)`. Entering it can take half the CPU time of a copy, so queue several copies inside.
        """

    def is_equal(self, on_host: torch.Tensor, tensor: torch.Tensor, *, after: Event | None) -> bool:
        """Wait for `after`, and return whether `on_host` and `tensor`, both uint8, have the same bytes.

        The comparison runs on the device of `tensor`. The host blocks until it is done.
        """
        if after is not None:
            self.synchronize(after)
        pieces = zip(torch.split(on_host, _COMPARED_BYTES), torch.split(tensor, _COMPARED_BYTES), strict=True)
        return all(torch.equal(host.to(tensor.device, non_blocking=True), own) for host, own in pieces)

    def copying_on(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        """Return a context manager for `copy_bytes` on `stream`. It makes `stream` current if copies require that."""
        return self.on(stream)

    @abc.abstractmethod
    def allocate_device(self, size_bytes: int) -> torch.Tensor:
        """Allocate uint8 `[size_bytes]` of device memory on the current stream."""

    def allocate_like(self, view: View) -> torch.Tensor:
        """Allocate a device tensor with the layout of the contiguous `view` on the current stream."""
        # Detached, because autograd forbids in-place changes in grad mode to a view that was made in no-grad mode.
        return self.allocate_device(view.dense_bytes).view(view.dtype).as_strided(view.size, view.stride).detach()

    @abc.abstractmethod
    def allocate_host(self, size_bytes: int) -> HostSlab:
        """Allocate exactly `size_bytes` of host memory.

        Lifetime:
            The memory lives until the slab is closed or garbage-collected and the copies that use it are done.

        Raises:
            StateError: The memory cannot be allocated or pinned.
        """


class CpuDevice(Device):
    """The CPU as a device. Device memory and host memory are both RAM. All work is synchronous, so streams are only names."""

    type = "cpu"
    has_blocking_copies = True

    def __init__(self) -> None:
        self.d2h_stream = "d2h"
        self.h2d_stream = "h2d"

    def current_stream(self) -> Stream:  # noqa: D102
        return "compute"

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[object]:  # noqa: D102
        return contextlib.nullcontext()

    def record_event(self, stream: Stream, *, is_timed: bool = False) -> Event:  # noqa: D102
        return time.perf_counter()

    def wait_event(self, stream: Stream, event: Event, hazard: Hazard) -> None:  # noqa: D102
        pass

    def is_done(self, event: Event) -> bool:  # noqa: D102
        return True

    def synchronize(self, event: Event) -> None:  # noqa: D102
        pass

    def measure_seconds(self, start: Event, end: Event) -> float:  # noqa: D102
        return float(end - start)

    def copy_bytes(self, *, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:  # noqa: D102
        destination.copy_(source)

    def allocate_device(self, size_bytes: int) -> torch.Tensor:  # noqa: D102
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def allocate_host(self, size_bytes: int) -> HostSlab:  # noqa: D102
        return HostSlab(torch.empty(size_bytes, dtype=torch.uint8, device="cpu"), free=lambda: None)


NO_CONTEXT = contextlib.nullcontext()
"""Context manager that does nothing. One instance is enough, because it has no state."""


def as_normal_tensors() -> contextlib.AbstractContextManager[object]:
    """Return a context manager that disables inference mode, because inference tensors cannot be changed outside that mode."""
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else NO_CONTEXT


class AcceleratorDevice(Device):
    """Current accelerator of `torch.accelerator`, such as a CUDA GPU."""

    def __init__(self, *, host_memory: HostMemory = HostMemory.PINNED) -> None:
        device = torch.accelerator.current_accelerator(check_available=True)  # without a check, CUDA builds always return CUDA
        if device is None:
            raise StateError(
                "torch found no accelerator. Use CpuDevice, or check the driver and whether torch supports your accelerator."
            )
        self.type = device.type
        self._host_memory = host_memory
        self.has_blocking_copies = host_memory is HostMemory.PAGEABLE
        self._index = torch.accelerator.current_device_index()
        self._device = torch.device(device.type, self._index)
        self.d2h_stream = torch.Stream(device=self._device)
        self.h2d_stream = torch.Stream(device=self._device)
        self._get_raw_stream = find_raw_stream_getter() if self.type == "cuda" else None
        self._streams: dict[int, Stream] = {}
        """Streams keyed by their CUDA handle. Stream objects with the same handle refer to the same queue."""
        # Copies of pageable memory block the host, so a faster launch would gain nothing.
        self._copies = cuda_copies.find_cuda_copies() if self.type == "cuda" and host_memory is HostMemory.PINNED else None
        self._events = EventPool(functools.partial(torch.Event, device=self._device))
        self._timed_events = EventPool(functools.partial(torch.Event, device=self._device, enable_timing=True))

    def current_stream(self) -> Stream:  # noqa: D102
        if self._get_raw_stream is None:
            return get_stream(self._index)
        # This runs for each save and each unpack. CUDA's handle is faster to get than a stream object.
        handle = self._get_raw_stream(self._index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = get_stream(self._index)
        return stream

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[object]:  # noqa: D102
        return stream  # type: ignore[no-any-return]

    def record_event(self, stream: Stream, *, is_timed: bool = False) -> Event:  # noqa: D102
        return (self._timed_events if is_timed else self._events).record(stream)

    def wait_event(self, stream: Stream, event: Event, hazard: Hazard) -> None:  # noqa: D102
        stream.wait_event(event.event)

    def wait_stream(self, stream: Stream, other: Stream, hazard: Hazard) -> None:  # noqa: D102
        self._events.order(stream, behind=other)

    def is_done(self, event: Event) -> bool:  # noqa: D102
        return not self.is_capturing() and bool(event.event.query())  # captured work has not run yet

    def synchronize(self, event: Event) -> None:  # noqa: D102
        event.event.synchronize()

    def measure_seconds(self, start: Event, end: Event) -> float:  # noqa: D102
        return float(start.event.elapsed_time(end.event)) / 1e3

    def stall(self, seconds: float) -> None:  # noqa: D102
        if self.type == "cuda":
            sleep_on_device(int(seconds * _CYCLES_PER_S))

    def owns(self, tensor: torch.Tensor) -> bool:  # noqa: D102
        return tensor.device == self._device

    def is_capturing(self) -> bool:  # noqa: D102
        return self.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def copy_bytes(self, *, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:  # noqa: D102
        if self._copies is None:
            destination.copy_(source, non_blocking=True)
        else:
            piece_bytes = cuda_copies.D2H_PIECE_BYTES if stream == self.d2h_stream else cuda_copies.H2D_PIECE_BYTES
            self._copies.queue(destination, source, stream, piece_bytes=piece_bytes)

    def copying_on(self, stream: Stream) -> contextlib.AbstractContextManager[object]:  # noqa: D102
        return self.on(stream) if self._copies is None else NO_CONTEXT

    def allocate_device(self, size_bytes: int) -> torch.Tensor:  # noqa: D102
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def allocate_like(self, view: View) -> torch.Tensor:  # noqa: D102
        return torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=self._device)

    def allocate_host(self, size_bytes: int) -> HostSlab:  # noqa: D102
        is_pinned = self._host_memory is HostMemory.PINNED
        if is_pinned and self.type == "cuda":
            return _register_host(size_bytes, self._device)
        # Copies of pageable memory are synchronous, so none is in flight when the memory is freed.
        return HostSlab(torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned), free=lambda: None)


_CYCLES_PER_S = 1.7e9
"""Approximate GPU clock rate. An H100 or H200 runs at up to 1.98 GHz, and slower under load."""


def _register_host(size_bytes: int, device: torch.device) -> HostSlab:
    """Allocate exactly `size_bytes` of pinned memory. Torch's own allocator would round up to a power of two."""
    buffer = torch.frombuffer(_map_host(size_bytes), dtype=torch.uint8)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(cudart.cudaHostRegister(buffer.data_ptr(), size_bytes, 0))
    if status != 0:
        _clear_last_error()
        raise StateError(
            f"CUDA could not pin {format_bytes(size_bytes)} of host memory (cudaHostRegister returned {status}). Free "
            f"host memory, raise the container's memory limit, or lower {_HOST_BUDGET}."
        )

    def free() -> None:
        torch.cuda.synchronize(device)  # queued copies may still use the memory
        status = int(cudart.cudaHostUnregister(buffer.data_ptr()))
        if status != 0:
            raise InternalError(f"cudaHostUnregister returned {status} for {format_bytes(size_bytes)} of host memory.")

    return HostSlab(buffer, free)


def _map_host(size_bytes: int) -> mmap.mmap:
    """Map anonymous memory, with huge pages if available. The OS allocates each page on first access."""
    try:
        # A private mapping, because huge pages in shared memory need a separate kernel setting.
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise StateError(
            f"The system could not allocate {format_bytes(size_bytes)} of host memory ({error.strerror}). Lower {_HOST_BUDGET}."
        ) from error
    if hasattr(mmap, "MADV_DONTFORK"):
        pages.madvise(mmap.MADV_DONTFORK)  # a data loader forked later must not keep the memory alive
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # pinning also works without huge pages, but takes longer
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


_HOST_BUDGET = "the host budget (--offload-host-budget, or `host_budget_bytes` of a TransferConfig)"


def _clear_last_error() -> None:
    """Clear CUDA's last error, which the user's next kernel launch would otherwise report."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")


def find_device(device_type: str, *, host_memory: HostMemory = HostMemory.PINNED) -> Device:
    """Return the device of type `device_type`, such as `cuda`. For the CPU, `host_memory` has no effect.

    Raises:
        StateError: No accelerator of this type is available.
    """
    if device_type == "cpu":
        return CpuDevice()
    device = AcceleratorDevice(host_memory=host_memory)
    if device.type != device_type:
        raise StateError(f"Device {device_type!r} was requested, but the accelerator is {device.type!r}. Use {device.type!r}.")
    return device
