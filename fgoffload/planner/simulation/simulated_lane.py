"""The groups of one microbatch in one model chunk, and where their bytes are, in numbers."""

from collections.abc import Hashable, Iterable

from fgoffload.planner.simulation.chunk_program import ChunkProgram
from fgoffload.planner.simulation.link_queue import Copy
from fgoffload.transfer_schedule import SavedState, ScheduledGroup, ScheduledLane

# To look up a member of an enumeration takes Python as long as a call.
_RESIDENT, _OFFLOADING, _OFFLOADED, _RELOADED, _FREED = SavedState


class SimulatedLane(ScheduledLane[ScheduledGroup, int]):
    """One microbatch in one model chunk, as far as the engine's lane knows it where all its groups were opened.

    Args:
        program: What the chunk does.
    """

    __slots__ = ("is_bare", "is_copied", "is_read", "number", "program", "reloads", "states")

    def __init__(self, program: ChunkProgram) -> None:
        super().__init__(ScheduledGroup(position, place.end_position) for position, place in enumerate(program.groups))
        count = len(program.parcels)
        self.program = program
        self.states = [_RESIDENT] * count
        """By parcel."""
        self.is_copied = [False] * count
        """By parcel: whether a copy to the host still holds its device memory."""
        self.is_read = [parcel.is_read_later for parcel in program.parcels]
        """By parcel: whether forward still reads it."""
        self.reloads: list[Copy | None] = [None] * count
        """By parcel: its copy to the device."""
        self.number: int | None = None
        """What tells it from others, where somebody has given it a number since it changed last."""
        self.is_bare = False
        """Whether its number alone says how far it is, and all else here is of another time or was never there."""

    @classmethod
    def make_bare(cls, program: ChunkProgram, number: int) -> "SimulatedLane":
        """Return a microbatch of which a number says how far it is, and that has nothing else yet."""
        lane = cls.__new__(cls)
        lane.program, lane.number, lane.is_bare = program, number, True
        return lane

    def become(self, other: "SimulatedLane") -> None:
        """Be as far as `other`, a microbatch in a chunk that does the same, where none of its parcels is on its way back."""
        self.groups = [group.copy() for group in other.groups]
        self.end, self.away = other.end, other.away
        self.ahead_bytes, self.let_go_bytes = other.ahead_bytes, other.let_go_bytes
        self._leftover = []
        self.states = other.states.copy()
        self.is_copied = other.is_copied.copy()
        self.is_read = other.is_read.copy()
        # Nobody waits for what is back, whenever that was.
        self.reloads = [None] * len(other.reloads)
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
            *[group.ahead_bytes for group in self.groups],
        )

    def list_away(self, group: int) -> list[int]:
        """Return the parcels of a group that can be called back."""
        states = self.states
        return [
            one for one in self.program.groups[group].members if (state := states[one]) is _OFFLOADING or state is _OFFLOADED
        ]

    def is_offloaded(self, saved: int) -> bool:
        """Return whether a parcel is on the host only."""
        return self.states[saved] is _OFFLOADED

    def count_bytes(self, away: Iterable[int]) -> int:
        """Return the bytes of parcels."""
        known = self.program.parcels
        return sum([known[parcel].size_bytes for parcel in away])
