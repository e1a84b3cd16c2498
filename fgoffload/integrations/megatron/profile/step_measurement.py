"""Measures a step of a training that runs through Megatron-Core's schedules: what each rank of a profile says.

A measurement is given to the integration before the model's first forward, so that every tag has its sites. While a step is
recorded nothing leaves and nothing runs again, and the step computes the bits that it computes without offload.
"""

import contextlib
import enum
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fgoffload.engine import ActivationLedger, Device, Lane, Region
from fgoffload.engine.device import Event
from fgoffload.errors import StateError
from fgoffload.integrations.megatron.adapter.grouped_linears import is_quantized
from fgoffload.integrations.megatron.adapter.layer_numbers import get_number
from fgoffload.integrations.megatron.adapter.schedule_call import ScheduleCall
from fgoffload.integrations.megatron.adapter.sites import is_sequential
from fgoffload.integrations.megatron.host_waits.waits import has_held_wait
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.patches import Patches
from fgoffload.integrations.megatron.profile.device_memory import count_parameter_bytes, find_device_memory
from fgoffload.integrations.megatron.profile.measured_layers import build_chunk
from fgoffload.integrations.megatron.profile.measured_units import LayerFacts, list_watched, watch_units
from fgoffload.integrations.megatron.profile.recorder import StepRecorder
from fgoffload.integrations.megatron.profile.token_gathers import TokenGathers
from fgoffload.integrations.megatron.recompute import layer_recompute
from fgoffload.integrations.megatron.recompute.layer_inputs import LayerInputs
from fgoffload.plan import OffloadPlan, Site
from fgoffload.planner.ranks.layer_model import HostWait
from fgoffload.planner.ranks.rank_model import ChunkModel
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.timing.profile import RankProfile


class MeasurementState(enum.Enum):
    """How far a measurement has come."""

    IDLE = enum.auto()  # steps are not looked at
    WANTED = enum.auto()  # the next step is recorded
    RECORDING = enum.auto()  # between the beginning and the end of a schedule
    RECORDED = enum.auto()  # a schedule is over, and its profile can be taken


