"""What a simulation counts while it runs: by tag and kind of layer, by cause of waiting, and over time where wanted."""

import collections
import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from fgoffload.planner.simulation.chunk_program import Mover
from fgoffload.planner.simulation.link_queue import Copy, Direction
from fgoffload.planner.simulation.simulation_result import MemorySample, RankTimeline, Span, StreamName, TagTraffic, Waits

_D2H = Direction.D2H
"""To look up a member of an enumeration takes Python as long as a call."""


class Cause(enum.Enum):
    """Why compute waits, for people."""

    WINDOW = "wait for the window"
    TURN = "wait for what leaves before the loss"
    RELOAD = "wait for a reload"
    HOST = "the host waits behind copies"
    LATE = "the host is late"
    NEIGHBOURS = "wait for a neighbour"

    __hash__ = object.__hash__
    """Members are themselves alone. The hash of `Enum` is Python, and takes several times as long."""


@dataclasses.dataclass(slots=True)
class _Tally:
    d2h_bytes: int = 0
    h2d_bytes: int = 0
    recalled_bytes: int = 0
    kept_bytes: int = 0
    d2h_s: float = 0.0
    h2d_s: float = 0.0
    exposed_s: float = 0.0


class Tallies:
    """Counts of one rank."""

    def __init__(self) -> None:
        self.movers: dict[Mover, _Tally] = {}
        """What each tag moved, in the order in which they were first submitted."""
        self.waits_s = dict.fromkeys(Cause, 0.0)
        """By cause."""
        self.compute_s = 0.0
        self.recompute_s = 0.0
        self.slowed_s = 0.0
        """What compute took longer in what is counted again: of the rest the link knows."""
        self._again: collections.Counter[Tallies] = collections.Counter()
        """What is counted again, how often, and is not in the other numbers yet."""

    def copy(self) -> "Tallies":
        """Return the counts as they are now."""
        other = Tallies()
        other.movers = {mover: dataclasses.replace(tally) for mover, tally in self.movers.items()}
        other.waits_s = self.waits_s.copy()
        other.compute_s, other.recompute_s, other.slowed_s = self.compute_s, self.recompute_s, self.slowed_s
        other._again = self._again.copy()
        return other

    def get(self, mover: Mover) -> _Tally:
        """Return the counts of `mover`."""
        found = self.movers.get(mover)
        if found is None:
            found = self.movers[mover] = _Tally()
        return found

    def add_wait(self, cause: Cause, seconds: float) -> None:
        """Count `seconds` in which compute waited."""
        self.waits_s[cause] += seconds

    def add_copy(self, copy: Copy, exposed_s: float) -> None:
        """Count a copy that is through, and the seconds of it in which compute waited for its direction."""
        if copy.mover is None:
            return
        tally = self.get(copy.mover)
        if copy.direction is _D2H:
            tally.d2h_s += copy.end_s - copy.start_s
        else:
            tally.h2d_s += copy.end_s - copy.start_s
        tally.exposed_s += exposed_s

    def cut_copy(self, copy: Copy, at_s: float) -> None:
        """Count a copy to the host up to `at_s`, and let what is counted later begin there."""
        if copy.mover is not None:
            self.get(copy.mover).d2h_s += at_s - copy.start_s
        copy.start_s = at_s

    def add(self, other: "Tallies", *, times: int) -> None:
        """Count what `other` has so many times as well."""
        for mover, counted in other.movers.items():
            tally = self.get(mover)
            tally.d2h_bytes += times * counted.d2h_bytes
            tally.h2d_bytes += times * counted.h2d_bytes
            tally.recalled_bytes += times * counted.recalled_bytes
            tally.kept_bytes += times * counted.kept_bytes
            tally.d2h_s += times * counted.d2h_s
            tally.h2d_s += times * counted.h2d_s
            tally.exposed_s += times * counted.exposed_s
        for cause, seconds in other.waits_s.items():
            self.waits_s[cause] += times * seconds
        self.compute_s += times * other.compute_s
        self.recompute_s += times * other.recompute_s
        self.slowed_s += times * other.slowed_s

    def count_again(self, other: "Tallies", *, times: int = 1) -> None:
        """Count what `other` has so many times more. Nobody changes it any more."""
        if other in self._again:
            self._again[other] += times
            return
        for mover in other.movers:
            self.get(mover)  # which has its place in the order now
        self._again[other] = times

    def has_kept(self) -> bool:
        """Return whether anything stayed since the host budget was used up."""
        return any(tally.kept_bytes for tally in self.movers.values())

    def sum_up(self) -> dict[str, Any]:
        """Return what was counted, by the fields of `RankResult`; `slowed_s` of what was counted again alone."""
        for other, times in self._again.items():
            self.add(other, times=times)
        self._again.clear()
        tags = tuple(
            TagTraffic(
                kind=mover.kind,
                tag=mover.tag,
                action=mover.action,
                d2h_bytes=tally.d2h_bytes,
                h2d_bytes=tally.h2d_bytes,
                recalled_bytes=tally.recalled_bytes,
                kept_bytes=tally.kept_bytes,
                d2h_s=tally.d2h_s,
                h2d_s=tally.h2d_s,
                exposed_s=tally.exposed_s,
            )
            for mover, tally in self.movers.items()
        )
        names = ("d2h_bytes", "h2d_bytes", "recalled_bytes", "kept_bytes", "d2h_s", "h2d_s")
        waits = Waits(
            window_s=self.waits_s[Cause.WINDOW],
            turn_s=self.waits_s[Cause.TURN],
            reload_s=self.waits_s[Cause.RELOAD],
            host_s=self.waits_s[Cause.HOST],
            late_s=self.waits_s[Cause.LATE],
            neighbours_s=self.waits_s[Cause.NEIGHBOURS],
        )
        return {
            **{name: sum(getattr(tag, name) for tag in tags) for name in names},
            "waits": waits,
            "compute_s": self.compute_s,
            "recompute_s": self.recompute_s,
            "slowed_s": self.slowed_s,
            "tags": tags,
        }


class Recorder:
    """Notes what one rank does over time."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._memory: list[MemorySample] = []

    def note_span(self, stream: StreamName, label: str, start_s: float, end_s: float, *, size_bytes: int = 0) -> None:
        """Note that `stream` was busy, or waited."""
        if end_s > start_s:
            self._spans.append(Span(stream=stream, label=label, start_s=start_s, end_s=end_s, size_bytes=size_bytes))

    def note_copies(self, copies: Sequence[Copy]) -> None:
        """Note copies that are through."""
        for copy in copies:
            stream = StreamName.D2H if copy.direction is Direction.D2H else StreamName.H2D
            self.note_span(stream, copy.label, copy.start_s, copy.end_s, size_bytes=copy.size_bytes)

    def note_memory(self, at_s: float, *, device_bytes: int, host_bytes: int) -> None:
        """Note how many bytes there are from `at_s` on."""
        self._memory.append(MemorySample(at_s=at_s, device_bytes=device_bytes, host_bytes=host_bytes))

    def finish(self) -> RankTimeline:
        """Return what was noted."""
        return RankTimeline(spans=tuple(self._spans), memory=tuple(self._memory))
