"""Finds the fastest plan within a memory budget, for all pipeline ranks.

    ranks -> treatments of each kind of layer with costs -> price sweeps for each rank -> local search
          -> simulation of all ranks together -> Solution

All predictions in a `Solution` come from the simulator.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from fgoffload.errors import BudgetError, ConfigError
from fgoffload.plan import OffloadPlan
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.simulation.simulation_result import StepResult
from fgoffload.planner.solving.decisions import Decision, explain_plan
from fgoffload.planner.solving.nearest_flags import NearestFlags
from fgoffload.planner.solving.pipeline_search import Candidate, PipelineSearch
from fgoffload.units import check_bytes, format_bytes

DEFAULT_LAYER_PASSES = 30_000
"""Maximum number of simulated layer passes (forward or backward of one layer) in the local search. Each takes 25 to 100 us."""

THOROUGH_LAYER_PASSES = 10 * DEFAULT_LAYER_PASSES
"""Maximum number of simulated layer passes with `--thorough`."""

PLANNED_SHARE = 0.998
"""Fraction of a device memory budget that a plan may use if the run must not exceed the budget. The rest is headroom for
temporaries, which are not predicted exactly."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A plan within a budget, with its prediction and its explanation."""

    plan: OffloadPlan  # plan for all ranks
    result: StepResult  # predicted step
    budget_bytes: int  # budget of each device
    decisions: tuple[Decision, ...]  # decisions for all tags, rank by rank
    baselines: Mapping[str, StepResult]
    """Predictions for the baselines of `megatron_flags.list_baselines`, by name. The plan is at least as fast as every
    baseline that fits the budget. Baselines without offload run without this package."""
    nearest: NearestFlags | None  # the fastest of Megatron's own settings within the budget; None if none fits


def solve(
    ranks: Sequence[RankModel],
    *,
    budget_bytes: int,
    host_budget_bytes: int | None = None,
    layer_passes: int = DEFAULT_LAYER_PASSES,
) -> Solution:
    """Return the fastest plan found that keeps every rank within the budget.

    Args:
        ranks: All pipeline ranks, in order.
        budget_bytes: Device bytes of each rank, static memory included.
        host_budget_bytes: Host bytes of each rank; defaults to the limits in `ranks`.
        layer_passes: Maximum number of simulated layer passes in the local search.

    Raises:
        ConfigError: An argument is invalid.
        BudgetError: No plan fits. The message says which rank exceeds the budget, and gives the smallest budget with a plan.
    """
    ranks = _prepare(ranks, budget_bytes, host_budget_bytes)
    return _solve(PipelineSearch(ranks, layer_passes=layer_passes), budget_bytes, None)


def solve_leaving_free(
    ranks: Sequence[RankModel], *, budget_bytes: int, free_bytes: int, layer_passes: int = DEFAULT_LAYER_PASSES
) -> Solution:
    """Return the fastest plan found that leaves headroom in the budget, for runs that must not exceed it.

    `free_bytes` is the minimum headroom, such as the excess of an earlier step over its prediction. Raise a BudgetError if no
    plan fits. Its `least_bytes` includes the headroom.
    """
    planned_bytes = count_planned_bytes(budget_bytes, free_bytes=free_bytes)
    try:
        return solve(ranks, budget_bytes=planned_bytes, layer_passes=layer_passes)
    except BudgetError as error:
        why = f"A plan may use {format_bytes(planned_bytes)} of a budget of {format_bytes(budget_bytes)}. {error.why}"
        raise BudgetError(why, count_budget_bytes(error.least_bytes, free_bytes=free_bytes)) from error


def sweep(
    ranks: Sequence[RankModel], budgets_bytes: Sequence[int], *, host_budget_bytes: int | None = None
) -> Iterator[Solution]:
    """Yield a solution for each budget, smallest first. A larger budget never yields a slower plan.

    Raise a BudgetError if no plan fits the first budget. `find_least_budget` returns the smallest budget that a plan fits.
    """
    ordered = sorted(set(budgets_bytes))
    ranks = _prepare(ranks, ordered[0] if ordered else 0, host_budget_bytes)
    search = PipelineSearch(ranks, layer_passes=DEFAULT_LAYER_PASSES)
    known: Candidate | None = None
    for budget_bytes in ordered:
        solution = _solve(search, budget_bytes, known)
        known = Candidate(plan=solution.plan, result=solution.result)
        yield solution


def find_least_budget(ranks: Sequence[RankModel], *, host_budget_bytes: int | None = None) -> int:
    """Return the smallest budget that any plan fits, in bytes. That plan can be slow."""
    return _find_least(_prepare(ranks, 0, host_budget_bytes)).result.peak_bytes


