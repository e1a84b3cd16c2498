"""Streams, events, copies and memory of a device.

Copies run on two streams of the engine, one for each direction, so that neither queues behind the other.

On the CPU both memories are RAM and copies are synchronous, so an event has passed once it is recorded. The engine works as on
a GPU: it copies to another buffer and drops the source, so a bug gives a wrong gradient.
"""

import abc
import contextlib
import functools
import mmap
import resource
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from fgoffload.engine.cuda_copies import find_cuda_copies
from fgoffload.engine.events import EventPool
from fgoffload.engine.geometry import View
from fgoffload.engine.hazards import Hazard
from fgoffload.engine.torch_internals import find_raw_stream_getter, get_stream, sleep_on_device
from fgoffload.errors import InternalError, StateError
from fgoffload.transfer_config import HostMemory
from fgoffload.units import MIB, format_bytes

Stream: TypeAlias = Any
"""Queue of device work: `torch.Stream`, or another device's equivalent. Hashable, compared with `==`."""
Event: TypeAlias = Any
"""Point in a stream: `RecordedEvent`, or another device's equivalent."""

_COMPARED_BYTES = 16 * MIB
"""Bytes of a host copy that a comparison copies to the device at a time, which must be few."""


class HostSlab:
    """Host memory for asynchronous copies.

    Args:
        buffer: uint8 `[size_bytes]`, on the CPU.
        free: Releases the memory once the copies queued so far are done. It must not reference the slab.
    """

    def __init__(self, buffer: torch.Tensor, free: Callable[[], None]) -> None:
        self.buffer = buffer
        self._finalizer = weakref.finalize(self, free)
        self._finalizer.atexit = False  # the driver may be gone by then

    def close(self) -> None:
        """Release the memory, as dropping the slab does. The host blocks until its copies are done."""
        self._finalizer()


