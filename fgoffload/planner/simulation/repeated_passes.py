"""Passes of a rank that begin alike, of which only the first is run step by step.

What a pass comes to does not depend on when it begins, but on where the parcels of its microbatch are, on which copies to the
host are under way, how far the first of them is, and which nobody has looked at yet, and on how far the host is ahead. Most
passes find an idle link, and where the link has no rest rounds of a schedule repeat: in a step of hundreds of microbatches
there are a few dozen such beginnings on each rank. The first pass of each is run, and what it came to is noted; for those after
it the same is counted, in all chunks of all ranks of a step that do the same in other layers.

    [Note: What is left of a pass]
    Copies to the host that are not through when it ends, and those that are and that nobody has looked at: each time they are
    made anew, as much later as the pass begins later, and those that were queued before it begin and end as much later. All
    else is a difference: of bytes, of counts and of seconds. A copy that is under way between two passes counts in each of them
    for as long as it ran there. Copies to the device that are under way behind a pass have no place here: backward has asked
    for all of them by then. A pass that leaves or finds any, or of which something stayed since the host budget was used up, is
    run each time.

    [Note: Microbatches that are a number]
    All that a pass changes of microbatches is how far they are, and as many are as far as each other. So each such place has a
    number, with one microbatch that is there; behind a pass that was counted others have their new number alone, until a pass
    is run that looks at them.
"""

import dataclasses
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.ranks.schedule import Pass, PassKind
from fgoffload.planner.simulation.chunk_program import ChunkProgram, ComputeStep, HostWaitStep, Step
from fgoffload.planner.simulation.lane_run import LaneRun
from fgoffload.planner.simulation.link_queue import Copy, Direction
from fgoffload.planner.simulation.rank_run import InFlight, RankRun
from fgoffload.planner.simulation.tallies import Cause, Tallies

_FEWEST_PASSES = 16
"""Of a step with fewer passes none begins as one before it did, or a few: to look for them takes longer than to run them."""

_DIGITS = 9
"""Of seconds by which the host is ahead, or that the first copy still takes: a nanosecond more or less is one of rounding."""

_UNSEEN_S = 1e-6
"""Seconds: more than rounding, and less than any copy takes."""

_NOTHING_SEEN = -1
"""In place of a peak: fewer bytes than any."""

_FORWARD = PassKind.FORWARD
"""To look up a member of an enumeration takes Python as long as a call."""


@dataclasses.dataclass(slots=True, eq=False)
class _Outcome:
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
    queued: tuple["_Left", ...]
    """Groups that were queued when it began and are still in flight, in order."""
    left: tuple["_Left", ...]
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
    """Whether the host waits in it: see `_HostPart`."""


class _Left(NamedTuple):
    """A group that is in flight behind a pass, and whose copy was not through before it."""

    entry: InFlight
    """As it was then."""
    start_s: float
    """Of its copy, since the start of the pass; infinite where it has not begun. So is the next."""
    end_s: float
    submitted_s: float

    @classmethod
    def note(cls, entry: InFlight, since_s: float) -> "_Left":
        """Return `entry` as it is behind a pass that began at `since_s`."""
        copy = entry.copy
        return cls(entry, copy.start_s - since_s, copy.end_s - since_s, copy.submitted_s - since_s)

    def set_times(self, copy: Copy, since_s: float) -> None:
        """Let `copy` begin and end as this one did, in a pass that began at `since_s`."""
        copy.start_s, copy.end_s = since_s + self.start_s, since_s + self.end_s


class _HostPart(NamedTuple):
    """What the host does in a pass before it waits."""

    seconds: float
    """That it takes, rounded. What it has not seen by then it does not see in them, however far behind that it is."""
    unseen_s: float
    """A bit more, so that what it sees just then is told from what it does not see."""
    has_wait: bool
    """Whether it waits at all; else it is as much further ahead at the end as it was at the start."""


class _Way(NamedTuple):
    """Forwards, or backwards, through a chunk."""

    part: _HostPart
    """What the host does in each."""
    outcomes: dict[Hashable, _Outcome]
    """What they came to, by how they begin."""
    never_alike: set[Hashable]
    """How those begin that have to be run each time."""


