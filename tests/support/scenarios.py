"""A short scenario for each hazard, in which only the engine's wait keeps results correct, on a device with real streams."""

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
"""Lengths of sleeps, which tests try in order. The work that could overtake a sleep, with its host calls, takes a few
milliseconds, but longer if other processes use the GPU."""
POISONED_COUNT = 32
"""The number of poisoned tensors of `NBYTES`, more than a scenario uses."""

_POLICIES = {
    # A larger window, so that the source is freed only when a second copy is queued.
    Hazard.SOURCE_STILL_USED: TransferPolicy(window_bytes=NBYTES + NBYTES // 2, prefetch_bytes=0),
    Hazard.GATHER_UNWRITTEN: TransferPolicy(window_bytes=1 << 30, prefetch_bytes=0),
    Hazard.BLOCK_UNWRITTEN: TransferPolicy(window_bytes=1 << 30, prefetch_bytes=0),
    Hazard.BUFFER_STILL_FILLED: TransferPolicy(window_bytes=0, prefetch_bytes=1 << 30),
}


def make_engine(device: Hostile, hazard: Hazard) -> OffloadEngine:
    """Return the engine for the scenario of `hazard`."""
    policy = _POLICIES.get(hazard, TransferPolicy(window_bytes=0, prefetch_bytes=0))
    # One block of host memory, so that the second storage reuses it.
    budget_bytes = NBYTES if hazard is Hazard.BLOCK_STILL_READ else 64 << 20
    return OffloadEngine(device=device, policy=policy, host_budget_bytes=budget_bytes)


class Bench:
    """A device, an optional engine, and two compute streams whose free memory is full of NaN. Sleeps take `late_ms`."""

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
            torch.cuda.empty_cache()  # allocations must not use memory of earlier tests, which is not poisoned
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

    def poison(self) -> None:
        """Fill all free memory with NaN, like the next kernels that use it."""
        poison_free_memory(self.device.type, (NBYTES,), count=2 * POISONED_COUNT)

    def leaf(self, seed: int = 0) -> torch.Tensor:
        values = torch.randn(N, N, generator=torch.Generator().manual_seed(seed))
        leaf = values.to(self.device.type).requires_grad_()
        self.synchronize()
        return leaf


def columns(h: torch.Tensor) -> torch.Tensor:
    """Save a sixteenth of `h`, which is gathered before its offload."""
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
        bench.engine.flush()  # gathers on the main stream from memory that the side stream writes
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
    bench.sites(torch.cos, y * 2).sum().backward()  # offloaded into the same block, without a wait on the main stream
    bench.wait(bench.main, bench.side)
    return [x.grad, y.grad]


def source_still_copied(bench: Bench) -> list[torch.Tensor]:
    x = bench.leaf()
    bench.sleep(bench.device.d2h_stream)
    output = bench.sites(torch.sin, x * 2)
    bench.poison()
    output.sum().backward()
    return [x.grad]


def source_still_used(bench: Bench) -> list[torch.Tensor]:
    x, y = bench.leaf(0), bench.leaf(1)
    h = x * 2
    first = bench.sites(torch.sin, h)
    bench.wait(bench.side, bench.main)
    with bench.on(bench.side):
        bench.sleep(bench.side)
        second = bench.sites(torch.cos, h)  # the same storage, whose offload is in flight
    del h
    third = bench.sites(torch.sin, y * 2)  # exceeds the window, so the first storage is freed
    bench.poison()
    bench.wait(bench.main, bench.side)
    (first + second + third).sum().backward()
    return [second.detach().clone(), x.grad, y.grad]


def buffer_still_used(bench: Bench) -> list[torch.Tensor]:
    x = bench.leaf()
    output = bench.sites(torch.sin, x * 2).sum()
    bench.synchronize()
    bench.sleep(bench.main)
    output.backward()  # the stream fills the buffer with NaN when it allocates it
    return [x.grad]


def block_unwritten(bench: Bench) -> list[torch.Tensor]:
    x = bench.leaf()
    bench.sleep(bench.device.d2h_stream)
    bench.sites(columns, x * 2).sum().backward()  # gathered, so compute does not wait for the offload
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
    del output  # nobody unpacks the tensors being reloaded
    if bench.engine:
        bench.engine.finish_step()
    tensors = [torch.ones(N, N, device=bench.device.type) for _ in range(2 * POISONED_COUNT)]
    bench.synchronize()
    return tensors


def buffer_still_read(bench: Bench) -> list[torch.Tensor]:
    output = bench.sites(torch.sin, bench.leaf() * 2)
    if bench.engine:
        bench.engine.approach_backward(bench.sites.lane, bench.sites.lane.groups[-1])  # the main stream owns the buffer
    bench.wait(bench.side, bench.main)
    with bench.on(bench.side), torch.no_grad():
        saved = output.grad_fn._saved_self
        bench.sleep(bench.side)
        found = saved.cos()
    if bench.engine:
        del saved, output
        bench.engine.finish_step()
        bench.poison()
    bench.synchronize()
    return [found]


def saved_again_after_its_offload(bench: Bench) -> list[torch.Tensor]:
    x = bench.leaf()
    h = x * 2
    first = bench.sites(torch.sin, h)  # offloaded and freed by the engine immediately; only `h` references the storage
    bench.wait(bench.side, bench.main)
    with bench.on(bench.side):
        bench.sleep(bench.side)
        second = bench.sites(torch.cos, h)
    del h
    if bench.engine:
        bench.engine.finish_step()
    bench.poison()
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
