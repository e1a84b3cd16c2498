"""The fastest plan within a memory budget, for all pipeline ranks.

    ranks -> choices of each kind of layer -> a mixed-integer program for each rank -> placed in layers
          -> simulated, corrected and bettered, rank by rank -> simulated together -> Solution

Every prediction in a `Solution` is the simulator's. Where there are few plans all of them are simulated, and the result is the
best there is; else it is the best that was found, and docs/concepts/planner.md says how far that was from the best where both
were run.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Mapping, Sequence

from fgoffload.errors import BudgetError, ConfigError
from fgoffload.plan import OffloadPlan
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.simulation.simulation_result import RankResult, StepResult
from fgoffload.planner.solving.flag_search import NearestFlags
from fgoffload.planner.solving.placement import State, keep_all
from fgoffload.planner.solving.rank_searches import RankSearches, begin_searches
from fgoffload.planner.solving.reasons import Decision, explain_rank
from fgoffload.planner.solving.search_limits import SearchLimits
from fgoffload.units import check_bytes, format_bytes

DEFAULT_TIME_LIMIT_S = 600.0
"""Seconds. The limits of the search end it long before, on slow and busy machines too: by those alone the plan is the same
everywhere. On a busy one, 60 seconds cut searches short that take 12 of the processor."""


_ROUTED_MORE = 1.1
"""Times as many bytes may be on their way when the loss begins: with a tenth more tokens routed to a rank's experts, what was
to stay until then is not waited for."""

PLANNED_SHARE = 0.998
"""The part of a device memory budget that a plan may use where a training has to keep to it: the bytes of layers are exact, and
those of what operators have for a moment are not."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A plan that keeps to a budget, and what is expected of it."""

    plan: OffloadPlan
    """For all ranks."""
    result: StepResult
    """What the simulator predicts."""
    budget_bytes: int
    """Of each device."""
    decisions: tuple[Decision, ...]
    """Rank by rank, what is done about each tag, and why."""
    bound_s: float | None
    """No plan makes the step of the slowest rank shorter than this, as the programs count, which leave out what neighbouring
    layers do to each other. None where no program was needed: all is kept, or all plans were simulated."""
    gap: float | None
    """How much longer than its bound the rank takes, as a part of it, where that is most. None where `bound_s` is."""
    baselines: Mapping[str, StepResult]
    """What people compare with, by name: `fgoffload.planner.solving.megatron_flags.baselines`. Where one of them keeps to the
    budget the plan is no slower. Those that offload nothing are Megatron's own, without this package."""
    nearest: NearestFlags | None
    """Megatron's own flags that come nearest to the plan within the budget, or None where none keep to it."""
    simulations: int
    """Of single ranks; one of all ranks together counts as many as there are."""
    states: tuple[State, ...]
    """What the layers of each rank do: where a search for a larger budget begins."""


def solve(
    ranks: Sequence[RankModel],
    *,
    budget_bytes: int,
    host_budget_bytes: int | None = None,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    limits: SearchLimits | None = None,
    start: Solution | None = None,
) -> Solution:
    """Return the fastest plan found that keeps every rank within the budget.

    Args:
        ranks: The pipeline, by number.
        budget_bytes: Device bytes of each rank, static memory included.
        host_budget_bytes: Host bytes of each rank. None leaves what the ranks say.
        time_limit_s: When to stop with what there is. A plan that was stopped so may differ from run to run.
        limits: How long to look otherwise.
        start: A solution for the same ranks and a smaller budget: the result is never slower.

    Raises:
        ConfigError: An argument is not what it must be.
        BudgetError: No plan was found that fits: which rank lacks how many bytes when, and the least budget that does.
    """
    ranks = _prepare(ranks, budget_bytes, host_budget_bytes)
    deadline_s = time.monotonic() + time_limit_s
    limits = limits or SearchLimits()
    if describe_static_lack(ranks, budget_bytes) is None:
        searches = begin_searches(ranks, budget_bytes=budget_bytes, limits=limits, deadline_s=deadline_s)
    else:
        searches = RankSearches(ranks, limits=limits, deadline_s=deadline_s)
    return _solve(searches, budget_bytes, start, since=0)


