"""Results of a simulated step: each rank's numbers, and its streams over time if asked for."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import NamedTuple

from fgoffload.plan import Action


class Detail(enum.Enum):
    """How much a simulation notes."""

    TOTALS = "totals"  # numbers of the step alone
    PEAKS = "peaks"  # also the most device bytes at each segment
    TIMELINE = "timeline"  # also what each stream did when, and the memory over time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Seconds in which compute had nothing to do, by cause."""

    window_s: float = 0.0  # more than the window was on its way to the host
    turn_s: float = 0.0  # something was on its way to the host when forward was over, and had to be gone before the loss
    reload_s: float = 0.0  # what backward asked for was not back
    host_s: float = 0.0  # the host waited for a few bytes behind copies
    late_s: float = 0.0  # the host was late, since groups left
    neighbours_s: float = 0.0  # what another rank computes was not there; with the filling and draining of the pipeline

    @property
    def copies_s(self) -> float:
        """Seconds for copies: all but those for neighbours, and for a host that is late."""
        return self.window_s + self.turn_s + self.reload_s + self.host_s


@dataclasses.dataclass(slots=True, kw_only=True)
class TagTraffic:
    """Traffic of one tag in a step on a rank, in layers of one kind with the same action."""

    kind: str  # of layer
    tag: str  # the tag. What several tags save counts for the one that it left with.
    action: Action  # what is done about it
    d2h_bytes: int = 0  # to the host
    h2d_bytes: int = 0  # back
    recalled_bytes: int = 0  # of `d2h_bytes`: still on the device when backward wanted them, so that nothing had to come back
    kept_bytes: int = 0  # that were to leave and stayed, since the host budget was used up
    d2h_s: float = 0.0  # of copies to the host
    h2d_s: float = 0.0  # of copies to the device
    exposed_s: float = 0.0  # of both: seconds while compute waited for that direction

    @property
    def hidden_s(self) -> float:
        """Seconds of copies beside which compute ran, or waited for something else."""
        return self.d2h_s + self.h2d_s - self.exposed_s


class StreamName(enum.Enum):
    """Streams of a timeline."""

    COMPUTE = "compute"
    D2H = "to host"
    H2D = "to device"


class Span(NamedTuple):
    """A stream was busy, or compute waited."""

    stream: StreamName
    label: str  # what it did: `F3 layers.12.expert_fc1`, `wait for the window`
    start_s: float
    end_s: float
    size_bytes: int = 0  # of a copy


class MemorySample(NamedTuple):
    """Bytes from a moment on, until the next sample."""

    at_s: float
    device_bytes: int
    host_bytes: int


@dataclasses.dataclass(slots=True)
class RankTimeline:
    """A rank over time."""

    spans: list[Span] = dataclasses.field(default_factory=list)  # in no particular order
    memory: list[MemorySample] = dataclasses.field(default_factory=list)  # in the order of time

    def note_span(self, stream: StreamName, label: str, start_s: float, end_s: float, *, size_bytes: int = 0) -> None:
        """Note what `stream` did, if it took any time."""
        if end_s > start_s:
            self.spans.append(Span(stream, label, start_s, end_s, size_bytes))


StretchKey = tuple[bool, int, str]
"""A segment: whether it is one of a forward, of which chunk, and its label: `layers.12.expert_fc1`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """A step on one rank."""

    rank: int
    step_s: float  # from the start of the step to the end of this rank's work, what comes after the last pass included
    peak_bytes: int  # the most device bytes at any time
    peak_at: str  # where that was first: `B3 layers.12.expert_fc1`, the pass and the segment
    static_bytes: int  # device bytes that are there all the time
    end_bytes: int
    """Device bytes when the step is over and its copies are done: the static ones, where every microbatch had its backward."""
    loss_window_bytes: int  # the most that was on its way to the host where a loss began; 0 on ranks that have none
    host_peak_bytes: int  # the most host bytes at any time
    d2h_bytes: int  # bytes to the host
    h2d_bytes: int  # bytes back
    recalled_bytes: int  # as of a `TagTraffic`, and so is the next
    kept_bytes: int
    waits: Waits
    compute_s: float  # seconds in which compute ran
    slowed_s: float  # of them: what it took longer since copies ran beside it
    recompute_s: float  # seconds of compute that runs again, with nothing beside it
    d2h_s: float  # seconds in which copies to the host ran
    h2d_s: float  # seconds in which copies to the device ran
    tags: tuple[TagTraffic, ...]  # by kind of layer, tag and action
    timeline: RankTimeline | None = None
    peaks: Mapping[StretchKey, int] | None = None
    """With `Detail.PEAKS`: the most device bytes while each ran, or others before and behind it without anything between."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A step on all ranks."""

    ranks: tuple[RankResult, ...]

    @property
    def step_s(self) -> float:
        """Seconds until the last rank is through."""
        return max(rank.step_s for rank in self.ranks)

    @property
    def worst_rank(self) -> RankResult:
        """Return the rank with the highest peak; the first of those."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """The highest peak of any rank."""
        return self.worst_rank.peak_bytes
