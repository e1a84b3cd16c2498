"""Clock, link and memory counters of one simulated rank. `rank_run` builds on them to run passes."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from fgoffload.planner.ranks.rank_model import HostPace, RankModel
from fgoffload.planner.ranks.schedule import Pass
from fgoffload.planner.simulation.chunk_events import CompiledChunk, Compute, EventKind, TrafficKey
from fgoffload.planner.simulation.link_queue import Copy, CopyQueue, LinkQueue
from fgoffload.planner.simulation.simulation_result import MemorySample, RankResult, RankTimeline, StreamName, TagTraffic, Waits
from fgoffload.transfer_schedule import STAGING_SLOTS

_TRAFFIC = tuple(field.name for field in dataclasses.fields(TagTraffic))[3:]  # names of the counters


class Cause(enum.Enum):
    """Causes of waits, with their labels in timelines. Names match the fields of `Waits`."""

    WINDOW = "wait for the window"
    TURN = "wait for offloads before the loss"
    RELOAD = "wait for a reload"
    HOST = "host waits for copies"
    LATE = "launch-bound"
    NEIGHBOURS = "wait for a neighbor"

    __hash__ = object.__hash__
    """Identity hash. Members are singletons, and `Enum`'s own hash is several times slower."""


NEIGHBOURS_PLACE = 3 + list(Cause).index(Cause.NEIGHBOURS)
"""Index in `RankClock.list_numbers` of the time that compute spends waiting for other ranks."""


