"""Summarizes a run in one log line, and explains why a tag offloaded nothing."""

import dataclasses
from typing import Any

from fgoffload.engine import StepStats, TagStats
from fgoffload.engine.stats import KeptReason
from fgoffload.units import format_bytes


@dataclasses.dataclass(slots=True)
class RunTotals:
    """Totals over one or all steps of a handle or block."""

    forwards: int = 0
    """Number of forwards with gradients enabled."""
    d2h_bytes: int = 0
    freed_bytes: int = 0
    """Offloaded bytes that were freed on the GPU. Excludes cancelled offloads and bytes still referenced elsewhere."""
    kept_bytes: int = 0
    host_peak_bytes: int = 0

    def add(self, stats: StepStats, *, forwards: int) -> None:
        """Add the statistics of one step, in which `forwards` forwards ran."""
        self.forwards += forwards
        self.host_peak_bytes = max(self.host_peak_bytes, stats.host_peak_bytes)
        for tag in stats.tags.values():
            self.d2h_bytes += tag.d2h_bytes
            self.freed_bytes += max(0, tag.d2h_bytes - tag.recalled_bytes - tag.held_elsewhere_bytes)
            self.kept_bytes += sum(tag.kept_bytes.values())

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd saved in the regions, excluding parameters."""
        return self.d2h_bytes + self.kept_bytes

    @property
    def percent(self) -> float:
        """Percentage of the saved bytes that were freed on the GPU."""
        return 100 * self.freed_bytes / self.saved_bytes if self.saved_bytes else 0.0

    @property
    def freed_bytes_per_forward(self) -> float:
        """Average GPU bytes freed per forward. Backward reloads them."""
        return self.freed_bytes / max(1, self.forwards)

    def __str__(self) -> str:
        """Return the totals as text, for the log line at the end of a run."""
        forwards = "1 forward" if self.forwards == 1 else f"{self.forwards} forwards"
        return (
            f"{forwards}. Average per forward: {format_bytes(self.saved_bytes / max(1, self.forwards))} saved in the regions, "
            f"{format_bytes(self.freed_bytes_per_forward)} ({self.percent:.1f}%) of that freed until backward. "
            f"Peak host memory: {format_bytes(self.host_peak_bytes)}."
        )


def explain_idle(tag: str, stats: TagStats | None, inert: str) -> str | None:
    """Return why `tag` offloaded nothing, with a fix. Return None if it offloaded something.

    `inert` is the result of `explain_inert` if the tag's regions did nothing, and empty otherwise.
    """
    if stats is not None and stats.d2h_bytes + stats.shared_bytes > 0:
        return None
    fix = "Fix the cause"
    if stats is None or not (stats.groups or stats.saved_tensors):
        reason = inert or "none of its regions ran in a forward with gradients."
    elif not stats.saved_tensors:
        reason = (
            "autograd saved nothing in its regions. Either no tensor there requires a gradient, or the ops are recomputed, or "
            "other saved-tensor hooks inside a region, such as `torch.autograd.graph.save_on_cpu`, take the tensors."
        )
    elif stats.kept_bytes:
        if KeptReason.TOO_SMALL.value in stats.kept_bytes:
            fix = "Lower `min_offloaded_bytes` in config=TransferConfig(...), which OffloadCallback also accepts"
        kept = ", ".join(f"{format_bytes(size_bytes)}: {why}" for why, size_bytes in stats.kept_bytes.items())
        reason = f"everything stayed on the device ({kept})."
    elif stats.dropped_storages:
        reason = (
            "backward used all tensors before they could be offloaded. A block offloads a group once it has saved "
            "`group_bytes`: use a smaller value, or end the block before backward."
        )
    else:
        reason = "autograd saved only parameters, which stay on the device."
    return f"tag {tag!r} offloaded nothing: {reason} {fix}, or omit the tag."


def explain_inert(hook: Any, *, is_in_backward: bool) -> str:
    """Return why a region does nothing: it runs in backward, hooks are not allowed, or another library's `hook` is active."""
    if is_in_backward:
        return "its regions ran in a backward: they are inside a reentrant checkpoint. Select a module around the checkpoint."
    if hook is None:
        return "its regions ran where saved-tensor hooks are not allowed, for example inside `torch.func` or `torch.jit.trace`."
    name = getattr(hook, "__qualname__", type(hook).__qualname__).split(".")[0]
    return f"its regions ran under other saved-tensor hooks, which take precedence: `{getattr(hook, '__module__', '')}.{name}`."
