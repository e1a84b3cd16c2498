"""`--offload-modules auto`: measures the first step, and applies a plan for the memory budget from the second step on.

[Note: When a plan is made]
The first step is measured with all activations on the GPU. When the next schedule begins, the optimizer has allocated its
memory and all activations are freed, so the memory in use is static. All processes exchange their measurements. The first
process makes the plan and sends it, or an error, to the others. So all processes apply the same plan or raise the same error. A
plan covers a maximum number and size of microbatches, which are the same on all processes. If a step has more microbatches, a
new plan is made at once. If its microbatches are larger, the step is measured first.

[Note: A step that does not fit]
A model that needs a budget may not fit with all activations on the GPU. So the measured step keeps a layer on the GPU only if
the budget has room for it, with a reserve for unknown memory. All tags of the other layers are offloaded, as far as host memory
allows. Their measured bytes are exact, but their times include waits for copies. These times are used only if no layer of the
same kind in the model chunk stayed on the GPU. If the step does not fit despite these offloads, it fails, as with every tag
selected. A later measurement ([Note: Two plans] in `measured_plans`) must not fail, because a plan that fits is in use. So a
simulation finds which layers may stay on the GPU. If the step would not fit at all, it is not measured.

[Note: A plan that exceeds its prediction]
The measured step and the plan keep different layers on the GPU, so temporary memory may differ. We therefore check the first
step under a plan. If it exceeded the budget on any rank, the next plan leaves the excess over the prediction free. After
`MAX_CHECKS` plans that exceed the budget, the last one is kept, with a warning.
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

FILLED_FRACTION = 0.8
"""Fraction of the budget that the first step may fill before it offloads layers. The rest is for temporary memory."""

MAX_CHECKS = 3
"""Maximum number of consecutive plans checked after their first step. See [Note: A plan that exceeds its prediction]."""


class AutoOffload(StepMeasurement):
    """Measures steps, makes plans within the budget in `config`, and applies them with `use_plan`.

    While a step is measured, the engine offloads the layers that do not fit.
    """

    def __init__(self, config: OffloadConfig, engine: OffloadEngine, *, use_plan: Callable[[OffloadPlan], None]) -> None:
        numel = config.min_offloaded_tensor_size
        super().__init__(engine.device, min_offloaded_numel=numel, use_plan=use_plan, observers=engine.observers)
        self._budget_bytes = config.offload_memory_budget_bytes or 0
        self._policy = config.transfer_policy
        self._engine = engine
        self._is_on_gpu = engine.device.type != "cpu"
        self.planned: PlannedStep | None = None
        """Plan in use; None before the first plan and while a step is measured."""
        self._measured: MeasuredStep | None = None
        self._link: LinkProfile | None = None
        self._static_bytes = 0
        """Allocated bytes when the measured step begins, or parameter and gradient bytes if the device cannot count memory."""
        self._staying: Layers | None = None
        """Layers that may stay on the GPU in a measured step; None keeps as many as fit."""
        self._step_end_s = 0.0
        """Seconds from the last pass to the end of the last measured step, on this process."""
        self._steps = 0
        """Number of steps that have begun."""
        self._current: ScheduleCall | None = None
        """Schedule call of the current or last step."""
        self._ended_call: ScheduleCall | None = None
        """Schedule call of the last step; None until the step has ended without an error."""
        self._peak_bytes: int | None = None
        """Peak device bytes of the first step under the plan in use; None if there is nothing to check."""
        self._checks_left = 0
        """Number of plans that may still be checked after their first step."""
        self._excess_bytes = 0
        """Maximum bytes by which a step's peak exceeded its prediction. Later plans leave that much free."""
        self._seconds: list[float] | None = None
        """Duration of each full step under the plan in use, in seconds; None if no other plan will be compared with it."""
        self._start_s = 0.0
        """Start of the current step, from `perf_counter`."""
        self._first_tried: TriedStep | None = None
        """First plan of a trial, once its steps are timed."""
        self._checked_peaks: Mapping[int, int] = {}
        """Peak of the first step under the plan in use, by pipeline rank; empty if that step was not checked."""
        self._is_offloaded = False
        """Whether the tensors of the current layer are offloaded in the measured forward."""
        self.request()

    def begin_step(self, call: ScheduleCall) -> None:
        """Make a plan if the previous step was measured or exceeded the budget, or if this step is larger than planned.

        Raises:
            PlanError: No plan fits the budget. All processes raise it.
            OffloadError: The measurement failed on a process. All processes raise an error.
        """
        self._steps += 1
        first = self._first_tried if self.planned is None else None  # set if the last step was measured again
        known = self.planned if first is None else first.planned
        if known is not None and not call.is_within(known.call):
            logger.info("a step of %s exceeds the plan for %s: making a new plan", call, known.call)
            self._plan(call)
        elif first is not None:
            self._plan_again(first)
        elif self.planned is not None:
            self._evaluate_last_step(self.planned, call)
        elif self.state is MeasurementState.RECORDED:
            failure = self._exchange()
            if failure is not None:
                raise failure
            self._plan(call)
        if self.state is MeasurementState.REQUESTED:
            self._static_bytes = self._count_bytes()
            if self._measured is None:
                check_static(self._static_bytes, budget_bytes=self._budget_bytes)
        self._current, self._ended_call = call, None
        super().begin_step(call)

    def finish_step(self) -> None:  # noqa: D102
        super().finish_step()
        self._ended_call = self._current
        if self.planned is not None and self._current == self.planned.call and self._checks_left and self._memory is not None:
            self._peak_bytes = self._memory.count_peak()

    def find_layer(self, lane: Lane, chunk: int, number: int, hidden: torch.Tensor) -> AbstractContextManager[None]:
        """Return a context manager that records a layer and may offload its tensors. See [Note: A step that does not fit]."""
        recorder = self._recorder
        may_stay = self._staying is None or (chunk, number) in self._staying
        self._is_offloaded = recorder is not None and not (may_stay and self._has_room(recorder))
        if recorder is None or not self._is_offloaded:
            return super().find_layer(lane, chunk, number, hidden)
        watch = self._engine.watch(lane)
        return recorder.layer(chunk, number, hidden, inner=watch if isinstance(watch, Saving) else None)

    def find_region(self, site: Site, lane: Lane) -> Region | None:
        """Return a region that records a site. If the layer is offloaded, it wraps the engine's region."""
        if self._recorder is None or not self._is_offloaded:
            return super().find_region(site, lane)
        return self._recorder.find_region(site, lane, inner=self._engine.find_region(site, lane))

    def _has_room(self, recorder: StepRecorder) -> bool:
        now_bytes = self._static_bytes + recorder.live_bytes if self._memory is None else self._memory.count_allocated()
        # If a simulation chose the layers, this check only limits the damage of a wrong prediction.
        fraction = FILLED_FRACTION if self._staying is None else 1.0
        return now_bytes + recorder.largest_layer_bytes <= fraction * self._budget_bytes

    # Planning.

    def _exchange(self) -> OffloadError | None:
        """Gather the measurements of all processes. If any process failed, return the error. Collective."""
        own: ProcessMeasurement | OffloadError
        try:
            own = self._take_measurement()
        except OffloadError as error:
            own = error
        except Exception as error:  # noqa: BLE001 - the other processes wait in `gather`
            own = OffloadError(f"the measurement failed on this process: {type(error).__name__}: {error}")
            own.__cause__ = error
        found = gather(own if isinstance(own, ProcessMeasurement) else str(own))
        failed = next((one for one in found if isinstance(one, str)), None)
        if isinstance(own, OffloadError):
            return own
        if failed is not None or self.call is None:
            return OffloadError(f"the measurement failed on another process: {failed}")
        measured = MeasuredStep(
            processes=tuple(one for one in found if not isinstance(one, str)),
            call=self.call,
            number=self._steps - 1,
            device_type=self._device.type,
            policy=self._policy,
        )
        older = self._measured if self._first_tried is not None else None
        self._measured = measured if older is None else measured.join_extra_bytes(older)
        return None

    def _take_measurement(self) -> ProcessMeasurement:
        rank = self.take_profile()  # before the exchange, because the measured step ends here
        if self._link is None:
            self._link = measure_link(self._device, sizes=QUICK_SIZES)
        if self._first_tried is not None:
            # Exclude an evaluation or checkpoint after the step, as the median of the compared steps does. The time after the
            # last pass does not depend on the plan.
            rank = dataclasses.replace(rank, step_end_s=min(rank.step_end_s, self._step_end_s))
        self._step_end_s = rank.step_end_s
        return ProcessMeasurement(rank=rank, link=self._link, host_budget_bytes=self._engine.arena.budget_bytes)

    def _plan(self, call: ScheduleCall) -> None:
        """Make a plan for `call`, or measure this step if its microbatches are larger than the measured ones."""
        self.forget()
        self._first_tried = None
        measured = self._measured
        if measured is None or call.tokens > measured.call.tokens:
            self._measure(None)
            return
        self._checks_left = MAX_CHECKS
        microbatches = max(call.microbatches, measured.call.microbatches)
        failure = self._try_to_plan(ScheduleCall(microbatches=microbatches, tokens=measured.call.tokens))
        if failure is not None:
            raise failure

    def _measure(self, staying: Layers | None) -> None:
        """Measure the step that begins now, with the layers `staying` on the GPU; None keeps as many as fit."""
        self._staying = staying
        self.apply(NOTHING)
        self.planned = self._seconds = self._peak_bytes = None
        self.request()

    def _try_to_plan(self, call: ScheduleCall) -> OffloadError | None:
        """Apply the fastest plan for `call`. If there is none, change nothing and return the error. Collective."""

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
        self._use(planned)
        self._excess_bytes = planned.free_bytes
        if self._is_on_gpu:
            self._seconds, self._start_s = [], perf_counter()
        logger.info("%s", planned.describe(self._budget_bytes))
        return None

    def _use(self, planned: PlannedStep) -> None:
        self.planned = planned
        self._seconds = self._peak_bytes = None
        self._checked_peaks = {}
        self.apply(planned.plan)
        if self._memory is not None:
            self._memory.take_peak()  # resets the peak, so that the next peak belongs to this plan

    def _evaluate_last_step(self, planned: PlannedStep, call: ScheduleCall) -> None:
        """Time and check the step before `call`, which ran under a plan."""
        if self._seconds is not None:
            start_s, self._start_s = self._start_s, perf_counter()
            if self._ended_call == planned.call:
                self._seconds.append(self._start_s - start_s)
        if self._peak_bytes is not None:
            self._check(planned, self._peak_bytes)
        elif self._seconds is not None and len(self._seconds) > TIMED_STEPS:
            self._compare(planned, statistics.median(self._seconds[1:]), call)  # the allocator adapts in the first step

    def _compare(self, planned: PlannedStep, step_s: float, call: ScheduleCall) -> None:
        """Once the first plan is timed, measure another step. Once both plans are timed, keep the faster one."""
        if self._checks_left and self._memory is not None:
            return
        if self._first_tried is None and call != planned.call:
            return  # only a full step is measured
        # All processes have timed the same steps. The slowest process determines the step time.
        tried = Tried(peak_bytes=max(self._checked_peaks.values(), default=0), step_s=max(gather(step_s)))
        if self._first_tried is None:
            self._measure_again(TriedStep(planned=planned, tried=tried, peaks=self._checked_peaks))
            return
        first = self._first_tried
        is_better = tried.score(self._budget_bytes) < first.tried.score(self._budget_bytes)
        made = (first.planned.origin, f"{planned.origin}, measured after warm-up")
        stays = "second" if is_better else "first"
        logger.info("%s: keeping the %s plan", describe_tried(first.tried, tried, made=made), stays)
        if is_better:
            self._seconds = self._first_tried = None
        else:
            self._return_to(first)

    def _measure_again(self, first: TriedStep) -> None:
        """Measure the step that begins now, after warm-up. Keep the first plan if the step would exceed the budget."""
        measured, free_bytes = self._measured, self._excess_bytes
        self._seconds = None
        if measured is None:
            return
        call = first.planned.call
        try:
            staying = ask_first(lambda: measured.find_staying(call, budget_bytes=self._budget_bytes, free_bytes=free_bytes))
        except OffloadError as error:
            logger.warning("keeping the plan %s: no step was measured after warm-up. %s", first.planned.origin, error)
            return
        self._first_tried = first
        self._measure(staying)

    def _plan_again(self, first: TriedStep) -> None:
        """Make a plan from the warm measurement, and try it. If no plan is found, return to the first plan."""
        older = self._measured
        failure = self._exchange() or self._try_to_plan(first.planned.call)
        if failure is not None:
            self._measured = older
            logger.warning(
                "keeping the plan %s: step %d was measured after warm-up, but no plan was found. %s",
                *(first.planned.origin, self._steps - 1, failure),
            )
            self._return_to(first)
        elif self.planned is not None and self.planned.plan.actions == first.planned.plan.actions:
            logger.info("the plan %s is the same as the first: keeping the first plan", self.planned.origin)
            self._return_to(first)
        else:
            self._checks_left = 1

    def _return_to(self, first: TriedStep) -> None:
        """Apply the first plan of a trial, and end the trial."""
        self.forget()
        self._checks_left, self._first_tried = 0, None
        self._use(first.planned)

    def _check(self, planned: PlannedStep, own_peak_bytes: int) -> None:
        """Make another plan if the first step under a plan exceeded the budget on any process. Collective."""
        self._peak_bytes = None
        self._checks_left -= 1
        found = gather((self._get_rank(), own_peak_bytes))
        peak_bytes = max(one_bytes for _, one_bytes in found)
        self._checked_peaks = {rank: max(one_bytes for one, one_bytes in found if one == rank) for rank in planned.peaks}
        # A peak above the prediction matters even below the budget, because the next plan may use the whole budget.
        self._excess_bytes = max(
            self._excess_bytes, *(self._checked_peaks[rank] - planned.peaks[rank] for rank in planned.peaks)
        )
        if self._first_tried is not None and peak_bytes > max(self._budget_bytes, self._first_tried.tried.peak_bytes):
            logger.info("a step under the plan %s used %s: keeping the first plan", planned.origin, format_bytes(peak_bytes))
            self._return_to(self._first_tried)
            return
        if peak_bytes <= self._budget_bytes or self._first_tried is not None:
            self._checks_left = 0
            return
        above_bytes = peak_bytes - self._budget_bytes
        above = f"a step used {format_bytes(peak_bytes)} at peak, {format_bytes(above_bytes)} above the budget"
        if not self._checks_left:
            logger.warning("%s, after %d plans: keeping the last one. Lower the budget by that much.", above, MAX_CHECKS)
            return
        logger.info("%s, and %s more than predicted: making a new plan", above, format_bytes(self._excess_bytes))
        failure = self._try_to_plan(planned.call)
        if failure is not None:
            self._checks_left = 0
            logger.warning("%s, but no other plan was found: keeping this one. %s", above, failure)

    def _solve(self, call: ScheduleCall) -> PlannedStep:
        if self._measured is None:
            raise PlanError("No step was measured.")
        # `MeasuredStep.plan` computes the free bytes of a second plan. See [Note: Memory that a plan leaves free].
        free_bytes = self._excess_bytes if self._first_tried is None else 0
        return self._measured.plan(call, budget_bytes=self._budget_bytes, free_bytes=free_bytes, known=self._first_tried)
