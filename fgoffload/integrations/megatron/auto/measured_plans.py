"""Makes plans during training, from a step that all processes measured, and times the steps under each of two plans.

[Note: Memory that a plan leaves free]
The next plan leaves free the bytes that steps took beyond their prediction. A prediction belongs to one measurement. The
prediction from the first step may be far too high, because host memory was still being pinned and offloads were slow. So we
keep the peaks of steps under a plan, not their difference from an older prediction. The newer measurement predicts the same
plan again, and its plans leave the difference free.

[Note: Two plans]
The first step of a run is cold: kernels are loaded, the allocator grows, and host memory is pinned during offload. Its
times include all that. The plan from them applies from the second step on, and a few of its steps are timed. Then one more step
is measured in the same way, now warm. A second plan is made from it, with the overhead during copies that the timed steps
showed ([Note: Cost of copies on a launch-bound host] in `planner/host_overhead.py`). A few steps under it are timed too, and
the faster plan is kept. Every step is a real training step: results are bitwise identical. A step lasts until the next
one begins, including everything that the script does in between. The median ignores one step that an evaluation or checkpoint
follows. The first step under a plan is not timed, since the allocator adapts in it.

[Note: What ends a trial]
A step with more or larger microbatches than planned ends a trial. A repeated measurement that was not used is then dropped, and
a new trial starts with a plan for that step. Smaller steps are neither timed nor measured; they run under the plan in use. The
first plan is kept if the repeated step would exceed the budget, fails or has no profile, if it leads to no plan or to the
same one, and if the second plan takes more memory than both the budget and the first plan.
"""

import bisect
import collections
import dataclasses
import statistics
from collections.abc import Mapping

from fgoffload.errors import OffloadError, PlanError
from fgoffload.integrations.megatron.adapter.measurement import ScheduleCall
from fgoffload.plan import Action, OffloadPlan
from fgoffload.planner.host_overhead import fit_slowdown_to_step, slow_down
from fgoffload.planner.ranks.layer_model import Segment
from fgoffload.planner.ranks.rank_model import RankModel, Turn
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.megatron_flags import MegatronFlags
from fgoffload.planner.solving.solver import count_planned_bytes, solve_leaving_free
from fgoffload.planner.timing.link_profile import LinkProfile
from fgoffload.planner.timing.profile import CPU, Profile, RankProfile, make_rank_model, merge_processes
from fgoffload.planner.tried_plan import Tried
from fgoffload.tags import default_tags
from fgoffload.transfer_schedule import TransferPolicy
from fgoffload.units import format_bytes, format_ms

Layers = frozenset[tuple[int, int]]
"""Layers, by chunk and number."""

TIMED_STEPS = 3
"""Number of timed steps of each plan, after its first step. A median of three ignores one outlier; more would cost time."""


