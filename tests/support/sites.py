"""Runs a forward with and without the engine, and compares results bitwise."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fgoffload import Site, TransferPolicy
from fgoffload.engine import CpuDevice, Device, Hazard, HostSlab, Lane, OffloadEngine
from fgoffload.engine.geometry import get_bytes
from fgoffload.engine.identity import get_key
from fgoffload.engine.torch_internals import count_storage_references
from support.hostile import POISON

Function = Callable[..., torch.Tensor]


def make_engine(device: Device | None = None, **options: Any) -> OffloadEngine:
    """Return an engine that by default offloads everything and has a host budget of 64 MiB."""
    options.setdefault("host_budget_bytes", 64 << 20)
    options.setdefault("policy", TransferPolicy(window_bytes=0, prefetch_bytes=1 << 20))
    return OffloadEngine(device=device or CpuDevice(), **options)


class Sites:
    """Wraps each function in a region of its own site, in one lane. Without an engine it only calls the functions."""

    def __init__(self, engine: OffloadEngine | None, *, microbatch: int = 0, has_end_marks: bool = False) -> None:
        self._has_end_marks = has_end_marks
        self.engine = engine
        self.lane = Lane(chunk=0, microbatch=microbatch)
        self._count = 0
        if engine:
            engine.begin_forward(self.lane)

    def __call__(
        self,
        function: Callable[..., Any],
        *inputs: torch.Tensor,
        tag: str = "core_attn",
        is_held: bool = False,
        output: Callable[[Any], torch.Tensor] = lambda result: result,
    ) -> Any:
        self._count += 1
        region = self.engine and self.engine.find_region(Site(chunk=0, layer=self._count, tag=tag), self.lane)
        if not region:
            return function(*inputs)
        region.enter(inputs[0])
        with region.saving():
            result = function(*inputs)
        region.end(output(result) if self._has_end_marks else None, is_held=is_held)
        return result

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with self.engine.watch(self.lane) if self.engine else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        with self.engine.follow(self.lane) if self.engine else contextlib.nullcontext():
            yield


def get_gradients(forward: Callable[[Sites], torch.Tensor], leaves: Sequence[torch.Tensor], sites: Sites) -> list[torch.Tensor]:
    """Return the gradients of `leaves` for a fixed random gradient of the output of `forward`."""
    for leaf in leaves:
        leaf.grad = None
    output = forward(sites)
    generator = torch.Generator().manual_seed(7)
    seed = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype).to(output.device)
    output.backward(seed)
    return [leaf.grad.clone() for leaf in leaves]


def check_same_bits(
    forward: Callable[[Sites], torch.Tensor], leaves: Sequence[torch.Tensor], engine: OffloadEngine | None = None
) -> OffloadEngine:
    """Check that the gradients of `leaves` are bitwise identical with and without `engine`, and return the engine."""
    engine = engine or make_engine()
    expected = get_gradients(forward, leaves, Sites(None))
    found = get_gradients(forward, leaves, Sites(engine))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return engine


def has_hooks() -> bool:
    """Return whether saved-tensor hooks are installed on this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # noqa: FBT003 - no public name


Point = tuple[Any, int]
"""An event: a stream, and the number of its operations before the event."""


class DelayedCpuDevice(CpuDevice):
    """A CPU device with copies that run as late as possible. Compute is not delayed.

    On the CPU a copy is done when the call returns, so a missing wait would go unnoticed. Here a copy is only queued, and runs
    when something waits for it. Until then its destination is full of poison. A source without other references is poisoned
    before it is read. So a missing wait gives a wrong result.
    """

    def __init__(self) -> None:
        super().__init__()
        streams = (self.d2h_stream, self.h2d_stream)
        self._queues: dict[Any, collections.deque[Callable[[], None]]] = {stream: collections.deque() for stream in streams}
        self._done = dict.fromkeys(streams, 0)
        self._count_of_one_holder = count_holders(torch.empty(1, device="cpu"))

    def record_event(self, stream: Any, *, is_timed: bool = False) -> Point:
        queue = self._queues.get(stream)
        return stream, 0 if queue is None else self._done[stream] + len(queue)

    def wait_event(self, stream: Any, event: Point, hazard: Hazard) -> None:
        if stream in self._queues:
            self._queues[stream].append(lambda: self.synchronize(event))
        else:
            self.synchronize(event)

    def is_done(self, event: Point) -> bool:
        stream, position = event
        return stream not in self._queues or self._done[stream] >= position

    def synchronize(self, event: Point) -> None:
        while not self.is_done(event):
            self._queues[event[0]].popleft()()
            self._done[event[0]] += 1

    def copy_bytes(self, *, destination: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        source = source.detach()  # the queue's own reference, to detect whether it is the last

        def copy() -> None:
            if count_holders(source) == self._count_of_one_holder:
                get_bytes(source).fill_(POISON)  # no other references: an allocator could have reused the memory
            destination.copy_(source)

        self._queues[stream].append(copy)

    def allocate_device(self, size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), POISON, dtype=torch.uint8, device="cpu")

    def allocate_host(self, size_bytes: int) -> HostSlab:
        return HostSlab(torch.full((size_bytes,), POISON, dtype=torch.uint8, device="cpu"), free=lambda: None)


def count_holders(tensor: torch.Tensor) -> int:
    """Return torch's count of references to the storage of `tensor`, which differs by version."""
    return count_storage_references(get_key(tensor))
