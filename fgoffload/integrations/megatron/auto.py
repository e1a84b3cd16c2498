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

[Note: A plan that takes more than was said]
What operators have for a moment was measured in one step, in which other layers stayed than in those that follow. So the first
step under a plan is looked at: where it took more than the budget on any rank, by what the allocator counts, the next plan
leaves free what that step took beyond its prediction. After a few of these the last one stays, with a warning.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch

from fgoffload.config import OffloadConfig
from fgoffload.engine import Lane, OffloadEngine, Region, Saving
from fgoffload.errors import OffloadError, PlanError
from fgoffload.integrations.link import QUICK_SIZES, measure_link
from fgoffload.integrations.megatron.collectives import broadcast, gather, is_first_process
from fgoffload.integrations.megatron.plan_trial import StepTimes
from fgoffload.integrations.megatron.profiling import MeasurementState, StepMeasurement
from fgoffload.integrations.megatron.recorder import StepRecorder
from fgoffload.integrations.megatron.schedule_call import ScheduleCall
from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.planner.late_host import HostGuess, Tried, assume_host, describe_trial
from fgoffload.planner.timing.profile import CPU, LinkProfile, Profile, RankProfile, make_rank_model, merge_processes
from fgoffload.units import format_bytes, format_ms

logger = logging.getLogger(__name__)

KEPT_PART = 0.8
"""Of the budget, that a measured step may fill before layers leave: the rest is for the loss, for gradients of activations and
for the largest layer's temporary tensors, of which nothing is known yet."""

MOST_CHECKS = 3
"""Plans in a row whose first step is looked at. See [Note: A plan that takes more than was said]."""

