"""Events of an accelerator that are recorded again when nobody holds them any more.

[Note: Events that are recorded again]
To make an event, record it and drop it costs the host 2.4 us on an H200 host, to record it again 0.9; each group that leaves
and comes back has two, beside those of waits that pass. Recorded again, an event stands for another point, perhaps of another
stream. Whoever asks it or waits for it later learns of that point, which says nothing about the copy that it was recorded for.
So an event comes back to its pool only with the last reference to what `EventPool.record` returned for that copy. Waits that
are queued need no reference: a stream waits for what the event stood for when the wait was queued.
"""

import collections
from collections.abc import Callable
from typing import Any


class RecordedEvent:
    """A point in a stream. Its event is recorded again once nobody holds this."""

    __slots__ = ("_idle", "event")

    def __init__(self, event: Any, idle: "collections.deque[Any]") -> None:
        self.event = event
        """Of torch, to be asked or waited for, and held no longer than this."""
        self._idle = idle

    def __del__(self) -> None:
        # Any thread may get here, in the middle of anything: only an atomic append.
        if hasattr(self, "_idle"):  # no interrupt came while it was made
            self._idle.append(self.event)


class EventPool:
    """Records events of one kind. See [Note: Events that are recorded again].

    Args:
        make: Returns a new `torch.Event`.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._idle: collections.deque[Any] = collections.deque()

    def record(self, stream: Any) -> RecordedEvent:
        """Return an event that passes when all work queued on `stream` so far is done."""
        return RecordedEvent(self._record(stream), self._idle)

    def order(self, stream: Any, behind: Any) -> None:
        """Make what is queued on `stream` from now on wait for what `behind` has queued so far."""
        event = self._record(behind)
        stream.wait_event(event)
        self._idle.append(event)  # a wait that is queued needs no reference

    def _record(self, stream: Any) -> Any:
        try:
            event = self._idle.pop()  # at once: another thread may take the last one
        except IndexError:
            event = self._make()
        event.record(stream)
        return event
