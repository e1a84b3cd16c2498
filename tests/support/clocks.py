"""A device with several streams that only keeps books: which work is ordered before which.

Work runs at once, on the CPU. But each stream has a vector clock, which work advances and waiting for an event merges, so
a test can ask whether one piece of work is ordered before another on a real device, however they would be timed. No event
ever counts as done, so nothing is right only because it happened to be finished.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from fgoffload.engine import CpuDevice

Clock = dict[object, int]


@dataclasses.dataclass(frozen=True)
class Work:
    """Something queued on a stream."""

    stream: object
    clock: Clock

    def is_before(self, other: Work) -> bool:
        return other.clock.get(self.stream, 0) >= self.clock[self.stream]


class ClockedCpuDevice(CpuDevice):
    def __init__(self) -> None:
        super().__init__()
        self._clocks: dict[object, Clock] = {}
        self._current: object = "compute"
        self.copies: list[Work] = []
        """Of both directions, in the order of queueing."""
        self.allocations: list[Work] = []

    @contextlib.contextmanager
    def on(self, stream: object) -> Iterator[None]:
        self._current, before = stream, self._current
        try:
            yield
        finally:
            self._current = before

    def queue(self, stream: object | None = None) -> Work:
        """Queue work on `stream`, or on the current one."""
        stream = self._current if stream is None else stream
        clock = self._clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        return Work(stream, dict(clock))

    def current_stream(self):
        return self._current

    def record_event(self, stream, *, is_timed=False):
        return self.queue(stream)

    def wait_event(self, stream, event, hazard):
        clock = self._clocks.setdefault(stream, {})
        for other, count in event.clock.items():
            clock[other] = max(clock.get(other, 0), count)

    def is_done(self, event):
        return False

    def copy_bytes(self, *, destination, source, stream):
        super().copy_bytes(destination=destination, source=source, stream=stream)
        self.copies.append(self.queue(stream))

    def allocate_device(self, size_bytes: int) -> torch.Tensor:
        self.allocations.append(self.queue())
        return super().allocate_device(size_bytes)

    def find_copies(self, stream: object) -> list[Work]:
        return [copy for copy in self.copies if copy.stream == stream]
