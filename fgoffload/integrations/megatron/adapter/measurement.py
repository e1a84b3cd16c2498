"""Reads the size of a step from the arguments of Megatron's schedules."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCall:
    """Number and size of a step's microbatches, which are the same on all ranks."""

    microbatches: int
    """Microbatches per step on each data-parallel rank."""
    tokens: int
    """Maximum tokens per microbatch: sequence length times microbatch size."""

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> "ScheduleCall":
        """Return the step size from a schedule's arguments. Megatron-Core's schedules take only keyword arguments.

        Source: `forward_backward_no_pipelining` and the other schedules, megatron-core 0.16.1.
        """
        return cls(
            microbatches=int(arguments.get("num_microbatches", 1)),
            tokens=int(arguments.get("seq_length", 1)) * int(arguments.get("micro_batch_size", 1)),
        )

    def is_within(self, other: "ScheduleCall") -> bool:
        """Return whether this step has at most as many microbatches as `other`, and no larger microbatches."""
        return self.microbatches <= other.microbatches and self.tokens <= other.tokens

    def __str__(self) -> str:
        return f"{self.microbatches} microbatches of {self.tokens} tokens"
