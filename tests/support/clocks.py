"""A device with several streams that records the order of work with vector clocks.

Work runs immediately, on the CPU. Each stream has a vector clock: work advances it, and waiting for an event merges the clocks.
So a test can check whether one piece of work is ordered before another on a real device, regardless of timing. The host also
has a clock: work that it has seen finish is ordered before all work that it queues later. An event counts as done only after
the host has waited for it, so no result is correct by luck, unless a test lets the host see it as done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from fgoffload.engine import CpuDevice, Hazard

Clock = dict[object, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Work queued on a stream."""

    stream: object
    clock: Clock

    def is_before(self, other: Work) -> bool:
        return other.clock.get(self.stream, 0) >= self.clock[self.stream]


class Wait(NamedTuple):
    """A wait that the engine queued: its hazard and its source location."""

    hazard: Hazard
    site: str
    """The waiting function with its callers up to the first public one, as in `poll > _order`."""
    line: tuple[str, int]
    """The file and line of the call."""


def merge(clock: Clock, other: Clock) -> None:
    """Advance `clock` to include everything in `other`."""
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


class ClockedCpuDevice(CpuDevice):
    """A CPU device whose streams have vector clocks.

    Args:
        leaves_out: Returns whether to skip a wait of the engine.
        sees_done: Returns whether the host sees an event as done without having waited for it.
    """

    def __init__(
        self, *, leaves_out: Callable[[Wait], bool] = lambda wait: False, sees_done: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__()
        self._leaves_out = leaves_out
        self._sees_done = sees_done
        self._clocks: dict[object, Clock] = {}
        self._host: Clock = {}
        self._current: object = "compute"
        self.copies: list[Work] = []
        """Copies in both directions, in queue order."""
        self.allocations: list[Work] = []
        self.waits: set[Wait] = set()

    @contextlib.contextmanager
    def on(self, stream: object) -> Iterator[None]:
        """Make `stream` the current stream inside the context."""
        self._current, before = stream, self._current
        try:
            yield
        finally:
            self._current = before

    def queue(self, stream: object | None = None) -> Work:
        """Queue work on `stream`, by default the current one."""
        stream = self._current if stream is None else stream
        clock = self._clocks.setdefault(stream, {})
        merge(clock, self._host)
        clock[stream] = clock.get(stream, 0) + 1
        return Work(stream, dict(clock))

    def join(self, stream: object, other: object) -> None:
        """Let `stream` wait for all work queued on `other`, as a wait of the program and not of the engine."""
        merge(self._clocks.setdefault(stream, {}), self.queue(other).clock)

    def current_stream(self):
        return self._current

    def record_event(self, stream, *, is_timed=False):
        return self.queue(stream)

    def wait_event(self, stream, event, hazard):
        wait = _find_wait(hazard)
        self.waits.add(wait)
        if not self._leaves_out(wait):
            merge(self._clocks.setdefault(stream, {}), event.clock)

    def is_done(self, event):
        is_known = all(self._host.get(stream, 0) >= count for stream, count in event.clock.items())
        if not is_known and self._sees_done():
            self.synchronize(event)
            return True
        return is_known

    def synchronize(self, event):
        merge(self._host, event.clock)

    def copy_bytes(self, *, destination, source, stream):
        assert stream == self._current, "a copy is queued on the current stream"
        super().copy_bytes(destination=destination, source=source, stream=stream)
        self.copies.append(self.queue(stream))

    def allocate_device(self, size_bytes: int) -> torch.Tensor:
        self.allocations.append(self.queue())
        return super().allocate_device(size_bytes)

    def find_copies(self, stream: object) -> list[Work]:
        return [copy for copy in self.copies if copy.stream == stream]


def _find_wait(hazard: Hazard) -> Wait:
    """Return the wait that the engine's code is queueing."""
    frame: Any = sys._getframe(1)
    while "/fgoffload/engine/" not in frame.f_code.co_filename or frame.f_code.co_filename.endswith("/device.py"):
        frame = frame.f_back
    line = frame.f_code.co_filename, frame.f_lineno
    functions = [frame.f_code.co_name]
    while functions[0].startswith(("_", "<")):
        frame = frame.f_back
        functions.insert(0, frame.f_code.co_name)
    return Wait(hazard, " > ".join(function for function in functions if not function.startswith("<")), line)