class StepTimes:
    """Times the steps under the plan in use, on this process. All times are seconds of one monotonic clock."""

    def __init__(self, now_s: float) -> None:
        self._begun_s = now_s
        self._seconds: list[float] = []
        self._steps = 0

    def note_end(self, now_s: float, *, is_full: bool) -> None:
        """Record that a step has ended and the next one begins. It is timed if it had all the microbatches of the plan."""
        if is_full:
            self._steps += 1
            if self._steps > 1:
                self._seconds.append(now_s - self._begun_s)
        self._begun_s = now_s

    @property
    def median_s(self) -> float | None:
        """Return the median seconds of a step; None until enough steps were timed."""
        return statistics.median(self._seconds) if len(self._seconds) >= TIMED_STEPS else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMeasurement:
    """Measurement of one process."""

    rank: RankProfile
    link: LinkProfile
    host_budget_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A plan in use, with its predicted peaks and time."""

    plan: OffloadPlan
    """Plan for all ranks."""
    call: ScheduleCall
    """Largest step that the plan is for."""
    peaks: Mapping[int, int]
    """Predicted peak device bytes, by pipeline rank."""
    step_s: float
    """Predicted seconds of the step."""
    free_bytes: int
    """Bytes of the budget that the plan leaves free, since steps took more than predicted."""
    measured_step: int
    """Number of the measured training step that the plan is made from, counted from 1."""

    @property
    def peak_bytes(self) -> int:
        """Return the highest peak of any rank."""
        return max(self.peaks.values())

    @property
    def origin(self) -> str:
        """Return which step the plan is made from, for a log."""
        return "of the first step" if self.measured_step == 1 else f"of step {self.measured_step}"

    def describe(self, budget_bytes: int) -> str:
        """Return a summary of the plan and its prediction within a budget, for a log."""
        offloads = self.plan.count(Action.OFFLOAD) + self.plan.count(Action.RECOMPUTE_AND_OFFLOAD)
        recomputes = self.plan.count(Action.RECOMPUTE) + self.plan.count(Action.RECOMPUTE_AND_OFFLOAD)
        return (
            f"plan {self.origin} for {self.call}: {offloads} sites offloaded, {recomputes} units recomputed; predicted peak "
            f"{format_bytes(self.peak_bytes)} of {format_bytes(budget_bytes)}, step {format_ms(self.step_s)}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TriedStep:
    """A plan that was in use, and the time and peaks of steps under it."""

    planned: PlannedStep
    tried: Tried
    peaks: Mapping[int, int]
    """Maximum device bytes of any process, by pipeline rank; empty if device bytes cannot be counted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """Measurements of one step by all processes."""

    processes: tuple[ProcessMeasurement, ...]
    call: ScheduleCall
    """Schedule call of the step."""
    number: int
    """Number of the training step, counted from 1."""
    device_type: str
    policy: TransferPolicy

    def join_extra_bytes(self, former: "MeasuredStep") -> "MeasuredStep":
        """Return this step with the larger temporary bytes of each segment, of this step and of an older one.

        The temporary bytes of an offloaded layer are unknown. With little room, it may have stayed only in the older step.
        """
        processes = [
            dataclasses.replace(own, rank=_join_extra_bytes(own.rank, older.rank))
            for own, older in zip(self.processes, former.processes, strict=True)
        ]
        return dataclasses.replace(self, processes=tuple(processes))

    def plan(self, call: ScheduleCall, *, budget_bytes: int, free_bytes: int, known: TriedStep | None = None) -> PlannedStep:
        """Return the fastest plan for `call`, whose microbatches are no larger than the measured ones.

        Args:
            call: Step to plan for.
            budget_bytes: Device bytes of each rank.
            free_bytes: Bytes of the budget that are left free in any case.
            known: Time and peaks of steps under an older plan for `call`. They determine the overhead of the host and any
                further bytes to leave free. See [Note: Memory that a plan leaves free].

        Raises:
            PlanError: No plan fits, or the older plan does not apply to the layers.
        """
        models = self._make_models(call.microbatches)
        if known is not None:
            plan = known.planned.plan
            models = slow_down(models, fit_slowdown_to_step(models, plan, step_s=known.tried.step_s))
            predicted = {rank.rank: rank.peak_bytes for rank in simulate(models, plan).ranks}
            free_bytes = max(free_bytes, *(known.peaks.get(rank, 0) - predicted[rank] for rank in predicted))
        try:
            solution = solve_leaving_free(models, budget_bytes=budget_bytes, free_bytes=free_bytes)
        except OffloadError as error:
            raise PlanError(f"--offload-memory-budget {format_bytes(budget_bytes)}: {error}") from error
        return PlannedStep(
            plan=solution.plan,
            call=call,
            peaks={rank.rank: rank.peak_bytes for rank in solution.result.ranks},
            step_s=solution.result.step_s,
            free_bytes=free_bytes,
            measured_step=self.number,
        )

    def find_staying(self, call: ScheduleCall, *, budget_bytes: int, free_bytes: int) -> Layers:
        """Return the most layers that may stay on the GPU of each rank when a step is measured again. The rest are offloaded.

        Times come from layers that stayed, if there are any. So one layer of each kind stays first, then another, and so on.

        Raises:
            PlanError: The step exceeds the budget even if all layers are offloaded.
        """
        # The measured step runs without a plan.
        models = [dataclasses.replace(model, turn=Turn.CANCEL) for model in self._make_models(call.microbatches)]
        planned_bytes = count_planned_bytes(budget_bytes, free_bytes=free_bytes)
        leaving = MegatronFlags(offload_modules=default_tags().names).make_plan(models).actions
        ordered = [_order_layers(model) for model in models]

        def choose(count: int) -> Layers:
            return frozenset(layer for layers in ordered for layer in layers[:count])

        def count_missing(count: int) -> int:
            """Return the missing bytes of the budget if `count` layers of each rank stay on the GPU."""
            staying = choose(count)
            actions = {site: action for site, action in leaving.items() if (site.chunk, site.layer) not in staying}
            return simulate(models, OffloadPlan(actions=actions)).peak_bytes - planned_bytes

        if (missing_bytes := count_missing(0)) > 0:
            raise PlanError(
                f"Even with everything offloaded, a step without recompute exceeds the budget by {format_bytes(missing_bytes)}."
            )
        counts = range(1, max(map(len, ordered)) + 1)
        return choose(bisect.bisect_left(counts, x=True, key=lambda count: count_missing(count) > 0))

    def _make_models(self, microbatches: int) -> tuple[RankModel, ...]:
        # Takes the slowest link, since any slow process of a pipeline rank delays the step.
        link = min((one.link for one in self.processes), key=lambda link: link.copies[-1].d2h_bytes_per_s)
        ranks = merge_processes(one.rank for one in self.processes)
        device = CPU if self.device_type == "cpu" else self.device_type
        profile = Profile(device=device, versions={}, date="", link=link, ranks=ranks)
        host_budget_bytes = min(one.host_budget_bytes for one in self.processes)
        return tuple(
            make_rank_model(
                profile, rank=rank.rank, policy=self.policy, microbatches=microbatches, host_budget_bytes=host_budget_bytes
            )
            for rank in ranks
        )


