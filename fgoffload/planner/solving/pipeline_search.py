"""Searches for the best plan for all pipeline ranks: first for each rank alone, then for all ranks together.

Ranks with the same layers differ only in their number of microbatches in flight. We search the first and the last of them, and
reuse the results for the others. Then we simulate the best states of all ranks together, because waits for neighbors shift
copies and thus change peaks. We repeat this with smaller budgets for ranks that exceed the budget.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from fgoffload.plan import OffloadPlan
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.simulation.simulation_result import StepResult
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.local_search import LocalSearch
from fgoffload.planner.solving.megatron_flags import MEGATRON_BASELINES, list_baselines, list_offloading_flags
from fgoffload.planner.solving.nearest_flags import FlagSearch, NearestFlags
from fgoffload.planner.solving.rank_search import RankSearch
from fgoffload.planner.solving.states import State, list_slots, make_plan, read_plan

_MOST_CORRECTIONS = 4
"""Maximum number of attempts, each with smaller budgets for ranks that peaked higher in the pipeline than alone."""

_FEWEST_WALKED, _MOST_WALKED = 60, 1000
"""Minimum and maximum number of simulations in the walks of one rank."""

_ROUTED_MORE = 1.1
"""Factor that adds a margin to the bytes in flight at the loss: a rank's experts may get more tokens than predicted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan and its prediction."""

    plan: OffloadPlan  # plan for all ranks, with its limit on the bytes in flight at the loss
    result: StepResult  # prediction for this plan

    def score(self, budget_bytes: int) -> tuple[float, ...]:
        """Return a sort key (lower is better): bytes above the budget, step time, number of actions in the plan."""
        return (max(self.result.peak_bytes - budget_bytes, 0), round(self.result.step_s, 9), len(self.plan.actions))


