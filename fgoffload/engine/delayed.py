"""Test device that runs copies as late as possible.

On the CPU a copy is done when the call returns, so a missing wait would go unnoticed. Here a copy is only queued, and runs when
something waits for it. Until then its destination holds poison. A source without other references is poisoned before it is
read. So a missing wait gives a wrong result.
"""

import collections
import dataclasses
from collections.abc import Callable

import torch

from fgoffload.engine.device import CpuDevice, CpuStream, Event, HostSlab, Stream
from fgoffload.engine.geometry import get_bytes
from fgoffload.engine.hazards import Hazard
from fgoffload.engine.identity import get_key
from fgoffload.engine.torch_internals import count_storage_references

POISON = 0xFF
"""Byte whose repetition is a NaN in every floating-point type of 16 bits and more."""


@dataclasses.dataclass(slots=True)
class _Point:
    """Event: the number of a stream's operations before it."""

    stream: CpuStream
    position: int


class DelayedCpuDevice(CpuDevice):
    """CPU whose copies run only when something waits for them. Compute is not delayed."""

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[CpuStream, collections.deque[Callable[[], None]]] = {
            self.d2h_stream: collections.deque(),
            self.h2d_stream: collections.deque(),
        }
        self._done: dict[CpuStream, int] = {self.d2h_stream: 0, self.h2d_stream: 0}
        self._count_of_one_holder = _count_holders(torch.empty(1, device="cpu"))

    def record_event(self, stream: Stream, *, is_timed: bool = False) -> Event:  # noqa: D102
        queue = self._queues.get(stream)
        return _Point(stream, 0 if queue is None else self._done[stream] + len(queue))

    def wait_event(self, stream: Stream, event: Event, hazard: Hazard) -> None:  # noqa: D102
        if stream in self._queues:
            self._queues[stream].append(lambda: self._run_until(event))
        else:
            self._run_until(event)

    def is_done(self, event: Event) -> bool:  # noqa: D102
        return event.stream not in self._queues or self._done[event.stream] >= event.position

    def synchronize(self, event: Event) -> None:  # noqa: D102
        self._run_until(event)

    def copy_bytes(self, *, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:  # noqa: D102
        source = source.detach()  # the queue's own reference, so that it can tell whether it is the last one

        def copy() -> None:
            if _count_holders(source) == self._count_of_one_holder:
                get_bytes(source).fill_(POISON)  # only this queue holds it: an allocator could have reused the memory
            destination.copy_(source)

        self._queues[stream].append(copy)

    def allocate_device(self, size_bytes: int) -> torch.Tensor:  # noqa: D102
        return torch.full((size_bytes,), POISON, dtype=torch.uint8, device="cpu")

    def allocate_host(self, size_bytes: int) -> HostSlab:  # noqa: D102
        return HostSlab(torch.full((size_bytes,), POISON, dtype=torch.uint8, device="cpu"), free=lambda: None)

    def _run_until(self, event: _Point) -> None:
        while not self.is_done(event):
            operation = self._queues[event.stream].popleft()
            operation()
            self._done[event.stream] += 1


def _count_holders(tensor: torch.Tensor) -> int:
    """Return torch's count of references to the storage of `tensor`, which differs by version."""
    return count_storage_references(get_key(tensor))
