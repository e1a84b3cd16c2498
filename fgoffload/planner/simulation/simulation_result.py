"""Results of a simulated step: totals of each rank and, with `Detail.TIMELINE`, its streams and memory over time."""

import dataclasses
import enum
from typing import NamedTuple

from fgoffload.plan import Action


class Detail(enum.Enum):
    """Level of detail of a simulation."""

    TOTALS = "totals"  # totals of the step
    TIMELINE = "timeline"  # also spans of each stream, and memory over time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Idle seconds of compute, by cause."""

    window_s: float = 0.0  # more bytes than the window were in flight to the host
    turn_s: float = 0.0  # copies to the host had to finish before the loss
    reload_s: float = 0.0  # backward needed tensors that were not reloaded yet
    host_s: float = 0.0  # the host waited for a small copy that was queued behind offloads
    late_s: float = 0.0  # the step was launch-bound, and the host was busy with offloaded groups
    neighbours_s: float = 0.0  # input from another rank was missing, pipeline fill and drain included

    @property
    def copies_s(self) -> float:
        """Seconds spent waiting for copies: all waits except `late_s` and `neighbours_s`."""
        return self.window_s + self.turn_s + self.reload_s + self.host_s


@dataclasses.dataclass(slots=True, kw_only=True)
class TagTraffic:
    """Traffic of one tag in a step on one rank, for layers of one kind with the same action."""

    kind: str
    tag: str  # the tag with which the tensors are offloaded, if they have several
    action: Action
    d2h_bytes: int = 0
    h2d_bytes: int = 0
    recalled_bytes: int = 0  # part of `d2h_bytes` that was still on the device when backward needed it
    kept_bytes: int = 0  # bytes that stayed on the GPU because the host budget was full
    d2h_s: float = 0.0
    h2d_s: float = 0.0
    exposed_s: float = 0.0  # part of `d2h_s` and `h2d_s` during which compute waited for the copies

    @property
    def hidden_s(self) -> float:
        """Seconds of copies that compute did not wait for."""
        return self.d2h_s + self.h2d_s - self.exposed_s


class StreamName(enum.Enum):
    """Streams of a timeline."""

    COMPUTE = "compute"
    D2H = "to host"
    H2D = "to device"


class Span(NamedTuple):
    """A span of time in which a stream is busy or compute waits."""

    stream: StreamName
    label: str  # such as `F3 layers.12.expert_fc1` or `wait for the window`
    start_s: float
    end_s: float
    size_bytes: int = 0  # 0 except for copies


class MemorySample(NamedTuple):
    """Device and host bytes from `at_s` to the next sample."""

    at_s: float
    device_bytes: int
    host_bytes: int


@dataclasses.dataclass(slots=True)
class RankTimeline:
    """Streams and memory of a rank over time."""

    spans: list[Span] = dataclasses.field(default_factory=list)  # in no particular order
    memory: list[MemorySample] = dataclasses.field(default_factory=list)  # ordered by time

    def note_span(self, stream: StreamName, label: str, start_s: float, end_s: float, *, size_bytes: int = 0) -> None:
        """Record a span of `stream`, unless it is empty."""
        if end_s > start_s:
            self.spans.append(Span(stream, label, start_s, end_s, size_bytes))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """A simulated step of one rank."""

    rank: int
    step_s: float  # from the start of the step to the end of this rank's work, optimizer included
    peak_bytes: int  # peak device bytes
    peak_at: str  # pass and segment of the first peak, such as `B3 layers.12.expert_fc1`
    static_bytes: int  # device bytes without activations
    end_bytes: int  # device bytes after the step and its copies
    loss_window_bytes: int  # maximum bytes in flight to the host at the start of a loss; 0 on ranks without a loss
    host_peak_bytes: int  # peak host bytes
    d2h_bytes: int
    h2d_bytes: int
    recalled_bytes: int  # see `TagTraffic`
    kept_bytes: int  # see `TagTraffic`
    waits: Waits
    compute_s: float  # busy seconds of compute
    slowed_s: float  # part of `compute_s` that copies added
    recompute_s: float  # seconds of recompute, without concurrent copies
    d2h_s: float
    h2d_s: float
    tags: tuple[TagTraffic, ...]  # one per kind of layer, tag and action
    timeline: RankTimeline | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A simulated step of all ranks."""

    ranks: tuple[RankResult, ...]

    @property
    def step_s(self) -> float:
        """Seconds until the last rank finishes."""
        return max(rank.step_s for rank in self.ranks)

    @property
    def worst_rank(self) -> RankResult:
        """First rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Highest peak device bytes of any rank."""
        return self.worst_rank.peak_bytes
