"""Results of steps, and the first difference between two trainings."""

import dataclasses
import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Losses and gradients of one step."""

    losses: tuple[float, ...]
    """Losses of the microbatches, in order."""
    gradient_digests: Mapping[str, str]
    """Digest of all bits of each gradient, by parameter name."""
    seconds: float
    """Seconds from the start of the step until the device finished it."""
    loss_names: tuple[str, ...] = ()
    """Names of the losses; empty if the number of the microbatch is the name."""

    @property
    def loss(self) -> float:
        """The mean loss over the microbatches; NaN without losses, as on all pipeline stages but the last."""
        return statistics.fmean(self.losses) if self.losses else math.nan

    @property
    def digest(self) -> str:
        """A digest of all bits of the losses and the gradients. Bitwise identical steps have equal digests."""
        values = [
            *(loss.hex() for loss in self.losses),
            *(f"{name} {one}" for name, one in sorted(self.gradient_digests.items())),
        ]
        return hashlib.sha256("\n".join(values).encode()).hexdigest()

    def name_loss(self, index: int) -> str:
        """Return the name of the loss at `index` for messages."""
        return self.loss_names[index] if self.loss_names else f"microbatch {index + 1}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where two trainings differ bitwise."""

    step: int
    """Number of the step, from 1."""
    what: str
    """Name of the parameter whose gradient differs, or of the microbatch whose loss differs."""


def find_loss_difference(before: Sequence[StepRecord], after: Sequence[StepRecord]) -> Difference | None:
    """Return the first loss that differs, or None."""
    for number, (one, other) in enumerate(zip(before, after, strict=True), start=1):
        if len(one.losses) != len(other.losses):
            return Difference(step=number, what=f"{len(one.losses)} and {len(other.losses)} losses")
        for index, (first, second) in enumerate(zip(one.losses, other.losses, strict=True)):
            # Compare hex forms: for `==`, -0.0 equals 0.0, and a NaN differs from itself.
            if first.hex() != second.hex():
                return Difference(step=number, what=one.name_loss(index))
    return None


def find_gradient_difference(before: Sequence[StepRecord], after: Sequence[StepRecord]) -> Difference | None:
    """Return the first gradient, in parameter order, that differs or exists in only one training, or None."""
    for number, (one, other) in enumerate(zip(before, after, strict=True), start=1):
        for name in dict.fromkeys((*one.gradient_digests, *other.gradient_digests)):
            if one.gradient_digests.get(name) != other.gradient_digests.get(name):
                return Difference(step=number, what=name)
    return None


def merge_steps(steps: Sequence[StepRecord]) -> StepRecord:
    """Merge the records of all ranks for one step. The names of losses and gradients include the rank."""
    if len(steps) == 1:
        return steps[0]
    return StepRecord(
        losses=tuple(loss for step in steps for loss in step.losses),
        loss_names=tuple(
            f"{step.name_loss(index)} of rank {rank}" for rank, step in enumerate(steps) for index in range(len(step.losses))
        ),
        gradient_digests={
            f"{name} of rank {rank}": digest
            for rank, step in enumerate(steps)
            for name, digest in step.gradient_digests.items()
        },
        seconds=max(step.seconds for step in steps),
    )
