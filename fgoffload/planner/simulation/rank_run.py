"""Simulates the compute, copies and memory of one rank, pass by pass.

[Note: Polling]
The engine polls for finished copies when forward reaches a layer or the loss, when it submits a group, when backward reaches a
group, and when backward has passed a layer without offloaded tensors. It frees device memory at these polls, not when a copy
ends (`OffloadEngine.poll`). If the host runs ahead of compute, a poll finds fewer finished copies (`RankModel.host_pace`).
`tests/unit/planner/simulation/test_simulator_engine.py` compares the engine with this simulation.
"""

import collections
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

from fgoffload.memory_tiers import SavedState
from fgoffload.planner.ranks.layer_model import HostWait
from fgoffload.planner.ranks.rank_model import HostPace, RankModel, Turn
from fgoffload.planner.ranks.schedule import Pass, PassKind
from fgoffload.planner.simulation.chunk_events import CompiledChunk, EventKind, Take
from fgoffload.planner.simulation.link_queue import Copy
from fgoffload.planner.simulation.rank_clock import Cause, RankClock
from fgoffload.planner.simulation.simulation_result import RankResult, RankTimeline, TagTraffic
from fgoffload.transfer_schedule import ReloadDecision, ScheduledGroup, ScheduledLane, TransferSchedule

_ROUNDING_S = 1e-9  # tolerance in seconds, far shorter than any copy

_NEARLY_DONE_PART = 0.005
"""At the loss, an offload is nearly done if its remaining time is at most this fraction of the forward time. Compute then waits
for it, because keeping its group on the GPU would require a recompute elsewhere, which is rarely faster."""

# Cached: looking up an enum member costs as much as a call.
_RESIDENT, _OFFLOADING, _OFFLOADED, _RELOADED, _FREED = SavedState
_FORWARD = PassKind.FORWARD


class SimulatedLane(ScheduledLane[ScheduledGroup, int]):
    """One microbatch in one model chunk: a lane of the transfer schedule, created with all of its groups."""

    __slots__ = ("chunk", "is_copied", "is_read", "reloads", "states", "traffic")

    def __init__(self, chunk: CompiledChunk, traffic: Sequence[TagTraffic]) -> None:
        super().__init__([ScheduledGroup(position, place.end_position) for position, place in enumerate(chunk.groups)])
        count = len(chunk.bundles)
        self.chunk = chunk
        self.traffic = traffic
        self.states = [_RESIDENT] * count  # state of each bundle
        self.is_copied = [False] * count  # for each bundle, whether a copy to the host still reads its device memory
        self.is_read = [bundle.is_read_later for bundle in chunk.bundles]  # for each, whether forward still reads it
        self.reloads: list[Copy | None] = [None] * count  # for each bundle, its copy to the device

    def list_remaining(self, group: int) -> list[int]:
        """Return the bundles of a group that are on the host or in flight to it."""
        states = self.states
        return [one for one in self.chunk.groups[group].members if (state := states[one]) is _OFFLOADING or state is _OFFLOADED]

    def is_offloaded(self, saved: int) -> bool:
        """Return whether a bundle is on the host only."""
        return self.states[saved] is _OFFLOADED

    def count_bytes(self, remaining: Iterable[int]) -> int:
        """Return the total size of the bundles in `remaining`."""
        known = self.chunk.bundles
        return sum([known[bundle].size_bytes for bundle in remaining])


class InFlight(NamedTuple):
    """A group in flight to the host."""

    copy: Copy
    lane: SimulatedLane
    bundles: Sequence[int]
    size_bytes: int


