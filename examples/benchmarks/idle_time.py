"""Finds the idle time of a device in a traced step, and how much of it occurs at host waits.

[Note: Idle time]
The device is idle while no kernel runs on any stream, between the first and last kernel of a step. Experts run on separate
streams, so gaps on a single stream do not count. Copies and fills are not kernels: a device that only copies is idle.

A gap is at a wait if the host returns from that wait within the gap. Until the wait is over, the host cannot launch the
kernel that ends the gap, whether a copy or a kernel transfers the awaited bytes. We also measure how much of each gap the host
spends inside waits. That part grows if other copies are queued ahead of the awaited bytes. In the rest of the gap, the host
launches kernels, some of which it could have launched before the wait.

A gap has a late launch if the launch call of the kernel that ends the gap returned only after the gap began: the device was
idle because of the host. In all other gaps, the kernel had already been launched, and the device was waiting for an event or
was slow to start the kernel.
"""

import bisect
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trace_events import Event, is_copy, is_kernel

WAIT_RANGE = "fgoffload: the host may wait"
"""Name of the profiler range around the waits to count. Other host waits, such as at the end of a step, do not count."""

_CALLS = ("cuda_runtime", "cuda_driver")


class Span(NamedTuple):
    """A time span, in microseconds of the trace's clock."""

    begin_us: float
    end_us: float

    @property
    def ms(self) -> float:
        """Length in milliseconds."""
        return (self.end_us - self.begin_us) / 1e3

    def find_overlap_ms(self, other: "Span") -> float:
        """Return the overlap of both spans in milliseconds."""
        return max(0.0, min(self.end_us, other.end_us) - max(self.begin_us, other.begin_us)) / 1e3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A period between two kernels in which no kernel runs."""

    span: Span
    kernel: str
    """Name of the kernel that ends the gap, without template arguments and parameters."""
    is_at_wait: bool
    """Whether the gap is at a wait. See [Note: Idle time]."""
    waiting_ms: float
    """Milliseconds of the gap that the host spent inside waits."""
    is_late_launch: bool
    """Whether the gap has a late launch. See [Note: Idle time]. False if the trace does not contain the launch call."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IdleTime:
    """Activity of a device in one step."""

    span_ms: float
    """Milliseconds from the start of the first kernel to the end of the last one."""
    waits: int
    """Number of calls in which the host waited, including waits while the device was busy."""
    gaps: tuple[Gap, ...]

    @property
    def idle_ms(self) -> float:
        """Total length of all gaps in milliseconds."""
        return sum(gap.span.ms for gap in self.gaps)

    @property
    def busy_ms(self) -> float:
        """Milliseconds in which at least one kernel ran."""
        return self.span_ms - self.idle_ms

    @property
    def late_ms(self) -> float:
        """Total length of all gaps with a late launch, in milliseconds."""
        return sum(gap.span.ms for gap in self.gaps if gap.is_late_launch)

    @property
    def at_waits(self) -> tuple[Gap, ...]:
        """The gaps at waits."""
        return tuple(gap for gap in self.gaps if gap.is_at_wait)

    @property
    def elsewhere_ms(self) -> float:
        """Total length of all gaps that are not at waits, in milliseconds."""
        return sum(gap.span.ms for gap in self.gaps if not gap.is_at_wait)

    @property
    def longest(self) -> Gap | None:
        """The longest gap; None if there are no gaps."""
        return max(self.gaps, key=lambda gap: gap.span.ms, default=None)

    def sum_by_kernel(self) -> dict[str, tuple[int, float, float]]:
        """Return the count, total ms and longest ms of gaps, keyed by the kernel that ends them, largest total first."""
        found: dict[str, list[float]] = {}
        for gap in self.gaps:
            found.setdefault(gap.kernel, []).append(gap.span.ms)
        rows = {kernel: (len(times), sum(times), max(times)) for kernel, times in found.items()}
        return dict(sorted(rows.items(), key=lambda item: item[1][1], reverse=True))


def find_idle_time(events: Sequence[Event]) -> IdleTime | None:
    """Return the idle time of the device in a traced step.

    Args:
        events: Trace events of one step of one process on one device.

    Returns:
        None if no kernel was traced, as on a CPU.
    """
    kernels = sorted(filter(is_kernel, events), key=_get_begin)
    if not kernels:
        return None
    waits = list_waits(events)
    launches = {_get_correlation(event): _get_span(event).end_us for event in events if event.get("cat") in _CALLS}
    gaps: list[Gap] = []
    begin_us = end_us = _get_begin(kernels[0])
    for kernel in kernels:
        span = Span(end_us, _get_begin(kernel))
        if span.ms > 0:
            launched_us = launches.get(_get_correlation(kernel), -math.inf)
            gaps.append(_describe_gap(span, kernel, waits, is_late_launch=launched_us > span.begin_us))
        end_us = max(end_us, _get_span(kernel).end_us)
    return IdleTime(span_ms=Span(begin_us, end_us).ms, waits=len(waits), gaps=tuple(gaps))


def list_waits(events: Iterable[Event]) -> list[Span]:
    """Return the calls inside `WAIT_RANGE` ranges in which the host waited, ordered by time."""
    events = list(events)
    ranges = _merge(_get_span(event) for event in events if _is_range(event))
    # A call that copies to pageable memory returns when the copy is done; with pinned memory, it returns immediately.
    slow = {_get_correlation(event) for event in events if is_copy(event, way="DtoH") and "Pageable" in event["name"]}
    calls = (
        _get_span(event)
        for event in events
        if event.get("cat") in _CALLS and ("Synchronize" in event["name"] or _get_correlation(event) in slow)
    )
    # Match calls by time, on any thread: no other thread calls CUDA while the training thread is in such a range.
    return sorted(call for call in calls if any(one.begin_us <= call.begin_us < one.end_us for one in ranges))


def shorten(name: str) -> str:
    """Return the kernel name without template arguments and parameters."""
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    return plain.partition("<")[0].partition("(")[0]


def _describe_gap(span: Span, kernel: Event, waits: Sequence[Span], *, is_late_launch: bool) -> Gap:
    # Waits do not overlap, so they are sorted by end as well as by begin.
    first = bisect.bisect_left(waits, span.begin_us, key=lambda wait: wait.end_us)
    last = bisect.bisect_left(waits, span.end_us, key=lambda wait: wait.begin_us)
    own = waits[first:last]
    return Gap(
        span=span,
        kernel=shorten(kernel["name"]),
        is_at_wait=any(span.begin_us <= wait.end_us <= span.end_us for wait in own),
        waiting_ms=sum(map(span.find_overlap_ms, own)),
        is_late_launch=is_late_launch,
    )


def _is_range(event: Event) -> bool:
    return event.get("cat") == "user_annotation" and event["name"] == WAIT_RANGE


def _merge(spans: Iterable[Span]) -> list[Span]:
    """Merge overlapping spans. Ranges are nested if one waiting method calls another."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.begin_us <= merged[-1].end_us:
            span = Span(merged[-1].begin_us, max(merged.pop().end_us, span.end_us))
        merged.append(span)
    return merged


def _get_begin(event: Event) -> float:
    return float(event["ts"])


def _get_span(event: Event) -> Span:
    return Span(_get_begin(event), _get_begin(event) + float(event["dur"]))


def _get_correlation(event: Event) -> int | None:
    found = event.get("args", {}).get("correlation")
    return None if found is None else int(found)
