"""Makes plans during training, from a step that all processes measured.

[Note: Memory that a plan leaves free]
If a step exceeds its predicted peak, the next plan leaves the excess free. The excess depends on the measurement: predictions
from the first step may be far too high, because host memory was still being pinned and offloads were slow. So we keep the
measured peaks of a plan. A newer measurement predicts peaks for the same plan, and the next plan leaves the difference free.

[Note: Two plans]
The first step of a run is cold: kernels are loaded, the allocator grows, and host memory is pinned, so it takes longer than
later steps. The first plan is made from this step. It applies from the second step on, and a few of its steps are timed. Then
one more step is measured, after warm-up. The second plan is made from that step, with the overhead during copies that the timed
steps showed ([Note: Cost of copies on a launch-bound host] in `planner/host_overhead.py`). The second plan is timed too, and
the faster plan is kept. This comparison is called a trial. All its steps are training steps with bitwise identical results. The
timing of a step ends when the next step begins, so it includes the script's work in between. The first step under a plan is not
timed, because the allocator is still adapting. The median ignores one step with an evaluation or checkpoint.

A step with more or larger microbatches than planned ends the trial. The plan for that step starts a new trial. Smaller steps
are neither timed nor measured. The first plan is kept if the second measurement fails or would not fit. It is also kept if
there is no second plan, if both plans are the same, or if the second plan takes more memory than both the first plan and the
budget.
"""

import collections
import dataclasses
from collections.abc import Mapping

from fgoffload.errors import OffloadError, PlanError
from fgoffload.integrations.megatron.adapter.measurement import ScheduleCall
from fgoffload.plan import Action, OffloadPlan
from fgoffload.planner.host_overhead import fit_slowdown_to_step, slow_down
from fgoffload.planner.ranks.rank_model import NumberedLayer, RankModel, Turn
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
"""Set of layers, each identified by its chunk and number."""

TIMED_STEPS = 3
"""Number of timed steps of each plan, after its first step. A median of three ignores one outlier."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMeasurement:
    """Profile, link and host memory of one process."""

    rank: RankProfile
    link: LinkProfile
    host_budget_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A plan in use, with its predicted peaks and time."""

    plan: OffloadPlan
    """Plan for all ranks."""
    call: ScheduleCall
    """Largest step that the plan covers."""
    peaks: Mapping[int, int]
    """Predicted peak device bytes, by pipeline rank."""
    step_s: float
    """Predicted seconds of the step."""
    free_bytes: int
    """Bytes of the budget that the plan leaves free. See [Note: Memory that a plan leaves free]."""
    measured_step: int
    """Number of the training step that was measured for the plan, from 1."""

    @property
    def peak_bytes(self) -> int:
        """Largest predicted peak of any rank."""
        return max(self.peaks.values())

    @property
    def origin(self) -> str:
        """Step that was measured for the plan, as text for a log."""
        return "from the first step" if self.measured_step == 1 else f"from step {self.measured_step}"

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
    """A plan, with the measured time and peaks of its steps."""

    planned: PlannedStep
    tried: Tried
    peaks: Mapping[int, int]
    """Maximum device bytes of any process, by pipeline rank; empty if device bytes cannot be counted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """Measurements of one step by all processes."""

    processes: tuple[ProcessMeasurement, ...]
    call: ScheduleCall
    number: int
    """Number of the training step, from 1."""
    device_type: str
    policy: TransferPolicy

    def join_extra_bytes(self, other: "MeasuredStep") -> "MeasuredStep":
        """Return a copy in which each segment has the larger of its temporary bytes in this step and in the older step `other`.

        The temporary bytes of an offloaded layer are unknown, but the layer may have stayed on the GPU in the older step.
        """
        processes = [
            dataclasses.replace(own, rank=_join_extra_bytes(own.rank, older.rank))
            for own, older in zip(self.processes, other.processes, strict=True)
        ]
        return dataclasses.replace(self, processes=tuple(processes))

    def plan(self, call: ScheduleCall, *, budget_bytes: int, free_bytes: int, known: TriedStep | None = None) -> PlannedStep:
        """Return the fastest plan for `call`, which must not have larger microbatches than the measured step.

        Args:
            call: Step to plan for.
            budget_bytes: Device bytes of each rank.
            free_bytes: Minimum bytes of the budget to leave free.
            known: Older plan for `call`, with time and peaks of its steps. They determine the host's overhead, and may raise
                `free_bytes`. See [Note: Memory that a plan leaves free].

        Raises:
            PlanError: No plan fits, or the older plan does not match the layers.
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
        """Return the largest set of layers that may stay on the GPU when a step is measured again. The rest are offloaded.

        Times of layers on the GPU are more accurate. So the set has one layer of each kind first, then a second, and so on.

        Raises:
            PlanError: The step exceeds the budget even if all layers are offloaded.
        """
        # The measured step runs without a plan.
        models = [dataclasses.replace(model, turn=Turn.CANCEL) for model in self._make_models(call.microbatches)]
        planned_bytes = count_planned_bytes(budget_bytes, free_bytes=free_bytes)
        offloads = MegatronFlags(offload_modules=default_tags().names).make_plan(models).actions
        ordered = [_order_layers(model) for model in models]

        staying: Layers = frozenset()
        for count in range(max(map(len, ordered)) + 1):
            chosen = frozenset(layer for layers in ordered for layer in layers[:count])
            actions = {site: action for site, action in offloads.items() if (site.chunk, site.layer) not in chosen}
            missing_bytes = simulate(models, OffloadPlan(actions=actions)).peak_bytes - planned_bytes
            if missing_bytes > 0 and not chosen:
                missing = format_bytes(missing_bytes)
                raise PlanError(f"A step without recompute exceeds the budget by {missing}, even if all tags are offloaded.")
            if missing_bytes > 0:
                break
            staying = chosen
        return staying

    def _make_models(self, microbatches: int) -> tuple[RankModel, ...]:
        # Use the slowest link, because one slow process delays all processes.
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
    """Return the chunk and number of a rank's layers: first one layer of each kind, then a second of each, and so on."""
    seen: collections.Counter[str] = collections.Counter()
    keys = []
    for chunk, layers in enumerate(one.layers for one in model.chunks):
        for layer in layers:
            keys.append((seen[layer.model.kind], chunk, layer.number))
            seen[layer.model.kind] += 1
    return [(chunk, number) for _, chunk, number in sorted(keys)]


def _join_extra_bytes(own: RankProfile, older: RankProfile) -> RankProfile:
    """Return a copy of `own` in which each segment has the larger of its temporary bytes in `own` and `older`."""
    known = {
        (chunk, layer.number, segment.name): segment
        for chunk, one in enumerate(older.chunks)
        for layer in one.layers
        for segment in layer.model.segments
    }

    def join(layer: NumberedLayer, chunk: int) -> NumberedLayer:
        pairs = [(segment, known.get((chunk, layer.number, segment.name), segment)) for segment in layer.model.segments]
        segments = tuple(
            dataclasses.replace(
                segment,
                forward_extra_bytes=max(segment.forward_extra_bytes, other.forward_extra_bytes),
                backward_extra_bytes=max(segment.backward_extra_bytes, other.backward_extra_bytes),
            )
            for segment, other in pairs
        )
        return dataclasses.replace(layer, model=dataclasses.replace(layer.model, segments=segments))

    chunks = [
        dataclasses.replace(one, layers=tuple(join(layer, chunk) for layer in one.layers))
        for chunk, one in enumerate(own.chunks)
    ]
    return dataclasses.replace(own, chunks=tuple(chunks))
