"""What a run came to, in one line, and which tags came to nothing, with the reason."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from fgoffload.engine import StepStats, TagStats
from fgoffload.units import format_bytes


@dataclasses.dataclass(slots=True)
class RunTotals:
    """The numbers of one step of a handle, or of all of them."""

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

    @property
    def percent(self) -> float:
        """Of what the regions saved, what was gone from the device."""
        return 100 * self.freed_bytes / self.saved_bytes if self.saved_bytes else 0.0

    @property
    def freed_bytes_per_forward(self) -> float:
        """Bytes that were gone from the device between a forward and its backward."""
        return self.freed_bytes / max(1, self.forwards)

    def __str__(self) -> str:
        """Return the line that ends a run."""
        saved_bytes, freed_bytes = self.saved_bytes / max(1, self.forwards), self.freed_bytes_per_forward
        return (
            f"{self.forwards} forwards: of {format_bytes(saved_bytes)} that the regions of one saved, "
            f"{format_bytes(freed_bytes)} ({self.percent:.1f}%) were gone from the device until backward; at most "
            f"{format_bytes(self.host_peak_bytes)} of host memory in use"
        )


@dataclasses.dataclass(slots=True)
class TagUse:
    """What a handle saw of one tag, which the engine does not know."""

    shadowed: int = 0
    """Executions below saved-tensor hooks of somebody else, where a region does nothing, or where none are allowed."""
    shadow: str = ""
    """Where the first of these was, as the end of a sentence. The hook itself is not kept: it may hold tensors."""
    recomputed: int = 0
    """Executions in a backward."""
    hidden: int = 0
    """Executions in which hooks of somebody else took all that was saved."""

    @property
    def was_inert(self) -> bool:
        """Whether regions ran where they have to leave everything alone."""
        return self.shadowed > 0 or self.recomputed > 0


def explain_idle(tag: str, stats: TagStats | None, use: TagUse) -> str | None:
    """Return why `tag` moved nothing, and what to do, or None where it moved something."""
    if stats is not None and stats.d2h_bytes + stats.shared_bytes > 0:
        return None
    return f"tag {tag!r} moved nothing: {_find_reason(stats, use)}"


def _find_reason(stats: TagStats | None, use: TagUse) -> str:
    if stats is None or not (stats.groups or stats.saved_tensors):
        return _find_reason_to_be_inert(use)
    if not stats.saved_tensors:
        if use.hidden:
            return (
                f"saved-tensor hooks inside of its regions have precedence, and take all that is saved there. {_SAVES_ON_CPU} "
                "Turn that off, or leave the tag out."
            )
        return "autograd saved nothing inside: nothing there has a gradient, or a recompute saves for it. Leave the tag out."
    if stats.kept_bytes:
        return f"all stayed. {_list_kept(stats.kept_bytes.items())}. Change that, or leave the tag out."
    if stats.dropped_storages:
        return (
            "backward had taken all of it before it could leave. A block lets a group leave that has saved `group_bytes`: give "
            "fewer, or leave the block before backward."
        )
    return "autograd saved parameters alone, and these stay. Leave the tag out."


def _find_reason_to_be_inert(use: TagUse) -> str:
    if use.shadowed:
        return (
            f"its regions ran {use.shadowed} times {use.shadow} Put the region around that, turn it off, or leave the tag out."
        )
    if use.recomputed:
        return (
            f"its regions ran without gradients, and {use.recomputed} times in a backward: they are inside of a reentrant "
            "checkpoint. Name a module around the checkpoint, turn it off, or leave the tag out."
        )
    return "no region of it ran in a forward with gradients. Leave the tag out."


def say_where(hook: Any) -> str:
    """Return where saved tensors go to `hook` of somebody else, or, without one, where no hooks are allowed."""
    if hook is None:
        return "where no saved-tensor hooks are allowed, as inside of `torch.func` and `torch.jit.trace`."
    name = getattr(hook, "__qualname__", type(hook).__qualname__).split(".")[0]
    where = f"below saved-tensor hooks of somebody else, which have precedence: `{getattr(hook, '__module__', '')}.{name}`."
    return f"{where} {_SAVES_ON_CPU}" if name == "save_on_cpu" else where


_SAVES_ON_CPU = (
    "`torch.autograd.graph.save_on_cpu` has such hooks, and with it transformers' `offload=True` for checkpoints and "
    "accelerate's `fsdp_activation_checkpointing_offload`."
)


def _list_kept(kept: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{format_bytes(size_bytes)}: {reason}" for reason, size_bytes in kept)
