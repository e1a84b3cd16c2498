"""`--offload-modules auto`: measures the first step, and applies a plan for the memory budget from the second step on.

[Note: When a plan is made]
One step is measured with all activations on the GPU. When the next schedule begins, the optimizer has allocated its memory and
no activation is left, so the memory in use is static. All processes exchange their measurements. The first process plans and
sends the plan or the error to the others, so that all apply the same plan or raise the same error. A plan holds for one number
and size of microbatches, which are the same on all processes. A step with more microbatches is planned at once. Larger
microbatches are measured first.

[Note: A step that does not fit]
A model that needs a budget may not fit with all activations on the GPU. So a layer stays on the GPU only while the budget has
room for it, with a reserve for unknown memory. All tags of other layers are offloaded during the measurement, as far as host
memory allows. Their bytes are the same, but their times include waits for copies, and count only if no layer of the same kind
in the model chunk stayed on the GPU. If even that does not fit, the first step fails as it would with every tag selected. A
later measurement ([Note: Two plans] in `measured_plans`) must not fail, since a plan that fits is in use. So a simulation finds
how many layers may stay on the GPU, and without such a number the step is not measured.

[Note: A plan that exceeds its prediction]
Temporary memory of operators is measured while other layers are on the GPU than under the plan. So the first step under a plan
is checked. If it exceeded the budget on any rank, the next plan leaves the excess over the prediction free. After `MOST_CHECKS`
such plans the last one is kept, with a warning.
"""

import dataclasses
import logging
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from time import perf_counter

import torch

from fgoffload.config import OffloadConfig
from fgoffload.engine import Lane, OffloadEngine, Region, Saving
from fgoffload.errors import OffloadError, PlanError
from fgoffload.integrations.collectives import ask_first, gather
from fgoffload.integrations.link import QUICK_SIZES, measure_link
from fgoffload.integrations.megatron.adapter.measurement import ScheduleCall
from fgoffload.integrations.megatron.auto.measured_plans import (
    TIMED_STEPS,
    Layers,
    MeasuredStep,
    PlannedStep,
    ProcessMeasurement,
    TriedStep,
)
from fgoffload.integrations.megatron.profile.device_memory import check_static
from fgoffload.integrations.megatron.profile.recorder import StepRecorder
from fgoffload.integrations.megatron.profile.step_measurement import MeasurementState, StepMeasurement
from fgoffload.plan import NOTHING, OffloadPlan, Site
from fgoffload.planner.timing.link_profile import LinkProfile
from fgoffload.planner.tried_plan import Tried, describe_tried
from fgoffload.units import format_bytes

logger = logging.getLogger(__name__)

KEPT_PART = 0.8
"""Part of the budget that the first measured step may fill before it offloads layers. The rest is for temporary memory."""

MOST_CHECKS = 3
"""Consecutive plans whose first step is checked. See [Note: A plan that exceeds its prediction]."""


