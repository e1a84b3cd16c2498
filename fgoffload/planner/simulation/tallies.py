"""What a simulation counts while it runs: by tag and kind of layer, by cause of waiting, and over time where wanted."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from fgoffload.planner.simulation.chunk_events import Mover
from fgoffload.planner.simulation.simulation_result import MemorySample, RankTimeline, Span, StreamName, TagTraffic, Waits


class Cause(enum.Enum):
    """Why compute waits, for people; by the fields of `Waits`."""

    WINDOW = "wait for the window"
    TURN = "wait for what leaves before the loss"
    RELOAD = "wait for a reload"
    HOST = "the host waits behind copies"
    LATE = "the host is late"
    NEIGHBOURS = "wait for a neighbour"

    __hash__ = object.__hash__
    """Members are themselves alone. The hash of `Enum` is Python, and takes several times as long."""


@dataclasses.dataclass(slots=True, eq=False)
class Tally:
    """What one tag moved, in layers of one kind that do the same about it: the fields of `TagTraffic`."""

    d2h_bytes: int = 0
    h2d_bytes: int = 0
    recalled_bytes: int = 0
    kept_bytes: int = 0
    d2h_s: float = 0.0
    h2d_s: float = 0.0
    exposed_s: float = 0.0


class Counts:
    """What is counted of one rank."""

    def __init__(self) -> None:
        self.compute_s = 0.0
        self.slowed_s = 0.0
        self.recompute_s = 0.0
        self.waits_s = dict.fromkeys(Cause, 0.0)
        """By cause."""
        self._tallies: dict[Mover, Tally] = {}

    def get_tally(self, mover: Mover) -> Tally:
        """Return what is counted of `mover`."""
        return self._tallies.setdefault(mover, Tally())

    def list_numbers(self) -> list[float]:
        """Return all counts, in the order of `make_fields`."""
        numbers = [self.compute_s, self.slowed_s, self.recompute_s, *self.waits_s.values()]
        for tally in self._tallies.values():
            numbers += dataclasses.astuple(tally)
        return numbers

    def make_fields(self, numbers: Sequence[float]) -> dict[str, Any]:
        """Return `numbers` by the fields of `RankResult`."""
        of_tally, start = len(_TALLIED), 3 + len(Cause)
        tags = []
        for place, mover in enumerate(self._tallies):
            own = numbers[start + place * of_tally : start + (place + 1) * of_tally]
            if any(own):
                counted: dict[str, Any] = dict(zip(_TALLIED, own, strict=True))
                tags.append(TagTraffic(kind=mover.kind, tag=mover.tag, action=mover.action, **counted))
        sums = {name: sum(getattr(tag, name) for tag in tags) for name in _TALLIED if name != "exposed_s"}
        waits = {f"{cause.name.lower()}_s": seconds for cause, seconds in zip(Cause, numbers[3:start], strict=True)}
        compute_s, slowed_s, recompute_s = numbers[:3]
        return {
            **sums,
            "waits": Waits(**waits),
            "compute_s": compute_s,
            "slowed_s": slowed_s,
            "recompute_s": recompute_s,
            "tags": tuple(tags),
        }


_TALLIED = tuple(field.name for field in dataclasses.fields(Tally))

NEIGHBOURS_PLACE = 3 + list(Cause).index(Cause.NEIGHBOURS)
"""Among the numbers of `Counts`, the seconds in which compute waits for other ranks."""


class Recorder:
    """Notes what one rank does over time."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._memory: list[MemorySample] = []

    def note_span(self, stream: StreamName, label: str, start_s: float, end_s: float, *, size_bytes: int = 0) -> None:
        """Note that `stream` was busy, or waited."""
        if end_s > start_s:
            self._spans.append(Span(stream=stream, label=label, start_s=start_s, end_s=end_s, size_bytes=size_bytes))

    def note_memory(self, at_s: float, *, device_bytes: int, host_bytes: int) -> None:
        """Note how many bytes there are from `at_s` on."""
        self._memory.append(MemorySample(at_s=at_s, device_bytes=device_bytes, host_bytes=host_bytes))

    def finish(self) -> RankTimeline:
        """Return what was noted."""
        return RankTimeline(spans=tuple(self._spans), memory=tuple(self._memory))
