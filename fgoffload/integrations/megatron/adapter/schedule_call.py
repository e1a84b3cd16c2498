"""What a training asks of one of Megatron-Core's schedules."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCall:
    """One step, as the schedule is called for it. All ranks call it alike."""

    microbatches: int
    """Of the step, on each data-parallel rank."""
    tokens: int
    """Of a microbatch, at most: sequence length times sequences."""

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> "ScheduleCall":
        """Return what the keyword arguments of a schedule say; Megatron-Core's take no others.

        Source: `forward_backward_no_pipelining` and its neighbours, megatron-core 0.16.1.
        """
        return cls(
            microbatches=int(arguments.get("num_microbatches", 1)),
            tokens=int(arguments.get("seq_length", 1)) * int(arguments.get("micro_batch_size", 1)),
        )

    def is_within(self, other: "ScheduleCall") -> bool:
        """Return whether it has no more microbatches than another step, and no larger ones."""
        return self.microbatches <= other.microbatches and self.tokens <= other.tokens

    def __str__(self) -> str:
        """Return both numbers, for a log."""
        return f"{self.microbatches} microbatches of {self.tokens} tokens"
