"""Seconds of copies and waits by the device's own clock, with a pair of timed events around each."""

import collections
from typing import NamedTuple

from fgoffload.engine.device import Device, Event, Stream
from fgoffload.engine.stats import TagStats, TimeKind


class _Span(NamedTuple):
    start: Event
    end: Event
    stats: TagStats
    kind: TimeKind


class NoStopWatch:
    """Measures nothing, and costs nothing."""

    def start(self, stream: Stream) -> Event:
        """Begin a stretch of `stream`."""
        return None

    def stop(self, start: Event, stream: Stream, stats: TagStats, kind: TimeKind) -> None:
        """End the stretch of `stream` that began at `start`; its seconds are for `stats`."""

    def collect(self) -> None:
        """Hand out the seconds measured so far."""


class StopWatch(NoStopWatch):
    """Measures stretches of streams. Each costs two events more, so an engine has one only where it was asked to."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._spans: collections.deque[_Span] = collections.deque()

    def start(self, stream: Stream) -> Event:  # noqa: D102
        return self._device.record_event(stream, is_timed=True)

    def stop(self, start: Event, stream: Stream, stats: TagStats, kind: TimeKind) -> None:  # noqa: D102
        self._spans.append(_Span(start, self._device.record_event(stream, is_timed=True), stats, kind))

    def collect(self) -> None:
        """Hand out the seconds measured so far. The host blocks until their copies and waits are done."""
        while self._spans:
            span = self._spans.popleft()
            self._device.synchronize(span.end)
            span.stats.add_seconds(span.kind, self._device.measure_seconds(span.start, span.end))