def _order_layers(model: RankModel) -> list[tuple[int, int]]:
    """Return the layers of a rank, by chunk and number: first one of each kind, then another of each, and so on."""
    seen: collections.Counter[str] = collections.Counter()
    keys = []
    for chunk, layers in enumerate(one.layers for one in model.chunks):
        for layer in layers:
            keys.append((seen[layer.model.kind], chunk, layer.number))
            seen[layer.model.kind] += 1
    return [(chunk, number) for _, chunk, number in sorted(keys)]


def _join_extra_bytes(own: RankProfile, older: RankProfile) -> RankProfile:
    """Return `own` with the larger temporary bytes of each segment in either profile."""
    known = {
        (chunk, layer.number, segment.name): segment
        for chunk, one in enumerate(older.chunks)
        for layer in one.layers
        for segment in layer.model.segments
    }

    def join(segment: Segment, chunk: int, number: int) -> Segment:
        other = known.get((chunk, number, segment.name), segment)
        return dataclasses.replace(
            segment,
            forward_extra_bytes=max(segment.forward_extra_bytes, other.forward_extra_bytes),
            backward_extra_bytes=max(segment.backward_extra_bytes, other.backward_extra_bytes),
        )

    chunks = []
    for chunk, one in enumerate(own.chunks):
        models = [
            dataclasses.replace(
                layer.model, segments=tuple(join(segment, chunk, layer.number) for segment in layer.model.segments)
            )
            for layer in one.layers
        ]
        layers = (dataclasses.replace(layer, model=model) for layer, model in zip(one.layers, models, strict=True))
        chunks.append(dataclasses.replace(one, layers=tuple(layers)))
    return dataclasses.replace(own, chunks=tuple(chunks))
