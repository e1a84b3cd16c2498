"""Devices that delay all work as long as allowed, and fill memory that must not be read with NaN.

[Note: Poison that adds no order]
Poison must not wait for anything that the engine itself could have forgotten to wait for, or it would hide the race that it is
there to show.

Device memory. A buffer is filled on the stream that allocates it, in the allocator's own order. Freed memory is poisoned by
`poison_free_memory`: allocated, filled and freed again on the current stream, as any kernel might. A copy that still reads what
was freed, or a kernel that reads what is not there yet, meets NaN.

Host memory. Slabs are full of NaN from the start. A block that is handed out again is poisoned twice. On the host, when it is
handed out, but only where no copy reads it any more: the bytes of an earlier step could be equal to those that are missing.
And on the copy stream, right before the copy that fills it: behind exactly those waits that the engine queued, so that a copy
to the device which still reads the block, or reads it too early, meets NaN. Waiting for the readers first would put the copy
behind them too, and a forgotten wait would do no harm.
"""

import contextlib
import random
from collections.abc import Collection
from typing import Any

import torch

from fgoffload.engine import AcceleratorDevice, Device, Hazard, HostSlab, OffloadEngine
from fgoffload.engine.geometry import View, get_bytes
from fgoffload.engine.host_block import HostBlock

POISON = 0xFF
"""Bytes of it are a NaN in every floating-point type of 16 bits and more."""
POISON_BYTES = 16 << 20
"""The largest copy to the host that can be preceded by poison."""
CYCLES_PER_MS = 2_000_000
"""Of `torch.cuda._sleep`; the clock of a GPU is 1 to 2 GHz, so a millisecond is one or two."""


class Hostile(Device):
    """Mixed in before a device: poisons its memory, sleeps before its copies and waits, and can leave out one kind of wait.

    Args:
        late: What sleeps: `d2h` and `h2d` before a copy, `compute` before a buffer is taken and wherever the test calls `nap`.
        probability: Of each sleep.
        milliseconds: Of a sleep, about.
        left_out: The hazard whose waits are not queued; None queues all.
        seed: Of the sleeps.
    """

    def __init__(
        self,
        *,
        late: Collection[str] = (),
        probability: float = 1.0,
        milliseconds: float = 2.0,
        left_out: Hazard | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._late = frozenset(late)
        self._probability = probability
        self._milliseconds = milliseconds
        self._random = random.Random(seed)
        self.left_out = left_out
        self._poison = super().allocate_device(POISON_BYTES).fill_(POISON)
        if self._poison.is_cuda:
            torch.cuda.synchronize()

    def sleep(self, stream: Any, milliseconds: float) -> None:
        """Keep `stream` busy."""

    def nap(self, stream: Any) -> None:
        """Keep `stream` busy, perhaps."""
        name = {self.d2h_stream: "d2h", self.h2d_stream: "h2d"}.get(stream, "compute")
        if name in self._late and self._random.random() < self._probability:
            self.sleep(stream, self._milliseconds)

    def wait_event(self, stream: Any, event: Any, hazard: Hazard) -> None:
        if hazard is Hazard.BUFFER_UNFILLED:
            self.nap(stream)
        if hazard is not self.left_out:
            super().wait_event(stream, event, hazard)

    def wait_stream(self, stream: Any, other: Any, hazard: Hazard) -> None:
        if hazard is not self.left_out:
            super().wait_stream(stream, other, hazard)

    def copy_bytes(self, *, destination: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        if stream == self.d2h_stream:
            poison = self._poison[: destination.nbytes].view(destination.dtype).view(destination.size())
            super().copy_bytes(destination=destination, source=poison, stream=stream)
        self.nap(stream)
        super().copy_bytes(destination=destination, source=source, stream=stream)

    def is_equal(self, on_host: torch.Tensor, tensor: torch.Tensor, *, after: Any) -> bool:
        return True  # asked in the first steps alone: to wait here would make in time what is late on purpose

    def allocate_device(self, size_bytes: int) -> torch.Tensor:
        return super().allocate_device(size_bytes).fill_(POISON)

    def allocate_like(self, view: View) -> torch.Tensor:
        buffer = super().allocate_like(view)
        get_bytes(buffer).fill_(POISON)
        return buffer

    def allocate_host(self, size_bytes: int) -> HostSlab:
        slab = super().allocate_host(size_bytes)
        slab.buffer.fill_(POISON)
        return slab


class HostileGpu(Hostile, AcceleratorDevice):
    """A CUDA device."""

    def sleep(self, stream: Any, milliseconds: float) -> None:
        with stream:
            torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))


def poison_blocks(engine: OffloadEngine) -> OffloadEngine:
    """Fill each block that the arena of `engine` hands out with NaN, where nothing reads it any more; return `engine`."""
    arena = engine.arena
    find_block = arena.find_block

    def find_poisoned_block(size_bytes: int) -> HostBlock | None:
        block = find_block(size_bytes)
        if block is not None and not block.reads_to_wait_for:
            for part in block.parts:
                part.fill_(POISON)
        return block

    arena.find_block = find_poisoned_block
    return engine


def poison_free_memory(device: str, sizes_bytes: Collection[int], *, count: int) -> None:
    """Fill what the allocator has free with NaN, on the current stream: `count` tensors of each size, all alive at once."""
    if device == "cuda":
        tensors = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes_bytes for _ in range(count)]
        for tensor in tensors:
            tensor.fill_(POISON)


@contextlib.contextmanager
def deterministic():
    """Let torch refuse ops whose bits differ between runs. Fresh memory is left as it is: the poison here is on purpose."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(mode=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)
        torch.utils.deterministic.fill_uninitialized_memory = filled