class KnownPasses:
    """What passes come to on ranks of a step that have one link and the same rules."""

    def __init__(self) -> None:
        self._chunks: dict[Hashable, tuple[int, _Way, _Way]] = {}
        """By what programs do: a number, and what forwards and backwards came to."""
        self._numbers: dict[Hashable, int] = {}
        """Of microbatches that are as far as each other, by what tells them from others."""
        self.there: list[LaneRun] = []
        """By number less one: a microbatch that is there. Nobody changes it."""
        self.released: dict[Hashable, int] = {}
        """By the number of a microbatch and parcels: its number when copies of those have been let go of."""

    @staticmethod
    def list_rules(rank: RankModel) -> Hashable:
        """Return what ranks must have alike so that passes come to the same; host budgets are looked at each time."""
        return rank.link, rank.policy, rank.host_pace, rank.turn, rank.late_group_s

    def get_chunk(self, program: ChunkProgram) -> tuple[int, _Way, _Way]:
        """Return the number of all programs that do the same as `program`, and what is known of their passes."""
        found = self._chunks.get(program.content)
        if found is None:
            forward, backward = (_Way(_find_host_part(steps), {}, set()) for steps in (program.forward, program.backward))
            found = self._chunks[program.content] = (len(self._chunks), forward, backward)
        return found

    def number(self, chunk: int, lane: LaneRun) -> int:
        """Return the number, from 1, that says how far a microbatch is in the chunks with a number."""
        count = len(self._numbers)
        number = self._numbers.setdefault((chunk, lane.describe()), count + 1)
        if number > count:
            self.there.append(lane.copy())
        return number


