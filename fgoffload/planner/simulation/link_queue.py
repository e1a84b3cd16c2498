"""Simulates the link between a device and its host, with a FIFO queue and a rate for each direction.

The first copy in each queue runs at its direction's rate, or at the duplex rate while the other direction is busy too. Rates
depend on nothing else, so the simulation advances from the end of one copy to the end of the next.
"""

import collections
import math

from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.planner.ranks.schedule import Pass
from fgoffload.planner.simulation.simulation_result import RankTimeline, StreamName, TagTraffic

_SAME_TIME = 1 + 1e-9
"""We treat times within this factor as equal. Otherwise, rounding could make a poll miss a copy that ends at the same time."""


class Copy:
    """A copy that is queued, running or done."""

    __slots__ = ("end_s", "label", "pass_", "size_bytes", "start_s", "traffic")

    def __init__(self, size_bytes: int, traffic: TagTraffic, pass_: Pass | None, label: str) -> None:
        self.size_bytes = size_bytes
        self.traffic = traffic  # counters that the copy updates
        self.pass_ = pass_  # pass that submitted it
        self.label = label
        self.start_s = math.inf  # time at which the copy became the first in its queue; infinite until then
        self.end_s = math.inf  # time at which the last byte arrived; infinite until then


class CopyQueue:
    """One direction of the link."""

    __slots__ = ("_latency_s", "_rate_bytes_per_s", "copies", "duplex_part", "left_s", "stream", "waited_since_s")

    def __init__(self, stream: StreamName, rate_bytes_per_s: float, link: LinkModel) -> None:
        self.stream = stream
        self.copies: collections.deque[Copy] = collections.deque()  # unfinished copies, in order; the first is running
        self.left_s = 0.0  # remaining seconds of the first copy at full rate, latency included
        # Capped, because a measured duplex rate above the one-way rate is noise.
        self.duplex_part = min(1.0, link.duplex_bytes_per_s / rate_bytes_per_s)
        """Fraction of this direction's rate that remains while the other direction is busy."""
        self.waited_since_s = math.inf  # time since which compute has been waiting for this direction; infinite if it is not
        self._rate_bytes_per_s = rate_bytes_per_s
        self._latency_s = link.copy_latency_s

    def count_left_bytes(self) -> float:
        """Return the bytes still to be copied."""
        sizes_bytes = [copy.size_bytes for copy in self.copies]
        return sum(sizes_bytes[1:]) + min([*sizes_bytes[:1], self.left_s * self._rate_bytes_per_s]) if sizes_bytes else 0.0

    def start(self, now_s: float) -> None:
        """Start the first copy in the queue."""
        copy = self.copies[0]
        copy.start_s = now_s
        self.left_s = self._latency_s + copy.size_bytes / self._rate_bytes_per_s


class LinkQueue:
    """Both directions of one rank's link, with a shared clock that only moves forward."""

    def __init__(self, link: LinkModel, timeline: RankTimeline | None) -> None:
        self.d2h = CopyQueue(StreamName.D2H, link.d2h_bytes_per_s, link)
        self.h2d = CopyQueue(StreamName.H2D, link.h2d_bytes_per_s, link)
        self.now_s = 0.0  # simulated time of both queues; advanced only when needed, so it may lag behind compute
        self.queued = 0  # unfinished copies in both directions
        self.slowed_s = 0.0  # seconds that copies have added to compute so far
        self._slowdown = link.compute_slowdown
        self._timeline = timeline

    def submit(self, queue: CopyQueue, copy: Copy, at_s: float) -> None:
        """Add a copy to a queue at `at_s`. Successive calls must not go back in time."""
        if self.now_s < at_s:
            self.advance(at_s)
        self.queued += 1
        queue.copies.append(copy)
        if len(queue.copies) == 1:
            queue.start(self.now_s)

    def advance(self, until_s: float) -> None:
        """Advance time to `until_s`; infinity empties both queues."""
        while self.queued and self.now_s < until_s:
            self._step(until_s)
        if self.now_s < until_s < math.inf:
            self.now_s = until_s

    def wait_for(self, queue: CopyQueue, copy: Copy, since_s: float) -> float:
        """Advance time until `copy` is done and return that time. Compute has been waiting since `since_s`."""
        self.advance(since_s)
        queue.waited_since_s = since_s
        while copy.end_s == math.inf:
            self._step(math.inf)
        queue.waited_since_s = math.inf
        return copy.end_s

    def run_compute(self, at_s: float, work_s: float) -> float:
        """Return the end time of compute that starts at `at_s` and takes `work_s`, or longer if copies run concurrently."""
        if not self._slowdown:
            return at_s + work_s
        if self.now_s < at_s:
            self.advance(at_s)
        factor = 1 + self._slowdown
        now_s = at_s
        while work_s > 0 and self.queued:
            end_s = now_s + work_s * factor
            self._step(end_s)
            passed_s = self.now_s - now_s
            self.slowed_s += passed_s * self._slowdown / factor
            if self.now_s >= end_s:
                return end_s
            work_s -= passed_s / factor
            now_s = self.now_s
        return now_s + work_s

    def _step(self, until_s: float) -> None:
        """Advance time to the end of the next copy, or to `until_s` if that is earlier. At least one queue must have a copy."""
        queue, other = (self.d2h, self.h2d) if self.d2h.copies else (self.h2d, self.d2h)
        part, other_part, left_s, other_left_s = 1.0, 1.0, queue.left_s, math.inf
        if other.copies:
            part, other_part = queue.duplex_part, other.duplex_part
            left_s, other_left_s = left_s / part, other.left_s / other_part
        began_s = self.now_s
        now_s = began_s + (left_s if left_s < other_left_s else other_left_s)
        self.now_s = now_s = now_s if now_s < until_s else until_s
        same_s = now_s * _SAME_TIME  # the copies in both directions may finish at the same time
        if began_s + left_s <= same_s:
            self._end_copy(queue)
        else:
            queue.left_s -= part * (now_s - began_s)
        if began_s + other_left_s <= same_s:
            self._end_copy(other)
        elif other_left_s < math.inf:
            other.left_s -= other_part * (now_s - began_s)

    def _end_copy(self, queue: CopyQueue) -> None:
        now_s, copy = self.now_s, queue.copies.popleft()
        self.queued -= 1
        copy.end_s = now_s
        if queue.stream is StreamName.D2H:
            copy.traffic.d2h_s += now_s - copy.start_s
        else:
            copy.traffic.h2d_s += now_s - copy.start_s
        if queue.waited_since_s < now_s:
            copy.traffic.exposed_s += now_s - max(copy.start_s, queue.waited_since_s)
        if self._timeline is not None:
            label = f"{copy.pass_} {copy.label}"
            self._timeline.note_span(queue.stream, label, copy.start_s, now_s, size_bytes=copy.size_bytes)
        if queue.copies:
            queue.start(now_s)