def solve_leaving_free(
    ranks: Sequence[RankModel], *, budget_bytes: int, free_bytes: int, limits: SearchLimits | None = None
) -> Solution:
    """Return what `solve` does for the part of a budget that a plan may use where a training has to keep to it.

    Args:
        ranks: The pipeline, by number.
        budget_bytes: Device bytes of each rank, static memory included.
        free_bytes: What a step took more than was predicted of it, which is left free.
        limits: As for `solve`.

    Raises:
        ConfigError: As `solve`.
        BudgetError: As `solve`, with the least budget that leaves as much free.
    """
    planned_bytes = count_planned_bytes(budget_bytes, free_bytes=free_bytes)
    try:
        return solve(ranks, budget_bytes=planned_bytes, limits=limits)
    except BudgetError as error:
        why = f"Of a budget of {format_bytes(budget_bytes)} a plan may use {format_bytes(planned_bytes)}. {error.why}"
        raise BudgetError(why, count_budget_bytes(error.least_bytes, free_bytes=free_bytes)) from error


def sweep(
    ranks: Sequence[RankModel],
    budgets_bytes: Sequence[int],
    *,
    host_budget_bytes: int | None = None,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    limits: SearchLimits | None = None,
) -> list[Solution]:
    """Return a solution for each budget, in the order of `budgets_bytes`. A larger budget is never slower.

    Args:
        ranks: The pipeline, by number.
        budgets_bytes: Device bytes of each rank. `find_least_budget` says where to begin.
        host_budget_bytes: As in `solve`.
        time_limit_s: For each budget, on average.
        limits: For each budget.

    Raises:
        ConfigError: As `solve`.
        BudgetError: As `solve`, for the smallest budget that no plan was found for.
    """
    ordered = sorted(set(budgets_bytes))
    ranks = _prepare(ranks, ordered[0] if ordered else 0, host_budget_bytes)
    deadline_s = time.monotonic() + time_limit_s * len(ordered)
    searches = RankSearches(ranks, limits=limits or SearchLimits(), deadline_s=deadline_s)
    found: dict[int, Solution] = {}
    start: Solution | None = None
    for budget_bytes in ordered:
        start = found[budget_bytes] = _solve(searches, budget_bytes, start, since=searches.simulations)
    return [found[budget_bytes] for budget_bytes in budgets_bytes]


def find_least_budget(
    ranks: Sequence[RankModel],
    *,
    host_budget_bytes: int | None = None,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    limits: SearchLimits | None = None,
) -> int:
    """Return the least budget that a plan was found for, in bytes, however slow that plan is.

    Raises:
        ConfigError: As `solve`.
    """
    ranks = _prepare(ranks, 0, host_budget_bytes)
    searches = RankSearches(ranks, limits=limits or SearchLimits(), deadline_s=time.monotonic() + time_limit_s)
    return _find_least(searches).result.peak_bytes