class RepeatingRun(RankRun):
    """A rank in the middle of a step, which runs no pass twice that begins alike.

    Args:
        rank: The rank.
        programs: What each of its chunks does.
        known: What passes come to, on this rank and others that have the same `KnownPasses.list_rules`.
    """

    def __init__(self, rank: RankModel, programs: Sequence[ChunkProgram], known: KnownPasses) -> None:
        super().__init__(rank, programs, recorder=None)
        self._known = known
        chunks = [known.get_chunk(program) for program in programs]
        self._forward_ways = [forward for _, forward, _ in chunks]
        """By chunk."""
        self._backward_ways = [backward for _, _, backward in chunks]
        """By chunk."""
        self._chunk_numbers = {id(program): chunk[0] for program, chunk in zip(programs, chunks, strict=True)}
        """By program."""

    @staticmethod
    def has_repeats(rank: RankModel, programs: Sequence[ChunkProgram]) -> bool:
        """Return whether passes of a rank may begin alike, and take long enough to look for that.

        Where nothing leaves a pass is a step or two. What token dispatchers hold is no part of how a pass begins here.
        """
        return rank.has_engine and len(rank.passes) >= _FEWEST_PASSES and any(program.groups for program in programs)

    def run_pass(self, one: Pass, *, ready_s: float) -> float:
        """Run a pass whose input is there at `ready_s`, or count it, and return when its output is."""
        if ready_s > self.clock_s:
            self._wait_until(ready_s, Cause.NEIGHBOURS)
        if self._link.queued:
            self._link.advance(self.clock_s)
            if self._link.is_returning:
                return self._run(one)
        if one.kind is _FORWARD:
            way, lane = self._forward_ways[one.chunk], None
        else:
            way, lane = self._backward_ways[one.chunk], self._lanes[one.chunk, one.microbatch]
        beginning = self._describe_beginning(way.part, lane)
        outcome = way.outcomes.get(beginning)
        if outcome is not None and self._has_room(outcome):
            self._repeat(one, outcome)
        elif outcome is not None or beginning in way.never_alike:
            self._run(one)
        else:
            self._watch(one, way, beginning)
        return self.clock_s

    def _run(self, one: Pass) -> float:
        """Run a pass that begins now, step by step."""
        lane = self._lanes.get((one.chunk, one.microbatch))
        if lane is not None:
            self._fill(lane)
            lane.number = None
        return super().run_pass(one, ready_s=self.clock_s)

    def _describe_beginning(self, part: _HostPart, lane: LaneRun | None) -> Hashable:
        """Return all that a pass depends on, where nothing is on its way back.

        Args:
            part: What the host does in it.
            lane: Its microbatch; None in a forward.
        """
        lead_s = self._count_lead_s()
        lead_s = part.seconds if lead_s >= part.seconds else round(lead_s, _DIGITS)
        number = None if lane is None else lane.number or self._number(lane)
        if not self._in_flight:
            return lead_s, number
        found: list[object] = [lead_s, number]
        is_seen, host_s, last_s = not self._is_a_layer_ahead, self._host_s, part.unseen_s
        for copy, own, parcels, _ in self._in_flight:
            # After how many seconds the host can see that a copy is through.
            unseen_s = copy.end_s - host_s
            if is_seen or unseen_s < 0.0:
                unseen_s = 0.0
            unseen_s = last_s if unseen_s >= last_s else round(unseen_s, _DIGITS)
            found += (own.number or self._number(own), own is lane, parcels, unseen_s)
        if self._link.queued:
            latency_s, copy_s = self._link.count_front_s()
            found += (self._link.queued, round(latency_s, _DIGITS), round(copy_s, _DIGITS))
        return tuple(found)

    def _number(self, lane: LaneRun) -> int:
        """Give a microbatch in a chunk its number: the same from 1 on for all that are as far."""
        lane.number = self._known.number(self._chunk_numbers[id(lane.program)], lane)
        return lane.number

    def _fill(self, lane: LaneRun) -> None:
        """Let a microbatch be as far as its number says. See [Note: Microbatches that are a number]."""
        if lane.is_bare and lane.number:
            lane.become(self._known.there[lane.number - 1])

    def _release_oldest(self) -> None:
        entry = self._in_flight[0]
        lane, before = entry.lane, entry.lane.number
        self._fill(lane)
        super()._release_oldest()
        if before:
            # Two that are as far as each other still are when the same copies are let go of.
            step, released = (before, entry.parcels), self._known.released
            lane.number = released.get(step)
            if lane.number is None:
                released[step] = self._number(lane)

    def _count_oldest_released(self) -> None:
        """Do what `_release_oldest` does, but for sums that an outcome has."""
        lane, parcels = self._in_flight[0].lane, self._in_flight[0].parcels
        number = self._known.released.get((lane.number, parcels))
        if number is None:
            self._release_oldest()
        else:
            self._in_flight.popleft()
            lane.number, lane.is_bare = number, True

    def _cut_front(self) -> None:
        """Count the first copy to the host for as long as it has run. See [Note: What is left of a pass]."""
        front = self._link.get_first(Direction.D2H)
        if front is not None:
            self._tallies.cut_copy(front, self.clock_s)

    def _has_room(self, outcome: _Outcome) -> bool:
        """Return whether the host budget takes all that a pass moves."""
        budget_bytes = self._rank.host_budget_bytes
        return budget_bytes is None or self._host_bytes + outcome.rise_host_bytes <= budget_bytes

    def _watch(self, one: Pass, way: _Way, beginning: Hashable) -> None:
        """Run a pass, and note what it came to, or that this cannot be said of others that begin so."""
        self._collect(None)
        self._cut_front()
        start_s, device_bytes, host_bytes = self.clock_s, self._device_bytes, self._host_bytes
        in_flight_bytes, abandoned, slowed_s = self._in_flight_bytes, self._abandoned, self._link.slowed_s
        first_lead_s = self._count_lead_s()
        earlier, queued = list(self._in_flight), self._link.queued
        key = (one.chunk, one.microbatch)
        lane = self._lanes.get(key)
        tallies, self._tallies = self._tallies, Tallies()
        peak_bytes, peak_at, host_peak_bytes = self._peak_bytes, self._peak_at, self._host_peak_bytes
        self._peak_bytes = self._host_peak_bytes = _NOTHING_SEEN
        loss_window_bytes, self._loss_window_bytes = self._loss_window_bytes, 0
        self._run(one)
        self._link.advance(self.clock_s)
        self._collect(None)
        self._cut_front()
        own, own_peak_bytes, own_host_peak_bytes = self._tallies, self._peak_bytes, self._host_peak_bytes
        own_label, own_loss_window_bytes = self._peak_at[1], self._loss_window_bytes
        self._loss_window_bytes = max(loss_window_bytes, own_loss_window_bytes)
        tallies.add(own, times=1)
        own.slowed_s = self._link.slowed_s - slowed_s
        self._tallies = tallies
        self._host_peak_bytes = max(host_peak_bytes, own_host_peak_bytes)
        if own_peak_bytes <= peak_bytes:
            self._peak_bytes, self._peak_at = peak_bytes, peak_at
        lane = self._lanes[key] if lane is None else lane
        still = set(map(id, self._in_flight))
        kept = sum(id(entry) in still for entry in earlier)
        queued = min(queued, kept)
        left = list(self._in_flight)[kept - queued :]
        if own.has_kept() or self._link.find_last(Direction.H2D) is not None:
            way.never_alike.add(beginning)
            return
        way.outcomes[beginning] = _Outcome(
            seconds=self.clock_s - start_s,
            net_bytes=self._device_bytes - device_bytes,
            rise_bytes=own_peak_bytes - device_bytes,
            peak_label=own_label,
            net_host_bytes=self._host_bytes - host_bytes,
            rise_host_bytes=own_host_peak_bytes - host_bytes,
            net_in_flight_bytes=self._in_flight_bytes - in_flight_bytes,
            net_abandoned=self._abandoned - abandoned,
            released=len(earlier) - kept,
            queued=tuple(_Left.note(entry, start_s) for entry in left[:queued]),
            left=tuple(_Left.note(entry, start_s) for entry in left[queued:]),
            waiting=self._link.queued,
            front=self._link.get_front(),
            program=self._programs[one.chunk],
            number=self._number(lane),
            loss_window_bytes=own_loss_window_bytes,
            tallies=own,
            first_lead_s=first_lead_s,
            lead_s=self._count_lead_s(),
            has_host_wait=way.part.has_wait,
        )

    def _repeat(self, one: Pass, outcome: _Outcome) -> None:
        """Count a pass that comes to `outcome`."""
        start_s, device_bytes = self.clock_s, self._device_bytes
        in_flight_bytes, abandoned = self._in_flight_bytes, self._abandoned
        more_s = 0.0 if outcome.has_host_wait else self._count_lead_s() - outcome.first_lead_s
        if self._link.queued:
            self._cut_front()
        for _ in range(outcome.released):
            self._count_oldest_released()
        key, program = (one.chunk, one.microbatch), self._programs[one.chunk]
        if one.kind is _FORWARD:
            lane = self._lanes[key] = self._unchanging.get(one.chunk) or LaneRun.make_bare(program, outcome.number)
        else:
            lane = self._lanes.pop(key)
            if program.groups:
                lane.number, lane.is_bare = outcome.number, True
        self.clock_s = start_s + outcome.seconds
        self._host_s = self.clock_s - outcome.lead_s - more_s
        self._device_bytes = device_bytes + outcome.net_bytes
        if device_bytes + outcome.rise_bytes > self._peak_bytes:
            self._peak_bytes = device_bytes + outcome.rise_bytes
            self._peak_at = (self._call(one), outcome.peak_label, outcome.program)
        host_peak_bytes = self._host_bytes + outcome.rise_host_bytes
        if host_peak_bytes > self._host_peak_bytes:
            self._host_peak_bytes = host_peak_bytes
        self._loss_window_bytes = max(self._loss_window_bytes, outcome.loss_window_bytes)
        self._host_bytes += outcome.net_host_bytes
        self._in_flight_bytes = in_flight_bytes + outcome.net_in_flight_bytes
        self._abandoned = abandoned + outcome.net_abandoned
        self._tallies.count_again(outcome.tallies)
        if outcome.left or self._link.queued:
            self._leave(outcome, lane, start_s)

    def _leave(self, outcome: _Outcome, lane: LaneRun, start_s: float) -> None:
        """Put what is in flight behind a pass there."""
        if outcome.queued:
            earlier = itertools.islice(self._in_flight, len(self._in_flight) - len(outcome.queued), None)
            for left, entry in zip(outcome.queued, earlier, strict=True):
                left.set_times(entry.copy, start_s)
        for left in outcome.left:
            was = left.entry.copy
            copy = Copy(was.direction, was.size_bytes, mover=was.mover, label=was.label, submitted_s=start_s + left.submitted_s)
            left.set_times(copy, start_s)
            self._in_flight.append(InFlight(copy, lane, left.entry.parcels, left.entry.size_bytes))
        waiting = [entry.copy for entry in self._in_flight if entry.copy.end_s == math.inf] if outcome.waiting else []
        self._link.resume(waiting, outcome.front, at_s=self.clock_s)


def _find_host_part(steps: Sequence[Step]) -> _HostPart:
    seconds = 0.0
    for step in steps:
        if isinstance(step, HostWaitStep):
            return _make_host_part(seconds, has_wait=True)
        if isinstance(step, ComputeStep):
            seconds += step.host_s
    return _make_host_part(seconds, has_wait=False)


def _make_host_part(seconds: float, *, has_wait: bool) -> _HostPart:
    unseen_s = round(seconds + _UNSEEN_S, _DIGITS)
    return _HostPart(round(seconds, _DIGITS), unseen_s, has_wait=has_wait)
