"""What passes of a step come to, by how they begin: what `repeated_passes` counts for those that begin alike.

[Note: Situations]
Behind a pass a rank is in a situation: which groups are on their way to the host, or there and nobody has seen it, of how
far a microbatch each, and how much is left of the first copy. What a pass comes to that begins there, and in which
situation the rank is behind it, is a transition. A step of thousands of passes has a few hundred. To follow one is a look
into a table: groups, copies and the queue are made anew only where a pass has to be run, or somebody looks at them.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.simulation.chunk_program import ChunkProgram, ComputeStep, HostWaitStep, Mover, Step
from fgoffload.planner.simulation.link_queue import Copy
from fgoffload.planner.simulation.rank_run import InFlight
from fgoffload.planner.simulation.simulated_lane import SimulatedLane
from fgoffload.planner.simulation.tallies import Tallies

DIGITS = 9
"""Of seconds by which the host is ahead, or that the first copy still takes: a nanosecond more or less is one of rounding."""

SITUATION_DIGITS = 11
"""The same of what tells situations from others. These follow each other: what is rounded of one is in all behind it."""

_UNSEEN_S = 1e-6
"""Seconds: more than rounding, and less than any copy takes."""


@dataclasses.dataclass(slots=True, eq=False)
class Outcome:
    """What a pass came to. Bytes and seconds are beside those with which it began. Nobody changes one."""

    seconds: float
    """From its start to its end."""
    net_bytes: int
    """On the device."""
    rise_bytes: int
    """The most on the device."""
    peak_label: str
    """Where that was first."""
    net_host_bytes: int
    """On the host."""
    rise_host_bytes: int
    """The most on the host; far below 0 where nothing left."""
    net_in_flight_bytes: int
    """On their way to the host, or not yet looked at."""
    net_abandoned: int
    """Parcels that a copy still holds and nothing else."""
    released: int
    """Groups that were in flight when it began, and were let go of."""
    queued: tuple["Left", ...]
    """Groups that were queued when it began and are still in flight, in order."""
    left: tuple["Left", ...]
    """Groups of its own that are still in flight, in order."""
    waiting: int
    """How many of both have copies that are not through."""
    front: tuple[float, float]
    """Of the first copy that is not through: the seconds of latency and the bytes that are left."""
    program: ChunkProgram
    """Of the chunk that was watched."""
    number: int
    """How far its microbatch is then."""
    loss_window_bytes: int
    """That were on their way when the loss began; 0 where none did. The rank that counts this may never have run one."""
    tallies: Tallies
    """What was counted."""
    first_lead_s: float
    """How far the host was ahead at its start."""
    lead_s: float
    """And at its end."""
    has_host_wait: bool
    """Whether the host waits in it: see `HostPart`."""


class Left(NamedTuple):
    """A group that is in flight behind a pass, and whose copy was not through before it."""

    entry: InFlight
    """As it was then."""
    start_s: float
    """Of its copy, since the start of the pass; infinite where it has not begun. So is the next."""
    end_s: float
    submitted_s: float

    @classmethod
    def note(cls, entry: InFlight, since_s: float) -> "Left":
        """Return `entry` as it is behind a pass that began at `since_s`."""
        copy = entry.copy
        return cls(entry, copy.start_s - since_s, copy.end_s - since_s, copy.submitted_s - since_s)

    def set_times(self, copy: Copy, since_s: float) -> None:
        """Let `copy` begin and end as this one did, in a pass that began at `since_s`."""
        copy.start_s, copy.end_s = since_s + self.start_s, since_s + self.end_s


class HostPart(NamedTuple):
    """What the host does in a pass before it waits."""

    seconds: float
    """That it takes, rounded. What it has not seen by then it does not see in them, however far behind that it is."""
    unseen_s: float
    """A bit more, so that what it sees just then is told from what it does not see."""
    has_wait: bool
    """Whether it waits at all; else it is as much further ahead at the end as it was at the start."""


class Way(NamedTuple):
    """Forwards, or backwards, through a chunk."""

    number: int
    """What tells it from others."""
    part: HostPart
    """What the host does in each."""
    outcomes: dict[Hashable, Outcome]
    """What they came to, by how they begin."""
    never_alike: set[Hashable]
    """How those begin that have to be run each time."""

    def copy(self) -> "Way":
        """Return what is known now."""
        return self._replace(outcomes=self.outcomes.copy(), never_alike=self.never_alike.copy())


class Leaving(NamedTuple):
    """A group that is in flight between two passes."""

    place: int
    """Which of the microbatches with groups in flight it is of, in the order of their first ones."""
    parcels: tuple[int, ...]
    """Of that microbatch."""
    size_bytes: int
    """Of them."""
    mover: Mover | None
    """What its copy is counted for."""
    unseen_s: float | None
    """What the host has still to do before it can see that the copy is through; None where it is not through."""


class Situation(NamedTuple):
    """What is in flight between two passes, with nothing on its way back. See [Note: Situations]."""

    number: int
    """What tells it from others."""
    leaving: tuple[Leaving, ...]
    """In order."""
    front: tuple[float, float]
    """Of the first copy that is not through: the seconds of latency and the bytes that are left."""
    left_bytes: float
    """Of all copies."""
    drain_s: float
    """Until all copies are through, where none runs the other way."""


class Transition(NamedTuple):
    """A pass that begins in a situation, and is counted."""

    outcome: Outcome
    """What it comes to."""
    behind: Situation
    """The situation behind it."""
    places: tuple[int, ...]
    """Of each microbatch with groups in flight there, its place before the pass; `OWN` of the one of the pass."""
    numbers: tuple[tuple[int, int], ...]
    """Of microbatches of which groups were let go of, the place before the pass and how far they are behind it."""
    lead_s: float | None
    """How far the host has to be ahead for all that to be so; None where it makes no difference."""

    def holds(self, lead_s: float) -> bool:
        """Return whether all that is so where the host is so far ahead, if that makes a difference."""
        return self.lead_s is None or round(self.lead_s - lead_s, SITUATION_DIGITS) == 0.0


OWN = -1
"""In place of a place: the microbatch of a pass that had nothing in flight before it."""


class Rest(NamedTuple):
    """A wait for a neighbour in a situation."""

    behind: Situation
    """The situation at its end, with the same microbatches."""
    tallies: Tallies
    """What was counted of copies meanwhile."""


class KnownPasses:
    """What passes come to on ranks of a step that have one link and the same rules."""

    def __init__(self) -> None:
        self._chunks: dict[Hashable, tuple[int, Way, Way]] = {}
        """By what programs do: a number, and what forwards and backwards came to."""
        self._numbers: dict[Hashable, int] = {}
        """Of microbatches that are as far as each other, by what tells them from others."""
        self._situations: dict[Hashable, Situation] = {}
        """By what tells them from others."""
        self.there: list[SimulatedLane] = []
        """By number less one: a microbatch that is there. Nobody changes it."""
        self.released: dict[Hashable, int] = {}
        """By the number of a microbatch and parcels: its number when copies of those have been let go of."""
        self.transitions: dict[Hashable, Transition] = {}
        """By the number of a situation and all else that a pass depends on."""
        self.rests: dict[Hashable, Rest] = {}
        """By the number of a situation, how long the wait is, and how far the host is ahead."""

    def copy(self) -> "KnownPasses":
        """Return what is known now: what one of both learns from then on the other does not."""
        other = KnownPasses()
        other._chunks = {
            content: (number, forward.copy(), backward.copy()) for content, (number, forward, backward) in self._chunks.items()
        }
        other._numbers, other._situations = self._numbers.copy(), self._situations.copy()
        other.there, other.released = self.there.copy(), self.released.copy()
        other.transitions, other.rests = self.transitions.copy(), self.rests.copy()
        return other

    @staticmethod
    def list_rules(rank: RankModel) -> Hashable:
        """Return what ranks must have alike so that passes come to the same; host budgets are looked at each time."""
        return rank.link, rank.policy, rank.host_pace, rank.turn, rank.late_group_s

    def get_chunk(self, program: ChunkProgram) -> tuple[int, Way, Way]:
        """Return the number of all programs that do the same as `program`, and what is known of their passes."""
        found = self._chunks.get(program.content)
        if found is None:
            number = len(self._chunks)
            forward, backward = (
                Way(2 * number + place, find_host_part(steps), {}, set())
                for place, steps in enumerate((program.forward, program.backward))
            )
            found = self._chunks[program.content] = (number, forward, backward)
        return found

    def number(self, chunk: int, lane: SimulatedLane) -> int:
        """Return the number, from 1, that says how far a microbatch is in the chunks with a number."""
        count = len(self._numbers)
        number = self._numbers.setdefault((chunk, lane.describe()), count + 1)
        if number > count:
            self.there.append(SimulatedLane.make_bare(lane.program, number))
            self.there[-1].become(lane)
        return number

    def get_situation(
        self, key: Hashable, leaving: Sequence[Leaving], front: tuple[float, float], left_bytes: float, drain_s: float
    ) -> Situation:
        """Return the situation that `key` tells from others: the first one that was as the rest says."""
        found = self._situations.get(key)
        if found is None:
            found = self._situations[key] = Situation(len(self._situations), tuple(leaving), front, left_bytes, drain_s)
        return found


class KnownSteps:
    """What passes come to in steps of one pipeline: on all its ranks, under this plan or another."""

    def __init__(self) -> None:
        self._of_rules: dict[Hashable, KnownPasses] = {}
        """By what ranks have alike whose passes come to the same."""

    def get(self, rank: RankModel) -> KnownPasses:
        """Return what is known of the passes of `rank`."""
        return self._of_rules.setdefault(KnownPasses.list_rules(rank), KnownPasses())

    def copy(self) -> "KnownSteps":
        """Return what is known now: what one of both learns from then on the other does not."""
        other = KnownSteps()
        other._of_rules = {rules: known.copy() for rules, known in self._of_rules.items()}
        return other


def find_host_part(steps: Sequence[Step]) -> HostPart:
    """Return what the host does in a pass of `steps` before it waits."""
    seconds = 0.0
    for step in steps:
        if isinstance(step, HostWaitStep):
            return _make_host_part(seconds, has_wait=True)
        if isinstance(step, ComputeStep):
            seconds += step.host_s
    return _make_host_part(seconds, has_wait=False)


def _make_host_part(seconds: float, *, has_wait: bool) -> HostPart:
    unseen_s = round(seconds + _UNSEEN_S, DIGITS)
    return HostPart(round(seconds, DIGITS), unseen_s, has_wait=has_wait)