class StepMeasurement:
    """Measures the steps that it is asked for, and has others run by plans.

    Args:
        device: Where the model lives.
        min_offloaded_numel: Elements. What is smaller will stay, whatever a plan says.
        use_plan: Lets the integration offload by a plan.
        observers: Are told of what a recorded step saves and takes, as those of an engine are.
    """

    def __init__(
        self,
        device: Device,
        *,
        min_offloaded_numel: int,
        use_plan: Callable[[OffloadPlan], None],
        observers: Sequence[ActivationLedger] = (),
    ) -> None:
        self._use_plan = use_plan
        self._layers: dict[tuple[int, int], tuple[weakref.ref[Any], LayerInputs]] = {}
        self._switches = Patches()
        """Recomputed units of the plan in use."""
        self._observers = observers
        self._device = device
        self._gathers = TokenGathers(device)
        self._min_offloaded_numel = min_offloaded_numel
        self._memory = find_device_memory(device.type)
        self.state = MeasurementState.IDLE
        self.call: ScheduleCall | None = None
        """Of the schedule that was recorded last."""
        self._recorder: StepRecorder | None = None
        """Of the step that is recorded, or was and waits for its profile to be taken."""
        self._facts: dict[tuple[int, int], LayerFacts] = {}
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._hooks: list[Any] = []
        self._config: Any = None
        self._started: Event = None
        self._ended: Event = None

    def request(self) -> None:
        """Record the next step."""
        self.state = MeasurementState.WANTED

    def close(self) -> None:
        """Take everything out of the model. A second call does nothing."""
        self._switches.remove()
        self.stop_watching()

    def stop_watching(self) -> None:
        """Measure no more: what times the parts of a layer is gone, and steps by plans take what they take without."""
        while self._hooks:
            self._hooks.pop().remove()
        self.forget()

    def forget(self) -> None:
        """Drop what is being recorded or was, and look at no step until the next request."""
        self._recorder = None
        self.state = MeasurementState.IDLE

    def apply(self, plan: OffloadPlan) -> None:
        """Offload by `plan` from now on, and let run again what it says. No forward is under way."""
        self._switches.remove()
        self._use_plan(plan)
        for (chunk, number), (reference, inputs) in self._layers.items():
            layer = reference()
            actions = plan.list_layer(chunk, number)
            for unit in (name for name, action in actions.items() if action.recomputes and layer is not None):
                layer_recompute.switch_on(self._switches, inputs, layer, unit)

    # What the integration tells.

    @property
    def is_recording(self) -> bool:
        """Return whether a step is being recorded."""
        return self.state is MeasurementState.RECORDING

    def prepare_layer(self, layer: Any, chunk: int, tags: tuple[str, ...], inputs: LayerInputs) -> None:
        """Learn what a layer has, and watch what of it could run again."""
        units = layer_recompute.find_units(layer)
        watched = list_watched(layer, units)
        number = get_number(layer)
        self._layers[chunk, number] = (weakref.ref(layer), inputs)
        self._facts[chunk, number] = LayerFacts(
            chunk=chunk,
            number=number,
            kind="dense" if getattr(layer.mlp, "experts", None) is None else "moe",
            tags=tags,
            units=units,
            watched=tuple(watched),
            wait=_find_wait(layer),
            is_quantized=is_quantized(layer.config),
            has_experts_in_turn=is_sequential(getattr(layer.mlp, "experts", None)),
        )
        self._config = layer.config
        self._hooks += watch_units(lambda: self._recorder, watched)

    def begin_step(self, call: ScheduleCall) -> None:
        """A schedule begins."""
        # One that is recorded still has raised: what it left is no step.
        if self.state in (MeasurementState.WANTED, MeasurementState.RECORDING):
            self.call = call
            self._recorder = StepRecorder(self._device, memory=self._memory, observers=self._observers)
            self._started = self._mark()
            self.state = MeasurementState.RECORDING

    def finish_step(self) -> None:
        """A schedule is over."""
        if self.state is MeasurementState.RECORDING:
            self._ended = self._mark()
            self.state = MeasurementState.RECORDED

    def watch_model(self, model: torch.nn.Module, chunk: int) -> contextlib.AbstractContextManager[None]:
        """Return a context for the forward of a model chunk."""
        self._models.add(model)
        if self._recorder is None or not self.is_recording:
            return contextlib.nullcontext()
        return self._recorder.model(chunk)

    def find_layer(
        self, lane: Lane, chunk: int, number: int, hidden: torch.Tensor
    ) -> contextlib.AbstractContextManager[None] | None:
        """Return a context for the forward of a layer with the input `hidden`, or None where no step is recorded."""
        return None if self._recorder is None else self._recorder.layer(chunk, number, hidden)

    def find_region(self, site: Site, lane: Lane) -> Region | None:
        """Return a region of the step that is recorded, for a site in the layer that forward is in."""
        return None if self._recorder is None else self._recorder.find_region(site, lane)

    def apart(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for what is not the model's own: nothing that is recorded takes longer by it."""
        return self._recorder.apart() if self._recorder is not None and self.is_recording else contextlib.nullcontext()

    # What comes of it.

    def take_profile(self) -> RankProfile:
        """Return what the recorded step ran, and forget its records. The host blocks until the step is done.

        What is on the device now counts as always there: call it when the graphs of the step are gone.

        Raises:
            StateError: No step was recorded since the last call.
        """
        recorder = self._recorder
        if self.state is not MeasurementState.RECORDED or recorder is None or self.call is None:
            raise StateError("no step was recorded. Call `request`, and run a step through Megatron's schedules.")
        now = self._mark()
        self._device.synchronize(now)
        profile = RankProfile(
            rank=self._get_rank(),
            pipeline=self._find_pipeline(self.call),
            chunks=self._build_chunks(recorder),
            static_bytes=self._count_bytes(),
            peak_bytes=None if self._memory is None else self._memory.take_peak(),
            step_s=self._device.measure_seconds(self._started, now) - recorder.measure_seconds(recorder.stalls),
            step_end_s=self._device.measure_seconds(self._ended, now),
            min_offloaded_numel=self._min_offloaded_numel,
        )
        self._recorder = None
        self.state = MeasurementState.IDLE
        return profile

    def _get_rank(self) -> int:
        """Return the number of this process's pipeline rank."""
        return int(load_module("megatron.core.parallel_state").get_pipeline_model_parallel_rank())

    def _count_bytes(self) -> int:
        """Return the device bytes now; where nobody counts, those of parameters and gradients."""
        return count_parameter_bytes(self._models) if self._memory is None else self._memory.read().allocated_bytes

    def _build_chunks(self, recorder: StepRecorder) -> tuple[ChunkModel, ...]:
        facts = {number: [self._facts[key] for key in sorted(self._facts) if key[0] == number] for number, _ in self._facts}
        return tuple(build_chunk(recorder, number, facts[number], self._gathers.measure_seconds) for number in sorted(facts))

    def _find_pipeline(self, call: ScheduleCall) -> Pipeline:
        state = load_module("megatron.core.parallel_state")
        stages = int(state.get_pipeline_model_parallel_world_size())
        chunks = int(state.get_virtual_pipeline_model_parallel_world_size() or 1)
        group_size = getattr(self._config, "microbatch_group_size_per_vp_stage", None) if chunks > 1 else None
        return Pipeline(microbatches=call.microbatches, stages=stages, chunks=chunks, group_size=group_size)

    def _mark(self) -> Event:
        return self._device.record_event(self._device.current_stream(), is_timed=True)


def _find_wait(layer: Any) -> HostWait | None:
    """Return what the host waits for in the forward of a layer, with the remedies that this integration has for it."""
    if getattr(layer.mlp, "token_dispatcher", None) is None:
        return None
    return HostWait.HOLD if has_held_wait(layer) else HostWait.KERNEL
