"""Pool of an accelerator's events, which are reused once nothing references them.

[Note: Reused events]
Creating, recording and dropping an event costs 2.4 us of CPU time on an H200 host. Reusing one costs 0.9 us. Each
offloaded group has two events, plus events for waits. A reused event marks another point, perhaps on another stream, so a
later query would say nothing about the first copy. So an event returns to its pool only with the last reference to the result
of `EventPool.record`. Queued waits need no reference: a stream waits for the point that the event marked when the wait was
queued.
"""

import collections
from collections.abc import Callable
from typing import Any


class RecordedEvent:
    """Point in a stream. Its event is reused once this object is freed."""

    __slots__ = ("_idle", "event")

    def __init__(self, event: Any, idle: "collections.deque[Any]") -> None:
        self.event = event
        """The torch event. Do not keep it longer than this object."""
        self._idle = idle

    def __del__(self) -> None:
        # Any thread may run this at any time, so only an atomic append is safe.
        if hasattr(self, "_idle"):  # no interrupt occurred during construction
            self._idle.append(self.event)


class EventPool:
    """Records events of one kind, which `make` creates. See [Note: Reused events]."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._idle: collections.deque[Any] = collections.deque()

    def record(self, stream: Any) -> RecordedEvent:
        """Return an event that passes when all work queued on `stream` so far is done."""
        return RecordedEvent(self._record(stream), self._idle)

    def order(self, stream: Any, behind: Any) -> None:
        """Make later work on `stream` wait for all work queued on `behind` so far."""
        event = self._record(behind)
        stream.wait_event(event)
        self._idle.append(event)  # a queued wait needs no reference

    def _record(self, stream: Any) -> Any:
        try:
            event = self._idle.pop()  # without a check first: another thread may take the last one
        except IndexError:
            event = self._make()
        event.record(stream)
        return event