_NOTHING = OffloadPlan(actions={})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """What one process measured."""

    rank: RankProfile
    link: LinkProfile
    host_budget_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """What the first step under a plan took on one process, in device bytes."""

    peak_bytes: int
    """At its worst moment."""
    beyond_bytes: int
    """Of them: more than was predicted of its pipeline rank."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """The plan in use, and what is expected of it."""

    plan: OffloadPlan
    """For all ranks."""
    call: ScheduleCall
    """The largest step that it is for."""
    peaks: Mapping[int, int]
    """By pipeline rank: device bytes at its worst moment."""
    step_s: float
    """Of the step."""

    @property
    def peak_bytes(self) -> int:
        """Return the highest peak of any rank."""
        return max(self.peaks.values())


class AutoOffload(StepMeasurement):
    """Measures, plans, and has the plan applied.

    Args:
        config: With the budget.
        engine: Offloads what does not fit while a step is measured.
        use_plan: Lets the integration offload by a plan.
        clock: Goes forward alone, in seconds.
        has_own_host: Whether the host is not the device, and can be late; None asks the device.
    """

    def __init__(
        self,
        config: OffloadConfig,
        engine: OffloadEngine,
        *,
        use_plan: Callable[[OffloadPlan], None],
        clock: Callable[[], float] = time.perf_counter,
        has_own_host: bool | None = None,
    ) -> None:
        super().__init__(
            engine.device,
            min_offloaded_numel=config.min_offloaded_tensor_size,
            use_plan=use_plan,
            observers=engine.observers,
        )
        self._budget_bytes = config.offload_memory_budget_bytes or 0
        self._policy = config.transfer_policy
        self._engine = engine
        self._clock = clock
        self._has_own_host = engine.device.type != "cpu" if has_own_host is None else has_own_host
        self.planned: PlannedStep | None = None
        """None before the first plan, and while a step is measured for another."""
        self._measured: list[_Measured] = []
        """Of all processes, of the last step that was measured."""
        self._measured_call: ScheduleCall | None = None
        self._link: LinkProfile | None = None
        self._kept_bytes = 0
        """Of parameters and gradients, where nobody counts device bytes."""
        self._current: ScheduleCall | None = None
        """The step that runs, or ran last."""
        self._taken_bytes: int | None = None
        """At peak, of the first step under the plan in use; None when it was compared, and where it will not be."""
        self._left_checks = 0
        """Steps that will still be compared so."""
        self._beyond_bytes = 0
        """How much more a step took than was predicted of its plan: what all later plans leave free."""
        self.guess = HostGuess.IN_TIME
        """What the plan in use takes the host for. See [Note: Two plans] in `plan_trial`."""
        self._times: StepTimes | None = None
        """Of the steps under the plan in use; None where no other plan is to be compared with it."""
        self._rival: tuple[PlannedStep, Tried] | None = None
        """The plan for a host that is in time, and what its steps took, while the one for a late host is tried."""
        self._checked_bytes = 0
        """At peak on any process, of the first step under the plan in use; 0 where it was not compared."""
        self._is_leaving = False
        """Whether the layer that forward is in is offloaded while it is measured."""
        self.request()

    def begin_step(self, call: ScheduleCall) -> None:
        """A schedule begins: plan where a step was measured, and again where a plan was left behind by this step or the last.

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
        elif self.planned is not None:
            if self._times is not None:
                self._times.note_end(self._clock(), is_full=self._current == self.planned.call)
            if self._taken_bytes is not None:
                self._check(self.planned, self._taken_bytes)
            elif self._times is not None:
                self._compare(self.planned, self._times)
        if self.state is MeasurementState.WANTED:
            self._kept_bytes = self._count_bytes()
        self._current = call
        super().begin_step(call)

    def finish_step(self) -> None:  # noqa: D102
        super().finish_step()
        if self.planned is not None and self._current == self.planned.call and self._left_checks and self._memory is not None:
            self._taken_bytes = self._memory.count_peak()

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
        self._measured = gather(own)

    def _plan(self, call: ScheduleCall) -> None:
        """Plan for `call`, or have it measured where its microbatches are larger than the measured ones.

        Raises:
            PlanError: No plan fits the budget.
        """
        self.guess, self._rival = HostGuess.IN_TIME, None
        measured = self._measured_call
        if measured is None or call.tokens > measured.tokens:
            self.apply(_NOTHING)
            self.planned = None
            self.request()
            return
        self._left_checks = MOST_CHECKS
        wanted = ScheduleCall(microbatches=max(call.microbatches, measured.microbatches), tokens=measured.tokens)
        failure = self._try_to_plan(wanted)
        if failure is not None:
            raise failure

    def _try_to_plan(self, call: ScheduleCall) -> PlanError | None:
        """Follow the fastest plan for `call` from now on; where there is none change nothing, and return why. All do alike."""
        found: PlannedStep | str = ""  # of all but the first process, and not looked at
        cause: Exception | None = None
        if is_first_process():
            try:
                found = self._solve(call)
            except Exception as error:  # noqa: BLE001 - whatever it is, the others wait for an answer
                found, cause = f"the first process could not plan: {type(error).__name__}: {error}", error
        planned = broadcast(found)
        if isinstance(planned, str):
            failure = PlanError(planned)
            failure.__cause__ = cause
            return failure
        self._follow(planned)
        # Without copies nobody asks, but for the plan that is to be compared with one that has them.
        if self._has_own_host and (planned.plan.offloaded_tags or self._rival is not None):
            self._times = StepTimes(self._clock())
        logger.info(
            "plan for %s and %s: %d sites are offloaded and %d units run again; %s at peak of %s, %s a step expected",
            _say(call),
            self.guess.value,
            planned.plan.count(Action.OFFLOAD) + planned.plan.count(Action.RECOMPUTE_AND_OFFLOAD),
            planned.plan.count(Action.RECOMPUTE) + planned.plan.count(Action.RECOMPUTE_AND_OFFLOAD),
            format_bytes(planned.peak_bytes),
            format_bytes(self._budget_bytes),
            format_ms(planned.step_s),
        )
        return None

    def _follow(self, planned: PlannedStep) -> None:
        """Do as a plan says from now on."""
        self.planned = planned
        self._times = self._taken_bytes = None
        self._checked_bytes = 0
        self.apply(planned.plan)
        if self._memory is not None:
            self._memory.take_peak()  # the peak from now on is of this plan

    def _compare(self, planned: PlannedStep, times: StepTimes) -> None:
        """Go on to the plan for a late host where the other one has been timed, and to the faster one where both have."""
        if times.median_s is None or (self._left_checks and self._memory is not None):
            return
        # All processes have timed the same steps: the slowest says what a step took.
        tried = Tried(peak_bytes=self._checked_bytes, step_s=max(gather(times.median_s)))
        if self._rival is None:
            self._rival, self.guess, self._left_checks = (planned, tried), HostGuess.LATE, 1
            failure = self._try_to_plan(planned.call)
            if failure is not None:
                logger.warning("nothing is tried for a late host, since no plan was found for one. %s", failure)
                self._return()
            elif self.planned is None or self.planned.plan.actions == planned.plan.actions:
                self._return()
            return
        _, rival = self._rival
        is_better = tried.score(self._budget_bytes) < rival.score(self._budget_bytes)
        logger.info(
            "%s: the %s stays", describe_trial(rival, tried, guess=HostGuess.IN_TIME), "second" if is_better else "first"
        )
        if is_better:
            self._times = self._rival = None
        else:
            self._return()

    def _return(self) -> None:
        """Follow the plan for a host that is in time again, for good."""
        if self._rival is not None:
            planned, _ = self._rival
            self.guess, self._left_checks, self._rival = HostGuess.IN_TIME, 0, None
            self._follow(planned)

    def _check(self, planned: PlannedStep, taken_bytes: int) -> None:
        """Plan again where the first step under a plan took more than the budget on any process. All know of all."""
        self._taken_bytes = None
        self._left_checks -= 1
        beyond_bytes = taken_bytes - planned.peaks[self._get_rank()]
        taken = gather(_Taken(peak_bytes=taken_bytes, beyond_bytes=beyond_bytes))
        self._checked_bytes = peak_bytes = max(one.peak_bytes for one in taken)
        # Within the budget too: the next plan may use all of it.
        self._beyond_bytes = max(self._beyond_bytes, *(one.beyond_bytes for one in taken))
        if self._rival is not None and peak_bytes > max(self._budget_bytes, self._rival[1].peak_bytes):
            logger.info("a step by the plan for %s took %s: the first stays", HostGuess.LATE.value, format_bytes(peak_bytes))
            self._return()
            return
        if peak_bytes <= self._budget_bytes or self._rival is not None:
            self._left_checks = 0
            return
        above = f"a step took {format_bytes(peak_bytes)} at peak, {peak_bytes - self._budget_bytes} bytes above the budget"
        if not self._left_checks:
            logger.warning("%s, after %d plans: the last one stays. Give a budget that much smaller.", above, MOST_CHECKS)
            return
        logger.info("%s, and %s more than predicted: planning again", above, format_bytes(self._beyond_bytes))
        failure = self._try_to_plan(planned.call)
        if failure is not None:
            self._left_checks = 0
            logger.warning("%s, and its plan stays: no other one was found. %s", above, failure)

    def _solve(self, call: ScheduleCall) -> "PlannedStep | str":
        """Return the plan for `call`, or why there is none."""
        # Here: SciPy takes longer to load than all else, and one process plans.
        from fgoffload.planner.solving.solver import solve_leaving_free

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
        if self.guess is HostGuess.LATE:
            models = list(assume_host(models, HostGuess.LATE))
        try:
            solution = solve_leaving_free(models, budget_bytes=self._budget_bytes, free_bytes=self._beyond_bytes)
        except OffloadError as error:
            return f"--offload-memory-budget {self._budget_bytes}: {error}"
        peaks = {rank.rank: rank.peak_bytes for rank in solution.result.ranks}
        return PlannedStep(plan=solution.plan, call=call, peaks=peaks, step_s=solution.result.step_s)


def _is_within(call: ScheduleCall, planned: ScheduleCall) -> bool:
    return call.microbatches <= planned.microbatches and call.tokens <= planned.tokens


def _say(call: ScheduleCall) -> str:
    return f"{call.microbatches} microbatches of {call.tokens} tokens"