class RankRun(RankClock):
    """Runs the passes of a rank and the copies that the transfer schedule requests. Takes the arguments of `RankClock`."""

    def __init__(self, rank: RankModel, chunks: Sequence[CompiledChunk], *, timeline: RankTimeline | None) -> None:
        super().__init__(rank, chunks, timeline=timeline)
        self._schedule = TransferSchedule(rank.policy)
        self._lanes: dict[tuple[int, int], SimulatedLane] = {}
        self._traffic = [[self._get_traffic(bundle.traffic_key) for bundle in chunk.bundles] for chunk in chunks]
        # Lanes without offload have no state, so all microbatches share one.
        self._unchanging = {number: SimulatedLane(chunk, ()) for number, chunk in enumerate(chunks) if not chunk.groups}
        self._in_flight: collections.deque[InFlight] = collections.deque()
        self._in_flight_bytes = 0
        self._host_budget_bytes = math.inf if rank.host_budget_bytes is None else rank.host_budget_bytes
        self._pass_start_s = 0.0
        self._following: tuple[int, int] | None = None
        self._loss_window_bytes = 0  # maximum bytes in flight at the start of a loss
        self._abandoned = 0  # number of bundles that backward no longer needs but that a copy to the host still reads
        # Unbound functions, because bound methods would form a reference cycle with this object.
        methods: dict[EventKind, Callable[[RankRun, Any, SimulatedLane], None]]
        methods = {kind: getattr(RankRun, kind.value) for kind in EventKind}
        if timeline is not None:
            methods[EventKind.COMPUTE] = RankRun.compute_and_note
        # Each event runs hundreds of times, so look up its method once.
        self._forwards = [[(methods[kind], argument) for kind, argument in chunk.forward] for chunk in chunks]
        self._backwards = [[(methods[kind], argument) for kind, argument in chunk.backward] for chunk in chunks]

    def run_pass(self, one: Pass, microbatch: int, ready_s: float, following: tuple[int, int] | None) -> None:
        """Run pass `one` no earlier than `ready_s`. `microbatch` is its index among the simulated microbatches.

        `following` is the chunk and microbatch of the next backward, or None if the engine does not predict it.
        """
        if ready_s > self.clock_s:
            self._wait_until(ready_s, Cause.NEIGHBOURS)
        self._pass, self._following, number = one, following, one.chunk
        self._pass_start_s = self.clock_s
        chunk = self._chunks[number]
        if one.kind is _FORWARD:
            lane = self._unchanging.get(number) or SimulatedLane(chunk, self._traffic[number])
            self._schedule.announce(None if following is None else self._lanes.get(following), during=None)
            self._lanes[number, microbatch] = lane
            self._add_bytes(chunk.base_bytes, "start of the pass")
            for method, argument in self._forwards[number]:
                method(self, argument, lane)
        else:
            lane = self._lanes.pop((number, microbatch))
            for method, argument in self._backwards[number]:
                method(self, argument, lane)
            self._add_bytes(-chunk.base_bytes, "end of the pass")
            self._recompute_s += chunk.recompute_s

    def has_groups(self, chunk: int) -> bool:
        """Return whether the plan offloads any tensor of a chunk."""
        return bool(self._chunks[chunk].groups)

    def finish(self, skipped: Sequence[float] | None) -> RankResult:
        """Wait for copies in flight, and return the result of the step."""
        self._link.advance(math.inf)
        while self._in_flight:
            self._release_oldest()
        self._note_memory(self._device_bytes)
        return self._make_result(skipped, loss_window_bytes=self._loss_window_bytes)

    def _wait_for_oldest(self, cause: Cause) -> None:
        self._wait_for_copy(self._link.d2h, self._in_flight[0].copy, cause)
        self._release_oldest()

    # Copies to the host.

    def submit(self, number: int, lane: SimulatedLane) -> None:
        """Offload a group, and wait while the bytes in flight exceed the window."""
        if self._in_flight:
            self.poll()
        chunk, size_bytes, submitted = lane.chunk, 0, []
        lane.groups[number].submit()
        for bundle in chunk.groups[number].bundles:
            bundle_bytes = chunk.bundles[bundle].size_bytes
            if self._host_bytes + bundle_bytes > self._host_budget_bytes:
                lane.traffic[bundle].kept_bytes += bundle_bytes
                continue
            submitted.append(bundle)
            size_bytes += bundle_bytes
            self._host_bytes += bundle_bytes
            lane.states[bundle] = _OFFLOADING
            lane.is_copied[bundle] = True
        if submitted:
            self._host_peak_bytes = max(self._host_peak_bytes, self._host_bytes)
            traffic = lane.traffic[submitted[0]]
            traffic.d2h_bytes += size_bytes
            copy = Copy(size_bytes, traffic, self._pass, chunk.groups[number].label)
            self._link.submit(self._link.d2h, copy, self.clock_s)
            self._in_flight.append(InFlight(copy, lane, submitted, size_bytes))
            self._in_flight_bytes += size_bytes
            if late_s := self._rank.late.find(1, chunk.groups[number].tensors):
                # This delay precedes the wait for the window, because only the device waits for the window.
                self._wait_until(self.clock_s + late_s, Cause.LATE)
        while self._schedule.policy.must_wait(in_flight_bytes=self._in_flight_bytes):
            self._wait_for_oldest(Cause.WINDOW)
        self._execute(self._schedule.look_ahead())

    def wait_for_host(self, host_wait: HostWait, _: object) -> None:
        """Block the host until compute catches up and, unless a kernel sends the bytes, queued copies to the host are done."""
        if host_wait is not HostWait.KERNEL:
            self._link.advance(self.clock_s)
            if self._link.d2h.copies:
                self._wait_for_copy(self._link.d2h, self._link.d2h.copies[-1], Cause.HOST)
        self._host_s = self.clock_s

    def open_site(self, *_: object) -> None:
        """Poll if any bundle is abandoned, as the engine does before it tests which storages are still referenced."""
        if self._abandoned:
            self.poll()

    def poll(self, *_: object) -> None:
        """Free the device memory of finished copies. See [Note: Polling]."""
        if not self._in_flight or self._rank.host_pace is HostPace.STEP_AHEAD:
            return
        self._link.advance(self.clock_s)
        if self._is_a_layer_ahead:
            # Without a tolerance, rounding could hide a copy for which the host has waited.
            seen_s = self._host_s + _ROUNDING_S
        else:
            seen_s = self._pass_start_s if self._rank.host_pace is HostPace.PASS_AHEAD else self.clock_s
        while self._in_flight and self._in_flight[0].copy.end_s <= seen_s:
            self._release_oldest()

    def _release_oldest(self) -> None:
        _, lane, bundles, size_bytes = self._in_flight.popleft()
        self._in_flight_bytes -= size_bytes
        for bundle in bundles:
            lane.is_copied[bundle] = False
            state = lane.states[bundle]
            if state is _OFFLOADING:
                lane.states[bundle] = _OFFLOADED
            elif state is _FREED:
                self._abandoned -= 1
            # A bundle whose offload was cancelled stays on the GPU. `read` frees a bundle that forward still reads.
            if state is not _RESIDENT and not lane.is_read[bundle]:
                self._device_bytes -= lane.chunk.bundles[bundle].device_bytes

    def read(self, bundles: Iterable[int], lane: SimulatedLane) -> None:
        """Record the last read of `bundles` in forward, and free the offloaded ones."""
        for bundle in bundles:
            lane.is_read[bundle] = False
            if lane.states[bundle] is _OFFLOADED:
                self._device_bytes -= lane.chunk.bundles[bundle].device_bytes

    # Copies to the device.

    def take(self, take: Take, lane: SimulatedLane) -> None:
        """Wait until the bundles that backward needs are reloaded. Mirrors `OffloadEngine.take`."""
        number, bundles = take
        group = None if number is None else lane.groups[number]
        if group is not None and not bundles and lane.is_first_unpack(group, is_offloaded=False):
            self._reach(lane, group)
        for bundle in bundles:
            if group is None:
                # The engine passes the size of a bundle whose offload was cancelled. 0 has the same effect: backward reaches
                # the bundle's group next, and the prefetch there ignores released bytes.
                self._execute(self._schedule.release(lane, 0))
            elif lane.is_first_unpack(group, is_offloaded=lane.states[bundle] is _OFFLOADED):
                self._reach(lane, group)
            if lane.states[bundle] is _OFFLOADED:
                self._reload(lane, (bundle,))
            reload = lane.reloads[bundle]
            if reload is not None:
                self._wait_for_copy(self._link.h2d, reload, Cause.RELOAD)

    def release(self, sizes_bytes: Iterable[int], lane: SimulatedLane) -> None:
        """Release resident tensors that backward has used."""
        for size_bytes in sizes_bytes:
            if lane.remaining:
                self._execute(self._schedule.release(lane, size_bytes))

    def _reach(self, lane: SimulatedLane, group: ScheduledGroup) -> None:
        """Tell the schedule that backward has reached `group`. Mirrors `OffloadEngine.approach_backward`."""
        if lane is not self._schedule.current:
            self._schedule.enter(lane)
            self._schedule.announce(None if self._following is None else self._lanes.get(self._following), during=lane)
        lane.leave(group.end_position)
        self.poll()
        self._execute(self._schedule.reach(lane, group))

    def pass_layer(self, _: None, lane: SimulatedLane) -> None:
        """Prefetch after backward has passed a layer without offloaded tensors. Mirrors `OffloadEngine.prefetch`."""
        self.poll()
        self._execute(self._schedule.prefetch(lane))

    def turn(self, planned_bytes: int | None, lane: SimulatedLane) -> None:
        """Finish or cancel offloads at the loss, before backward begins. Mirrors `OffloadEngine.expect_backward`."""
        self.poll()
        window_bytes = self._find_loss_window() if planned_bytes is None else planned_bytes
        while self._in_flight_bytes > window_bytes:
            self._wait_for_oldest(Cause.TURN)
        self._loss_window_bytes = max(self._loss_window_bytes, self._in_flight_bytes)
        self._execute(self._schedule.expect_backward(lane))

    def _find_loss_window(self) -> float:
        """Return how many bytes may be in flight at the start of the loss if the plan does not set a limit."""
        if self._rank.turn is Turn.CANCEL:
            return math.inf
        self._link.advance(self.clock_s)
        patience_s = _NEARLY_DONE_PART * (self.clock_s - self._pass_start_s)
        left_bytes = self._link.d2h.count_left_bytes() - patience_s * self._rank.link.d2h_bytes_per_s
        # Copies finish in order, so only the first ones can be nearly done.
        window_bytes = 0
        for entry in reversed(self._in_flight):
            if left_bytes <= 0:
                break
            left_bytes -= entry.size_bytes
            window_bytes += entry.size_bytes
        return window_bytes

    def _execute(self, decisions: Iterable[ReloadDecision[ScheduledGroup, int]]) -> None:
        """Cancel the offload of bundles that are still on the GPU, and reload the others."""
        for decision in decisions:
            lane = cast("SimulatedLane", decision.lane)
            for number in decision.cancelled:
                lane.states[number] = _RESIDENT
                size_bytes = lane.chunk.bundles[number].size_bytes
                self._host_bytes -= size_bytes
                lane.traffic[number].recalled_bytes += size_bytes
            self._reload(lane, decision.reloaded)

    def _reload(self, lane: SimulatedLane, bundles: Iterable[int]) -> None:
        for number in bundles:
            size_bytes, device_bytes, label, _, _ = lane.chunk.bundles[number]
            traffic = lane.traffic[number]
            traffic.h2d_bytes += size_bytes
            self._add_bytes(device_bytes, label)
            lane.states[number] = _RELOADED
            lane.reloads[number] = copy = Copy(size_bytes, traffic, self._pass, label)
            self._link.submit(self._link.h2d, copy, self.clock_s)

    def free(self, bundles: Iterable[int], lane: SimulatedLane) -> None:
        """Free the device memory of bundles after backward, unless a copy to the host still reads it."""
        for number in bundles:
            size_bytes, device_bytes, _, _, _ = lane.chunk.bundles[number]
            state = lane.states[number]
            lane.states[number] = _FREED
            if state is _OFFLOADING:
                # A site without offload needed the bundle while it was still resident.
                lane.traffic[number].recalled_bytes += size_bytes
            if state is not _RESIDENT:
                self._host_bytes -= size_bytes
            if lane.is_copied[number]:
                self._abandoned += 1
            elif state is not _OFFLOADED:
                self._device_bytes -= device_bytes
