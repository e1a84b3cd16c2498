"""The search of all pipeline ranks: each by itself first, alike ranks once, and then all together.

Neighbours change when a rank's copies run, and so its peak. So the states that are best alone are simulated together, and ranks
that are above the budget there get a smaller one.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from fgoffload.plan import OffloadPlan
from fgoffload.planner.ranks.output_copies import copy_outputs
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.simulation.simulation_result import StepResult
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.megatron_flags import MEGATRONS_OWN, baselines, list_offloading_flags
from fgoffload.planner.solving.nearest_flags import FlagSearch, NearestFlags
from fgoffload.planner.solving.peak_times import shorten_together
from fgoffload.planner.solving.rank_search import CostTable, RankSearch, strip_place
from fgoffload.planner.solving.states import State, list_slots, make_plan, read_plan

_MOST_CORRECTIONS = 4
"""Times that ranks get a smaller budget since they took more beside their neighbours than alone. One or two are usual."""

_FEWEST_WALKED, _MOST_WALKED = 60, 1000
"""Simulations of one rank: fewer lead walks nowhere, more find little."""

_SHORTENED = 1.01
"""Of a step: what a rank alone takes is known of a shortened step, and may be off by so much for the whole one."""

_ROUTED_MORE = 1.1
"""Times as many bytes may be in flight when the loss begins: with a tenth more tokens routed to a rank's experts, what was to
stay until then is not waited for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan, and what the simulator says of it."""

    plan: OffloadPlan
    """For all ranks, with what may be in flight when losses begin."""
    result: StepResult
    """Of exactly that plan."""

    def score(self, budget_bytes: int) -> tuple[float, ...]:
        """Return what a better one has less of: bytes above the budget, time, and rows."""
        return (max(self.result.peak_bytes - budget_bytes, 0), round(self.result.step_s, 9), len(self.plan.actions))


class PipelineSearch:
    """The search for the best plan of all ranks. What was found for one budget is known for the next.

    Args:
        ranks: The pipeline, by number.
        layer_passes: Forwards and backwards of single layers that walks may simulate for a budget, over all ranks.

    Raises:
        ConfigError: Two kinds of layers have one name.
    """

    def __init__(self, ranks: Sequence[RankModel], *, layer_passes: int) -> None:
        self.ranks = tuple(ranks)
        self._layer_passes = layer_passes
        self._short = shorten_together(self.ranks)
        self._costs = CostTable()
        self._places: dict[RankModel, int] = {}
        # By place, that of the first rank which is alike. Such a rank is hashed once: that takes milliseconds.
        self._alike = [self._places.setdefault(strip_place(rank), place) for place, rank in enumerate(self.ranks)]
        self._searches: dict[tuple[int, int | None], RankSearch] = {}
        self._plans = baselines(self.ranks)

    @functools.cached_property
    def baselines(self) -> Mapping[str, StepResult]:
        """Return what those that people compare with come to, by name: Megatron's own recompute without this package.

        Recompute that runs nothing again is left out, as that of whole layers beside CUDA graphs.
        """
        alone = [copy_outputs(dataclasses.replace(rank, has_engine=False)) for rank in self.ranks]
        return {
            name: simulate(alone if name in MEGATRONS_OWN else self.ranks, plan)
            for name, plan in self._plans.items()
            if plan.actions or name not in MEGATRONS_OWN
        }

    @functools.cached_property
    def flags(self) -> FlagSearch:
        """Return the search for Megatron's own flags."""
        return FlagSearch(self.ranks)

    def find(self, budget_bytes: int, nearest: NearestFlags | None, known: Candidate | None = None) -> Candidate:
        """Return the best plan found: within the budget, or, where none is, with the least bytes above it.

        Args:
            budget_bytes: Of each device. 0 asks for the least peak.
            nearest: Megatron's own flags that come nearest, where the search begins as well.
            known: A plan for a smaller budget. The result is never slower.
        """
        usual = [*self._plans.values(), *(flags.make_plan(self.ranks) for flags in list_offloading_flags(self.ranks))]
        usual += [] if nearest is None else [nearest.flags.make_plan(self.ranks)]
        usual += [] if known is None else [known.plan]
        begins = [[read_plan(plan, rank) for plan in usual] for rank in self.ranks]
        found = [] if known is None else [known]
        has_loss = any(rank.turning_chunk is not None for rank in self.ranks)
        for loss_window_bytes in (None, 0) if has_loss else (None,):
            states = self._find_states(budget_bytes, begins, loss_window_bytes)
            found.append(self._bound_window(states, budget_bytes, loss_window_bytes))
            if not found[-1].plan.actions:
                return found[-1]
        best = min(found, key=lambda one: one.score(budget_bytes))
        # What is found rank by rank may wait for its neighbours where ranks that all do the same do not.
        most = best.result.step_s / self.baselines["baseline"].step_s * _SHORTENED
        for number, plan in enumerate(usual):
            if self._is_promising([own[number] for own in begins], budget_bytes, most):
                bounded = dataclasses.replace(plan, loss_window_bytes=0)
                found.append(Candidate(plan=bounded, result=simulate(self.ranks, bounded)))
        return min(found, key=lambda one: one.score(budget_bytes))

    def _is_promising(self, states: Sequence[State], budget_bytes: int, most: float) -> bool:
        """Return whether each rank by itself keeps to the budget, and takes at most `most` times what keeping all takes."""
        for place, state in enumerate(states):
            search = self._get_search(place, 0)
            verdict = search.judge(state)
            if verdict.peak_bytes > budget_bytes or verdict.step_s > most * search.kept.step_s:
                return False
        return True

    def _find_states(
        self, budget_bytes: int, begins: Sequence[Sequence[State]], loss_window_bytes: int | None
    ) -> tuple[State, ...]:
        """Return the best state of each rank, such that they fit together."""
        budgets = [budget_bytes] * len(self.ranks)
        searches = [self._get_search(place, loss_window_bytes) for place in range(len(self.ranks))]
        for search, own in zip(searches, begins, strict=True):
            search.find(budget_bytes, starts=own)
        if loss_window_bytes is None or len(self.ranks) == 1:
            self._walk(searches, budget_bytes)
        states = [search.pick(budget_bytes) for search in searches]
        fits_alone = all(search.judge(state).peak_bytes <= budget_bytes for search, state in zip(searches, states, strict=True))
        for _ in range(_MOST_CORRECTIONS if fits_alone else 0):
            plan = self._make_plan(states, loss_window_bytes)
            result = simulate(self._short, plan)
            if result.peak_bytes <= budget_bytes:
                result = simulate(self.ranks, plan)
            above = {one.rank: one.peak_bytes - budget_bytes for one in result.ranks if one.peak_bytes > budget_bytes}
            if not above:
                break
            for place, above_bytes in above.items():
                search = searches[place]
                alone_bytes = search.judge(states[place]).peak_bytes
                budgets[place] = max(min(budgets[place], alone_bytes) - above_bytes, 1)
                states[place] = search.find(budgets[place], starts=[])
        return tuple(states)

    def _walk(self, searches: Sequence[RankSearch], budget_bytes: int) -> None:
        """Spend the passes of walks, on the ranks whose step is longest."""
        left = self._layer_passes
        distinct = list({id(search): search for search in searches}.values())
        ordered = sorted(distinct, key=lambda one: -one.judge(one.pick(budget_bytes)).step_s)
        for search in ordered:
            before = len(search.known)
            simulations = left // max(search.layer_passes, 1)
            if simulations < _FEWEST_WALKED:
                return
            # Half of what is left for each but the last: others may turn out longer.
            own = max(_FEWEST_WALKED, simulations if search is ordered[-1] else simulations // 2)
            search.improve(budget_bytes, simulations=min(own, _MOST_WALKED))
            left -= (len(search.known) - before) * search.layer_passes

    def _get_search(self, place: int, loss_window_bytes: int | None) -> RankSearch:
        window = None if self.ranks[place].turning_chunk is None else loss_window_bytes
        key = (self._alike[place], window)
        if key not in self._searches:
            self._searches[key] = RankSearch(self.ranks[place], costs=self._costs, loss_window_bytes=window)
        return self._searches[key]

    def _make_plan(self, states: Sequence[State], loss_window_bytes: int | None) -> OffloadPlan:
        placed = ((list_slots(rank), state) for rank, state in zip(self.ranks, states, strict=True))
        return make_plan(placed, loss_window_bytes=loss_window_bytes)

    def _bound_window(self, states: Sequence[State], budget_bytes: int, loss_window_bytes: int | None) -> Candidate:
        """Return the plan of `states` with what may be in flight to the host where losses begin.

        A little more than was in flight there without such a bound where that fits, and else nothing where as much does not.
        """
        plan = self._make_plan(states, loss_window_bytes)
        windows = [
            one.loss_window_bytes
            for rank, one in zip(self.ranks, simulate(self._short, plan).ranks, strict=True)
            if rank.turning_chunk is not None and one.d2h_bytes
        ]
        if not windows or loss_window_bytes is not None:
            return Candidate(plan=plan, result=simulate(self.ranks, plan))
        tried = []
        for window_bytes in dict.fromkeys((round(max(windows) * _ROUTED_MORE), max(windows), 0)):
            bounded = dataclasses.replace(plan, loss_window_bytes=window_bytes)
            tried.append(Candidate(plan=bounded, result=simulate(self.ranks, bounded)))
            if tried[-1].result.peak_bytes <= budget_bytes:
                break
        return min(tried, key=lambda one: one.score(budget_bytes))
