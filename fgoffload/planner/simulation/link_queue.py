"""The link between a device and its host over time: a queue each way, first in, first out, and one rate for each that runs.

Bytes flow like a fluid. The first copy of each queue moves, after its latency, at its direction's rate, or at the rate for both
ways while the other direction moves too. Nothing else changes a rate, so between two ends of copies time is skipped in one go.
"""

import collections
import enum
import itertools
import math
from collections.abc import Sequence

from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.planner.simulation.chunk_program import Mover

SAME_MOMENT = 1 + 1e-9
"""Moments that differ by less than this factor are one. A copy that ends just when somebody looks is through, however the times
of hundreds of rounds were added up: that a whole step and a part of it have one result depends on it."""


class Direction(enum.Enum):
    """Which way a copy goes."""

    D2H = "to host"  # what leaves
    H2D = "to device"  # what comes back


_D2H = Direction.D2H
"""To look up a member of an enumeration takes Python as long as a call."""


class Copy:
    """One copy: what one group moves at once."""

    __slots__ = ("direction", "end_s", "label", "mover", "size_bytes", "start_s", "submitted_s")

    def __init__(self, direction: Direction, size_bytes: int, *, mover: Mover | None, label: str, submitted_s: float) -> None:
        self.direction = direction
        self.size_bytes = size_bytes
        self.mover = mover
        """What it is counted for."""
        self.label = label
        """For people."""
        self.submitted_s = submitted_s
        """When it joined the queue."""
        self.start_s = math.inf
        """When it was the first of its queue; infinite before."""
        self.end_s = math.inf
        """When its last byte was through; infinite before."""


class _Stream:
    """One direction."""

    __slots__ = ("bytes_left", "duplex_bytes_per_s", "latency_left_s", "queue", "rate_bytes_per_s")

    def __init__(self, rate_bytes_per_s: float, duplex_bytes_per_s: float) -> None:
        self.queue: collections.deque[Copy] = collections.deque()
        self.rate_bytes_per_s = rate_bytes_per_s
        # Two ways at once are never faster than one alone, whatever a measurement says.
        self.duplex_bytes_per_s = min(rate_bytes_per_s, duplex_bytes_per_s)
        self.latency_left_s = 0.0
        self.bytes_left = 0.0


