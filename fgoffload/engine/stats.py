"""Statistics of a step: bytes that each tag offloads, reloads and keeps on the device, and times of copies and waits."""

import collections
import dataclasses
import enum
from typing import TYPE_CHECKING

from fgoffload.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table


class KeptReason(enum.Enum):
    """Reason why a saved tensor stays on the device."""

    PARAMETER = "a parameter or a view of one"
    MARKED = "excluded from offload"
    FILTERED = "the user's filter kept it"
    RECOMPUTED = "its storage belongs to a recompute, which empties and refills it"
    REFERENCED = "something else still references its storage"
    OTHER_DEVICE = "not in the memory of the engine's device"
    SUBCLASS = "a tensor subclass"
    LAYOUT = "not a plain strided tensor"
    EMPTY = "no elements"
    TOO_SMALL = "below the minimum size"
    HOST_BUDGET = "the host budget is used up"
    CHANGED = "changed in place after it was saved"


class TimeKind(enum.Enum):
    """Kind of GPU time that the engine measures for each tag."""

    D2H = "copies to the host"  # from the start of a group's first copy to the end of its last
    H2D = "copies to the device"
    WAIT = "compute waits"  # for a reload, or for a copy to the host because the window is full


@dataclasses.dataclass(slots=True)
class TagStats:
    """Statistics of one tag in one step, on this rank."""

    groups: int = 0
    """Number of times that a site of the tag ran."""
    saved_tensors: int = 0
    """Number of tensors that autograd saved in the tag's regions."""
    d2h_bytes: int = 0
    """Bytes offloaded."""
    h2d_bytes: int = 0
    """Bytes reloaded."""
    shared_bytes: int = 0
    """Bytes that another group with the same storage had already offloaded."""
    recalled_bytes: int = 0
    """Bytes whose offload was cancelled, because they were still on the GPU when backward needed them."""
    held_elsewhere_bytes: int = 0
    """Bytes whose offload freed nothing, because something else still referenced their storage."""
    prefetch_misses: int = 0
    """Number of storages that were reloaded only after backward had reached their group."""
    dropped_storages: int = 0
    """Number of storages that autograd had dropped before their group was offloaded."""
    kept_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes that stayed on the GPU, keyed by the value of `KeptReason`. Parameters are not counted."""
    seconds: dict[TimeKind, float] = dataclasses.field(default_factory=dict)
    """Seconds of copies and waits, measured on the GPU. Empty if times are not measured."""

    def add_kept(self, reason: KeptReason, size_bytes: int) -> None:
        """Count `size_bytes` that stay on the device for `reason`."""
        self.kept_bytes[reason.value] = self.kept_bytes.get(reason.value, 0) + size_bytes


@dataclasses.dataclass(slots=True)
class StepStats:
    """Statistics of one step, on this rank. `rich.print` shows them as a table."""

    tags: dict[str, TagStats] = dataclasses.field(default_factory=dict)
    """Statistics of each tag, in order of first use."""
    window_waits: int = 0
    """Number of times that compute waited because the bytes in flight to the host exceeded the window."""
    host_bytes: int = 0
    """Host bytes in use at the end of the step."""
    host_peak_bytes: int = 0
    """Peak host bytes in use since the engine was created."""
    host_reserved_bytes: int = 0
    """Host bytes reserved from the system at the end of the step."""

    @property
    def d2h_bytes(self) -> int:
        """Bytes offloaded by all tags."""
        return sum(tag.d2h_bytes for tag in self.tags.values())

    @property
    def h2d_bytes(self) -> int:
        """Bytes reloaded by all tags."""
        return sum(tag.h2d_bytes for tag in self.tags.values())

    @property
    def prefetch_misses(self) -> int:
        """Number of storages of all tags that were reloaded only after backward had reached their group."""
        return sum(tag.prefetch_misses for tag in self.tags.values())

    def __rich__(self) -> "Table":
        """Return a table with one row per tag."""
        from rich.table import Table

        table = Table(
            caption=f"host memory: {format_bytes(self.host_bytes)} in use, {format_bytes(self.host_peak_bytes)} at peak, "
            f"{format_bytes(self.host_reserved_bytes)} reserved; window waits: {self.window_waits}"
        )
        table.add_column("tag")
        for heading in ("groups", "offloaded", "reloaded", "shared", "cancelled", "still referenced", "prefetch misses"):
            table.add_column(heading, justify="right")
        kinds = [kind for kind in TimeKind if any(kind in tag.seconds for tag in self.tags.values())]
        for kind in kinds:
            table.add_column(f"{kind.name.lower()} ms", justify="right")
        table.add_column("kept on the GPU")
        for name, tag in self.tags.items():
            sizes = (tag.d2h_bytes, tag.h2d_bytes, tag.shared_bytes, tag.recalled_bytes, tag.held_elsewhere_bytes)
            table.add_row(
                name,
                str(tag.groups),
                *(format_bytes(size_bytes) if size_bytes else "-" for size_bytes in sizes),
                str(tag.prefetch_misses),
                *(f"{1e3 * tag.seconds.get(kind, 0.0):.2f}" for kind in kinds),
                "\n".join(f"{format_bytes(size_bytes)} {why}" for why, size_bytes in tag.kept_bytes.items()),
            )
        return table


class Counters:
    """Statistics of the current step. Each `TagStats` lives as long as the engine, so groups can refer to it."""

    def __init__(self) -> None:
        self._tags: collections.defaultdict[str, TagStats] = collections.defaultdict(TagStats)
        self.window_waits = 0

    def get_tag(self, tag: str) -> TagStats:
        """Return the statistics of `tag`, created on first use."""
        return self._tags[tag]

    def read_tags(self) -> dict[str, TagStats]:
        """Return a copy of the statistics of each tag that was used in this step."""
        return {name: dataclasses.replace(tag) for name, tag in self._tags.items() if tag != TagStats()}

    def finish(self) -> StepStats:
        """Return the statistics of each tag that was used in this step, and reset them."""
        finished = StepStats(tags=self.read_tags(), window_waits=self.window_waits)
        self.window_waits = 0
        for name in finished.tags:
            blank = TagStats()
            for field in dataclasses.fields(TagStats):
                setattr(self._tags[name], field.name, getattr(blank, field.name))
        return finished
