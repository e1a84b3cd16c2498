"""One rank over a step: its compute, its copies and its memory, pass by pass.

[Note: Where the engine looks]
The engine lets go of what copies no longer need where it looks for them: where forward comes to a layer, where a group is
submitted, where backward comes to a group, and where it has passed a layer of which nothing left. Device memory is freed there,
and not when a copy is done (`OffloadEngine.poll`). It sees what is done where the host is, and a host that has run ahead of
compute sees fewer copies done: `RankModel.host_pace`. `tests/unit/planner/simulation/test_simulator_engine.py` runs the engine
beside this.
"""

import collections
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple, cast

from fgoffload.planner.ranks.rank_model import HostPace, RankModel, Turn
from fgoffload.planner.ranks.schedule import Pass, PassKind
from fgoffload.planner.simulation.chunk_program import (
    ChunkProgram,
    ComputeStep,
    DispatchStep,
    FreeStep,
    HoldStep,
    HostWaitStep,
    LetGoStep,
    Mover,
    OpenStep,
    PassedStep,
    PollStep,
    ReadStep,
    Step,
    SubmitStep,
    TakeStep,
    TurnStep,
)
from fgoffload.planner.simulation.link_queue import Copy, Direction, LinkQueue
from fgoffload.planner.simulation.simulated_lane import SimulatedLane
from fgoffload.planner.simulation.simulation_result import RankResult, StreamName, StretchKey
from fgoffload.planner.simulation.tallies import Cause, Recorder, Tallies
from fgoffload.transfer_schedule import STAGING_SLOTS, CallBack, SavedState, ScheduledGroup, TransferSchedule

_ROUNDING_S = 1e-9
"""Seconds: far less than any copy takes."""


_NEARLY_DONE_PART = 0.005
"""Of what forward took: a copy to the host that is done in so much time is nearly done. Who plans would rather wait for it than
do without what it lets go of: a group more on the device costs a recompute somewhere, and few take less."""

# To look up a member of an enumeration takes Python as long as a call.
_RESIDENT, _OFFLOADING, _OFFLOADED, _RELOADED, _FREED = SavedState
_D2H, _H2D = Direction
_FORWARD, _STEP_AHEAD = PassKind.FORWARD, HostPace.STEP_AHEAD


class RoundState(NamedTuple):
    """A rank between two rounds of its schedule."""

    step_s: float
    """How far it is."""
    slowed_s: float
    """What copies have slowed compute by, but for what is counted again."""
    left_behind: tuple[float, ...]
    """Bytes on the device, on the host, and on their way, and how far the host is ahead: what the next round finds."""
    in_flight: Hashable | None
    """All else that it finds, microbatches and copies, by what tells it from others; None where nobody says that."""
    tallies: Tallies
    """What it has come to so far."""


class InFlight(NamedTuple):
    """A group on its way to the host."""

    copy: Copy
    lane: SimulatedLane
    parcels: tuple[int, ...]
    size_bytes: int


