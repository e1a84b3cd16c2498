"""Protocol for measuring the integration's steps."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from fgoffload.engine import Lane, Region
from fgoffload.integrations.megatron.adapter.schedule_call import ScheduleCall
from fgoffload.plan import Site


class Measurement(Protocol):
    """Measures steps, in which nothing is offloaded. Implemented in `profile.step_measurement`."""

    @property
    def is_recording(self) -> bool:
        """Return whether a step is being recorded."""

    def close(self) -> None:
        """Remove all hooks and patches from the model."""

    def prepare_layer(self, layer: Any, chunk: int, tags: tuple[str, ...], inputs: Any) -> None:
        """Record the facts of `layer` in model chunk `chunk`: its sites of `tags`, and `inputs` for checkpoints around it."""

    def begin_step(self, call: ScheduleCall) -> None:
        """Start recording when a schedule begins, if its step is to be measured."""

    def finish_step(self) -> None:
        """Stop recording when a schedule ends."""

    def watch_model(self, model: torch.nn.Module, chunk: int) -> AbstractContextManager[object]:
        """Return a context for the forward of a model chunk."""

    def find_layer(self, lane: Lane, chunk: int, number: int, hidden: torch.Tensor) -> AbstractContextManager[object] | None:
        """Return a context for the forward of a layer with the input `hidden`, or None if no step is recorded."""

    def find_region(self, site: Site, lane: Lane) -> Region | None:
        """Return a region of the recorded step, for a site in the layer that forward is in."""

    def apart(self) -> AbstractContextManager[object]:
        """Return a context for work outside the model."""
