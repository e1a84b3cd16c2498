"""`--offload-modules auto`: the first step measures, and from the second on a plan for the memory budget applies.

[Note: When a plan is made]
A step is measured with everything kept. When the next schedule begins, the optimizer has all its memory and no activation is
left: what is on the device then is what no plan moves. All processes exchange what they measured; the first one plans and sends
the plan, or why there is none, to the others, so that all do the same or raise the same. A plan is for some microbatches of
some size. All processes call a schedule with the same numbers, so that all know without asking when a step goes beyond: more
microbatches only count more of the same, and the plan is made anew at once; larger ones are measured first.

[Note: A step that does not fit]
A model that needs a budget may not fit while everything is kept. So a layer is kept only as long as the budget has room for it,
with a part in reserve for what is not known yet. Else all its tags are offloaded while it is measured, as far as host memory
allows: its bytes are the same, and its times count only where it was kept in no microbatch. Where that does not fit either, the
first step fails as it would with every tag selected.
"""

import dataclasses
import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from fgoffload.config import OffloadConfig
from fgoffload.engine import Lane, OffloadEngine, Region, Saving
from fgoffload.errors import OffloadError, PlanError
from fgoffload.integrations.link import QUICK_SIZES, measure_link
from fgoffload.integrations.megatron import recompute
from fgoffload.integrations.megatron.layer_inputs import LayerInputs
from fgoffload.integrations.megatron.patches import Patches
from fgoffload.integrations.megatron.profiling import MeasurementState, StepMeasurement
from fgoffload.integrations.megatron.recorder import StepRecorder
from fgoffload.integrations.megatron.schedule_call import ScheduleCall
from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.planner.timing.profile import CPU, LinkProfile, Profile, RankProfile, make_rank_model, merge_processes
from fgoffload.policy import PLANNED_SHARE
from fgoffload.units import format_bytes, format_ms

logger = logging.getLogger(__name__)

KEPT_PART = 0.8
"""Of the budget, that a measured step may fill before layers leave: the rest is for the loss, for gradients of activations and
for the largest layer's temporary tensors, of which nothing is known yet."""

_NOTHING = OffloadPlan(actions={})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """What one process measured."""

    rank: RankProfile
    link: LinkProfile
    host_budget_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """The plan in use, and what is expected of it."""

    plan: OffloadPlan
    """For all ranks."""
    call: ScheduleCall
    """The largest step that it is for."""
    peak_bytes: int
    """Device bytes at the worst moment of the worst rank."""
    step_s: float
    """Of the step."""