class LinkQueue:
    """Both directions of one rank's link, at one moment that only goes forward.

    Args:
        link: Its rates.
    """

    def __init__(self, link: LinkModel) -> None:
        self._latency_s = link.copy_latency_s
        self._slowdown = link.compute_slowdown
        self._d2h = _Stream(link.d2h_bytes_per_s, link.duplex_bytes_per_s)
        self._h2d = _Stream(link.h2d_bytes_per_s, link.duplex_bytes_per_s)
        self.now_s = 0.0
        """The queues are as they are at this moment. It lags behind compute until somebody needs to know."""
        self.done: list[Copy] = []
        """The copies that ended, in order. Who reads it empties it."""
        self.queued = 0
        """Copies that are not through, both ways: compute asks before each stretch."""
        self.slowed_s = 0.0
        """What compute took longer so far since copies ran beside it."""

    def submit(
        self, direction: Direction, size_bytes: int, at_s: float, *, mover: Mover | None = None, label: str = ""
    ) -> Copy:
        """Let a copy join its queue at `at_s`, which is not before anything that was asked for.

        Returns:
            The copy, whose end is known when the queues have come so far.
        """
        if self.now_s < at_s:
            self.advance(at_s)
        stream = self._d2h if direction is _D2H else self._h2d
        copy = Copy(direction, size_bytes, mover=mover, label=label, submitted_s=at_s)
        stream.queue.append(copy)
        self.queued += 1
        if len(stream.queue) == 1:
            self._start(stream)
        return copy

    def find_last(self, direction: Direction) -> Copy | None:
        """Return the copy that is through last of those queued now, or None where the queue is empty."""
        queue = (self._d2h if direction is _D2H else self._h2d).queue
        return queue[-1] if queue else None

    @property
    def is_returning(self) -> bool:
        """Whether anything is on its way to the device."""
        return bool(self._h2d.queue)

    def get_first(self, direction: Direction) -> Copy | None:
        """Return the copy that is under way, or None where the queue is empty."""
        queue = (self._d2h if direction is _D2H else self._h2d).queue
        return queue[0] if queue else None

    def get_front(self) -> tuple[float, float]:
        """Return the seconds of latency, and the bytes, that are left of the first copy to the host."""
        return self._d2h.latency_left_s, self._d2h.bytes_left

    def count_front_s(self) -> tuple[float, float]:
        """Return the seconds of latency, and of copying with nothing the other way, that are left of it."""
        return self._d2h.latency_left_s, self._d2h.bytes_left / self._d2h.rate_bytes_per_s

    def count_drain_s(self) -> float:
        """Return the seconds until all copies to the host are through, with nothing the other way."""
        latency_s, copy_s = self.count_front_s()
        waiting = itertools.islice(self._d2h.queue, 1, None)
        return latency_s + copy_s + sum(self._latency_s + one.size_bytes / self._d2h.rate_bytes_per_s for one in waiting)

    def resume(self, copies: Sequence[Copy], front: tuple[float, float], *, at_s: float) -> None:
        """Be at `at_s`, with `copies` on their way to the host and nothing else.

        Args:
            copies: In order. The first has begun.
            front: What `get_front` said when as much of it was left.
            at_s: The moment.
        """
        self.now_s = at_s
        self._d2h.queue.clear()
        self._d2h.queue.extend(copies)
        self.queued = len(copies)
        if copies:
            self._d2h.latency_left_s, self._d2h.bytes_left = front

    def count_left_bytes(self, direction: Direction) -> float:
        """Return the bytes of a direction that are not through yet."""
        stream = self._d2h if direction is Direction.D2H else self._h2d
        return stream.bytes_left + sum(copy.size_bytes for copy in list(stream.queue)[1:]) if stream.queue else 0.0

    def advance(self, until_s: float) -> None:
        """Let time pass until `until_s`; infinity runs both queues empty."""
        while self.queued and self.now_s < until_s:
            self._step(until_s)
        if self.now_s < until_s < math.inf:
            self.now_s = until_s

    def finish(self, copy: Copy) -> float:
        """Let time pass until `copy` is through, and return when that is."""
        while copy.end_s == math.inf:
            self._step(math.inf)
        return copy.end_s

    def run_compute(self, at_s: float, work_s: float) -> float:
        """Return when compute that begins at `at_s` and takes `work_s` alone is over: copies beside it slow it down."""
        if not self._slowdown:
            return at_s + work_s
        if self.now_s < at_s:
            self.advance(at_s)
        factor = 1 + self._slowdown
        now_s = at_s
        while work_s > 0 and self.queued:
            end_s = now_s + work_s * factor
            self._step(end_s)
            self.slowed_s += (self.now_s - now_s) * self._slowdown / factor
            if self.now_s >= end_s:
                return end_s
            work_s -= (self.now_s - now_s) / factor
            now_s = self.now_s
        return now_s + work_s

    def _step(self, until_s: float) -> None:
        """Let time pass until the next latency or copy is over, or until `until_s` if that is first. One queue has a copy."""
        stream = self._d2h
        if self._h2d.queue:
            if stream.queue:
                self._step_both(until_s)
                return
            stream = self._h2d
        left_s = stream.latency_left_s or stream.bytes_left / stream.rate_bytes_per_s
        event_s = self.now_s + left_s
        if event_s <= until_s * SAME_MOMENT:
            self.now_s = event_s if event_s < until_s else until_s
            self._end(stream)
            return
        if stream.latency_left_s:
            stream.latency_left_s -= until_s - self.now_s
        else:
            stream.bytes_left -= stream.rate_bytes_per_s * (until_s - self.now_s)
        self.now_s = until_s

    def _step_both(self, until_s: float) -> None:
        """Do what `_step` does while both queues have copies."""
        d2h, h2d = self._d2h, self._h2d
        d2h_rate, h2d_rate = d2h.rate_bytes_per_s, h2d.rate_bytes_per_s
        if not d2h.latency_left_s and not h2d.latency_left_s:
            d2h_rate, h2d_rate = d2h.duplex_bytes_per_s, h2d.duplex_bytes_per_s
        d2h_s = d2h.latency_left_s or d2h.bytes_left / d2h_rate
        h2d_s = h2d.latency_left_s or h2d.bytes_left / h2d_rate
        began_s, passed_s = self.now_s, d2h_s if d2h_s < h2d_s else h2d_s
        event_s = began_s + passed_s
        if event_s > until_s * SAME_MOMENT:
            passed_s = until_s - began_s
            self.now_s = until_s
        else:
            self.now_s = event_s if event_s < until_s else until_s
        same_s = self.now_s * SAME_MOMENT  # both directions may have come to something
        self._pass(d2h, d2h_s if began_s + d2h_s <= same_s else passed_s, d2h_s, d2h_rate)
        self._pass(h2d, h2d_s if began_s + h2d_s <= same_s else passed_s, h2d_s, h2d_rate)

    def _pass(self, stream: _Stream, passed_s: float, event_s: float, rate_bytes_per_s: float) -> None:
        """Let `passed_s` pass in one direction, whose latency or copy is over after `event_s`."""
        if passed_s >= event_s:
            self._end(stream)
        elif stream.latency_left_s:
            stream.latency_left_s -= passed_s
        else:
            stream.bytes_left -= rate_bytes_per_s * passed_s

    def _end(self, stream: _Stream) -> None:
        """Let the latency of a direction's first copy, or else that copy, be over now."""
        if stream.latency_left_s:
            stream.latency_left_s = 0.0
            return
        copy = stream.queue.popleft()
        copy.end_s = self.now_s
        self.done.append(copy)
        self.queued -= 1
        if stream.queue:
            self._start(stream)

    def _start(self, stream: _Stream) -> None:
        copy = stream.queue[0]
        copy.start_s = self.now_s
        stream.latency_left_s = self._latency_s
        stream.bytes_left = copy.size_bytes