def describe_static_lack(ranks: Sequence[RankModel], budget_bytes: int) -> str | None:
    """Return an error message if the static memory of a rank uses up the budget, or None if some budget is left."""
    worst = max(ranks, key=lambda rank: rank.static_bytes)
    missing_bytes = worst.static_bytes - budget_bytes
    if missing_bytes < 0:
        return None
    lack = f" Even without activations, that is {format_bytes(missing_bytes)} over the budget." if missing_bytes else ""
    return (
        f"A memory budget of {format_bytes(budget_bytes)} is not above the static memory of pipeline rank {worst.rank}: "
        f"{format_bytes(worst.static_bytes)} of weights, gradients, optimizer state and reserve.{lack}"
    )


def count_planned_bytes(budget_bytes: int, *, free_bytes: int) -> int:
    """Return how many bytes of a device memory budget a plan may use."""
    return min(round(budget_bytes * PLANNED_SHARE), budget_bytes - free_bytes)


def count_budget_bytes(planned_bytes: int, *, free_bytes: int) -> int:
    """Return the smallest budget of which a plan may use `planned_bytes`: the inverse of `count_planned_bytes`."""
    return max(math.ceil((planned_bytes - 0.5) / PLANNED_SHARE), planned_bytes + free_bytes)


def _solve(search: PipelineSearch, budget_bytes: int, known: Candidate | None) -> Solution:
    lacking = describe_static_lack(search.ranks, budget_bytes)
    if lacking is not None:
        least_bytes = _find_least(search.ranks).result.peak_bytes
        raise BudgetError(f"{lacking} The smallest budget with a plan is {format_bytes(least_bytes)}.", least_bytes)
    nearest = search.flags.find(budget_bytes)
    best = search.find(budget_bytes, nearest, known)
    if best.result.peak_bytes > budget_bytes:
        least = _find_least(search.ranks)
        if least.result.peak_bytes > budget_bytes:
            raise _make_error(search.ranks, least.result, budget_bytes)
        best = min(best, search.find(budget_bytes, nearest, least), key=lambda one: one.score(budget_bytes))
    return Solution(
        plan=best.plan,
        result=best.result,
        budget_bytes=budget_bytes,
        decisions=explain_plan(search.ranks, best.plan, search.baselines["baseline"], budget_bytes=budget_bytes),
        baselines=search.baselines,
        nearest=nearest,
    )


def _find_least(ranks: Sequence[RankModel]) -> Candidate:
    """Return the plan with the lowest peak, even if it is slow."""
    # A new search, because errors suggest the budget found here, and a search with that budget must find the same plan.
    return PipelineSearch(ranks, layer_passes=DEFAULT_LAYER_PASSES).find(0, None)


def _prepare(ranks: Sequence[RankModel], budget_bytes: int, host_budget_bytes: int | None) -> tuple[RankModel, ...]:
    if not ranks:
        raise ConfigError("ranks is empty. Pass at least one rank.")
    for name, size in (("budget_bytes", budget_bytes), ("host_budget_bytes", host_budget_bytes or 0)):
        if check_bytes(size, name=name) < 0:
            raise ConfigError(f"{name} {size} is below 0 bytes. Use a size, for example 60 * fgoffload.units.GIB.")
    if host_budget_bytes is None:
        return tuple(ranks)
    return tuple(dataclasses.replace(rank, host_budget_bytes=host_budget_bytes) for rank in ranks)


def _make_error(ranks: Sequence[RankModel], least: StepResult, budget_bytes: int) -> BudgetError:
    """Return the error for a budget below the peak of `least`, the plan with the lowest peak."""
    worst = least.worst_rank
    rank = next(one for one in ranks if one.rank == worst.rank)
    host, fix = "", ""
    if rank.host_budget_bytes is not None:
        host = f" and a host budget of {format_bytes(rank.host_budget_bytes)} per rank"
        layer_bytes = max((layer.model.saved_bytes for chunk in rank.chunks for layer in chunk.layers), default=0)
        if rank.host_budget_bytes - worst.host_peak_bytes < layer_bytes:
            fix = " The host budget has no room for another layer, so a larger host budget may help too."
    return BudgetError(
        f"No plan fits a memory budget of {format_bytes(budget_bytes)}{host}. Even with the plan that uses the least memory, "
        f"pipeline rank {worst.rank} exceeds the memory budget by {format_bytes(worst.peak_bytes - budget_bytes)} at "
        f"{worst.peak_at}. The smallest budget with a plan is {format_bytes(worst.peak_bytes)}.{fix}",
        worst.peak_bytes,
    )
