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

import itertools
import math
from collections.abc import Hashable, Sequence

from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.ranks.schedule import Pass, PassKind
from fgoffload.planner.simulation.chunk_program import ChunkProgram
from fgoffload.planner.simulation.known_passes import (
    DIGITS,
    OWN,
    SITUATION_DIGITS,
    HostPart,
    KnownPasses,
    Leaving,
    Left,
    Outcome,
    Rest,
    Situation,
    Transition,
    Way,
)
from fgoffload.planner.simulation.link_queue import Copy, Direction
from fgoffload.planner.simulation.rank_run import InFlight, RankRun, RoundState
from fgoffload.planner.simulation.simulated_lane import SimulatedLane
from fgoffload.planner.simulation.simulation_result import RankResult
from fgoffload.planner.simulation.tallies import Cause, Tallies

_FEWEST_PASSES = 16
"""Of a step with fewer passes none begins as one before it did, or a few: to look for them takes longer than to run them."""

_NOTHING_SEEN = -1
"""In place of a peak: fewer bytes than any."""

_DRAINED = -1.0
"""In place of how long a wait is: longer than all copies take."""

# To look up a member of an enumeration takes Python as long as a call.
_FORWARD, _D2H = PassKind.FORWARD, Direction.D2H


class RepeatingRun(RankRun):
    """A rank in the middle of a step, which runs no pass twice that begins alike.

    Args:
        rank: The rank.
        programs: What each of its chunks does.
        known: What passes come to, on this rank and others that have the same `KnownPasses.list_rules`.
    """

    def __init__(self, rank: RankModel, programs: Sequence[ChunkProgram], known: KnownPasses) -> None:
        super().__init__(rank, programs, recorder=None)
        self.names_in_flight = True
        self._known = known
        chunks = [known.get_chunk(program) for program in programs]
        self._forward_ways = [forward for _, forward, _ in chunks]
        """By chunk."""
        self._backward_ways = [backward for _, _, backward in chunks]
        """By chunk."""
        self._chunk_numbers = {id(program): chunk[0] for program, chunk in zip(programs, chunks, strict=True)}
        """By program."""
        self._host_budget_bytes = math.inf if rank.host_budget_bytes is None else rank.host_budget_bytes
        self._situation: Situation | None = None
        """What is in flight; None where nobody knows the like of it."""
        self._leaving: list[SimulatedLane] = []
        """The microbatches with groups in flight, by their places in that situation."""
        self._is_made = True
        """Whether groups, copies and the queue are as the situation says: behind passes that were counted they are not yet."""
        self._enter()

    @staticmethod
    def has_repeats(rank: RankModel, programs: Sequence[ChunkProgram]) -> bool:
        """Return whether passes of a rank may begin alike, and take long enough to look for that.

        Where nothing leaves a pass is a step or two. What token dispatchers hold is no part of how a pass begins here.
        """
        return rank.has_engine and len(rank.passes) >= _FEWEST_PASSES and any(program.groups for program in programs)

    def run_pass(self, one: Pass, *, ready_s: float) -> float:
        """Run a pass whose input is there at `ready_s`, or count it, and return when its output is."""
        if ready_s > self.clock_s:
            self._rest(ready_s)
        if one.kind is _FORWARD:
            way, lane, number = self._forward_ways[one.chunk], None, None
        else:
            way, lane = self._backward_ways[one.chunk], self._lanes[one.chunk, one.microbatch]
            number = lane.number or self._number(lane)
        situation = self._situation
        if situation is None:
            self._run_or_count(one, way, lane)
            return self.clock_s
        lead_s = known_s = 0.0
        if self._is_a_layer_ahead:
            lead_s = self.clock_s - self._host_s
            known_s = way.part.seconds if lead_s >= way.part.seconds else round(lead_s, DIGITS)
        leaving = self._leaving
        place = leaving.index(lane) if leaving and lane in leaving else OWN
        key = (situation.number, way.number, number, place, known_s)
        step = self._known.transitions.get(key)
        if step is not None and (step.lead_s is None or step.holds(lead_s)) and self._has_room(step.outcome):
            self._follow(one, step, lead_s)
            return self.clock_s
        self._make()
        before = [other.number for other in leaving]
        outcome, behind = self._run_or_count(one, way, lane), self._situation
        if outcome is not None and behind is not None:
            self._known.transitions[key] = self._note_transition(outcome, behind, lead_s, known_s, leaving, before)
        return self.clock_s

    def get_state(self) -> RoundState:
        """Return how far the rank is, and what is under way."""
        situation = self._situation
        if situation is None:
            return super().get_state()._replace(in_flight=None)
        self._collect(None)  # what was through in a pass that was run is of this round
        lanes = ((chunk, lane.number or self._number(lane)) for (chunk, _), lane in self._lanes.items())
        return RoundState(
            step_s=self.clock_s,
            slowed_s=self._link.slowed_s,
            left_behind=(
                *(self._device_bytes, self._host_bytes, self._in_flight_bytes, self._count_lead_s()),
                *(situation.left_bytes, 0.0),
            ),
            in_flight=(situation.number, *lanes),
            tallies=self._tallies.copy(),
        )

    def finish(self) -> RankResult:
        """Let the copies under way end, and return what the step came to."""
        self._make()
        return super().finish()

    # In situations. See [Note: Situations] in `known_passes`.

    def _enter(self) -> Situation:
        """Be in the situation that what is in flight is, and return it. Nothing is on its way back, and all is counted."""
        known, host_s = self._known, self._host_s
        leaving: list[SimulatedLane] = []
        groups: list[Leaving] = []
        key: list[object] = []
        for copy, lane, parcels, size_bytes in self._in_flight:
            if lane not in leaving:
                leaving.append(lane)
            unseen_s = None
            if copy.end_s < math.inf:
                unseen_s = max(copy.end_s - host_s, 0.0) if self._is_a_layer_ahead else 0.0
            groups.append(Leaving(leaving.index(lane), parcels, size_bytes, copy.mover, unseen_s))
            key.append(
                (
                    groups[-1].place,
                    lane.number or self._number(lane),
                    parcels,
                    None if unseen_s is None else round(unseen_s, SITUATION_DIGITS),
                )
            )
        front, drain_s, left_bytes = (0.0, 0.0), 0.0, 0.0
        if self._link.queued:
            front, drain_s = self._link.get_front(), self._link.count_drain_s()
            left_bytes = self._link.count_left_bytes(_D2H)
            key.append((round(front[0], SITUATION_DIGITS), round(self._link.count_front_s()[1], SITUATION_DIGITS)))
        situation = known.get_situation(tuple(key), groups, front, left_bytes, drain_s)
        self._situation, self._leaving, self._is_made = situation, leaving, True
        return situation

    def _make(self) -> None:
        """Let groups, copies and the queue be as the situation says."""
        if self._is_made or self._situation is None:
            return
        self._is_made = True
        self._in_flight.clear()
        waiting = []
        for place, parcels, size_bytes, mover, unseen_s in self._situation.leaving:
            copy = Copy(_D2H, size_bytes, mover=mover, label="", submitted_s=self.clock_s)
            if unseen_s is None:
                waiting.append(copy)
            else:
                copy.start_s = copy.end_s = self._host_s + unseen_s if self._is_a_layer_ahead else self.clock_s
            self._in_flight.append(InFlight(copy, self._leaving[place], parcels, size_bytes))
        if waiting:
            waiting[0].start_s = self.clock_s
        self._link.resume(waiting, self._situation.front, at_s=self.clock_s)

    def _rest(self, until_s: float) -> None:
        """Wait for a neighbour."""
        situation = self._situation
        if situation is None or not situation.drain_s:
            self._wait_until(until_s, Cause.NEIGHBOURS)
            return
        rest_s = until_s - self.clock_s
        key = (
            situation.number,
            _DRAINED if rest_s > situation.drain_s else round(rest_s, SITUATION_DIGITS),
            round(self._count_lead_s(), SITUATION_DIGITS),
        )
        rest = self._known.rests.get(key)
        if rest is None:
            self._make()
            self._collect(None)  # what was through before is not of this wait
            self._wait_until(until_s, Cause.NEIGHBOURS)
            tallies, self._tallies = self._tallies, Tallies()
            self._link.advance(until_s)
            self._collect(None)
            self._cut_front()
            tallies, self._tallies = self._tallies, tallies
            rest = self._known.rests[key] = Rest(self._enter(), tallies)
        else:
            self._wait_until(until_s, Cause.NEIGHBOURS)
            self._situation, self._is_made = rest.behind, False
        self._tallies.count_again(rest.tallies)

    def _follow(self, one: Pass, step: Transition, lead_s: float) -> None:
        """Count a pass that begins in a known situation, with the host `lead_s` ahead."""
        outcome, leaving = step.outcome, self._leaving
        for place, number in step.numbers:
            lane = leaving[place]
            lane.number, lane.is_bare = number, True
        more_s = 0.0 if outcome.has_host_wait else lead_s - outcome.first_lead_s
        lane = self._count_microbatch(one, outcome)
        self._count(one, outcome, more_s)
        places = step.places
        self._leaving = [lane if place == OWN else leaving[place] for place in places] if places else []
        self._situation, self._is_made = step.behind, False

    def _note_transition(
        self,
        outcome: Outcome,
        behind: Situation,
        lead_s: float,
        known_s: float,
        before: Sequence[SimulatedLane],
        numbers: Sequence[int | None],
    ) -> Transition:
        """Return the pass that was counted, or run, as one of all that begin in the same situation.

        Args:
            outcome: What it came to.
            behind: The situation behind it.
            lead_s: How far the host was ahead.
            known_s: What the key of the transition says of that.
            before: The microbatches with groups in flight then.
            numbers: How far they were.
        """
        after = [(place, lane.number) for place, lane in enumerate(before)]
        # Of a host that is further ahead than it goes in a pass the key does not say how far. Where it waits in the pass that
        # makes no difference: what was through by then it sees. Else it does for what it has not seen behind the pass.
        depends = lead_s > known_s and not outcome.has_host_wait and any(group.unseen_s for group in behind.leaving)
        return Transition(
            outcome=outcome,
            behind=behind,
            places=tuple(before.index(lane) if lane in before else OWN for lane in self._leaving),
            numbers=tuple(
                (place, number)
                for (place, number), was in zip(after, numbers, strict=True)
                if number is not None and number != was
            ),
            lead_s=lead_s if depends else None,
        )

    # Without a transition.

    def _run_or_count(self, one: Pass, way: Way, lane: SimulatedLane | None) -> Outcome | None:
        """Count a pass that begins now, or run it, and return what those come to that begin so; None where nobody knows."""
        self._situation = None
        if self._link.queued:
            self._link.advance(self.clock_s)
            if self._link.is_returning:
                self._run(one)
                return None
        beginning = self._describe_beginning(way.part, lane)
        outcome = way.outcomes.get(beginning)
        if outcome is not None and self._has_room(outcome):
            self._repeat(one, outcome)
        elif outcome is not None or beginning in way.never_alike:
            self._run(one)
            return None
        else:
            outcome = self._watch(one, way, beginning)
        if outcome is not None:
            self._enter()
        return outcome

    def _run(self, one: Pass) -> float:
        """Run a pass that begins now, step by step."""
        lane = self._lanes.get((one.chunk, one.microbatch))
        if lane is not None:
            self._fill(lane)
            lane.number = None
        return super().run_pass(one, ready_s=self.clock_s)

    def _describe_beginning(self, part: HostPart, lane: SimulatedLane | None) -> Hashable:
        """Return all that a pass depends on, where nothing is on its way back.

        Args:
            part: What the host does in it.
            lane: Its microbatch; None in a forward.
        """
        lead_s = self._count_lead_s()
        lead_s = part.seconds if lead_s >= part.seconds else round(lead_s, DIGITS)
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
            unseen_s = last_s if unseen_s >= last_s else round(unseen_s, DIGITS)
            found += (own.number or self._number(own), own is lane, parcels, unseen_s)
        if self._link.queued:
            latency_s, copy_s = self._link.count_front_s()
            found += (self._link.queued, round(latency_s, DIGITS), round(copy_s, DIGITS))
        return tuple(found)

    def _number(self, lane: SimulatedLane) -> int:
        """Give a microbatch in a chunk its number: the same from 1 on for all that are as far."""
        lane.number = self._known.number(self._chunk_numbers[id(lane.program)], lane)
        return lane.number

    def _fill(self, lane: SimulatedLane) -> None:
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
        front = self._link.get_first(_D2H)
        if front is not None:
            self._tallies.cut_copy(front, self.clock_s)

    def _has_room(self, outcome: Outcome) -> bool:
        """Return whether the host budget takes all that a pass moves."""
        return self._host_bytes + outcome.rise_host_bytes <= self._host_budget_bytes

    def _watch(self, one: Pass, way: Way, beginning: Hashable) -> Outcome | None:
        """Run a pass, and note what it came to; None where this cannot be said of others that begin so."""
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
            return None
        outcome = way.outcomes[beginning] = Outcome(
            seconds=self.clock_s - start_s,
            net_bytes=self._device_bytes - device_bytes,
            rise_bytes=own_peak_bytes - device_bytes,
            peak_label=own_label,
            net_host_bytes=self._host_bytes - host_bytes,
            rise_host_bytes=own_host_peak_bytes - host_bytes,
            net_in_flight_bytes=self._in_flight_bytes - in_flight_bytes,
            net_abandoned=self._abandoned - abandoned,
            released=len(earlier) - kept,
            queued=tuple(Left.note(entry, start_s) for entry in left[:queued]),
            left=tuple(Left.note(entry, start_s) for entry in left[queued:]),
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
        return outcome

    def _repeat(self, one: Pass, outcome: Outcome) -> None:
        """Count a pass that comes to `outcome`."""
        start_s, sums = self.clock_s, (self._device_bytes, self._in_flight_bytes, self._abandoned)
        more_s = 0.0 if outcome.has_host_wait else self._count_lead_s() - outcome.first_lead_s
        if self._link.queued:
            self._cut_front()
        for _ in range(outcome.released):
            self._count_oldest_released()
        # An outcome has what these come to.
        self._device_bytes, self._in_flight_bytes, self._abandoned = sums
        lane = self._count_microbatch(one, outcome)
        self._count(one, outcome, more_s)
        if outcome.left or self._link.queued:
            self._leave(outcome, lane, start_s)

    def _count_microbatch(self, one: Pass, outcome: Outcome) -> SimulatedLane:
        """Let the microbatch of a pass be as far as it is behind it, and return it."""
        key, program = (one.chunk, one.microbatch), self._programs[one.chunk]
        if one.kind is _FORWARD:
            lane = self._lanes[key] = self._unchanging.get(one.chunk) or SimulatedLane.make_bare(program, outcome.number)
        else:
            lane = self._lanes.pop(key)
            if program.groups:
                lane.number, lane.is_bare = outcome.number, True
        return lane

    def _count(self, one: Pass, outcome: Outcome, more_s: float) -> None:
        """Count what a pass comes to, with the host `more_s` further ahead than it was in `outcome`."""
        self.clock_s += outcome.seconds
        self._host_s = self.clock_s - outcome.lead_s - more_s
        most_bytes = self._device_bytes + outcome.rise_bytes
        if most_bytes > self._peak_bytes:
            self._peak_bytes = most_bytes
            self._peak_at = (self._call(one), outcome.peak_label, outcome.program)
        self._device_bytes += outcome.net_bytes
        most_host_bytes = self._host_bytes + outcome.rise_host_bytes
        if most_host_bytes > self._host_peak_bytes:
            self._host_peak_bytes = most_host_bytes
        self._host_bytes += outcome.net_host_bytes
        if outcome.loss_window_bytes > self._loss_window_bytes:
            self._loss_window_bytes = outcome.loss_window_bytes
        self._in_flight_bytes += outcome.net_in_flight_bytes
        self._abandoned += outcome.net_abandoned
        self._tallies.count_again(outcome.tallies)

    def _leave(self, outcome: Outcome, lane: SimulatedLane, start_s: float) -> None:
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