class PipelineSearch:
    """Searches for the best plan for all ranks, and caches results across budgets.

    For each budget, the walks of all ranks together simulate at most `layer_passes` forwards and backwards of single layers.
    """

    def __init__(self, ranks: Sequence[RankModel], *, layer_passes: int) -> None:
        self.ranks = tuple(ranks)
        self._layer_passes = layer_passes
        self._searches: dict[tuple[int, int | None], RankSearch] = {}
        alike: dict[object, list[int]] = {}
        for place, rank in enumerate(self.ranks):
            layers = tuple(tuple(layer.model for layer in chunk.layers) for chunk in rank.chunks)
            alike.setdefault((layers, rank.turning_chunk), []).append(place)
        self._searched: dict[int, list[int]] = {}  # keyed by rank index: indices of the searched ranks with the same layers
        for places in alike.values():
            chosen = sorted({places[0], places[-1]})
            self._searched.update({place: chosen for place in places})

    @functools.cached_property
    def baselines(self) -> Mapping[str, StepResult]:
        """Predictions for the baselines, by name. Recompute settings without effect, as under CUDA graphs, are omitted."""
        plans = {name: (flags, flags.make_plan(self.ranks)) for name, flags in list_baselines(self.ranks).items()}
        return {
            name: simulate(flags.adapt(self.ranks), plan)
            for name, (flags, plan) in plans.items()
            if plan.actions or name not in MEGATRON_BASELINES
        }

    @functools.cached_property
    def flags(self) -> FlagSearch:
        """Search for the best of Megatron's own flags."""
        return FlagSearch(self.ranks, self.baselines["baseline"])

    def find(self, budget_bytes: int, nearest: NearestFlags | None, known: Candidate | None = None) -> Candidate:
        """Return the fastest plan found within the budget or, if none fits, the plan closest to the budget.

        With a budget of 0, that is the plan with the lowest peak. `nearest`, the best of Megatron's own flags, is one of the
        starting points. The returned plan is never slower than `known`, a plan for a smaller budget.
        """
        flags = list_baselines(self.ranks)
        usual = [one.make_plan(self.ranks) for one in (*flags.values(), *list_offloading_flags(self.ranks))]
        nearest_plan = None if nearest is None else nearest.flags.make_plan(self.ranks)
        usual += [] if known is None else [known.plan]
        found = [] if known is None else [known]
        found += self._find_together(budget_bytes, usual, nearest_plan)
        # If each rank's plan is searched separately, ranks may wait for each other, so a baseline for all ranks may be faster.
        compared = [(flags[name], result) for name, result in self.baselines.items()]
        compared += [] if nearest is None else [(nearest.flags, nearest.result)]
        for one, result in compared:
            best_s = min((has.result.step_s for has in found if has.result.peak_bytes <= budget_bytes), default=math.inf)
            if result.peak_bytes <= budget_bytes and result.step_s < best_s:
                windows = [rank.loss_window_bytes for rank in result.ranks]
                plan = dataclasses.replace(one.make_plan(self.ranks), loss_window_bytes=round(max(windows) * _ROUTED_MORE))
                found.append(Candidate(plan=plan, result=simulate(self.ranks, plan)))
        return min(found, key=lambda one: one.score(budget_bytes))

    def _find_together(self, budget_bytes: int, usual: Sequence[OffloadPlan], nearest: OffloadPlan | None) -> list[Candidate]:
        """Return plans that combine the best state of each rank. Each plan corrects the previous one."""
        searches = [
            (place, self._get_search(place)) for place in sorted({one for chosen in self._searched.values() for one in chosen})
        ]
        slowest_s = max(search.microbatch_s for _, search in searches)
        for place, search in searches:
            rank = self.ranks[place]
            state = None if nearest is None else read_plan(nearest, rank)
            starts = [read_plan(plan, rank) for plan in usual]
            search.find(budget_bytes, starts=starts, nearest=state, slowest_s=slowest_s)
        self._walk([search for _, search in searches], budget_bytes, slowest_s)
        budgets = [budget_bytes] * len(self.ranks)
        found: list[Candidate] = []
        for _ in range(_MOST_CORRECTIONS):
            picked = [self._pick(place, budget) for place, budget in enumerate(budgets)]
            found.append(self._simulate([state for state, _, _ in picked], [window for _, window, _ in picked]))
            above = [one.peak_bytes - budget_bytes for one in found[-1].result.ranks]
            alone = [peak_bytes for _, _, peak_bytes in picked]
            if max(above) <= 0 or max(alone) > budget_bytes:
                break
            for place, above_bytes in enumerate(above):
                if above_bytes > 0:
                    budgets[place] = max(min(budgets[place], alone[place]) - above_bytes, 1)
        return found

    def _simulate(self, states: Sequence[State], windows: Sequence[int | None]) -> Candidate:
        placed = ((list_slots(rank), state) for rank, state in zip(self.ranks, states, strict=True))
        window_bytes = max((one for one in windows if one is not None), default=None)
        plan = make_plan(placed, loss_window_bytes=window_bytes)
        return Candidate(plan=plan, result=simulate(self.ranks, plan))

    def _pick(self, place: int, budget_bytes: int) -> tuple[State, int | None, int]:
        """Return the best state of a rank alone, its limit on the bytes in flight at the loss, and its peak."""
        search = self._get_search(place)
        if place not in self._searched[place]:
            borrowed = search.borrow([self._get_search(other) for other in self._searched[place]], budget_bytes)
            if borrowed is not None:
                return borrowed, None, search.evaluate(borrowed).peak_bytes
        state = search.find(budget_bytes)
        if self.ranks[place].turning_chunk is not None:
            # Compare three limits on the bytes in flight at the loss: the maximum with a margin, the maximum itself, and 0.
            most_bytes = search.evaluate(state).loss_window_bytes
            searches = [self._get_search(place, window) for window in (round(most_bytes * _ROUTED_MORE), most_bytes, 0)]
            search = min(searches, key=lambda one: one.score(state, budget_bytes))
        window = search.loss_window_bytes if any(one.moved_bytes for one in state) else None
        return state, window, search.evaluate(state).peak_bytes

    def _walk(self, searches: Sequence[RankSearch], budget_bytes: int, slowest_s: float) -> None:
        """Run walks with at most `layer_passes` simulated layer passes in total, starting with the slowest ranks."""
        left = self._layer_passes
        picked = [(search.pick(budget_bytes), search) for search in searches]
        walked = [(search.evaluate(one).step_s, search) for one, search in picked if not search.is_nearly_free(one, slowest_s)]
        for place, (_, search) in enumerate(sorted(walked, key=lambda pair: -pair[0]), start=1):
            before = len(search.known)
            simulations = left // max(search.layer_passes, 1)
            if simulations < _FEWEST_WALKED:
                return
            # Each rank gets half of the remaining simulations, and the last rank gets all of them.
            own = max(_FEWEST_WALKED, simulations if place == len(walked) else simulations // 2)
            if search.kept.peak_bytes > budget_bytes:
                LocalSearch(search, budget_bytes).run(min(own, _MOST_WALKED))
            left -= (len(search.known) - before) * search.layer_passes

    def _get_search(self, place: int, loss_window_bytes: int | None = None) -> RankSearch:
        key = (place, loss_window_bytes)
        if key not in self._searches:
            self._searches[key] = RankSearch(self.ranks[place], loss_window_bytes=loss_window_bytes)
        return self._searches[key]
