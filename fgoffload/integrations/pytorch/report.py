"""What a run came to, in one line, and which tags came to nothing, with the reason."""

import dataclasses
from collections.abc import Iterable

from fgoffload.engine import StepStats, TagStats
from fgoffload.units import format_bytes


@dataclasses.dataclass(slots=True)
class RunTotals:
    """The numbers of all steps of one handle."""

    forwards: int = 0
    """Forwards in grad mode."""
    d2h_bytes: int = 0
    freed_bytes: int = 0
    """Of what left, what was gone from the device: not called back before, and not held by something else."""
    kept_bytes: int = 0
    host_peak_bytes: int = 0

    def add(self, stats: StepStats, *, forwards: int) -> None:
        """Add the numbers of one more call of `stats`."""
        self.forwards += forwards
        self.host_peak_bytes = max(self.host_peak_bytes, stats.host_peak_bytes)
        for tag in stats.tags.values():
            self.d2h_bytes += tag.d2h_bytes
            self.freed_bytes += max(0, tag.d2h_bytes - tag.recalled_bytes - tag.held_elsewhere_bytes)
            self.kept_bytes += sum(tag.kept_bytes.values())

    @property
    def saved_bytes(self) -> int:
        """Bytes that the regions saved, parameters not counted."""
        return self.d2h_bytes + self.kept_bytes

    def __str__(self) -> str:
        """Return the line that ends a run."""
        forwards = max(1, self.forwards)
        percent = 100 * self.freed_bytes / self.saved_bytes if self.saved_bytes else 0.0
        return (
            f"{self.forwards} forwards: of {format_bytes(self.saved_bytes / forwards)} that the regions of one saved, "
            f"{format_bytes(self.freed_bytes / forwards)} ({percent:.1f}%) were gone from the device until backward; at most "
            f"{format_bytes(self.host_peak_bytes)} of host memory in use"
        )


@dataclasses.dataclass(slots=True)
class TagUse:
    """What a handle saw of one tag, which the engine does not know."""

    shadowed: int = 0
    """Executions below saved-tensor hooks of somebody else, where a region does nothing."""


def explain_idle(tag: str, stats: TagStats | None, use: TagUse) -> str | None:
    """Return why `tag` moved nothing, and what to do, or None where it moved something."""
    if stats is not None and stats.d2h_bytes + stats.shared_bytes > 0:
        return None
    return f"tag {tag!r} moved nothing: {_find_reason(stats, use)}"


def _find_reason(stats: TagStats | None, use: TagUse) -> str:
    if stats is None or not (stats.groups or stats.saved_tensors):
        if use.shadowed:
            return (
                f"its regions ran {use.shadowed} times below saved-tensor hooks of somebody else, a checkpoint's for one, "
                "which have precedence. Put the region around the checkpoint, or leave the tag out."
            )
        return (
            "no region of it ran in a forward with gradients. A module that was compiled before `offload` does not see it: "
            "call `offload` first. Else leave the tag out."
        )
    if not stats.saved_tensors:
        return "autograd saved nothing inside: nothing there has a gradient, or a recompute saves for it. Leave the tag out."
    if not stats.kept_bytes:
        return "autograd saved parameters alone, and these stay. Leave the tag out."
    return f"all stayed. {_list_kept(stats.kept_bytes.items())}. Change that, or leave the tag out."


def _list_kept(kept: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{format_bytes(size_bytes)}: {reason}" for reason, size_bytes in kept)
