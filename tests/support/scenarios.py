"""A short scenario per hazard in which only the wait against it keeps results correct, on a device with real streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from fgoffload import TransferPolicy
from fgoffload.engine import Hazard, OffloadEngine
from support.hostile import Hostile, poison_free_memory
from support.sites import Sites

N = 1024
NBYTES = N * N * 4
LATE_MS = 25.0, 100.0, 400.0
"""Of a sleep, and of those that are tried after it. What could overtake it, the host's calls in between included, takes a few
milliseconds; where other processes use the GPU too, it may have to wait for its turn longer than that."""
POISONED_COUNT = 32
"""Tensors of `NBYTES`, more than a scenario uses."""

_POLICIES = {
    # Later than its neighbours: the source is released only when a second copy is queued.
    Hazard.SOURCE_STILL_USED: TransferPolicy(window_bytes=NBYTES + NBYTES // 2, prefetch_bytes=0),
    Hazard.GATHER_UNWRITTEN: TransferPolicy(window_bytes=1 << 30, prefetch_bytes=0),
    Hazard.BLOCK_UNWRITTEN: TransferPolicy(window_bytes=1 << 30, prefetch_bytes=0),
    Hazard.BUFFER_STILL_FILLED: TransferPolicy(window_bytes=0, prefetch_bytes=1 << 30),
}


def make_engine(device: Hostile, hazard: Hazard) -> OffloadEngine:
    """Return the engine for the scenario of `hazard`."""
    policy = _POLICIES.get(hazard, TransferPolicy(window_bytes=0, prefetch_bytes=0))
    # One block of host memory, so that the second storage gets that of the first.
    budget_bytes = NBYTES if hazard is Hazard.BLOCK_STILL_READ else 64 << 20
    return OffloadEngine(device=device, policy=policy, host_budget_bytes=budget_bytes)


class Bench:
    """A device, an engine or none, and two compute streams whose free memory is full of NaN; `late_ms` are those of sleeps."""

    def __init__(self, device: Hostile, engine: OffloadEngine | None, *, late_ms: float = LATE_MS[0]) -> None:
        self.device = device
        self._late_ms = late_ms
        self.engine = engine
        self.sites = Sites(engine)
        self._has_streams = device.type == "cuda"
        self.main = torch.cuda.current_stream() if self._has_streams else None
        self.side = torch.cuda.Stream() if self._has_streams else None
        self.synchronize()
        if self._has_streams:
            torch.cuda.empty_cache()  # what earlier tests left would be used instead of what is poisoned here
        for stream in (self.main, self.side):
            with self.on(stream):
                poison_free_memory(self.device.type, (NBYTES,), count=POISONED_COUNT)
        self.synchronize()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream) if self._has_streams else contextlib.nullcontext()

    def sleep(self, stream: Any) -> None:
        self.device.sleep(stream, self._late_ms)

    def wait(self, stream: Any, other: Any) -> None:
        if self._has_streams:
            stream.wait_stream(other)

    def synchronize(self) -> None:
        if self._has_streams:
            torch.cuda.synchronize()

    def scribble(self) -> None:
        """Fill all that is free with NaN, as kernels that get the memory next might."""
        poison_free_memory(self.device.type, (NBYTES,), count=2 * POISONED_COUNT)

    def leaf(self, seed: int = 0) -> torch.Tensor:
        values = torch.randn(N, N, generator=torch.Generator().manual_seed(seed))
        leaf = values.to(self.device.type).requires_grad_()
        self.synchronize()
        return leaf


def columns(h: torch.Tensor) -> torch.Tensor:
    """Save a sixteenth of `h`, which is gathered before it moves."""
    return h[:, ::16].sin()


def source_unwritten(bench: Bench) -> list[torch.Tensor]:
    x = bench.leaf()
    bench.sleep(bench.main)
    bench.sites(torch.sin, x * 2).sum().backward()
    return [x.grad]


def gather_unwritten(bench: Bench) -> list[torch.Tensor]:
    x = bench.leaf()
    h = x * 2
    bench.wait(bench.side, bench.main)
    with bench.on(bench.side):
        bench.sleep(bench.side)
        output = bench.sites(columns, h.clone(), is_held=True)
    if bench.engine:
        bench.engine.flush()  # gathers on the main stream what the side stream writes
    bench.wait(bench.main, bench.side)
    output.sum().backward()
    return [x.grad]


def block_still_read(bench: Bench) -> list[torch.Tensor]:
    x, y = bench.leaf(0), bench.leaf(1)
    with bench.on(bench.side):
        output = bench.sites(torch.sin, x * 2)
        bench.sleep(bench.device.h2d_stream)
        output.sum().backward()  # waits on the side stream for the late copy
        del output
    bench.sites(torch.cos, y * 2).sum().backward()  # leaves into the same block, and the main stream waits for nobody
    bench.wait(bench.main, bench.side)
    return [x.grad, y.grad]


def source_still_copied(bench: Bench) -> list[torch.Tensor]:
    x = bench.leaf()
    bench.sleep(bench.device.d2h_stream)
    output = bench.sites(torch.sin, x * 2)
    bench.scribble()
    output.sum().backward()
    return [x.grad]


def source_still_used(bench: Bench) -> list[torch.Tensor]:
    x, y = bench.leaf(0), bench.leaf(1)
    h = x * 2
    first = bench.sites(torch.sin, h)
    bench.wait(bench.side, bench.main)
    with bench.on(bench.side):
        bench.sleep(bench.side)
        second = bench.sites(torch.cos, h)  # the same storage, which is on its way already
    del h
    third = bench.sites(torch.sin, y * 2)  # over the window: the first storage is let go
    bench.scribble()
    bench.wait(bench.main, bench.side)
    (first + second + third).sum().backward()
    return [second.detach().clone(), x.grad, y.grad]


def buffer_still_used(bench: Bench) -> list[torch.Tensor]:
    x = bench.leaf()
    output = bench.sites(torch.sin, x * 2).sum()
    bench.synchronize()
    bench.sleep(bench.main)
    output.backward()  # the buffer is filled with NaN where the stream has come to it
    return [x.grad]


def block_unwritten(bench: Bench) -> list[torch.Tensor]:
    x = bench.leaf()
    bench.sleep(bench.device.d2h_stream)
    bench.sites(columns, x * 2).sum().backward()  # gathered: compute does not wait for the copy to the host
    return [x.grad]


def buffer_unfilled(bench: Bench) -> list[torch.Tensor]:
    x = bench.leaf()
    output = bench.sites(torch.sin, x * 2)
    bench.sleep(bench.device.h2d_stream)
    output.sum().backward()
    return [x.grad]


def buffer_still_filled(bench: Bench) -> list[torch.Tensor]:
    output = bench.sites(torch.sin, bench.sites(torch.sin, bench.leaf() * 2))
    bench.synchronize()
    if bench.engine:
        bench.sleep(bench.device.h2d_stream)
        bench.engine.approach_backward(bench.sites.lane, bench.sites.lane.groups[-1])
    del output  # nobody takes what is coming back
    if bench.engine:
        bench.engine.finish_step()
    tensors = [torch.ones(N, N, device=bench.device.type) for _ in range(2 * POISONED_COUNT)]
    bench.synchronize()
    return tensors


def buffer_still_read(bench: Bench) -> list[torch.Tensor]:
    output = bench.sites(torch.sin, bench.leaf() * 2)
    if bench.engine:
        bench.engine.approach_backward(bench.sites.lane, bench.sites.lane.groups[-1])  # the buffer is the main stream's
    bench.wait(bench.side, bench.main)
    with bench.on(bench.side), torch.no_grad():
        saved = output.grad_fn._saved_self
        bench.sleep(bench.side)
        found = saved.cos()
    if bench.engine:
        del saved, output
        bench.engine.finish_step()
        bench.scribble()
    bench.synchronize()
    return [found]


def saved_again_after_it_left(bench: Bench) -> list[torch.Tensor]:
    x = bench.leaf()
    h = x * 2
    first = bench.sites(torch.sin, h)  # leaves, and is released at once: only the name h still holds the storage
    bench.wait(bench.side, bench.main)
    with bench.on(bench.side):
        bench.sleep(bench.side)
        second = bench.sites(torch.cos, h)
    del h
    if bench.engine:
        bench.engine.finish_step()
    bench.scribble()
    bench.wait(bench.main, bench.side)
    (first + second).sum().backward()
    return [second.detach().clone(), x.grad]


Scenario = Callable[[Bench], list[torch.Tensor]]

SCENARIOS: dict[Hazard, Scenario] = {
    Hazard.SOURCE_UNWRITTEN: source_unwritten,
    Hazard.GATHER_UNWRITTEN: gather_unwritten,
    Hazard.BLOCK_STILL_READ: block_still_read,
    Hazard.SOURCE_STILL_COPIED: source_still_copied,
    Hazard.SOURCE_STILL_USED: source_still_used,
    Hazard.BUFFER_STILL_USED: buffer_still_used,
    Hazard.BLOCK_UNWRITTEN: block_unwritten,
    Hazard.BUFFER_UNFILLED: buffer_unfilled,
    Hazard.BUFFER_STILL_FILLED: buffer_still_filled,
    Hazard.BUFFER_STILL_READ: buffer_still_read,
}
