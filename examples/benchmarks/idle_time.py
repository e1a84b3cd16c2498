"""When a device stood idle in a traced step, and how much of that lies at waits of the host. Numbers in, numbers out.

[Note: What idle means]
Between the first and the last kernel of a step, the time in which no kernel runs, whatever its stream: experts run on streams
of their own, and the gaps of one stream say nothing. Copies and fills are not kernels: a device that only copies is idle.

A gap lies at a wait if the host comes back from that wait within it: the kernel that ends the gap could not be launched before.
That holds for bytes that a copy brings and for bytes that a kernel writes, of which no copy tells. How much of such a gap the
host spends inside of waits is counted too: that is what copies ahead of those bytes make longer. The rest is launching, and
what the host had not launched before it began to wait.

A gap is a late launch if the call that launched the kernel which ends it came back only after the gap had begun: the host is
why the device was idle. In all other gaps the kernel had been launched, and the device waited for an event or took its time.
"""

import bisect
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trace_events import Event, is_copy, is_kernel

WAIT_RANGE = "fgoffload: the host may wait"
"""The name of a profiler range around what waits. What the host waits for by itself, as at a step's end, is no wait here."""

_CALLS = ("cuda_runtime", "cuda_driver")


class Span(NamedTuple):
    """A time, in microseconds of the trace's clock."""

    begin_us: float
    end_us: float

    @property
    def ms(self) -> float:
        """How long it is."""
        return (self.end_us - self.begin_us) / 1e3

    def find_overlap_ms(self, other: "Span") -> float:
        """Return how long both are at once."""
        return max(0.0, min(self.end_us, other.end_us) - max(self.begin_us, other.begin_us)) / 1e3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time without a kernel, between two."""

    span: Span
    kernel: str
    """The name of the one that ends it, without its types."""
    is_at_wait: bool
    """See [Note: What idle means]."""
    waiting_ms: float
    """Of it, how long the host was inside of waits."""
    is_late_launch: bool
    """See [Note: What idle means]. False where the trace does not have the launch."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IdleTime:
    """What a device did in one step."""

    span_ms: float
    """From the begin of the first kernel to the end of the last one."""
    waits: int
    """Calls in which the host waited, whether or not the device was idle meanwhile."""
    gaps: tuple[Gap, ...]
    """In order."""

    @property
    def idle_ms(self) -> float:
        """All gaps together."""
        return sum(gap.span.ms for gap in self.gaps)

    @property
    def busy_ms(self) -> float:
        """How long at least one kernel ran."""
        return self.span_ms - self.idle_ms

    @property
    def late_ms(self) -> float:
        """All gaps together that are late launches."""
        return sum(gap.span.ms for gap in self.gaps if gap.is_late_launch)

    @property
    def at_waits(self) -> tuple[Gap, ...]:
        """The gaps that lie at waits."""
        return tuple(gap for gap in self.gaps if gap.is_at_wait)

    @property
    def elsewhere_ms(self) -> float:
        """All other gaps together."""
        return sum(gap.span.ms for gap in self.gaps if not gap.is_at_wait)

    @property
    def longest(self) -> Gap | None:
        """The longest gap, or None where kernels follow each other without any."""
        return max(self.gaps, key=lambda gap: gap.span.ms, default=None)

    def sum_by_kernel(self) -> dict[str, tuple[int, float, float]]:
        """Return by the kernel that ends them how many gaps there are, their ms, and those of the longest; the most first."""
        found: dict[str, list[float]] = {}
        for gap in self.gaps:
            found.setdefault(gap.kernel, []).append(gap.span.ms)
        rows = {kernel: (len(times), sum(times), max(times)) for kernel, times in found.items()}
        return dict(sorted(rows.items(), key=lambda item: item[1][1], reverse=True))


def find_idle_time(events: Sequence[Event]) -> IdleTime | None:
    """Return what the device of a trace did.

    Args:
        events: Of one step, process and device.

    Returns:
        None where no kernel was traced, as on a CPU.
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
    """Return the calls in which the host waited inside of ranges called `WAIT_RANGE`, in order."""
    events = list(events)
    ranges = _merge(_get_span(event) for event in events if _is_range(event))
    # A copy to memory that is not locked returns when it is done; to pinned memory, at once.
    slow = {_get_correlation(event) for event in events if is_copy(event, way="DtoH") and "Pageable" in event["name"]}
    calls = (
        _get_span(event)
        for event in events
        if event.get("cat") in _CALLS and ("Synchronize" in event["name"] or _get_correlation(event) in slow)
    )
    # By time, whatever the thread: no other one calls CUDA while a training's own is in such a range.
    return sorted(call for call in calls if any(one.begin_us <= call.begin_us < one.end_us for one in ranges))


def shorten(name: str) -> str:
    """Return the name of a kernel without its types."""
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    return plain.partition("<")[0].partition("(")[0]


def _describe_gap(span: Span, kernel: Event, waits: Sequence[Span], *, is_late_launch: bool) -> Gap:
    # The host is in one wait at a time, so that their ends are in order too.
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
    """Return spans that do not overlap: ranges lie in each other where one method that waits calls another."""
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
