"""Sums up a run in one log line, and explains idle tags."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from fgoffload.engine import StepStats, TagStats
from fgoffload.units import format_bytes


@dataclasses.dataclass(slots=True)
class RunTotals:
    """Totals of one step of a handle, or of all its steps."""

    forwards: int = 0
    """Number of forwards in grad mode."""
    d2h_bytes: int = 0
    freed_bytes: int = 0
    """Offloaded bytes that were freed on the GPU, neither cancelled nor still referenced elsewhere."""
    kept_bytes: int = 0
    host_peak_bytes: int = 0

    def add(self, stats: StepStats, *, forwards: int) -> None:
        """Add the statistics of one call of `stats`."""
        self.forwards += forwards
        self.host_peak_bytes = max(self.host_peak_bytes, stats.host_peak_bytes)
        for tag in stats.tags.values():
            self.d2h_bytes += tag.d2h_bytes
            self.freed_bytes += max(0, tag.d2h_bytes - tag.recalled_bytes - tag.held_elsewhere_bytes)
            self.kept_bytes += sum(tag.kept_bytes.values())

    @property
    def saved_bytes(self) -> int:
        """Bytes that the regions saved, without parameters."""
        return self.d2h_bytes + self.kept_bytes

    @property
    def percent(self) -> float:
        """Percentage of the saved bytes that were freed on the GPU."""
        return 100 * self.freed_bytes / self.saved_bytes if self.saved_bytes else 0.0

    @property
    def freed_bytes_per_forward(self) -> float:
        """Bytes per forward that were free on the GPU until its backward."""
        return self.freed_bytes / max(1, self.forwards)

    def __str__(self) -> str:
        """Return the last log line of a run."""
        saved_bytes, freed_bytes = self.saved_bytes / max(1, self.forwards), self.freed_bytes_per_forward
        return (
            f"{self.forwards} forwards: of {format_bytes(saved_bytes)} that the regions of one saved, "
            f"{format_bytes(freed_bytes)} ({self.percent:.1f}%) were freed until backward; at most "
            f"{format_bytes(self.host_peak_bytes)} of host memory in use"
        )


@dataclasses.dataclass(slots=True)
class TagUse:
    """Counts of a tag's runs that only the handle knows."""

    shadowed: int = 0
    """Number of runs below foreign saved-tensor hooks, or where hooks are not allowed. A region does nothing there."""
    shadow: str = ""
    """Place of the first shadowed run, as the end of a sentence. The hook itself is not kept, since it may hold tensors."""
    recomputed: int = 0
    """Number of runs in a backward."""
    hidden: int = 0
    """Number of runs in which foreign hooks took all saved tensors."""


def explain_idle(tag: str, stats: TagStats | None, use: TagUse) -> str | None:
    """Return why `tag` offloaded nothing and what to do. None if it offloaded something."""
    if stats is not None and stats.d2h_bytes + stats.shared_bytes > 0:
        return None
    return f"tag {tag!r} offloaded nothing: {_find_reason(stats, use)}"


def _find_reason(stats: TagStats | None, use: TagUse) -> str:
    if stats is None or not (stats.groups or stats.saved_tensors):
        return _find_reason_to_be_inert(use)
    if not stats.saved_tensors:
        if use.hidden:
            return (
                f"saved-tensor hooks inside its regions take precedence and receive all tensors. {_SAVES_ON_CPU} Switch that "
                "off, or leave the tag out."
            )
        return "autograd saved nothing inside: nothing there has a gradient, or it is recomputed. Leave the tag out."
    if stats.kept_bytes:
        return f"everything stayed on the device. {_list_kept(stats.kept_bytes.items())}. Change that, or leave the tag out."
    if stats.dropped_storages:
        return (
            "backward used all tensors before they could be offloaded. A block offloads a group once it has saved "
            "`group_bytes`: give fewer, or end the block before backward."
        )
    return "autograd saved only parameters, which stay on the device. Leave the tag out."


def _find_reason_to_be_inert(use: TagUse) -> str:
    if use.shadowed:
        return (
            f"its regions ran {use.shadowed} times {use.shadow} Put the region around that, switch it off, or leave the tag "
            "out."
        )
    if use.recomputed:
        return (
            f"its regions ran without gradients, and {use.recomputed} times in a backward: they are inside a reentrant "
            "checkpoint. Select a module around the checkpoint, switch it off, or leave the tag out."
        )
    return "none of its regions ran in a forward with gradients. Leave the tag out."


def say_where(hook: Any) -> str:
    """Describe the place below the foreign `hook` or, without one, the place where hooks are not allowed."""
    if hook is None:
        return "where saved-tensor hooks are not allowed, as inside `torch.func` and `torch.jit.trace`."
    name = getattr(hook, "__qualname__", type(hook).__qualname__).split(".")[0]
    where = f"below other saved-tensor hooks, which take precedence: `{getattr(hook, '__module__', '')}.{name}`."
    return f"{where} {_SAVES_ON_CPU}" if name == "save_on_cpu" else where


_SAVES_ON_CPU = (
    "`torch.autograd.graph.save_on_cpu` has such hooks; transformers' `offload=True` for checkpoints and accelerate's "
    "`fsdp_activation_checkpointing_offload` use it."
)


def _list_kept(kept: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{format_bytes(size_bytes)}: {reason}" for reason, size_bytes in kept)