class Device(abc.ABC):
    """The interface of a device."""

    type: str
    """Device type, as in `torch.device.type`."""
    d2h_stream: Stream
    """Stream of copies to the host, first in first out. May overlap compute and the other direction."""
    h2d_stream: Stream
    """Stream of copies to the device, first in first out. May overlap compute and the other direction."""

    has_blocking_copies = False
    """Whether a copy to the host is done when `copy_bytes` returns."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether the bytes of `tensor` lie in this device's memory."""
        return tensor.device.type == self.type

    def is_capturing(self) -> bool:
        """Return whether the caller's thread is capturing a graph."""
        return False

    @abc.abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream on which the caller's thread queues compute."""

    @abc.abstractmethod
    def on(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        """Return a context in which `stream` is the current stream."""

    @abc.abstractmethod
    def record_event(self, stream: Stream, *, is_timed: bool = False) -> Event:
        """Return an event that passes when all work queued on `stream` so far is done."""

    @abc.abstractmethod
    def wait_event(self, stream: Stream, event: Event, hazard: Hazard) -> None:
        """Make later work on `stream` wait for `event`, to prevent `hazard`. The host does not block."""

    def wait_stream(self, stream: Stream, other: Stream, hazard: Hazard) -> None:
        """Make later work on `stream` wait for all work queued on `other` so far. The host does not block."""
        self.wait_event(stream, self.record_event(other), hazard)

    @abc.abstractmethod
    def is_done(self, event: Event) -> bool:
        """Return whether `event` has passed, without blocking. False while a graph is captured."""

    @abc.abstractmethod
    def synchronize(self, event: Event) -> None:
        """Block the host until `event` has passed."""

    @abc.abstractmethod
    def measure_seconds(self, start: Event, end: Event) -> float:
        """Return the seconds between two timed events that have passed."""

    def stall(self, seconds: float) -> None:
        """Keep the current stream idle for about `seconds`, so that the CPU gets ahead. Does nothing on the CPU."""
        return

    @abc.abstractmethod
    def copy_bytes(self, *, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Queue a copy on `stream`. Both tensors must stay alive and unchanged until an event after it.

        Args:
            destination: Contiguous tensor with the type and size of `source`.
            source: Contiguous tensor, not bool: a copy of bools need not keep every bit.
            stream: Call inside of `copying_on(stream)`. A switch costs half the CPU time of a copy, so switch once for several.
        """

    def is_equal(self, on_host: torch.Tensor, tensor: torch.Tensor, *, after: Event | None) -> bool:
        """Return whether `on_host` has the bytes of `tensor`, both uint8, once `after` has passed.

        They are compared on the device of `tensor`. The host blocks until `after` has passed and the current stream is done.
        """
        if after is not None:
            self.synchronize(after)
        pieces = zip(torch.split(on_host, _COMPARED_BYTES), torch.split(tensor, _COMPARED_BYTES), strict=True)
        return all(torch.equal(host.to(tensor.device, non_blocking=True), own) for host, own in pieces)

    def copying_on(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        """Return a context for `copy_bytes` on `stream`. It makes `stream` current if copies need that."""
        return self.on(stream)

    @abc.abstractmethod
    def allocate_device(self, size_bytes: int) -> torch.Tensor:
        """Return uint8 `[size_bytes]` of device memory, ordered on the current stream."""

    def allocate_like(self, view: View) -> torch.Tensor:
        """Return device memory with the type, size and stride of the contiguous `view`, ordered on the current stream."""
        # Detached: with grad mode on, autograd forbids in-place changes of a view that was made without it.
        return self.allocate_device(view.dense_bytes).view(view.dtype).as_strided(view.size, view.stride).detach()

    @abc.abstractmethod
    def allocate_host(self, size_bytes: int) -> HostSlab:
        """Return host memory of exactly `size_bytes`.

        Lifetime:
            Until the slab is closed or dropped. The memory is released when the copies that use it are done.

        Raises:
            StateError: The memory cannot be allocated or pinned.
        """


class CpuDevice(Device):
    """CPU as a device. Device memory and host memory are both RAM, and all work is synchronous, so streams are only names."""

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
"""Shared instance, since it has no state."""


def as_normal_tensors() -> contextlib.AbstractContextManager[object]:
    """Return a context for allocations that outlive inference mode, whose tensors cannot be written outside that mode."""
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else NO_CONTEXT


class AcceleratorDevice(Device):
    """Accelerator that `torch.accelerator` finds, CUDA first."""

    def __init__(self, *, host_memory: HostMemory = HostMemory.PINNED) -> None:
        device = torch.accelerator.current_accelerator(check_available=True)  # else a CUDA build names it without a GPU too
        if device is None:
            raise StateError(
                "torch finds no accelerator. Use CpuDevice, or check the driver and that torch is built for your accelerator."
            )
        self.type = device.type
        self._host_memory = host_memory
        self.has_blocking_copies = host_memory is HostMemory.PAGEABLE
        self._index = torch.accelerator.current_device_index()
        self._device = torch.device(device.type, self._index)
        self.d2h_stream = torch.Stream(device=self._device)
        self.h2d_stream = torch.Stream(device=self._device)
        self._get_address = find_raw_stream_getter() if self.type == "cuda" else None
        self._streams: dict[int, Stream] = {}
        """Streams by the driver's address. Streams with equal addresses are one queue."""
        # The driver synchronizes copies of pageable memory, so torch makes these copies.
        self._copies = find_cuda_copies() if self.type == "cuda" and host_memory is HostMemory.PINNED else None
        self._events = EventPool(functools.partial(torch.Event, device=self._device))
        self._timed_events = EventPool(functools.partial(torch.Event, device=self._device, enable_timing=True))

    def current_stream(self) -> Stream:  # noqa: D102
        if self._get_address is None:
            return get_stream(self._index)
        # This runs for each save and each unpack. The driver's address is faster to get than a stream object.
        address = self._get_address(self._index)
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = get_stream(self._index)
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
        return not self.is_capturing() and bool(event.event.query())  # captured work does not run

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
            self._copies.queue(destination, source, stream)

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
        # Copies of pageable memory are synchronous, so none is in flight.
        return HostSlab(torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned), free=lambda: None)


_CYCLES_PER_S = 1.7e9
"""Approximate clock of a multiprocessor. An H100 or H200 has at most 1.98e9, and less under load."""


def _register_host(size_bytes: int, device: torch.device) -> HostSlab:
    """Return pinned memory of exactly `size_bytes`. Torch's pinned allocator rounds up to powers of two."""
    buffer = torch.frombuffer(_map_host(size_bytes), dtype=torch.uint8)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(cudart.cudaHostRegister(buffer.data_ptr(), size_bytes, 0))
    if status != 0:
        _clear_last_error()
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
        raise StateError(
            f"CUDA could not pin {format_bytes(size_bytes)} of host memory (cudaHostRegister returned {status}). The limit "
            f"for pinned memory is {limit}. Increase it (`ulimit -l`) or the container's memory limit, or lower {_HOST_BUDGET}."
        )

    def free() -> None:
        torch.cuda.synchronize(device)  # a copy must not still read or write the memory
        status = int(cudart.cudaHostUnregister(buffer.data_ptr()))
        if status != 0:
            raise InternalError(f"cudaHostUnregister returned {status} for {format_bytes(size_bytes)} of host memory.")

    return HostSlab(buffer, free)


def _map_host(size_bytes: int) -> mmap.mmap:
    """Return anonymous memory, with huge pages if available. Pages are allocated on first touch."""
    try:
        # Private, since shared memory gets huge pages only by a separate kernel setting.
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise StateError(
            f"The system has no {format_bytes(size_bytes)} of host memory ({error.strerror}). Lower {_HOST_BUDGET}."
        ) from error
    if hasattr(mmap, "MADV_DONTFORK"):
        pages.madvise(mmap.MADV_DONTFORK)  # data loaders that are forked later must not keep the memory
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # without huge pages, pinning only takes longer
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


_HOST_BUDGET = "the host budget (--offload-host-budget, or `host_budget_bytes` of a TransferConfig)"


def _clear_last_error() -> None:
    """Consume the driver's last error. Otherwise the user's next kernel would raise it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")


def find_device(device_type: str, *, host_memory: HostMemory = HostMemory.PINNED) -> Device:
    """Return the device for tensors whose `device.type` is `device_type`. On the CPU all memory is pageable.

    Raises:
        StateError: There is no such device.
    """
    if device_type == "cpu":
        return CpuDevice()
    device = AcceleratorDevice(host_memory=host_memory)
    if device.type != device_type:
        raise StateError(f"Device {device_type!r} was requested, but the accelerator is {device.type!r}. Use {device.type!r}.")
    return device
