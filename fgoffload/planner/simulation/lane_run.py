"""The groups of one microbatch in one model chunk, as the engine's lane keeps them: where backward is, and what is called back.

The rules are those of `Lane` in fgoffload/engine/group.py, in numbers.
"""

import enum
from collections.abc import Hashable, Iterable

from fgoffload.planner.simulation.chunk_program import ChunkProgram
from fgoffload.planner.simulation.link_queue import Copy


class ParcelState(enum.Enum):
    """Where a parcel is."""

    RESIDENT = enum.auto()  # on the device only: not yet saved or submitted, or kept, or called back in time
    OFFLOADING = enum.auto()  # on the device, and the engine has not seen that its copy to the host is done
    OFFLOADED = enum.auto()  # on the host only
    RELOADED = enum.auto()  # on the host, and in a device buffer that is filled when its copy is done
    FREED = enum.auto()  # backward is through with it

    __hash__ = object.__hash__
    """Members are themselves alone. The hash of `Enum` is Python, and takes several times as long."""


AWAY = (ParcelState.OFFLOADING, ParcelState.OFFLOADED)
"""What can be called back."""


class LaneRun:
    """One microbatch in one model chunk.

    Args:
        program: What the chunk does.
    """

    __slots__ = (
        "ahead_bytes",
        "ahead_bytes_of",
        "away",
        "end",
        "is_bare",
        "is_copied",
        "is_read",
        "let_go_bytes",
        "number",
        "program",
        "reloads",
        "states",
    )

    def __init__(self, program: ChunkProgram) -> None:
        count = len(program.parcels)
        self.program = program
        self.states = [ParcelState.RESIDENT] * count
        """By parcel."""
        self.is_copied = [False] * count
        """By parcel: whether a copy to the host still holds its device memory."""
        self.is_read = [parcel.is_read_later for parcel in program.parcels]
        """By parcel: whether forward still reads it."""
        self.reloads: list[Copy | None] = [None] * count
        """By parcel: its copy to the device."""
        self.end = self.away = len(program.groups)
        """Backward has left all groups but the first `end`; the first `away` have not been called back."""
        self.ahead_bytes = 0
        """Called back for groups that backward has not come to."""
        self.let_go_bytes = 0
        """What backward took of sites that stay: it lets go of it when the op that asked is done."""
        self.ahead_bytes_of = [0] * len(program.groups)
        """By group: of `ahead_bytes`, those for it."""
        self.number: int | None = None
        """What tells it from others, where somebody has given it a number since it changed last."""
        self.is_bare = False
        """Whether its number alone says how far it is, and all else here is of another time or was never there."""

    @classmethod
    def make_bare(cls, program: ChunkProgram, number: int) -> "LaneRun":
        """Return a microbatch of which a number says how far it is, and that has nothing else yet."""
        lane = cls.__new__(cls)
        lane.program, lane.number, lane.is_bare = program, number, True
        return lane

    def copy(self) -> "LaneRun":
        """Return another microbatch that is as far as this one, where none of its parcels is on its way back."""
        other = LaneRun.__new__(LaneRun)
        other.program, other.number = self.program, self.number
        other.become(self)
        return other

    def become(self, other: "LaneRun") -> None:
        """Be as far as `other`, a microbatch in a chunk that does the same, where none of its parcels is on its way back."""
        self.states = other.states.copy()
        self.is_copied = other.is_copied.copy()
        self.is_read = other.is_read.copy()
        # Nobody waits for what is back, whenever that was.
        self.reloads = [None] * len(other.reloads)
        self.end, self.away = other.end, other.away
        self.ahead_bytes, self.let_go_bytes = other.ahead_bytes, other.let_go_bytes
        self.ahead_bytes_of = other.ahead_bytes_of.copy()
        self.is_bare = False

    def describe(self) -> Hashable:
        """Return what tells this microbatch from others in the same chunk, where none of its parcels is on its way back."""
        return (
            *self.states,
            *self.is_copied,
            *self.is_read,
            self.end,
            self.away,
            self.ahead_bytes,
            self.let_go_bytes,
            *self.ahead_bytes_of,
        )

    def is_news(self, group: int) -> bool:
        """Return whether that something of `group` is asked for shows that backward has come to it."""
        if self.end > self.program.groups[group].end_position or self.away > group:
            return True
        # It may have been called back while backward was behind all groups, or in one inside of it.
        return self.ahead_bytes_of[group] > 0

    def leave(self, position: int) -> None:
        """Take note that backward has left the groups from `position` on."""
        for group in range(position, self.end):
            self.expect(group, 0)
        if self.end > position:
            self.end = position
        if self.away > position:
            self.away = position

    def expect(self, group: int, size_bytes: int) -> None:
        """Take note that `size_bytes` of `group` are called back before backward has come to it; 0 when it has."""
        self.ahead_bytes += size_bytes - self.ahead_bytes_of[group]
        self.ahead_bytes_of[group] = size_bytes

    def list_away(self, group: int, *, but: Iterable[int] = ()) -> list[int]:
        """Return the parcels of `group` that can be called back, without those of `but`."""
        states = self.states
        return [one for one in self.program.groups[group].members if states[one] in AWAY and one not in but]

    def count_bytes(self, parcels: Iterable[int]) -> int:
        """Return the bytes of `parcels`."""
        known = self.program.parcels
        return sum([known[parcel].size_bytes for parcel in parcels])