class RankRun:
    """A rank in the middle of a step.

    Args:
        rank: The rank.
        programs: What each of its chunks does.
        recorder: Notes every span and the memory; None where only totals are wanted.
        notes_peaks: Whether to note the most device bytes at each stretch.
    """

    def __init__(
        self,
        rank: RankModel,
        programs: Sequence[ChunkProgram],
        *,
        recorder: Recorder | None,
        notes_peaks: bool = False,
    ) -> None:
        self.clock_s = 0.0
        """Compute has come so far."""
        self._rank = rank
        self._schedule = TransferSchedule(rank.policy)
        self._programs = programs
        self._recorder = recorder
        self._link = LinkQueue(rank.link)
        self._tallies = Tallies()
        self._lanes: dict[tuple[int, int], SimulatedLane] = {}
        self.names_in_flight = not any(program.groups for program in programs)
        """Whether `get_state` says what is in flight: where nothing leaves that is what dispatchers hold."""
        # Of microbatches of which nothing leaves nothing ever changes.
        self._unchanging = {chunk: SimulatedLane(program) for chunk, program in enumerate(programs) if not program.groups}
        self._in_flight: collections.deque[InFlight] = collections.deque()
        self._in_flight_bytes = 0
        # The step before has left what dispatchers hold.
        self._held_bytes = {
            step.dispatcher: step.size_bytes for program in programs for step in program.backward if isinstance(step, HoldStep)
        }
        """By dispatcher, of those that hold what a recompute began with."""
        self._static_bytes = rank.static_bytes + STAGING_SLOTS * max((program.staged_bytes for program in programs), default=0)
        self._device_bytes = self._peak_bytes = self._static_bytes + sum(self._held_bytes.values())
        self._host_bytes = self._host_peak_bytes = 0
        self._left_out = 0
        """Microbatches of the step before the pass that runs, that were not simulated: by so many its number is too low."""
        self._pass: Pass | None = None
        self._peak_at: tuple[Pass | None, str, ChunkProgram | None] = (None, "between steps", None)
        """In which pass, and where; and the program that calls it so, where that is another rank's or chunk's."""
        self._pass_start_s = 0.0
        self._is_a_layer_ahead = rank.host_pace is HostPace.LAYER_AHEAD and any(program.groups for program in programs)
        """Whether it depends on `_host_s` what the engine sees."""
        self._host_s = 0.0
        """The host has come to where compute is at that time; no later than `clock_s`. Not counted where nothing asks."""
        self._loss_window_bytes = 0
        """The most that was on its way where a loss began."""
        self._abandoned = 0
        """Parcels that backward is through with, and that a copy to the host still holds."""
        acts: Mapping[type[Step], Callable[..., None]] = self._ACT
        self._peaks: dict[StretchKey, int] | None = {} if notes_peaks else None
        if recorder is not None:
            acts = {**acts, ComputeStep: RankRun._record_parts}
        elif notes_peaks:
            acts = {**acts, ComputeStep: RankRun._compute_noting_peak}
        # A pass is run hundreds of times: who runs each of its steps is found once.
        self._forwards = [[(acts[type(step)], step) for step in program.forward] for program in programs]
        self._backwards = [[(acts[type(step)], step) for step in program.backward] for program in programs]

    def run_pass(self, one: Pass, *, ready_s: float) -> float:
        """Run a pass whose input is there at `ready_s`, and return when its output is."""
        if ready_s > self.clock_s:
            self._wait_until(ready_s, Cause.NEIGHBOURS)
        self._pass = self._call(one) if self._left_out else one
        self._pass_start_s = self.clock_s
        program = self._programs[one.chunk]
        if one.kind is _FORWARD:
            lane = self._lanes[one.chunk, one.microbatch] = self._unchanging.get(one.chunk) or SimulatedLane(program)
            self._add_bytes(program.base_bytes, "start of the pass")
            for act, step in self._forwards[one.chunk]:
                act(self, step, lane)
        else:
            lane = self._lanes.pop((one.chunk, one.microbatch))
            for act, step in self._backwards[one.chunk]:
                act(self, step, lane)
            self._add_bytes(-program.base_bytes, "end of the pass")
            self._tallies.recompute_s += program.recompute_s
        return self.clock_s

    def leave_out(self, microbatches: int) -> None:
        """Take note that so many were left out, and that those behind them come with the numbers of these."""
        self._left_out += microbatches

    def _call(self, one: Pass) -> Pass:
        """Return what a pass is called in the step."""
        return Pass(kind=one.kind, chunk=one.chunk, microbatch=one.microbatch + self._left_out) if self._left_out else one

    def get_state(self) -> RoundState:
        """Return how far the rank is, and what is under way."""
        self._link.advance(self.clock_s)
        self._collect(None)
        left = (self._link.count_left_bytes(direction) for direction in Direction)
        return RoundState(
            step_s=self.clock_s,
            slowed_s=self._link.slowed_s,
            left_behind=(self._device_bytes, self._host_bytes, self._in_flight_bytes, self._count_lead_s(), *left),
            in_flight=frozenset(self._held_bytes.items()) if self.names_in_flight else None,
            tallies=self._tallies.copy(),
        )

    def finish(self) -> RankResult:
        """Let the copies under way end, and return what the step came to."""
        end_s = self.clock_s
        self._link.advance(math.inf)
        self._collect(None)
        while self._in_flight:
            self._release_oldest()
        self._note_memory(max(end_s, self._link.now_s))
        return self._get_totals(end_s + self._rank.step_end_s)

    def _get_totals(self, step_s: float) -> RankResult:
        pass_, label, named_by = self._peak_at
        if pass_ is not None and named_by is not None:
            label = self._programs[pass_.chunk].find_label(label, named_by)
        counted = self._tallies.sum_up()
        counted["slowed_s"] += self._link.slowed_s
        return RankResult(
            rank=self._rank.rank,
            step_s=step_s,
            peak_bytes=self._peak_bytes,
            peak_at=label if pass_ is None else f"{pass_} {label}",
            static_bytes=self._static_bytes,
            end_bytes=self._device_bytes,
            loss_window_bytes=self._loss_window_bytes,
            host_peak_bytes=self._host_peak_bytes,
            timeline=None if self._recorder is None else self._recorder.finish(),
            peaks=self._peaks,
            **counted,
        )

    def _count_lead_s(self) -> float:
        """Return the seconds of compute that the host is ahead, where it depends on them what it sees."""
        return self.clock_s - self._host_s if self._is_a_layer_ahead else 0.0

    # Compute.

    def _compute(self, step: ComputeStep, _: SimulatedLane) -> None:
        device_bytes = self._device_bytes
        if device_bytes + step.rise_bytes > self._peak_bytes:
            self._see_peak(device_bytes + step.rise_bytes, step.peak_label)
        start_s = self.clock_s
        self.clock_s = end_s = self._link.run_compute(start_s, step.seconds) if self._link.queued else start_s + step.seconds
        self._tallies.compute_s += end_s - start_s
        self._device_bytes = device_bytes + step.net_bytes
        if self._is_a_layer_ahead:
            host_s = self._host_s + step.host_s
            self._host_s = host_s if host_s < end_s else end_s

    def _compute_noting_peak(self, step: ComputeStep, lane: SimulatedLane) -> None:
        if self._pass is not None and self._peaks is not None:
            key = (self._pass.kind is _FORWARD, self._pass.chunk, step.peak_label)
            self._peaks[key] = max(self._peaks.get(key, 0), self._device_bytes + step.rise_bytes)
        self._compute(step, lane)

    def _record_parts(self, step: ComputeStep, _: SimulatedLane) -> None:
        for part in step.parts:
            self._see_peak(self._device_bytes + max(part.extra_bytes, part.net_bytes), part.label)
            start_s = self.clock_s
            self._note_memory(start_s, extra_bytes=part.extra_bytes)
            self.clock_s = self._link.run_compute(start_s, part.seconds)
            self._tallies.compute_s += self.clock_s - start_s
            if self._recorder is not None:
                self._recorder.note_span(StreamName.COMPUTE, f"{self._pass} {part.label}", start_s, self.clock_s)
            self._device_bytes += part.net_bytes
            self._note_memory(self.clock_s)
        self._host_s = min(self._host_s + step.host_s, self.clock_s)

    def _name(self, label: str) -> str:
        """Return what a copy is called in a timeline; nothing where there is none."""
        return "" if self._recorder is None else f"{self._pass} {label}"

    def _wait_until(self, until_s: float, cause: Cause) -> None:
        if until_s > self.clock_s:
            self._tallies.add_wait(cause, until_s - self.clock_s)
            if self._recorder is not None:
                self._recorder.note_span(StreamName.COMPUTE, cause.value, self.clock_s, until_s)
            self.clock_s = until_s

    def _wait_for_copy(self, copy: Copy, cause: Cause) -> None:
        since_s = self.clock_s
        if copy.end_s > since_s:
            self._wait_until(self._link.finish(copy), cause)
            self._collect(copy.direction, since_s=since_s)

    def _collect(self, waited_for: Direction | None, *, since_s: float = math.inf) -> None:
        """Count the copies that are through.

        Args:
            waited_for: The direction for which compute has waited until now, if it has.
            since_s: Since when. When a wait for a direction is over, none of its copies is half through: first in, first out.
        """
        done = self._link.done
        for copy in done:
            is_exposed = copy.direction is waited_for and copy.end_s > since_s
            self._tallies.add_copy(copy, copy.end_s - max(copy.start_s, since_s) if is_exposed else 0.0)
        if self._recorder is not None:
            self._recorder.note_copies(done)
        done.clear()

    # Memory.

    def _add_bytes(self, size_bytes: int, label: str) -> None:
        self._device_bytes += size_bytes
        if self._device_bytes > self._peak_bytes:
            self._see_peak(self._device_bytes, label)
        if self._recorder is not None:
            self._note_memory(self.clock_s)

    def _see_peak(self, size_bytes: int, label: str) -> None:
        if size_bytes > self._peak_bytes:
            self._peak_bytes = size_bytes
            self._peak_at = (self._pass, label, None)

    def _note_memory(self, at_s: float, *, extra_bytes: int = 0) -> None:
        if self._recorder is not None:
            device_bytes = self._device_bytes + extra_bytes
            self._recorder.note_memory(at_s, device_bytes=device_bytes, host_bytes=self._host_bytes)

    def _hold(self, step: HoldStep, _: SimulatedLane) -> None:
        self._held_bytes[step.dispatcher] = step.size_bytes
        self._add_bytes(step.size_bytes, "what a token dispatcher holds")

    def _dispatch(self, step: DispatchStep, _: SimulatedLane) -> None:
        self._device_bytes -= self._held_bytes.pop(step.dispatcher, 0)
        self._note_memory(self.clock_s)

    # To the host.

    def _submit(self, step: SubmitStep, lane: SimulatedLane) -> None:
        """Let a group leave, and wait while more than the window is on its way."""
        self._poll()
        group = lane.program.groups[step.group]
        parcels = lane.program.parcels
        lane.groups[step.group].submit()
        leaving, size_bytes = [], 0
        for parcel in group.parcels:
            if self._find_room(parcels[parcel].size_bytes, group.mover):
                leaving.append(parcel)
                size_bytes += parcels[parcel].size_bytes
                lane.states[parcel] = _OFFLOADING
                lane.is_copied[parcel] = True
        if leaving:
            copy = self._link.submit(_D2H, size_bytes, self.clock_s, mover=group.mover, label=self._name(group.label))
            self._in_flight.append(InFlight(copy, lane, tuple(leaving), size_bytes))
            self._in_flight_bytes += size_bytes
            self._tallies.get(group.mover).d2h_bytes += size_bytes
            self._note_memory(self.clock_s)
        if leaving and self._rank.late_group_s:
            # Ahead of the window, for which the device waits and the host does not.
            self._wait_until(self.clock_s + self._rank.late_group_s, Cause.LATE)
        while self._schedule.policy.must_wait(in_flight_bytes=self._in_flight_bytes):
            self._wait_for_copy(self._in_flight[0].copy, Cause.WINDOW)
            self._release_oldest()

    def _find_room(self, size_bytes: int, mover: Mover) -> bool:
        """Take `size_bytes` of the host budget, and return whether they were there."""
        budget_bytes = self._rank.host_budget_bytes
        if budget_bytes is not None and self._host_bytes + size_bytes > budget_bytes:
            self._tallies.get(mover).kept_bytes += size_bytes
            return False
        self._host_bytes += size_bytes
        if self._host_bytes > self._host_peak_bytes:
            self._host_peak_bytes = self._host_bytes
        return True

    def _wait_for_host(self, step: HostWaitStep, _: SimulatedLane) -> None:
        """The host waits until compute is where it is; for what takes the copy engine, behind all that is queued to it."""
        if step.takes_link:
            self._link.advance(self.clock_s)
            last = self._link.find_last(_D2H)
            if last is not None:
                self._wait_for_copy(last, Cause.HOST)
        self._host_s = self.clock_s

    def _open(self, _: OpenStep, __: SimulatedLane) -> None:
        # It looks for storages that something else holds, and one that a copy still holds looks like one of those.
        if self._abandoned:
            self._poll()

    def _poll(self, *_: object) -> None:
        """Let go of what copies that are done no longer need. See [Note: Where the engine looks]."""
        if not self._in_flight or self._rank.host_pace is _STEP_AHEAD:
            return
        self._link.advance(self.clock_s)
        seen_s = self._find_host()
        while self._in_flight and self._in_flight[0].copy.end_s <= seen_s:
            self._release_oldest()

    def _find_host(self) -> float:
        """Return the time of compute that the host has come to, where it has not launched the whole step."""
        if self._is_a_layer_ahead:
            # Where it has just waited for a copy it sees that one, whatever was rounded since.
            return self._host_s + _ROUNDING_S
        return self._pass_start_s if self._rank.host_pace is HostPace.PASS_AHEAD else self.clock_s

    def _release_oldest(self) -> None:
        entry = self._in_flight.popleft()
        self._in_flight_bytes -= entry.size_bytes
        lane = entry.lane
        for parcel in entry.parcels:
            lane.is_copied[parcel] = False
            state = lane.states[parcel]
            self._abandoned -= state is _FREED
            if state is _OFFLOADING:
                lane.states[parcel] = _OFFLOADED
            # What was called back backward still wants, and what forward reads is freed behind that.
            if state is not _RESIDENT and not lane.is_read[parcel]:
                self._device_bytes -= lane.program.parcels[parcel].device_bytes
        self._note_memory(self.clock_s)

    def _read(self, step: ReadStep, lane: SimulatedLane) -> None:
        """Forward has read parcels for the last time: those that have left go."""
        for parcel in step.parcels:
            lane.is_read[parcel] = False
            if lane.states[parcel] is _OFFLOADED:
                self._device_bytes -= lane.program.parcels[parcel].device_bytes
        self._note_memory(self.clock_s)

    # And back.

    def _take(self, step: TakeStep, lane: SimulatedLane) -> None:
        """Backward asks for parcels: what is not back is waited for. `OffloadEngine.take`, in numbers."""
        group = None if step.group is None else lane.groups[step.group]
        if group is not None and not step.parcels and lane.is_news(group, is_offloaded=False):
            self._reach(lane, group)
        for parcel in step.parcels:
            if group is None:
                # The engine counts the bytes of a parcel that stayed after all. Backward reaches the group of that parcel next,
                # so nothing asks for the sum before the prefetch there, which has no such limit.
                self._execute(self._schedule.let_go(lane, 0))
            elif lane.is_news(group, is_offloaded=lane.states[parcel] is _OFFLOADED):
                self._reach(lane, group)
            if lane.states[parcel] is _OFFLOADED:
                self._reload(lane, (parcel,))
            reload = lane.reloads[parcel]
            if reload is not None and reload.end_s > self.clock_s:
                self._wait_for_copy(reload, Cause.RELOAD)

    def _let_go(self, step: LetGoStep, lane: SimulatedLane) -> None:
        """Backward takes what stayed."""
        for size_bytes in step.sizes_bytes:
            if lane.away:
                self._execute(self._schedule.let_go(lane, size_bytes))

    def _reach(self, lane: SimulatedLane, group: ScheduledGroup) -> None:
        """Backward has come to `group`. `OffloadEngine.approach_backward`, in numbers."""
        lane.leave(group.end_position)
        self._poll()
        self._execute(self._schedule.reach(lane, group))

    def _pass_layer(self, _: PassedStep, lane: SimulatedLane) -> None:
        self._poll()
        self._execute(self._schedule.prefetch(lane))

    def _turn(self, step: TurnStep, lane: SimulatedLane) -> None:
        """Backward comes next. `OffloadEngine.expect_backward`, in numbers."""
        self._poll()
        window_bytes = self._find_loss_window() if step.window_bytes is None else step.window_bytes
        while self._in_flight_bytes > window_bytes:
            self._wait_for_copy(self._in_flight[0].copy, Cause.TURN)
            self._release_oldest()
        self._loss_window_bytes = max(self._loss_window_bytes, self._in_flight_bytes)
        self._execute(self._schedule.expect_backward(lane))

    def _find_loss_window(self) -> float:
        """Return what may be on its way when the loss begins, where no plan says so."""
        if self._rank.turn is Turn.CALL_BACK:
            return math.inf
        self._link.advance(self.clock_s)
        patience_s = _NEARLY_DONE_PART * (self.clock_s - self._pass_start_s)
        left_bytes = self._link.count_left_bytes(_D2H) - patience_s * self._rank.link.d2h_bytes_per_s
        # First in, first out: what is nearly done are the first ones.
        window_bytes = 0
        for entry in reversed(self._in_flight):
            if left_bytes <= 0:
                break
            left_bytes -= entry.size_bytes
            window_bytes += entry.size_bytes
        return window_bytes

    def _execute(self, decisions: Iterable[CallBack[ScheduledGroup, int]]) -> None:
        """Keep what has not left yet, and bring back what has."""
        for decision in decisions:
            lane = cast("SimulatedLane", decision.lane)
            for number in decision.cancelled:
                lane.states[number] = _RESIDENT
                parcel = lane.program.parcels[number]
                self._host_bytes -= parcel.size_bytes
                self._tallies.get(parcel.mover).recalled_bytes += parcel.size_bytes
            self._reload(lane, decision.reloaded)

    def _reload(self, lane: SimulatedLane, parcels: Iterable[int]) -> None:
        for number in parcels:
            parcel = lane.program.parcels[number]
            self._add_bytes(parcel.device_bytes, parcel.label)
            lane.states[number] = _RELOADED
            lane.reloads[number] = self._link.submit(
                _H2D, parcel.size_bytes, self.clock_s, mover=parcel.mover, label=self._name(parcel.label)
            )
            self._tallies.get(parcel.mover).h2d_bytes += parcel.size_bytes

    def _free(self, step: FreeStep, lane: SimulatedLane) -> None:
        """Backward is through with parcels: their device memory goes, unless a copy to the host still reads it."""
        for number in step.parcels:
            size_bytes = lane.program.parcels[number].size_bytes
            state = lane.states[number]
            lane.states[number] = _FREED
            if state is _OFFLOADING:
                # A site that stays has asked for it while it was still there.
                self._tallies.get(lane.program.parcels[number].mover).recalled_bytes += size_bytes
            if state is not _RESIDENT:
                self._host_bytes -= size_bytes
            if lane.is_copied[number]:
                self._abandoned += 1
            elif state is not _OFFLOADED:
                self._device_bytes -= lane.program.parcels[number].device_bytes
        self._note_memory(self.clock_s)

    # Functions of the class: bound ones would be cycles of objects, a rank and its steps.
    _ACT: ClassVar[Mapping[type[Step], Callable[..., None]]] = {
        ComputeStep: _compute,
        HostWaitStep: _wait_for_host,
        OpenStep: _open,
        SubmitStep: _submit,
        ReadStep: _read,
        TakeStep: _take,
        LetGoStep: _let_go,
        FreeStep: _free,
        PassedStep: _pass_layer,
        PollStep: _poll,
        TurnStep: _turn,
        HoldStep: _hold,
        DispatchStep: _dispatch,
    }
    """What a rank does in each kind of step."""
