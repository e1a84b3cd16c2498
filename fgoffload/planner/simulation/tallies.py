"""What a simulation counts while it runs, by tag and kind of layer and by cause of waiting."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from fgoffload.planner.simulation.chunk_events import Mover
from fgoffload.planner.simulation.simulation_result import TagTraffic, Waits

_TRAFFIC = tuple(field.name for field in dataclasses.fields(TagTraffic))[3:]
"""The numbers of a tag."""


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


class Counts:
    """What is counted of one rank."""

    def __init__(self) -> None:
        self.slowed_s = 0.0
        self.recompute_s = 0.0
        self.waits_s = dict.fromkeys(Cause, 0.0)
        self._tags: dict[Mover, TagTraffic] = {}

    def get_traffic(self, mover: Mover) -> TagTraffic:
        """Return what is counted of `mover`."""
        return self._tags.setdefault(mover, TagTraffic(kind=mover.kind, tag=mover.tag, action=mover.action))

    def list_numbers(self) -> list[float]:
        """Return all counts, in the order of `make_fields`."""
        numbers = [self.slowed_s, self.recompute_s, *self.waits_s.values()]
        return numbers + [getattr(one, name) for one in self._tags.values() for name in _TRAFFIC]

    def make_fields(self, numbers: Sequence[float]) -> dict[str, Any]:
        """Return `numbers` by the fields of `RankResult`."""
        left = iter(numbers)
        fields: dict[str, Any] = {name: next(left) for name in ("slowed_s", "recompute_s")}
        fields["waits"] = Waits(**{f"{cause.name.lower()}_s": next(left) for cause in Cause})
        tags = []
        for one in self._tags.values():
            moved: dict[str, Any] = {name: next(left) for name in _TRAFFIC}
            tags.append(dataclasses.replace(one, **moved))
        fields["tags"] = tuple(one for one in tags if one.d2h_bytes or one.kept_bytes)
        return fields | {name: sum(getattr(one, name) for one in tags) for name in _TRAFFIC if name != "exposed_s"}


NEIGHBOURS_PLACE = 2 + list(Cause).index(Cause.NEIGHBOURS)
"""Among the numbers of `Counts`, the seconds in which compute waits for other ranks."""
