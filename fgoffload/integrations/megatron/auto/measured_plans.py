"""Plans made of a step that all processes measured, while a training runs. The first process makes them, for all.

[Note: What a plan leaves free]
What steps take beyond their prediction is left free by the next plan, and a prediction is of one measurement: the first step's
may be far above what is taken, where layers left late while host memory was locked. So what is known of steps under a plan is
kept, and not how far it was from an older prediction: the newer measurement says what it predicts of that plan, and the rest
is what its plans leave free.
"""

import bisect
import collections
import dataclasses
from collections.abc import Mapping

from fgoffload.errors import OffloadError, PlanError
from fgoffload.integrations.megatron.adapter.schedule_call import ScheduleCall
from fgoffload.plan import Action, OffloadPlan
from fgoffload.planner.ranks.layer_model import Segment
from fgoffload.planner.ranks.rank_model import RankModel, Turn
from fgoffload.planner.timing.link_profile import LinkProfile
from fgoffload.planner.timing.profile import CPU, Profile, RankProfile, make_rank_model, merge_processes
from fgoffload.planner.tried_plan import Tried
from fgoffload.tags import default_tags
from fgoffload.transfer_schedule import TransferPolicy
from fgoffload.units import format_bytes, format_ms

Layers = frozenset[tuple[int, int]]
"""Some, by chunk and number."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMeasurement:
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
    peaks: Mapping[int, int]
    """By pipeline rank: device bytes at its worst moment."""
    step_s: float
    """Of the step."""
    free_bytes: int
    """Of the budget, that it leaves free since steps took more than was predicted of them."""
    measured_step: int
    """The number of the training's step that it is made of, from 1."""

    @property
    def peak_bytes(self) -> int:
        """Return the highest peak of any rank."""
        return max(self.peaks.values())

    @property
    def origin(self) -> str:
        """Return what it is made of, for a log."""
        return "of the first step" if self.measured_step == 1 else f"of step {self.measured_step}"

    def describe(self, budget_bytes: int) -> str:
        """Return what it does and what is expected of it within a budget, for a log."""
        offloads = self.plan.count(Action.OFFLOAD) + self.plan.count(Action.RECOMPUTE_AND_OFFLOAD)
        recomputes = self.plan.count(Action.RECOMPUTE) + self.plan.count(Action.RECOMPUTE_AND_OFFLOAD)
        return (
            f"plan {self.origin} for {self.call}: {offloads} sites offloaded, {recomputes} units recomputed; predicted peak "
            f"{format_bytes(self.peak_bytes)} of {format_bytes(budget_bytes)}, step {format_ms(self.step_s)}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TriedStep:
    """A plan that was in use, and what steps under it took."""

    planned: PlannedStep
    tried: Tried
    peaks: Mapping[int, int]
    """By pipeline rank: the most device bytes that any process of it took; empty where nobody counts them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """What all processes measured in one step."""

    processes: tuple[ProcessMeasurement, ...]
    call: ScheduleCall
    """Of the step."""
    number: int
    """Of the step in the training, from 1."""
    device_type: str
    policy: TransferPolicy

    def join_extra_bytes(self, former: "MeasuredStep") -> "MeasuredStep":
        """Return this step with what segments of an older one of the same training had for a moment, where that was more.

        Of a layer that leaves while it is measured nobody knows it: with little room one may have stayed in the older alone.
        """
        processes = [
            dataclasses.replace(own, rank=_join_extra_bytes(own.rank, older.rank))
            for own, older in zip(self.processes, former.processes, strict=True)
        ]
        return dataclasses.replace(self, processes=tuple(processes))

    def plan(self, call: ScheduleCall, *, budget_bytes: int, free_bytes: int, known: TriedStep | None = None) -> PlannedStep:
        """Return the fastest plan for `call`.

        Args:
            call: Of microbatches that are no larger than the measured ones.
            budget_bytes: Of each device.
            free_bytes: Of it, what is left free in any case.
            known: What steps under an older plan for `call` took: they say how late the host is, and what is left free
                beyond that. See [Note: What a plan leaves free].

        Raises:
            PlanError: There is none, or layers cannot do what the older plan says.
        """
        # Here: SciPy takes longer to load than all else, and one process plans.
        from fgoffload.planner.host_overhead import fit_slowdown_to_step, slow_down
        from fgoffload.planner.simulation.simulator import simulate
        from fgoffload.planner.solving.solver import solve_leaving_free

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
        """Return the layers that may stay where a step is measured again, while the others leave. As many as fit, on all ranks.

        Times are those of layers that stayed, where there are any: first one of each kind does, then another, and so on.

        Raises:
            PlanError: The step is above the budget though all leaves that may.
        """
        from fgoffload.planner.simulation.simulator import simulate
        from fgoffload.planner.solving.megatron_flags import MegatronFlags
        from fgoffload.planner.solving.solver import count_planned_bytes

        # As it runs: by no plan.
        models = [dataclasses.replace(model, turn=Turn.CALL_BACK) for model in self._make_models(call.microbatches)]
        planned_bytes = count_planned_bytes(budget_bytes, free_bytes=free_bytes)
        leaving = MegatronFlags(offload_modules=default_tags().names).make_plan(models).actions
        ordered = [_order_layers(model) for model in models]

        def choose(count: int) -> Layers:
            return frozenset(layer for layers in ordered for layer in layers[:count])

        def count_missing(count: int) -> int:
            """Return the bytes that the budget lacks where so many layers of each rank stay."""
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
        # The slowest link of all: which process of a pipeline rank is late makes no difference to the step.
        link = min((one.link for one in self.processes), key=lambda link: link.copies[-1].d2h_bytes_per_s)
        ranks = merge_processes(one.rank for one in self.processes)
        device = CPU if self.device_type == "cpu" else self.device_type
        profile = Profile(device=device, versions={}, date="", link=link, ranks=ranks)
        host_budget_bytes = min(one.host_budget_bytes for one in self.processes)
        return tuple(
            make_rank_model(
                profile,
                rank=rank.rank,
                policy=self.policy,
                microbatches=microbatches,
                host_budget_bytes=host_budget_bytes,
            )
            for rank in ranks
        )


def _order_layers(model: RankModel) -> list[tuple[int, int]]:
    """Return the layers of a rank, by chunk and number: one of each kind, then another one of each, and so on."""
    seen: collections.Counter[str] = collections.Counter()
    keys = []
    for chunk, layers in enumerate(one.layers for one in model.chunks):
        for layer in layers:
            keys.append((seen[layer.model.kind], chunk, layer.number))
            seen[layer.model.kind] += 1
    return [(chunk, number) for _, chunk, number in sorted(keys)]


def _join_extra_bytes(own: RankProfile, older: RankProfile) -> RankProfile:
    """Return `own` with the most that each segment of a layer has for a moment in either."""
    known = {
        (chunk, layer.number, segment.name): segment
        for chunk, one in enumerate(older.chunks)
        for layer in one.layers
        for segment in layer.model.segments
    }
    chunks = []
    for chunk, one in enumerate(own.chunks):
        layers = []
        for layer in one.layers:
            segments = tuple(
                _join_segment(segment, known.get((chunk, layer.number, segment.name))) for segment in layer.model.segments
            )
            layers.append(dataclasses.replace(layer, model=dataclasses.replace(layer.model, segments=segments)))
        chunks.append(dataclasses.replace(one, layers=tuple(layers)))
    return dataclasses.replace(own, chunks=tuple(chunks))


def _join_segment(own: Segment, older: Segment | None) -> Segment:
    if older is None:
        return own
    return dataclasses.replace(
        own,
        forward_extra_bytes=max(own.forward_extra_bytes, older.forward_extra_bytes),
        backward_extra_bytes=max(own.backward_extra_bytes, older.backward_extra_bytes),
    )
