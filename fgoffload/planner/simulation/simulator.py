"""What a plan comes to: the time, the memory, the waits and the copies of a training step, without a device.

    result = simulate(ranks, plan)
    result.step_s, result.worst_rank.peak_bytes, result.worst_rank.peak_at

Each rank has three streams: compute, copies to the host and copies to the device. What is copied when is decided by the code
that decides it for the engine, `fgoffload.transfer_schedule`. Ranks wait for each other as the pipeline's schedule has it.
docs/concepts/planner.md says what is taken into account, and what is not.
"""

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence

from fgoffload.errors import ConfigError, PlanError
from fgoffload.plan import Action, OffloadPlan
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.simulation.chunk_compiler import Actions, compile_rank
from fgoffload.planner.simulation.chunk_program import ChunkProgram
from fgoffload.planner.simulation.known_passes import KnownSteps
from fgoffload.planner.simulation.pass_order import Alone, InPipeline, PassOrder
from fgoffload.planner.simulation.rank_run import RankRun
from fgoffload.planner.simulation.repeated_passes import RepeatingRun
from fgoffload.planner.simulation.simulation_result import Detail, RankResult, StepResult
from fgoffload.planner.simulation.steady_state import add_rounds, find_rounds, leave_out_rounds
from fgoffload.planner.simulation.tallies import Recorder

__all__ = ["Detail", "RankResult", "StepResult", "simulate", "simulate_rank"]


def simulate(
    ranks: Sequence[RankModel],
    plan: OffloadPlan,
    *,
    p2p_s: float = 0.0,
    detail: Detail = Detail.TOTALS,
    only: int | None = None,
    known: KnownSteps | None = None,
) -> StepResult:
    """Return what a step under `plan` comes to on all ranks of a pipeline.

    Args:
        ranks: All of them, in order. Each has as many chunks; chunk c of rank r is virtual stage c * p + r of p ranks.
        plan: For all ranks; what it does not name is kept.
        p2p_s: Seconds from the end of a pass to the moment when the next stage can begin with its output.
        detail: What to note. With `Detail.TIMELINE` every pass is simulated.
        only: The number of the rank of which it is noted; None for all. Of the others there are totals, which takes less time.
        known: Of steps of the same ranks, by this plan or others: learns what passes come to here.

    Raises:
        ConfigError: The ranks are no pipeline, or their passes wait for each other for ever.
        PlanError: A layer cannot do what the plan says of it, or no rank has that layer.
    """
    _check_ranks(ranks, p2p_s)
    actions = _group_by_layer(plan)
    _check_layers(ranks, actions)
    programs = [compile_rank(rank, actions, loss_window_bytes=plan.loss_window_bytes) for rank in ranks]
    order = functools.partial(InPipeline, chunks=len(ranks[0].chunks), p2p_s=p2p_s)
    details = [detail if only is None or rank.rank == only else Detail.TOTALS for rank in ranks]
    return StepResult(ranks=_simulate(ranks, programs, order, details, known or KnownSteps()))


def simulate_rank(rank: RankModel, plan: OffloadPlan, *, detail: Detail = Detail.TOTALS) -> RankResult:
    """Return what a step under `plan` comes to on one rank that never waits for its neighbours.

    Args:
        rank: The rank.
        plan: For all ranks: what it says of layers that this one does not have is not looked at.
        detail: What to note. With `Detail.TIMELINE` every pass is simulated.

    Raises:
        PlanError: A layer cannot do what the plan says of it.
    """
    programs = [compile_rank(rank, _group_by_layer(plan), loss_window_bytes=plan.loss_window_bytes)]
    return _simulate([rank], programs, Alone, [detail], KnownSteps())[0]


def _simulate(
    ranks: Sequence[RankModel],
    programs: Sequence[Sequence[ChunkProgram]],
    make_order: Callable[..., PassOrder],
    details: Sequence[Detail],
    known: KnownSteps,
) -> tuple[RankResult, ...]:
    runs = [_make_run(rank, own, detail, known) for rank, own, detail in zip(ranks, programs, details, strict=True)]
    passes = [rank.passes for rank in ranks]
    rounds = None
    if Detail.TIMELINE not in details:
        rounds = find_rounds(passes, len(ranks[0].chunks), are_named=all(run.names_in_flight for run in runs))
    order = make_order(runs, passes, rounds.list_marks() if rounds else ())
    left_out = leave_out_rounds(order, rounds) if rounds else []
    order.run()
    results = [run.finish() for run in runs]
    for one in left_out:
        results = [add_rounds(result, own, one.times) for result, own in zip(results, one.numbers, strict=True)]
    return tuple(results)


def _make_run(rank: RankModel, programs: Sequence[ChunkProgram], detail: Detail, known: KnownSteps) -> RankRun:
    if detail is Detail.TOTALS and RepeatingRun.has_repeats(rank, programs):
        return RepeatingRun(rank, programs, known.get(rank))
    recorder = Recorder() if detail is Detail.TIMELINE else None
    return RankRun(rank, programs, recorder=recorder, notes_peaks=detail is Detail.PEAKS)


def _group_by_layer(plan: OffloadPlan) -> dict[tuple[int, int], Mapping[str, Action]]:
    actions: dict[tuple[int, int], dict[str, Action]] = collections.defaultdict(dict)
    for site, action in plan.actions.items():
        actions[site.chunk, site.layer][site.tag] = action
    return dict(actions)


def _check_ranks(ranks: Sequence[RankModel], p2p_s: float) -> None:
    numbers = [rank.rank for rank in ranks]
    if not ranks or numbers != list(range(len(ranks))):
        raise ConfigError(f"ranks {numbers} are not all ranks of a pipeline in order. Give ranks 0, 1, and so on.")
    counts = [len(rank.chunks) for rank in ranks]
    if len(set(counts)) > 1:
        raise ConfigError(f"ranks have {counts} chunks. Give each as many: those of a pipeline are interleaved.")
    if not 0 <= p2p_s < math.inf:
        raise ConfigError(f"p2p_s {p2p_s} is not a number of seconds from 0. Give such a number.")


def _check_layers(ranks: Sequence[RankModel], actions: Actions) -> None:
    known = {(number, layer.number) for rank in ranks for number, chunk in enumerate(rank.chunks) for layer in chunk.layers}
    for chunk, layer in sorted(actions):
        if (chunk, layer) not in known:
            raise PlanError(f"The plan names layers.{layer} in chunk {chunk}, and no rank has it there. Plan for this model.")