class RankClock:
    """State of a rank during a simulated step: compute time, link and memory."""

    def __init__(self, rank: RankModel, chunks: Sequence[CompiledChunk], *, timeline: RankTimeline | None) -> None:
        self.clock_s = 0.0  # current time of the compute stream
        self._rank = rank
        self._chunks = chunks
        self._timeline = timeline
        self._recompute_s = 0.0
        self._waits_s = dict.fromkeys(Cause, 0.0)
        self._tags: dict[TrafficKey, TagTraffic] = {}
        self._link = LinkQueue(rank.link, timeline)
        # At the start, dispatchers still hold tensors from the previous step.
        kept = [argument for chunk in chunks for kind, argument in chunk.backward if kind is EventKind.RETAIN]
        self._dispatcher_bytes: dict[tuple[int, int], int] = dict(kept)
        self._static_bytes = rank.static_bytes + STAGING_SLOTS * max((chunk.staged_bytes for chunk in chunks), default=0)
        self._device_bytes = self._peak_bytes = self._static_bytes + sum(self._dispatcher_bytes.values())
        self._host_bytes = self._host_peak_bytes = 0
        self._pass: Pass | None = None
        self._peak_at: tuple[Pass | None, str] = (None, "between steps")
        self._is_a_layer_ahead = rank.host_pace is HostPace.LAYER_AHEAD and any(chunk.groups for chunk in chunks)
        """Whether a poll for finished copies depends on `_host_s`."""
        self._host_s = 0.0  # time at which the host launched the last op, at most `clock_s`; updated only if needed

    def _get_traffic(self, key: TrafficKey) -> TagTraffic:
        return self._tags.setdefault(key, TagTraffic(kind=key.kind, tag=key.tag, action=key.action))

    def list_numbers(self) -> list[float]:
        """Return all counters that accumulate over a step: times first, then the traffic of each tag."""
        numbers = [self.clock_s, self._link.slowed_s, self._recompute_s, *self._waits_s.values()]
        return numbers + [getattr(one, name) for one in self._tags.values() for name in _TRAFFIC]

    def _make_result(self, skipped: Sequence[float] | None, *, loss_window_bytes: int) -> RankResult:
        numbers = self.list_numbers()
        left = iter(numbers if skipped is None else [one + more for one, more in zip(numbers, skipped, strict=True)])
        step_s, slowed_s, recompute_s = next(left), next(left), next(left)
        waits = {f"{cause.name.lower()}_s": next(left) for cause in Cause}
        tags = []
        for one in self._tags.values():
            moved: dict[str, Any] = {name: next(left) for name in _TRAFFIC}
            tags.append(dataclasses.replace(one, **moved))
        sums: dict[str, Any] = {name: sum(getattr(one, name) for one in tags) for name in _TRAFFIC if name != "exposed_s"}
        pass_, label = self._peak_at
        return RankResult(
            rank=self._rank.rank,
            step_s=step_s + self._rank.step_end_s,
            peak_bytes=self._peak_bytes,
            peak_at=label if pass_ is None else f"{pass_} {label}",
            static_bytes=self._static_bytes,
            end_bytes=self._device_bytes,
            loss_window_bytes=loss_window_bytes,
            host_peak_bytes=self._host_peak_bytes,
            waits=Waits(**waits),
            compute_s=step_s - sum(waits.values()),
            slowed_s=slowed_s,
            recompute_s=recompute_s,
            tags=tuple(one for one in tags if one.d2h_bytes or one.kept_bytes),
            timeline=self._timeline,
            **sums,
        )

    def compute(self, compute: Compute, _: object) -> None:
        """Run compute, which copies in flight may slow down."""
        seconds, net_bytes, rise_bytes, label, host_s = compute
        device_bytes = self._device_bytes
        if device_bytes + rise_bytes > self._peak_bytes:
            self._peak_bytes = device_bytes + rise_bytes
            self._peak_at = (self._pass, label)
        start_s = self.clock_s
        self.clock_s = end_s = self._link.run_compute(start_s, seconds) if self._link.queued else start_s + seconds
        self._device_bytes = device_bytes + net_bytes
        if self._is_a_layer_ahead:
            host_s += self._host_s
            self._host_s = host_s if host_s < end_s else end_s

    def compute_and_note(self, compute: Compute, _: object) -> None:
        """Run compute, and record its span and memory in the timeline."""
        _, net_bytes, rise_bytes, label, _ = compute
        start_s, highest_bytes = self.clock_s, self._device_bytes + rise_bytes
        self._note_memory(highest_bytes if rise_bytes > net_bytes else self._device_bytes)
        self.compute(compute, _)
        if self._timeline is not None:
            self._timeline.note_span(StreamName.COMPUTE, f"{self._pass} {label}", start_s, self.clock_s)

    def _wait_until(self, until_s: float, cause: Cause) -> None:
        if until_s > self.clock_s:
            self._waits_s[cause] += until_s - self.clock_s
            if self._timeline is not None:
                self._timeline.note_span(StreamName.COMPUTE, cause.value, self.clock_s, until_s)
                self._note_memory(self._device_bytes)
            self.clock_s = until_s

    def _wait_for_copy(self, queue: CopyQueue, copy: Copy, cause: Cause) -> None:
        if copy.end_s > self.clock_s:
            self._wait_until(self._link.wait_for(queue, copy, self.clock_s), cause)

    def _add_bytes(self, size_bytes: int, label: str) -> None:
        self._device_bytes += size_bytes
        if self._device_bytes > self._peak_bytes:
            self._peak_bytes = self._device_bytes
            self._peak_at = (self._pass, label)

    def _note_memory(self, device_bytes: int) -> None:
        """Record a memory sample. Of several samples with the same time, the last one applies."""
        if self._timeline is not None:
            self._timeline.memory.append(MemorySample(self.clock_s, device_bytes, self._host_bytes))

    def retain(self, kept: tuple[tuple[int, int], int], _: object) -> None:
        """Count tensors that a token dispatcher keeps alive after their backward."""
        dispatcher, size_bytes = kept
        self._dispatcher_bytes[dispatcher] = size_bytes
        self._add_bytes(size_bytes, "tensors kept by a token dispatcher")

    def dispatch(self, dispatcher: tuple[int, int], _: object) -> None:
        """Free the tensors that a token dispatcher kept."""
        self._device_bytes -= self._dispatcher_bytes.pop(dispatcher, 0)
