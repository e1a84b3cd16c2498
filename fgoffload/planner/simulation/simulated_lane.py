"""The groups of one microbatch in one model chunk, and where their bytes are, in numbers."""

from collections.abc import Iterable, Sequence

from fgoffload.planner.simulation.chunk_events import CompiledChunk
from fgoffload.planner.simulation.link_queue import Copy
from fgoffload.planner.simulation.simulation_result import TagTraffic
from fgoffload.transfer_schedule import SavedState, ScheduledGroup, ScheduledLane

# To look up a member of an enumeration takes Python as long as a call.
_RESIDENT, _OFFLOADING, _OFFLOADED, _RELOADED, _FREED = SavedState


class SimulatedLane(ScheduledLane[ScheduledGroup, int]):
    """One microbatch in one model chunk, as far as the engine's lane knows it where all its groups were opened.

    Args:
        chunk: What the chunk does.
        traffic: By parcel, what its copies are counted for.
    """

    __slots__ = ("chunk", "is_copied", "is_read", "reloads", "states", "traffic")

    def __init__(self, chunk: CompiledChunk, traffic: Sequence[TagTraffic]) -> None:
        super().__init__([ScheduledGroup(position, place.end_position) for position, place in enumerate(chunk.groups)])
        count = len(chunk.parcels)
        self.chunk = chunk
        self.traffic = traffic
        self.states = [_RESIDENT] * count  # by parcel
        self.is_copied = [False] * count  # by parcel: whether a copy to the host still references its device memory
        self.is_read = [parcel.is_read_later for parcel in chunk.parcels]  # by parcel: whether forward still reads it
        self.reloads: list[Copy | None] = [None] * count  # by parcel: its copy to the device

    def list_away(self, group: int) -> list[int]:
        """Return the parcels of a group that can be called back."""
        states = self.states
        return [one for one in self.chunk.groups[group].members if (state := states[one]) is _OFFLOADING or state is _OFFLOADED]

    def is_offloaded(self, saved: int) -> bool:
        """Return whether a parcel is on the host only."""
        return self.states[saved] is _OFFLOADED

    def count_bytes(self, away: Iterable[int]) -> int:
        """Return the bytes of parcels."""
        known = self.chunk.parcels
        return sum([known[parcel].size_bytes for parcel in away])
