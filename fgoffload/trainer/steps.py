"""Results of training steps, and a comparison of the steps of two training runs."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Results of one step, on this rank or merged over all ranks."""

    step: int = 0
    """Number of the step, counted from 0."""
    losses: tuple[float, ...]
    """Mean loss of each microbatch, in order. Empty on all pipeline stages except the last."""
    gradient_digests: Mapping[str, str]
    """SHA-256 of each reduced gradient's bytes, keyed by chunk and parameter name. Empty if not requested."""
    seconds: float
    """Seconds from the start of forward until the device has finished the optimizer step, excluding the digests."""

    @property
    def loss(self) -> float:
        """Mean loss over the microbatches, or NaN without losses."""
        return statistics.fmean(self.losses) if self.losses else math.nan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """First step, counted from 1, in which two training runs differ, and the microbatch or parameter that differs."""

    step: int
    what: str


def find_differences(before: Sequence[StepResult], after: Sequence[StepResult]) -> dict[str, Difference]:
    """Return the first differences under the keys `losses` and `gradients`. Bitwise identical training runs have none."""
    found: dict[str, Difference] = {}
    for number, (one, other) in enumerate(zip(before, after, strict=True), start=1):
        for what, name in (("losses", _find_loss(one, other)), ("gradients", _find_gradient(one, other))):
            if name is not None:
                found.setdefault(what, Difference(step=number, what=name))
    return found


def _find_loss(one: StepResult, other: StepResult) -> str | None:
    if len(one.losses) != len(other.losses):
        return f"{len(one.losses)} and {len(other.losses)} losses"
    # Compare hex strings, because `==` treats -0.0 as equal to 0.0, and NaN as different from itself.
    pairs = enumerate(zip(one.losses, other.losses, strict=True))
    return next((f"microbatch {index + 1}" for index, (first, second) in pairs if first.hex() != second.hex()), None)


def _find_gradient(one: StepResult, other: StepResult) -> str | None:
    """Return the name of the first gradient, in parameter order, that differs or exists in only one step."""
    names = dict.fromkeys((*one.gradient_digests, *other.gradient_digests))
    return next((name for name in names if one.gradient_digests.get(name) != other.gradient_digests.get(name)), None)


def merge_steps(steps: Sequence[StepResult]) -> StepResult:
    """Merge the results of all ranks for one step. Losses are in rank order, and the names of gradients include the rank."""
    if len(steps) == 1:
        return steps[0]
    return StepResult(
        step=steps[0].step,
        losses=tuple(loss for step in steps for loss in step.losses),
        gradient_digests={
            f"{name} of rank {rank}": digest
            for rank, step in enumerate(steps)
            for name, digest in step.gradient_digests.items()
        },
        seconds=max(step.seconds for step in steps),
    )
