"""Measures copies and waits by the device's clock, with a pair of timed events around each."""

import collections
from typing import NamedTuple

from fgoffload.engine.device import Device, Event, Stream
from fgoffload.engine.stats import TagStats, TimeKind


class _Span(NamedTuple):
    start: Event
    end: Event
    stats: TagStats
    kind: TimeKind


class StopWatch:
    """Measures spans of streams with two timed events each. That costs extra events, so an engine has it only on request."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._spans: collections.deque[_Span] = collections.deque()

    def start(self, stream: Stream) -> Event:
        """Begin a span of `stream`."""
        return self._device.record_event(stream, is_timed=True)

    def stop(self, start: Event, stream: Stream, stats: TagStats, kind: TimeKind) -> None:
        """End the span of `stream` that began at `start`. Its seconds are added to `stats`."""
        self._spans.append(_Span(start, self._device.record_event(stream, is_timed=True), stats, kind))

    def collect(self) -> None:
        """Add the seconds measured so far to their statistics. The host blocks until the copies and waits are done."""
        while self._spans:
            span = self._spans.popleft()
            self._device.synchronize(span.end)
            span.stats.add_seconds(span.kind, self._device.measure_seconds(span.start, span.end))
