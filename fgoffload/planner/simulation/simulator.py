"""Simulates a training step under a plan without using a device: time, memory, waits and copies.

    result = simulate(ranks, plan)
    result.step_s, result.worst_rank.peak_bytes, result.worst_rank.peak_at

Each rank has three streams: compute, copies to the host and copies to the device. `fgoffload.transfer_schedule` schedules
copies, as in the engine. Ranks wait for each other as the pipeline schedule requires. docs/concepts/planner.md lists
the effects that the simulator models and those that it ignores.
"""

import collections
from collections.abc import Mapping, Sequence

from fgoffload.errors import ConfigError, PlanError
from fgoffload.plan import Action, OffloadPlan
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.simulation.chunk_compiler import Actions, compile_rank
from fgoffload.planner.simulation.pipeline_run import find_rounds, run_pipeline
from fgoffload.planner.simulation.rank_run import RankRun
from fgoffload.planner.simulation.simulation_result import Detail, RankResult, RankTimeline, StepResult

__all__ = ["Detail", "RankResult", "StepResult", "simulate", "simulate_rank"]


def simulate(
    ranks: Sequence[RankModel], plan: OffloadPlan, *, detail: Detail = Detail.TOTALS, only: int | None = None
) -> StepResult:
    """Simulate a step under `plan` on all ranks of a pipeline.

    Args:
        ranks: All ranks in order, each with the same number of chunks. Chunk c of rank r is virtual stage c * p + r of p ranks.
        plan: Plan for all ranks. Sites that the plan does not name stay on the GPU.
        detail: Level of detail. With `Detail.TIMELINE`, every pass is simulated.
        only: The only rank to which `detail` applies, or None for all ranks. Other ranks get `Detail.TOTALS`.

    Raises:
        ConfigError: The ranks do not form a pipeline, or their passes deadlock.
        PlanError: The plan has actions that a layer does not support, or names a layer that no rank has.
    """
    _check_ranks(ranks)
    actions = group_by_layer(plan)
    _check_layers(ranks, actions)
    details = [detail if only is None or rank.rank == only else Detail.TOTALS for rank in ranks]
    return StepResult(ranks=_simulate(ranks, actions, details, loss_window_bytes=plan.loss_window_bytes))


def simulate_rank(rank: RankModel, plan: OffloadPlan, *, detail: Detail = Detail.TOTALS) -> RankResult:
    """Simulate a step under `plan` on one rank, without waits for its neighbors. Actions for other ranks are ignored."""
    return _simulate([rank], group_by_layer(plan), [detail], loss_window_bytes=plan.loss_window_bytes)[0]


def _simulate(
    ranks: Sequence[RankModel], actions: Actions, details: Sequence[Detail], *, loss_window_bytes: int | None
) -> tuple[RankResult, ...]:
    runs = []
    for rank, detail in zip(ranks, details, strict=True):
        timeline = RankTimeline() if detail is Detail.TIMELINE else None
        chunks = compile_rank(rank, actions, loss_window_bytes=loss_window_bytes, merges=timeline is None)
        runs.append(RankRun(rank, chunks, timeline=timeline))
    passes, count = [rank.passes for rank in ranks], len(ranks[0].chunks)
    rounds = find_rounds(passes, count, are_all_simulated=Detail.TIMELINE in details)
    return run_pipeline(runs, passes, chunks=count, rounds=rounds)


def group_by_layer(plan: OffloadPlan) -> dict[tuple[int, int], Mapping[str, Action]]:
    """Return the actions of a plan, keyed by chunk and layer number, then by tag or unit."""
    actions: dict[tuple[int, int], dict[str, Action]] = collections.defaultdict(dict)
    for site, action in plan.actions.items():
        actions[site.chunk, site.layer][site.tag] = action
    return dict(actions)


def _check_ranks(ranks: Sequence[RankModel]) -> None:
    numbers = [rank.rank for rank in ranks]
    if not ranks or numbers != list(range(len(ranks))):
        raise ConfigError(f"ranks {numbers} are not a whole pipeline. Pass all pipeline ranks in order: 0, 1, and so on.")
    counts = [len(rank.chunks) for rank in ranks]
    if len(set(counts)) > 1:
        raise ConfigError(f"the ranks have {counts} chunks. All ranks of a pipeline must have the same number of chunks.")


def _check_layers(ranks: Sequence[RankModel], actions: Actions) -> None:
    known = {(number, layer.number) for rank in ranks for number, chunk in enumerate(rank.chunks) for layer in chunk.layers}
    for chunk, layer in sorted(actions):
        if (chunk, layer) not in known:
            raise PlanError(f"The plan names layers.{layer} in chunk {chunk}, which no rank has. Make a plan for this model.")
