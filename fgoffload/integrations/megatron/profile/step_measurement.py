"""Measures one rank's training step in Megatron-Core's schedules.

A recorded step recomputes nothing, and offloads only layers that exceed `auto`'s budget. Recording does not change results.
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
from fgoffload.integrations.megatron.adapter.layer_numbers import get_number
from fgoffload.integrations.megatron.adapter.measurement import ScheduleCall
from fgoffload.integrations.megatron.adapter.sites import is_quantized, is_sequential
from fgoffload.integrations.megatron.host_waits.waits import has_held_wait
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.patches import Patches
from fgoffload.integrations.megatron.profile.device_memory import count_parameter_bytes, find_device_memory
from fgoffload.integrations.megatron.profile.measured_layers import build_chunk
from fgoffload.integrations.megatron.profile.measured_units import LayerFacts, list_watched, watch_units
from fgoffload.integrations.megatron.profile.recorder import StepRecorder
from fgoffload.integrations.megatron.recompute import layer_recompute
from fgoffload.integrations.megatron.recompute.layer_inputs import LayerInputs
from fgoffload.plan import OffloadPlan, Site
from fgoffload.planner.ranks.layer_model import HostWait
from fgoffload.planner.ranks.rank_model import ChunkModel
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.timing.profile import RankProfile


class MeasurementState(enum.Enum):
    """Progress of a measurement."""

    IDLE = enum.auto()  # no step is recorded
    REQUESTED = enum.auto()  # the next step will be recorded
    RECORDING = enum.auto()  # the schedule of the recorded step is running
    RECORDED = enum.auto()  # the schedule has ended, and `take_profile` can be called


class StepMeasurement:
    """Measures steps on request, and applies plans to later steps by calling `use_plan`.

    Storages with fewer saved elements than `min_offloaded_numel` stay on the GPU under any plan. `observers` count the saves
    and unpacks of a recorded step.
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
        """Patches for recomputing the units of the plan in use."""
        self._observers = observers
        self._device = device
        self._min_offloaded_numel = min_offloaded_numel
        self._memory = find_device_memory(device.type)
        self.state = MeasurementState.IDLE
        self.call: ScheduleCall | None = None
        """Schedule call that runs the recorded step."""
        self._recorder: StepRecorder | None = None
        """Recorder of the step. `take_profile` drops it."""
        self._facts: dict[tuple[int, int], LayerFacts] = {}
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._hooks: list[Any] = []
        self._config: Any = None
        self._started: Event = None
        self._ended: Event = None

    def request(self) -> None:
        """Record the next step."""
        self.state = MeasurementState.REQUESTED

    def close(self) -> None:
        """Remove all hooks and patches from the model."""
        self._switches.remove()
        self.stop_watching()

    def stop_watching(self) -> None:
        """Stop measuring, and remove the layers' hooks, which would slow down later steps."""
        while self._hooks:
            self._hooks.pop().remove()
        self.forget()

    def forget(self) -> None:
        """Drop all records, and stop recording until the next request."""
        self._recorder = None
        self.state = MeasurementState.IDLE

    def apply(self, plan: OffloadPlan) -> None:
        """Offload and recompute according to `plan` from the next forward on. Call this between forwards."""
        self._switches.remove()
        self._use_plan(plan)
        for (chunk, number), (reference, inputs) in self._layers.items():
            layer = reference()
            actions = plan.list_layer(chunk, number)
            for unit in (name for name, action in actions.items() if action.recomputes and layer is not None):
                layer_recompute.switch_on(self._switches, inputs, layer, unit)

    # Called by the integration.

    @property
    def is_recording(self) -> bool:
        """Return whether a step is being recorded."""
        return self.state is MeasurementState.RECORDING

    def prepare_layer(self, layer: Any, chunk: int, inputs: LayerInputs) -> None:
        """Record the properties of a layer, and add hooks to its modules that can be recomputed."""
        units = layer_recompute.find_units(layer)
        watched = list_watched(layer, units)
        number = get_number(layer)
        self._layers[chunk, number] = (weakref.ref(layer), inputs)
        self._facts[chunk, number] = LayerFacts(
            number=number,
            kind="dense" if getattr(layer.mlp, "experts", None) is None else "moe",
            units=units,
            watched=tuple(watched),
            wait=_find_wait(layer),
            is_quantized=is_quantized(layer.config),
            has_sequential_experts=is_sequential(getattr(layer.mlp, "experts", None)),
        )
        self._config = layer.config
        self._hooks += watch_units(lambda: self._recorder, watched)

    def begin_step(self, call: ScheduleCall) -> None:
        """Start recording if a step was requested. Called when a schedule begins."""
        # If the state is RECORDING, the previous step raised an exception. Its incomplete records are dropped.
        if self.state in (MeasurementState.REQUESTED, MeasurementState.RECORDING):
            self.call = call
            self._recorder = StepRecorder(self._device, memory=self._memory, observers=self._observers)
            self._started = self._mark()
            self.state = MeasurementState.RECORDING

    def finish_step(self) -> None:
        """Stop recording. Called when a schedule ends."""
        if self.state is MeasurementState.RECORDING:
            self._ended = self._mark()
            self.state = MeasurementState.RECORDED

    def watch_model(self, model: torch.nn.Module, chunk: int) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that records the forward of a model chunk if a step is being recorded."""
        self._models.add(model)
        if self._recorder is None or not self.is_recording:
            return contextlib.nullcontext()
        return self._recorder.model(chunk)

    def find_layer(self, lane: Lane, chunk: int, number: int, hidden: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that records a layer's forward with the input `hidden` if a step is being recorded."""
        return contextlib.nullcontext() if self._recorder is None else self._recorder.layer(chunk, number, hidden)

    def find_region(self, site: Site, lane: Lane) -> Region | None:
        """Return a region that records a site of the current layer, or None if no step is being recorded."""
        return None if self._recorder is None else self._recorder.find_region(site, lane)

    def apart(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for work outside the model, whose time is not recorded."""
        return self._recorder.apart() if self._recorder is not None and self.is_recording else contextlib.nullcontext()

    # Results.

    def take_profile(self) -> RankProfile:
        """Return the profile of the recorded step and drop its records. The host blocks until the step is done.

        All allocated bytes count as static memory, so call this only after the autograd graphs of the step are freed.

        Raises:
            StateError: No step has been recorded since the last call.
        """
        recorder = self._recorder
        if self.state is not MeasurementState.RECORDED or recorder is None or self.call is None:
            raise StateError("No step was recorded. Call `request`, then run a step with a Megatron schedule.")
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
        return int(load_module("megatron.core.parallel_state").get_pipeline_model_parallel_rank())

    def _count_bytes(self) -> int:
        """Return the allocated bytes or, on a device without counters, the bytes of parameters and gradients."""
        return count_parameter_bytes(self._models) if self._memory is None else self._memory.read().allocated_bytes

    def _build_chunks(self, recorder: StepRecorder) -> tuple[ChunkModel, ...]:
        facts = {number: [self._facts[key] for key in sorted(self._facts) if key[0] == number] for number, _ in self._facts}
        return tuple(build_chunk(recorder, number, facts[number]) for number in sorted(facts))

    def _find_pipeline(self, call: ScheduleCall) -> Pipeline:
        state = load_module("megatron.core.parallel_state")
        stages = int(state.get_pipeline_model_parallel_world_size())
        chunks = int(state.get_virtual_pipeline_model_parallel_world_size() or 1)
        group_size = getattr(self._config, "microbatch_group_size_per_vp_stage", None) if chunks > 1 else None
        return Pipeline(microbatches=call.microbatches, stages=stages, chunks=chunks, group_size=group_size)

    def _mark(self) -> Event:
        return self._device.record_event(self._device.current_stream(), is_timed=True)


def _find_wait(layer: Any) -> HostWait | None:
    """Return how a layer's forward synchronizes on token counts, or None if it does not."""
    if getattr(layer.mlp, "token_dispatcher", None) is None:
        return None
    return HostWait.HOLD if has_held_wait(layer) else HostWait.KERNEL
