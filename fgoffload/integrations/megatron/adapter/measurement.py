"""Size of a step, and protocol for measuring the integration's steps."""

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from fgoffload.engine import Lane, Region
from fgoffload.plan import Site


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCall:
    """Size of one step, from its schedule's arguments. All ranks pass the same."""

    microbatches: int
    """Microbatches per step on each data-parallel rank."""
    tokens: int
    """Maximum tokens per microbatch: sequence length times sequences."""

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> "ScheduleCall":
        """Return the call from a schedule's keyword arguments. Megatron-Core's schedules take no positional ones.

        Source: `forward_backward_no_pipelining` and the other schedules, megatron-core 0.16.1.
        """
        return cls(
            microbatches=int(arguments.get("num_microbatches", 1)),
            tokens=int(arguments.get("seq_length", 1)) * int(arguments.get("micro_batch_size", 1)),
        )

    def is_within(self, other: "ScheduleCall") -> bool:
        """Return whether the step has no more and no larger microbatches than `other`."""
        return self.microbatches <= other.microbatches and self.tokens <= other.tokens

    def __str__(self) -> str:
        """Return both numbers as text for logs."""
        return f"{self.microbatches} microbatches of {self.tokens} tokens"


class Measurement(Protocol):
    """Measures steps, in which nothing is offloaded. Implemented in `profile.step_measurement`."""

    @property
    def is_recording(self) -> bool:
        """Return whether a step is being recorded."""

    def close(self) -> None:
        """Remove all hooks and patches from the model."""

    def prepare_layer(self, layer: Any, chunk: int, inputs: Any) -> None:
        """Record the facts of `layer` in model chunk `chunk`, and `inputs` for checkpoints around it."""

    def begin_step(self, call: ScheduleCall) -> None:
        """Start recording when a schedule begins, if its step is to be measured."""

    def finish_step(self) -> None:
        """Stop recording when a schedule ends."""

    def watch_model(self, model: torch.nn.Module, chunk: int) -> AbstractContextManager[object]:
        """Return a context for the forward of a model chunk."""

    def find_layer(self, lane: Lane, chunk: int, number: int, hidden: torch.Tensor) -> AbstractContextManager[object]:
        """Return a context for the forward of a layer with the input `hidden`, while a step is recorded."""

    def find_region(self, site: Site, lane: Lane) -> Region | None:
        """Return a region of the recorded step, for a site in the layer that forward is in."""

    def apart(self) -> AbstractContextManager[object]:
        """Return a context for work outside the model."""
