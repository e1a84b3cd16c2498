"""Results of a training run, merged over ranks."""

import dataclasses
import statistics
from collections.abc import Sequence

from fgoffload.engine.ledger import LedgerSample
from fgoffload.engine.stats import StepStats, TagStats
from fgoffload.trainer.steps import StepResult, merge_steps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Results of one training run on one rank, or merged from all ranks."""

    steps: tuple[StepResult, ...]
    counted_step: int
    """1-based number of the step whose activation bytes are counted."""
    activation_peak_bytes: int
    """Peak activation bytes on the device in `counted_step`."""
    samples: tuple[LedgerSample, ...]
    """Activation bytes over the course of `counted_step`."""
    activation_peak_place: str = ""
    """Op at which the peak occurs, for example `layers.3.core_attn mb=2`. Empty without an engine."""
    allocator_peak_bytes: int | None = None
    """Peak allocated bytes on the device, including parameters. None on a CPU."""
    stats: StepStats | None = None
    """Engine statistics. None without offload."""
    ranks: int = 1
    """Number of merged ranks."""

    @property
    def timed_steps(self) -> tuple[StepResult, ...]:
        """All steps except the first, a warm-up, and the last, in which activations are counted unless CUDA graphs are used."""
        return self.steps[1:-1]

    def find_step_seconds(self) -> float | None:
        """Return the median time of the timed steps, or None with fewer than three steps."""
        return statistics.median(step.seconds for step in self.timed_steps) if self.timed_steps else None


def merge_ranks(records: Sequence[RunRecord]) -> RunRecord:
    """Merge the records of all ranks into one.

    The record has the losses and gradients of every rank. Memory and time are maxima over ranks. Copied bytes, prefetch
    misses and waits are sums. The memory curve is from the rank with the highest activation peak.
    """
    if len(records) == 1:
        return records[0]
    worst = max(range(len(records)), key=lambda rank: records[rank].activation_peak_bytes)
    place = records[worst].activation_peak_place
    allocated = [record.allocator_peak_bytes for record in records if record.allocator_peak_bytes is not None]
    return dataclasses.replace(
        records[worst],
        steps=tuple(merge_steps(steps) for steps in zip(*(record.steps for record in records), strict=True)),
        activation_peak_place=f"{place} of rank {worst}" if place else "",
        allocator_peak_bytes=max(allocated, default=None),
        stats=_merge_stats([record.stats for record in records if record.stats is not None]),
        ranks=len(records),
    )


def _merge_stats(stats: Sequence[StepStats]) -> StepStats | None:
    if not stats:
        return None
    merged = StepStats(
        window_waits=sum(one.window_waits for one in stats), host_peak_bytes=max(one.host_peak_bytes for one in stats)
    )
    for name, own in (item for one in stats for item in one.tags.items()):
        tag = merged.tags.setdefault(name, TagStats())
        tag.d2h_bytes += own.d2h_bytes
        tag.h2d_bytes += own.h2d_bytes
        tag.prefetch_misses += own.prefetch_misses
        for reason, kept_bytes in own.kept_bytes.items():
            tag.kept_bytes[reason] = tag.kept_bytes.get(reason, 0) + kept_bytes
    return merged