class AutoOffload(StepMeasurement):
    """Measures, plans, and has the plan applied.

    Args:
        config: With the budget.
        engine: Offloads what does not fit while a step is measured.
        use_plan: Lets the integration offload by a plan.
    """

    def __init__(self, config: OffloadConfig, engine: OffloadEngine, *, use_plan: Callable[[OffloadPlan], None]) -> None:
        super().__init__(engine.device, min_offloaded_numel=config.min_offloaded_tensor_size, observers=engine.observers)
        self._budget_bytes = config.offload_memory_budget_bytes or 0
        self._policy = config.transfer_policy
        self._engine = engine
        self._use_plan = use_plan
        self.planned: PlannedStep | None = None
        """None before the first plan, and while a step is measured for another."""
        self._measured: list[_Measured] = []
        """Of all processes, of the last step that was measured."""
        self._measured_call: ScheduleCall | None = None
        self._link: LinkProfile | None = None
        self._layers: dict[tuple[int, int], tuple[weakref.ref[Any], LayerInputs]] = {}
        self._switches = Patches()
        """What runs again, by the plan in use."""
        self._kept_bytes = 0
        """Of parameters and gradients, where nobody counts device bytes."""
        self._is_leaving = False
        """Whether the layer that forward is in is offloaded while it is measured."""
        self.request()

    def close(self) -> None:  # noqa: D102
        self._switches.remove()
        super().close()

    def prepare_layer(self, layer: Any, chunk: int, tags: tuple[str, ...], inputs: LayerInputs) -> None:  # noqa: D102
        super().prepare_layer(layer, chunk, tags, inputs)
        self._layers[chunk, int(layer.layer_number) - 1] = (weakref.ref(layer), inputs)

    def begin_step(self, call: ScheduleCall) -> None:
        """A schedule begins: plan where a step was measured, and plan again where this one goes beyond the plan.

        Raises:
            PlanError: No plan fits the budget; all processes raise alike.
        """
        if self.state is MeasurementState.RECORDED:
            self._measured_call = self.call
            self._exchange()
            self._plan(call)
        elif self.planned is not None and not _is_within(call, self.planned.call):
            logger.info("a step of %s is beyond the plan for %s: planning again", _say(call), _say(self.planned.call))
            self._plan(call)
        if self.state is MeasurementState.WANTED:
            self._kept_bytes = self._count_bytes()
        super().begin_step(call)

    def find_layer(self, lane: Lane, chunk: int, number: int, hidden: torch.Tensor) -> AbstractContextManager[None] | None:
        """Return a context that records a layer, which leaves where there is no room. See [Note: A step that does not fit]."""
        recorder = self._recorder
        self._is_leaving = recorder is not None and not self._has_room(recorder)
        if recorder is None or not self._is_leaving:
            return super().find_layer(lane, chunk, number, hidden)
        watch = self._engine.watch(lane)
        return recorder.layer(chunk, number, hidden, inner=watch if isinstance(watch, Saving) else None)

    def find_region(self, site: Site, lane: Lane) -> Region | None:
        """Return a region of the measured step, with one of the engine inside where the layer leaves."""
        if self._recorder is None or not self._is_leaving:
            return super().find_region(site, lane)
        return self._recorder.find_region(site, lane, inner=self._engine.find_region(site, lane))

    def _has_room(self, recorder: StepRecorder) -> bool:
        now_bytes = self._kept_bytes + recorder.live_bytes if self._memory is None else self._memory.count_allocated()
        return now_bytes + recorder.largest_layer_bytes <= KEPT_PART * self._budget_bytes

    # Planning.

    def _exchange(self) -> None:
        """Learn what all processes have measured."""
        if self._link is None:
            self._link = measure_link(self._device, sizes=QUICK_SIZES)
        own = _Measured(rank=self.take_profile(), link=self._link, host_budget_bytes=self._engine.arena.budget_bytes)
        self._measured = _gather(own)

    def _plan(self, call: ScheduleCall) -> None:
        """Plan for `call`, or have it measured where its microbatches are larger than the measured ones.

        Raises:
            PlanError: No plan fits the budget.
        """
        measured = self._measured_call
        if measured is None or call.tokens > measured.tokens:
            self._apply(_NOTHING)
            self.planned = None
            self.request()
            return
        wanted = ScheduleCall(microbatches=max(call.microbatches, measured.microbatches), tokens=measured.tokens)
        found, failure = None, None
        if _is_first_process():
            try:
                found = self._solve(wanted)
            except Exception as error:  # noqa: BLE001 - whatever it is, the others wait for an answer
                found, failure = f"the first process could not plan: {type(error).__name__}: {error}", error
        planned = _broadcast(found)
        if isinstance(planned, str):
            raise PlanError(planned) from failure
        self.planned = planned
        self._apply(planned.plan)
        logger.info(
            "plan for %s: %d sites are offloaded and %d units run again; %s at peak of %s, %s a step expected",
            _say(wanted),
            planned.plan.count(Action.OFFLOAD) + planned.plan.count(Action.RECOMPUTE_AND_OFFLOAD),
            planned.plan.count(Action.RECOMPUTE) + planned.plan.count(Action.RECOMPUTE_AND_OFFLOAD),
            format_bytes(planned.peak_bytes),
            format_bytes(self._budget_bytes),
            format_ms(planned.step_s),
        )

    def _solve(self, call: ScheduleCall) -> "PlannedStep | str":
        """Return the plan for `call`, or why there is none."""
        # Here: SciPy takes longer to load than all else, and one process plans.
        from fgoffload.planner.solving.solver import solve

        # The slowest link of all: which process of a pipeline rank is late makes no difference to the step.
        link = min((one.link for one in self._measured), key=lambda link: link.copies[-1].d2h_bytes_per_s)
        ranks = merge_processes(one.rank for one in self._measured)
        device = CPU if self._device.type == "cpu" else self._device.type
        profile = Profile(device=device, versions={}, date="", link=link, ranks=ranks)
        host_budget_bytes = min(one.host_budget_bytes for one in self._measured)
        models = [
            make_rank_model(
                profile,
                rank=rank.rank,
                policy=self._policy,
                microbatches=call.microbatches,
                host_budget_bytes=host_budget_bytes,
            )
            for rank in ranks
        ]
        try:
            solution = solve(models, budget_bytes=round(self._budget_bytes * PLANNED_SHARE))
        except OffloadError as error:
            return f"--offload-memory-budget {self._budget_bytes}: {error}"
        return PlannedStep(plan=solution.plan, call=call, peak_bytes=solution.result.peak_bytes, step_s=solution.result.step_s)

    def _apply(self, plan: OffloadPlan) -> None:
        """Offload by `plan` from now on, and let run again what it says. No forward is under way."""
        self._switches.remove()
        self._use_plan(plan)
        for (chunk, number), (reference, inputs) in self._layers.items():
            layer = reference()
            actions = plan.list_layer(chunk, number)
            for unit in (name for name, action in actions.items() if action.recomputes and layer is not None):
                recompute.switch_on(self._switches, inputs, layer, unit)


def _is_within(call: ScheduleCall, planned: ScheduleCall) -> bool:
    return call.microbatches <= planned.microbatches and call.tokens <= planned.tokens


def _say(call: ScheduleCall) -> str:
    return f"{call.microbatches} microbatches of {call.tokens} tokens"


def _is_alone() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


def _is_first_process() -> bool:
    return _is_alone() or torch.distributed.get_rank() == 0


def _gather(own: _Measured) -> list[_Measured]:
    """Return what all processes measured, in their order, on each of them."""
    if _is_alone():
        return [own]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, own)
    return found


def _broadcast(found: "PlannedStep | str | None") -> "PlannedStep | str":
    """Return what the first process found, on all of them."""
    box: list[Any] = [found]
    if not _is_alone():
        torch.distributed.broadcast_object_list(box, src=0)
    planned: PlannedStep | str = box[0]
    return planned