class AutoOffload(StepMeasurement):
    """Measures steps, makes plans and applies them.

    Args:
        config: Settings, with the budget.
        engine: Engine that offloads layers without room while a step is measured.
        use_plan: Makes the integration offload by a plan.
    """

    def __init__(self, config: OffloadConfig, engine: OffloadEngine, *, use_plan: Callable[[OffloadPlan], None]) -> None:
        numel = config.min_offloaded_tensor_size
        super().__init__(engine.device, min_offloaded_numel=numel, use_plan=use_plan, observers=engine.observers)
        self._budget_bytes = config.offload_memory_budget_bytes or 0
        self._policy = config.transfer_policy
        self._engine = engine
        self._has_own_host = engine.device.type != "cpu"
        self.planned: PlannedStep | None = None
        """Plan in use; None before the first plan and while a step is measured."""
        self._measured: MeasuredStep | None = None
        self._link: LinkProfile | None = None
        self._kept_bytes = 0
        """Bytes of parameters and gradients, if device bytes cannot be counted."""
        self._staying: Layers | None = None
        """Layers that may stay on the GPU in a measured step; None keeps as many as fit."""
        self._step_end_s = 0.0
        """Seconds after the last pass of the last measured step, on this process."""
        self._steps = 0
        """Number of steps that have begun."""
        self._current: ScheduleCall | None = None
        """Schedule call of the running or last step."""
        self._ended_call: ScheduleCall | None = None
        """Schedule call of the last step; None until the step has ended without an error."""
        self._taken_bytes: int | None = None
        """Peak device bytes of the first step under the plan in use, until they are checked."""
        self._left_checks = 0
        """Number of plans whose first step will still be checked."""
        self._beyond_bytes = 0
        """Maximum bytes by which a step exceeded its prediction. Later plans leave them free."""
        self._seconds: list[float] | None = None
        """Seconds of full steps under the plan in use; None if no other plan will be compared with it."""
        self._begun_s = 0.0
        """Start of the running step by `perf_counter`."""
        self._rival: TriedStep | None = None
        """First plan of a trial, once its steps are timed."""
        self._checked: Mapping[int, int] = {}
        """Peak of the first step under the plan in use, by pipeline rank; empty if it was not checked."""
        self._is_offloaded = False
        """Whether the measured layer in forward is offloaded."""
        self.request()

    def begin_step(self, call: ScheduleCall) -> None:
        """Plan after a measured step, and again if this step or the last one exceeded the plan.

        Raises:
            PlanError: No plan fits the budget. All processes raise it.
            OffloadError: A process has no profile of the first step. All processes raise it.
        """
        self._steps += 1
        rival = self._rival if self.planned is None else None  # set if the last step was measured again
        known = self.planned if rival is None else rival.planned
        if known is not None and not call.is_within(known.call):
            logger.info("a step of %s exceeds the plan for %s: planning again", call, known.call)
            self._plan(call)
        elif rival is not None:
            self._plan_again(rival)
        elif self.planned is not None:
            self._look_at(self.planned, call)
        elif self.state is MeasurementState.RECORDED:
            failure = self._exchange()
            if failure is not None:
                raise failure
            self._plan(call)
        if self.state is MeasurementState.REQUESTED:
            self._kept_bytes = self._count_bytes()
            if self._measured is None:
                check_static(self._kept_bytes, budget_bytes=self._budget_bytes)
        self._current, self._ended_call = call, None
        super().begin_step(call)

    def finish_step(self) -> None:  # noqa: D102
        super().finish_step()
        self._ended_call = self._current
        if self.planned is not None and self._current == self.planned.call and self._left_checks and self._memory is not None:
            self._taken_bytes = self._memory.count_peak()

    def find_layer(self, lane: Lane, chunk: int, number: int, hidden: torch.Tensor) -> AbstractContextManager[None]:
        """Return a context that records a layer, and offloads it without room. See [Note: A step that does not fit]."""
        recorder = self._recorder
        may_stay = self._staying is None or (chunk, number) in self._staying
        self._is_offloaded = recorder is not None and not (may_stay and self._has_room(recorder))
        if recorder is None or not self._is_offloaded:
            return super().find_layer(lane, chunk, number, hidden)
        watch = self._engine.watch(lane)
        return recorder.layer(chunk, number, hidden, inner=watch if isinstance(watch, Saving) else None)

    def find_region(self, site: Site, lane: Lane) -> Region | None:
        """Return a region that records a site, around the engine's region if the layer is offloaded."""
        if self._recorder is None or not self._is_offloaded:
            return super().find_region(site, lane)
        return self._recorder.find_region(site, lane, inner=self._engine.find_region(site, lane))

    def _has_room(self, recorder: StepRecorder) -> bool:
        now_bytes = self._kept_bytes + recorder.live_bytes if self._memory is None else self._memory.count_allocated()
        # After a simulation chose the layers, this check only limits the damage of a wrong choice.
        part = KEPT_PART if self._staying is None else 1.0
        return now_bytes + recorder.largest_layer_bytes <= part * self._budget_bytes

    # Planning.

    def _exchange(self) -> OffloadError | None:
        """Gather the measurements of all processes. Return the error if one failed. Collective."""
        own: ProcessMeasurement | OffloadError
        try:
            own = self._take_own()
        except OffloadError as error:
            own = error
        except Exception as error:  # noqa: BLE001 - other processes wait for an answer
            own = OffloadError(f"the measurement failed on this process: {type(error).__name__}: {error}")
            own.__cause__ = error
        found = gather(own if isinstance(own, ProcessMeasurement) else str(own))
        failed = next((one for one in found if isinstance(one, str)), None)
        if isinstance(own, OffloadError):
            return own
        if failed is not None or self.call is None:
            return OffloadError(f"the measurement failed on another rank: {failed}")
        measured = MeasuredStep(
            processes=tuple(one for one in found if not isinstance(one, str)),
            call=self.call,
            number=self._steps - 1,
            device_type=self._device.type,
            policy=self._policy,
        )
        former = self._measured if self._rival is not None else None
        self._measured = measured if former is None else measured.join_extra_bytes(former)
        return None

    def _take_own(self) -> ProcessMeasurement:
        rank = self.take_profile()  # first, since it measures until now
        if self._link is None:
            self._link = measure_link(self._device, sizes=QUICK_SIZES)
        if self._rival is not None:
            # Excludes an evaluation or checkpoint after the step, as the median of the compared steps does. Plans do not change
            # the time after the last pass.
            rank = dataclasses.replace(rank, step_end_s=min(rank.step_end_s, self._step_end_s))
        self._step_end_s = rank.step_end_s
        return ProcessMeasurement(rank=rank, link=self._link, host_budget_bytes=self._engine.arena.budget_bytes)

    def _plan(self, call: ScheduleCall) -> None:
        """Plan for `call`, or measure its step if its microbatches are larger than the measured ones."""
        self.forget()
        self._rival = None
        measured = self._measured
        if measured is None or call.tokens > measured.call.tokens:
            self._measure(None)
            return
        self._left_checks = MOST_CHECKS
        microbatches = max(call.microbatches, measured.call.microbatches)
        failure = self._try_to_plan(ScheduleCall(microbatches=microbatches, tokens=measured.call.tokens))
        if failure is not None:
            raise failure

    def _measure(self, staying: Layers | None) -> None:
        """Measure the step that begins now with `staying` on the GPU; None keeps as many layers as there is room for."""
        self._staying = staying
        self.apply(NOTHING)
        self.planned = self._seconds = self._taken_bytes = None
        self.request()

    def _try_to_plan(self, call: ScheduleCall) -> OffloadError | None:
        """Apply the fastest plan for `call`. Without one, change nothing and return the reason. Collective."""

        def solve() -> PlannedStep | PlanError:
            try:
                return self._solve(call)
            except PlanError as error:
                return error

        try:
            planned = ask_first(solve)
        except OffloadError as error:
            return error
        if isinstance(planned, PlanError):
            return planned
        self._follow(planned)
        self._beyond_bytes = planned.free_bytes
        if self._has_own_host:
            self._seconds, self._begun_s = [], perf_counter()
        logger.info("%s", planned.describe(self._budget_bytes))
        return None

    def _follow(self, planned: PlannedStep) -> None:
        self.planned = planned
        self._seconds = self._taken_bytes = None
        self._checked = {}
        self.apply(planned.plan)
        if self._memory is not None:
            self._memory.take_peak()  # the next peak is this plan's

    def _look_at(self, planned: PlannedStep, call: ScheduleCall) -> None:
        """Time and check the step that ended before `call`, for which a plan is in use."""
        if self._seconds is not None:
            begun_s, self._begun_s = self._begun_s, perf_counter()
            if self._ended_call == planned.call:
                self._seconds.append(self._begun_s - begun_s)
        if self._taken_bytes is not None:
            self._check(planned, self._taken_bytes)
        elif self._seconds is not None and len(self._seconds) > TIMED_STEPS:
            self._compare(planned, statistics.median(self._seconds[1:]), call)  # the allocator adapts in the first

    def _compare(self, planned: PlannedStep, step_s: float, call: ScheduleCall) -> None:
        """Measure again once the first plan is timed. Choose the faster plan once both are timed."""
        if self._left_checks and self._memory is not None:
            return
        if self._rival is None and call != planned.call:
            return  # measures only a full step
        # All processes have timed the same steps. The slowest process determines the step time.
        tried = Tried(peak_bytes=max(self._checked.values(), default=0), step_s=max(gather(step_s)))
        if self._rival is None:
            self._measure_again(TriedStep(planned=planned, tried=tried, peaks=self._checked))
            return
        rival = self._rival
        is_better = tried.score(self._budget_bytes) < rival.tried.score(self._budget_bytes)
        made = (rival.planned.origin, f"{planned.origin}, measured after warm-up")
        stays = "second" if is_better else "first"
        logger.info("%s: keeping the %s", describe_tried(rival.tried, tried, made=made), stays)
        if is_better:
            self._seconds = self._rival = None
        else:
            self._return(rival)

    def _measure_again(self, first: TriedStep) -> None:
        """Measure the step that begins, now warm. Keep the first plan if the step would exceed the budget."""
        measured, free_bytes = self._measured, self._beyond_bytes
        self._seconds = None
        if measured is None:
            return
        call = first.planned.call
        try:
            staying = ask_first(lambda: measured.find_staying(call, budget_bytes=self._budget_bytes, free_bytes=free_bytes))
        except OffloadError as error:
            logger.warning("keeping the plan %s: no step was measured after warm-up. %s", first.planned.origin, error)
            return
        self._rival = first
        self._measure(staying)

    def _plan_again(self, first: TriedStep) -> None:
        """Plan from the warm measurement, and try that plan. Return to the first plan without one."""
        former = self._measured
        failure = self._exchange() or self._try_to_plan(first.planned.call)
        if failure is not None:
            self._measured = former
            logger.warning(
                "keeping the plan %s: step %d was measured after warm-up, but no plan was found. %s",
                *(first.planned.origin, self._steps - 1, failure),
            )
            self._return(first)
        elif self.planned is not None and self.planned.plan.actions == first.planned.plan.actions:
            logger.info("the plan %s is the same: keeping the first", self.planned.origin)
            self._return(first)
        else:
            self._left_checks = 1

    def _return(self, first: TriedStep) -> None:
        """Return to the first plan of a trial, and end the trial."""
        self.forget()
        self._left_checks, self._rival = 0, None
        self._follow(first.planned)

    def _check(self, planned: PlannedStep, taken_bytes: int) -> None:
        """Plan again if the first step under a plan exceeded the budget on any process. Collective."""
        self._taken_bytes = None
        self._left_checks -= 1
        found = gather((self._get_rank(), taken_bytes))
        peak_bytes = max(one_bytes for _, one_bytes in found)
        self._checked = {rank: max(one_bytes for one, one_bytes in found if one == rank) for rank in planned.peaks}
        # Counts below the budget too, since the next plan may use all of it.
        self._beyond_bytes = max(self._beyond_bytes, *(self._checked[rank] - planned.peaks[rank] for rank in planned.peaks))
        if self._rival is not None and peak_bytes > max(self._budget_bytes, self._rival.tried.peak_bytes):
            logger.info("a step under the plan %s took %s: keeping the first", planned.origin, format_bytes(peak_bytes))
            self._return(self._rival)
            return
        if peak_bytes <= self._budget_bytes or self._rival is not None:
            self._left_checks = 0
            return
        above_bytes = peak_bytes - self._budget_bytes
        above = f"a step took {format_bytes(peak_bytes)} at peak, {format_bytes(above_bytes)} above the budget"
        if not self._left_checks:
            logger.warning("%s, after %d plans: keeping the last. Lower the budget by that much.", above, MOST_CHECKS)
            return
        logger.info("%s, and %s more than predicted: planning again", above, format_bytes(self._beyond_bytes))
        failure = self._try_to_plan(planned.call)
        if failure is not None:
            self._left_checks = 0
            logger.warning("%s, but no other plan was found: keeping it. %s", above, failure)

    def _solve(self, call: ScheduleCall) -> PlannedStep:
        if self._measured is None:
            raise PlanError("No step was measured.")
        # A second plan computes its own free bytes. See [Note: Memory that a plan leaves free].
        free_bytes = self._beyond_bytes if self._rival is None else 0
        return self._measured.plan(call, budget_bytes=self._budget_bytes, free_bytes=free_bytes, known=self._rival)
