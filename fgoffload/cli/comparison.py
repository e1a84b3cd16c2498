"""Measurements of a training, and the comparison of two. Nothing is printed here."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from fgoffload.benchmark.steps import (
    Difference,
    StepRecord,
    find_gradient_difference,
    find_loss_difference,
    merge_steps,
)


@dataclasses.dataclass(frozen=True, slots=True)
class MemorySample:
    """The activation bytes on the device at one point of the measured step."""

    position: int
    """Number of tensors that autograd had saved or unpacked by then. It is the same in every run."""
    resident_bytes: int
    """Bytes of storages that autograd holds, without parameters."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TagTransfer:
    """Bytes that one tag moved in the measured step."""

    d2h_bytes: int
    """Bytes offloaded."""
    h2d_bytes: int
    """Bytes reloaded."""
    kept_bytes: Mapping[str, int]
    """Bytes saved under the tag that stayed on the device, by reason."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """The engine's statistics of the measured step."""

    tags: Mapping[str, TagTransfer]
    host_peak_bytes: int
    """Peak host bytes of the training."""
    prefetch_misses: int
    """Storages whose reload started only when backward asked for them."""
    window_waits: int
    """How often compute waited because more bytes than the window were in flight to the host."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Record of one training. Its last step is the measured one."""

    steps: tuple[StepRecord, ...]
    activation_peak_bytes: int
    """Peak activation bytes on the device in the measured step."""
    samples: tuple[MemorySample, ...]
    activation_peak_place: str = ""
    """Place of the peak in the step, as in `layers.3.core_attn mb=2`; empty without an engine."""
    allocator_peak_bytes: int | None = None
    """Peak of the device's allocator, parameters included; None on a CPU."""
    transfers: Transfers | None = None
    """Engine statistics; None without offload."""
    ranks: int = 1
    """Number of processes; see `merge_ranks`."""

    @property
    def timed_steps(self) -> tuple[StepRecord, ...]:
        """The steps whose time counts: all but the first, a warm-up, and the last, which the measurement slows."""
        return self.steps[1:-1]

    def find_step_seconds(self) -> float | None:
        """Return the median time of a step, or None when there were fewer than three steps."""
        return statistics.median(step.seconds for step in self.timed_steps) if self.timed_steps else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The same training without and with offload."""

    without: RunRecord
    """Offload off."""
    with_offload: RunRecord
    """Offload on."""

    @property
    def is_equal(self) -> bool:
        """Whether all losses and all gradients of all steps are bitwise identical."""
        return self.find_loss_difference() is None and self.find_gradient_difference() is None

    @property
    def saved_fraction(self) -> float:
        """The fraction of the activation peak that offload saves; negative if the peak grew."""
        before = self.without.activation_peak_bytes
        return 1 - self.with_offload.activation_peak_bytes / before if before else 0.0

    def find_loss_difference(self) -> Difference | None:
        """Return the first loss that differs, or None."""
        return find_loss_difference(self.without.steps, self.with_offload.steps)

    def find_gradient_difference(self) -> Difference | None:
        """Return the first gradient that differs or that only one training has, or None."""
        return find_gradient_difference(self.without.steps, self.with_offload.steps)


def merge_ranks(records: Sequence[RunRecord]) -> RunRecord:
    """Merge the records of all ranks into one.

    Losses and gradients keep their rank in the name, so that a comparison covers every rank. Memory and time are the maximum
    over ranks; bytes moved, prefetch misses and waits are summed. The memory curve comes from the rank with the highest
    activation peak.
    """
    if len(records) == 1:
        return records[0]
    worst = max(range(len(records)), key=lambda rank: records[rank].activation_peak_bytes)
    place = records[worst].activation_peak_place
    allocated = [record.allocator_peak_bytes for record in records if record.allocator_peak_bytes is not None]
    transfers = [record.transfers for record in records if record.transfers is not None]
    return RunRecord(
        steps=tuple(merge_steps(steps) for steps in zip(*(record.steps for record in records), strict=True)),
        activation_peak_bytes=records[worst].activation_peak_bytes,
        activation_peak_place=f"{place} of rank {worst}" if place else "",
        samples=records[worst].samples,
        allocator_peak_bytes=max(allocated, default=None),
        transfers=_merge_transfers(transfers) if transfers else None,
        ranks=len(records),
    )


def _merge_transfers(transfers: Sequence[Transfers]) -> Transfers:
    names = dict.fromkeys(name for one in transfers for name in one.tags)
    return Transfers(
        tags={name: _merge_tags([one.tags[name] for one in transfers if name in one.tags]) for name in names},
        host_peak_bytes=max(one.host_peak_bytes for one in transfers),
        prefetch_misses=sum(one.prefetch_misses for one in transfers),
        window_waits=sum(one.window_waits for one in transfers),
    )


def _merge_tags(tags: Sequence[TagTransfer]) -> TagTransfer:
    reasons = dict.fromkeys(reason for tag in tags for reason in tag.kept_bytes)
    return TagTransfer(
        d2h_bytes=sum(tag.d2h_bytes for tag in tags),
        h2d_bytes=sum(tag.h2d_bytes for tag in tags),
        kept_bytes={reason: sum(tag.kept_bytes.get(reason, 0) for tag in tags) for reason in reasons},
    )
