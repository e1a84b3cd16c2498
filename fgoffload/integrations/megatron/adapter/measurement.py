"""What the integration asks of whoever measures its steps."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from fgoffload.engine import Lane, Region
from fgoffload.integrations.megatron.adapter.schedule_call import ScheduleCall
from fgoffload.plan import Site


class Measurement(Protocol):
    """Measures steps, in which nothing leaves. `profile.step_measurement` has the one there is."""

    @property
    def is_recording(self) -> bool:
        """Return whether a step is being recorded."""

    def close(self) -> None:
        """Take everything out of the model."""

    def prepare_layer(self, layer: Any, chunk: int, tags: tuple[str, ...], inputs: Any) -> None:
        """Learn what `layer` of model chunk `chunk` has: sites of `tags`, and checkpoints around it by `inputs`."""

    def begin_step(self, call: ScheduleCall) -> None:
        """A schedule begins."""

    def finish_step(self) -> None:
        """A schedule is over."""

    def watch_model(self, model: torch.nn.Module, chunk: int) -> AbstractContextManager[object]:
        """Return a context for the forward of a model chunk."""

    def find_layer(self, lane: Lane, chunk: int, number: int, hidden: torch.Tensor) -> AbstractContextManager[object] | None:
        """Return a context for the forward of a layer with the input `hidden`, or None where no step is recorded."""

    def find_region(self, site: Site, lane: Lane) -> Region | None:
        """Return a region of the step that is recorded, for a site in the layer that forward is in."""

    def apart(self) -> AbstractContextManager[object]:
        """Return a context for what is not the model's own."""
