"""Devices that delay all work as long as allowed, and fill memory that must not be read with NaN.

[Note: Poison that adds no order]
Poison must not wait for anything that the engine could have forgotten to wait for, or it would hide races.

Device memory: a buffer is filled on the stream that allocates it, in the allocator's own order. `poison_free_memory` allocates,
fills and frees memory on the current stream, as any kernel might. A copy that still reads freed memory, or a kernel that reads
a buffer before its reload, reads NaN.

Host memory: slabs are full of NaN from the start. A reused block is poisoned twice. First on the host, when the arena returns
it, if no copy still reads it, since bytes of an earlier step could equal the missing ones. Then on the copy stream, directly
before the copy that fills it, after exactly the waits that the engine queued. So a copy to the device that still reads the
block, or reads it too early, reads NaN. Waiting for the readers first would order the copy after them and hide a missing wait.
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
"""A byte that makes NaN in every floating-point type of at least 16 bits."""
POISON_BYTES = 16 << 20
"""The largest copy to the host that can be poisoned."""
CYCLES_PER_MS = 2_000_000
"""Cycles of `torch.cuda._sleep` for 1 to 2 ms, since GPU clocks are 1 to 2 GHz."""


class Hostile(Device):
    """A mixin for devices: poisons memory, sleeps before copies and waits, and can skip the waits of one hazard.

    Args:
        late: Streams that sleep: `d2h` and `h2d` before a copy, `compute` before it uses a buffer and where a test calls `nap`.
        probability: The probability of each sleep.
        milliseconds: The approximate length of a sleep.
        left_out: The hazard whose waits are skipped. None skips no wait.
        seed: The seed of the sleeps.
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
        """Keep `stream` busy with the given probability, if it is one of `late`."""
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
        return True  # used only in the first steps; a wait would undo the delays

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
    """Fill each block that the arena of `engine` returns with NaN, unless a copy still reads it. Returns `engine`."""
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
    """Fill free memory of the allocator with NaN on the current stream, as `count` simultaneous tensors of each size."""
    if device == "cuda":
        tensors = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes_bytes for _ in range(count)]
        for tensor in tensors:
            tensor.fill_(POISON)


@contextlib.contextmanager
def deterministic():
    """Let torch reject nondeterministic ops, without its own fill of new memory, which would overwrite the poison."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(mode=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)
        torch.utils.deterministic.fill_uninitialized_memory = filled