def _solve(searches: RankSearches, budget_bytes: int, start: Solution | None, *, since: int) -> Solution:
    """Return the solution for one budget, not slower than `start`, which is one for a smaller budget.

    Simulations from `since` on were for it.
    """
    _check_static(searches, budget_bytes)
    found = [_try(searches, searches.find_states(budget_bytes, starts=() if start is None else start.states), budget_bytes)]
    if not found[0].fits(budget_bytes):
        least = _find_least(searches)
        if not least.fits(budget_bytes):
            raise _make_error(searches.ranks, least.result, budget_bytes)
        found += [least, _try(searches, searches.find_states(budget_bytes, starts=least.states), budget_bytes)]
    if start is not None:
        found.append(_Candidate(states=start.states, plan=start.plan, result=start.result))
    best = min(found, key=lambda one: one.score(budget_bytes))
    best = min((best, *_try_others(searches, best, budget_bytes)), key=lambda one: one.score(budget_bytes))
    bound_s, gap = searches.find_bound()
    return Solution(
        plan=best.plan,
        result=best.result,
        budget_bytes=budget_bytes,
        decisions=_explain(searches, best.states, best.result, budget_bytes),
        bound_s=bound_s,
        gap=gap,
        baselines=searches.simulate_baselines(),
        nearest=searches.find_nearest(budget_bytes),
        simulations=searches.simulations - since,
        states=best.states,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A plan, and what the simulator says of it."""

    states: tuple[State, ...]
    """What the layers of each rank do."""
    plan: OffloadPlan
    """The same as a plan, with what may be on its way when losses begin."""
    result: StepResult
    """Of exactly that plan."""

    def fits(self, budget_bytes: int) -> bool:
        """Return whether every rank keeps to the budget."""
        return self.result.peak_bytes <= budget_bytes

    def score(self, budget_bytes: int) -> tuple[float, float]:
        """Return what a better one has less of: bytes above the budget, and time."""
        return (max(self.result.peak_bytes - budget_bytes, 0), round(self.result.step_s, 9))


def _try(searches: RankSearches, states: tuple[State, ...], budget_bytes: int) -> _Candidate:
    """Return the plan of `states` with what may be on its way to the host where losses begin, and what it comes to.

    A little more than was on its way there without such a bound where that fits, and else nothing where as much does not.
    """
    result = searches.simulate_together(states)
    plan = searches.make_plan(states)
    windows = [one.loss_window_bytes for rank, one in _list_turning(searches.ranks, result) if one.d2h_bytes]
    if not windows:
        return _Candidate(states=states, plan=plan, result=result)
    if not max(windows):
        # Nothing was on its way there, so that the bound changes nothing.
        return _Candidate(states=states, plan=dataclasses.replace(plan, loss_window_bytes=0), result=result)
    tried = []
    for window_bytes in (round(max(windows) * _ROUTED_MORE), max(windows), 0):
        bounded = dataclasses.replace(plan, loss_window_bytes=window_bytes)
        tried.append(_Candidate(states=states, plan=bounded, result=searches.simulate_plan(bounded)))
        if tried[-1].fits(budget_bytes):
            return tried[-1]
    return min(tried, key=lambda one: one.score(budget_bytes))


def _try_waiting(searches: RankSearches, known: _Candidate, budget_bytes: int) -> _Candidate | None:
    """Return a plan in which nothing may be on its way when losses begin, searched for from `known`.

    None where that spares no rank with a loss any memory that it lacks.
    """
    if not searches.gains_by_waiting(known.states, budget_bytes):
        return None
    states = searches.find_waiting_states(known.states, budget_bytes)
    plan = dataclasses.replace(searches.make_plan(states), loss_window_bytes=0)
    return _Candidate(states=states, plan=plan, result=searches.simulate_plan(plan))


def _try_others(searches: RankSearches, known: _Candidate, budget_bytes: int) -> list[_Candidate]:
    """Return plans that may be better than what is known, which was searched for rank by rank.

    One in which nothing may be on its way when losses begin. And beside that search, plans by which all leaves that can, where
    no rank takes longer alone than a whole step by what is known: what is found rank by rank may wait for its neighbours where
    these do not, since all ranks do the same. And what is known, with a rank with a loss that runs nothing again.
    """
    offloading = searches.list_offloading(budget_bytes, shorter_than_s=known.result.step_s)
    offloading += searches.list_leaving_first(known.states, budget_bytes)
    plans = [dataclasses.replace(searches.make_plan(states), loss_window_bytes=0) for states in offloading]
    waiting, results = searches.simulate_beside(functools.partial(_try_waiting, searches, known, budget_bytes), plans)
    found = [
        _Candidate(states=states, plan=plan, result=result)
        for states, plan, result in zip(offloading, plans, results, strict=True)
    ]
    return found if waiting is None else [waiting, *found]


def _find_least(searches: RankSearches) -> _Candidate:
    """Return the plan with the least peak that was found, however long it takes."""
    return _try(searches, searches.find_least_states(), 0)


def _list_turning(ranks: Sequence[RankModel], result: StepResult) -> list[tuple[RankModel, RankResult]]:
    """Return the ranks whose forward ends in a loss, each with what it came to."""
    pairs = zip(ranks, result.ranks, strict=True)
    return [(rank, one) for rank, one in pairs if rank.turning_chunk is not None]


def _prepare(ranks: Sequence[RankModel], budget_bytes: int, host_budget_bytes: int | None) -> tuple[RankModel, ...]:
    if not ranks:
        raise ConfigError("ranks is empty. Give at least one.")
    for name, size in (("budget_bytes", budget_bytes), ("host_budget_bytes", host_budget_bytes or 0)):
        if check_bytes(size, name=name) < 0:
            raise ConfigError(f"{name} {size} is below 0 bytes. Give a size, as in 60 * fgoffload.units.GIB.")
    if host_budget_bytes is None:
        return tuple(ranks)
    return tuple(dataclasses.replace(rank, host_budget_bytes=host_budget_bytes) for rank in ranks)


def _check_static(searches: RankSearches, budget_bytes: int) -> None:
    """Refuse a budget that what is always on the device takes alone: with what it lacks there, and the nearest that does."""
    lacking = describe_static_lack(searches.ranks, budget_bytes)
    if lacking is None:
        return
    least_bytes = _find_least(searches).result.peak_bytes
    raise BudgetError(f"{lacking} The nearest budget that a plan was found for is {format_bytes(least_bytes)}.", least_bytes)


def describe_static_lack(ranks: Sequence[RankModel], budget_bytes: int) -> str | None:
    """Return what a rank lacks for its static memory alone, without any search; None where each has room for it."""
    worst = max(ranks, key=lambda rank: rank.static_bytes)
    missing_bytes = worst.static_bytes - budget_bytes
    if missing_bytes < 0:
        return None
    return (
        f"A memory budget of {format_bytes(budget_bytes)} is not above the static memory of pipeline rank {worst.rank}, "
        f"{format_bytes(worst.static_bytes)} of weights, gradients, optimizer and reserve, which no plan moves. That rank "
        f"lacks {format_bytes(missing_bytes)} between steps, with no activation there."
    )


def _make_error(ranks: Sequence[RankModel], least: StepResult, budget_bytes: int) -> BudgetError:
    """Return what to say where even the plan with the least peak, which came to `least`, does not fit."""
    worst = least.worst_rank
    rank = next(one for one in ranks if one.rank == worst.rank)
    host, fix = "", ""
    if rank.host_budget_bytes is not None:
        host = f" and a host budget of {format_bytes(rank.host_budget_bytes)} a rank"
        layer_bytes = max((layer.model.saved_bytes for chunk in rank.chunks for layer in chunk.layers), default=0)
        if rank.host_budget_bytes - worst.host_peak_bytes < layer_bytes:
            fix = " The host budget has no room for another layer: a larger one may do too."
    return BudgetError(
        f"No plan was found that keeps to a memory budget of {format_bytes(budget_bytes)}{host}: with everything recomputed or "
        f"offloaded that helps, pipeline rank {worst.rank} lacks {format_bytes(worst.peak_bytes - budget_bytes)} at "
        f"{worst.peak_at}. A memory budget of {format_bytes(worst.peak_bytes)} fits.{fix}",
        worst.peak_bytes,
    )


def _explain(searches: RankSearches, states: Sequence[State], result: StepResult, budget_bytes: int) -> tuple[Decision, ...]:
    decisions: list[Decision] = []
    for place, (search, state) in enumerate(zip(searches.of_ranks, states, strict=True)):
        kept = search.judge(keep_all(search.slots, search.modes))
        decisions += explain_rank(
            searches.ranks[place],
            searches.list_slots(place),
            state,
            result.ranks[place],
            keeps_within_budget=kept.peak_bytes <= budget_bytes,
        )
    return tuple(decisions)


def count_planned_bytes(budget_bytes: int, *, free_bytes: int) -> int:
    """Return the device bytes that a plan may use of a budget.

    Args:
        budget_bytes: Of a device.
        free_bytes: What a step took more than was predicted of it, which plans leave free.
    """
    return min(round(budget_bytes * PLANNED_SHARE), budget_bytes - free_bytes)


def count_budget_bytes(planned_bytes: int, *, free_bytes: int) -> int:
    """Return the least budget of which a plan may use `planned_bytes`: the inverse of `count_planned_bytes`."""
    return max(math.ceil((planned_bytes - 0.5) / PLANNED_SHARE), planned_bytes + free_bytes)
