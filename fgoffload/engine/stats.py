"""What a step moved, kept and waited for, per tag."""

import dataclasses
import enum


class KeptReason(enum.Enum):
    """Why a saved tensor stays on the device."""

    PARAMETER = "a parameter or a view of one"
    MARKED = "marked to stay"
    FILTERED = "the user's filter kept it"
    RECOMPUTED = "its storage belongs to a recompute, which empties and refills it"
    HELD = "something else holds its storage"
    OTHER_DEVICE = "not in the memory of the engine's device"
    SUBCLASS = "a tensor subclass"
    LAYOUT = "not a plain strided tensor"
    EMPTY = "no elements"
    TOO_SMALL = "below the minimum size"
    HOST_BUDGET = "the host budget is used up"


@dataclasses.dataclass(slots=True)
class TagStats:
    """One tag in one step, on this rank."""

    groups: int = 0
    """Executions of the tag's sites."""
    saved_tensors: int = 0
    """Tensors that autograd saved inside."""
    d2h_bytes: int = 0
    """Bytes that left for the host."""
    h2d_bytes: int = 0
    """Bytes that came back."""
    shared_bytes: int = 0
    """Bytes that had left already, with a group that saved the same storage before."""
    recalled_bytes: int = 0
    """Bytes that left and were still on the device when backward wanted them, so that nothing had to come back."""
    held_elsewhere_bytes: int = 0
    """Bytes that left and freed nothing, since something else still held their storage when they came back."""
    kept_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes that stayed, by the value of their `KeptReason`. Parameters are not counted."""

    def add_kept(self, reason: KeptReason, size_bytes: int) -> None:
        """Count `size_bytes` that stay for `reason`."""
        self.kept_bytes[reason.value] = self.kept_bytes.get(reason.value, 0) + size_bytes


@dataclasses.dataclass(slots=True)
class StepStats:
    """One step, on this rank."""

    tags: dict[str, TagStats] = dataclasses.field(default_factory=dict)
    """By tag, in the order of first use."""
    window_waits: int = 0
    """How often compute had to wait because more than the window was on its way to the host."""
    prefetch_misses: int = 0
    """Storages whose way back started only when backward had already come to their group."""
    host_bytes: int = 0
    """Host bytes in use at the end of the step."""
    host_peak_bytes: int = 0
    """The most host bytes in use at any time since the engine was made."""
    host_reserved_bytes: int = 0
    """Host bytes taken from the system, at the end of the step."""

    def get_tag(self, tag: str) -> TagStats:
        """Return the numbers of `tag`, from nought where it is new."""
        return self.tags.setdefault(tag, TagStats())

    @property
    def d2h_bytes(self) -> int:
        """Bytes that left for the host, all tags."""
        return sum(tag.d2h_bytes for tag in self.tags.values())

    @property
    def h2d_bytes(self) -> int:
        """Bytes that came back, all tags."""
        return sum(tag.h2d_bytes for tag in self.tags.values())
