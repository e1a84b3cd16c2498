"""The searches of all pipeline ranks: alike ranks once, each by itself, and then all together."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from fgoffload.errors import ConfigError
from fgoffload.plan import OffloadPlan
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import ChunkModel, RankModel
from fgoffload.planner.simulation.simulation_result import StepResult
from fgoffload.planner.simulation.simulator import simulate, simulate_rank
from fgoffload.planner.solving.choices import Mode, list_modes
from fgoffload.planner.solving.frontier import LayerPoints, measure_layer
from fgoffload.planner.solving.moments import shorten
from fgoffload.planner.solving.placement import LayerSlot, State, list_slots, make_plan
from fgoffload.planner.solving.program import count_step_s
from fgoffload.planner.solving.search import Found, Judge, RankSearch, SearchLimits, Verdict

_MOST_CORRECTIONS = 4
"""Times that a rank gets a smaller budget since it took more beside its neighbours than alone. One is usual."""


class RankSearches:
    """The searches of all ranks.

    Args:
        ranks: The pipeline, by number.
        limits: How long to look, over all ranks.
        deadline_s: When to stop, by `time.monotonic`.
    """

    def __init__(self, ranks: Sequence[RankModel], *, limits: SearchLimits, deadline_s: float) -> None:
        self.ranks = tuple(ranks)
        self.of_ranks: list[RankSearch] = []
        """By place in `ranks`. Ranks that are alike share theirs."""
        self._limits = limits
        self._together = 0
        self._founds: dict[int, Found] = {}
        self._results: dict[object, StepResult] = {}
        self._least: tuple[State, ...] | None = None
        self._modes: dict[LayerModel, tuple[Mode, ...]] = {}
        self._points: dict[object, LayerPoints] = {}
        searches: dict[RankModel, RankSearch] = {}
        shared = dataclasses.replace(limits, ladder_passes=limits.ladder_passes // max(len(self.ranks), 1))
        for rank in self.ranks:
            short = shorten(rank)
            alike = _strip_place(short)
            if alike not in searches:
                searches[alike] = RankSearch(
                    short,
                    _list_modes(rank, self._modes),
                    points=functools.partial(self._measure_layers, rank),
                    judge=_make_judge(short),
                    limits=shared,
                    deadline_s=deadline_s,
                )
            self.of_ranks.append(searches[alike])
        self._apart = list(searches.values())

    @property
    def simulations(self) -> int:
        """Return how many simulations of single ranks were run; one of all together counts as many as there are."""
        return sum(search.simulations for search in self._apart) + self._together * len(self.ranks)

    def list_slots(self, place: int) -> tuple[LayerSlot, ...]:
        """Return the layers of the rank at `place`."""
        return list_slots(self.ranks[place])

    def make_plan(self, states: Sequence[State]) -> OffloadPlan:
        """Return the plan of all ranks."""
        return make_plan((list_slots(rank), state) for rank, state in zip(self.ranks, states, strict=True))

    def simulate_together(self, states: Sequence[State]) -> StepResult:
        """Return what the simulator says of all ranks; the same states are asked about once."""
        key = tuple(tuple(configuration.actions for configuration in state) for state in states)
        if key not in self._results:
            self._together += 1
            self._results[key] = simulate(self.ranks, self.make_plan(states))
        return self._results[key]

    def find_states(self, budget_bytes: int, *, starts: Sequence[State] = ()) -> tuple[State, ...]:
        """Return the fastest states found within the budget; where none fit, those with the least bytes above it.

        Args:
            budget_bytes: Of each device.
            starts: Of all ranks, from a smaller budget. The result is never slower.
        """
        self._founds = {}
        if math.prod(search.plans for search in self.of_ranks) <= self._limits.exhaustive_plans:
            return self._try_all(budget_bytes)
        states = self._correct(self._find_apart(budget_bytes, starts), budget_bytes)
        if starts and self._score(starts, budget_bytes) <= self._score(states, budget_bytes):
            return tuple(starts)
        return states

    def find_least_states(self) -> tuple[State, ...]:
        """Return the states with the least peaks found."""
        if self._least is None:
            self._least = self.find_states(0)
        return self._least

    def find_bound(self) -> tuple[float | None, float | None]:
        """Return the longest bound of a rank, and how much longer than its own a rank takes, where that is most."""
        bounds = []
        for number, found in self._founds.items():
            if found.program is not None:
                short = self._apart[number].rank
                whole = self.ranks[self.of_ranks.index(self._apart[number])]
                # Of the shortened step, and then for as many microbatches as the whole one has.
                added_s = found.program.bound_s * len(whole.passes) / len(short.passes)
                bound_s = found.kept_s + found.program.bound_s
                bounds.append((count_step_s(whole) + added_s, found.verdict.step_s / bound_s - 1))
        if not bounds:
            return None, None
        return max(bound for bound, _ in bounds), max(max(gap for _, gap in bounds), 0.0)

    def _measure_layers(self, rank: RankModel) -> dict[str, LayerPoints]:
        """Return what each kind of layer of `rank` costs; ranks with the same link and rules share what was measured."""
        models = {layer.model.kind: layer.model for chunk in rank.chunks for layer in chunk.layers}
        longest = max((len(chunk.layers) for chunk in rank.chunks), default=0)
        rules = (rank.link, rank.policy, rank.min_offloaded_bytes, rank.host_budget_bytes is None, longest)
        for model in models.values():
            if (model, rules) not in self._points:
                self._points[model, rules] = measure_layer(rank, model, self._modes[model])
        return {kind: self._points[model, rules] for kind, model in models.items()}

    def _find_apart(self, budget_bytes: int, starts: Sequence[State]) -> tuple[State, ...]:
        """Return the best state of each rank by itself: first what programs say, and then moves, where the step is longest."""
        founds: dict[int, Found] = {}
        off_bytes = 0
        for number, search in enumerate(self._apart):
            own = [starts[self.of_ranks.index(search)]] if starts else []
            found = founds[number] = search.find_start(budget_bytes, starts=own, off_bytes=off_bytes)
            # Neighbours in the pipeline are off by much the same.
            off_bytes = found.off_bytes or off_bytes
        left, left_passes = self._limits.simulations, self._limits.layer_passes
        worst_first = sorted(founds, key=lambda one: _get_urgency(founds[one], budget_bytes), reverse=True)
        for number in worst_first:
            search, before = self._apart[number], self._apart[number].simulations
            most = min(left, left_passes // max(search.layer_passes, 1))
            founds[number] = search.improve_found(founds[number], budget_bytes, simulations=most)
            left -= search.simulations - before
            left_passes -= (search.simulations - before) * search.layer_passes
        self._founds = founds
        by_search = {id(search): founds[number].state for number, search in enumerate(self._apart)}
        return tuple(by_search[id(search)] for search in self.of_ranks)

    def _correct(self, states: tuple[State, ...], budget_bytes: int) -> tuple[State, ...]:
        """Return states that fit together: neighbours change when a rank's copies run, and so its peak."""
        budgets = [budget_bytes] * len(self.ranks)
        # What a rank has no room for alone it has none for beside others. A budget of 0 asks for the least peaks.
        fits_alone = all(found.verdict.peak_bytes <= budget_bytes for found in self._founds.values())
        for _ in range(_MOST_CORRECTIONS if fits_alone else 0):
            peaks = [result.peak_bytes for result in self.simulate_together(states).ranks]
            above = {place: peak - budget_bytes for place, peak in enumerate(peaks) if peak > budget_bytes}
            if not above:
                break
            changed = list(states)
            for place, above_bytes in above.items():
                budgets[place] = max(budgets[place] - above_bytes, 1)
                search = self.of_ranks[place]
                found = search.find_start(budgets[place], starts=[states[place]])
                most = min(self._limits.simulations, self._limits.layer_passes // max(search.layer_passes, 1)) // len(above)
                changed[place] = search.improve_found(found, budgets[place], simulations=most).state
            if tuple(changed) == states:
                break
            states = tuple(changed)
        return states

    def _try_all(self, budget_bytes: int) -> tuple[State, ...]:
        """Return the best of all states of all ranks together."""
        every = itertools.product(*(tuple(search.list_states()) for search in self.of_ranks))
        return min(every, key=lambda states: self._score(states, budget_bytes))

    def _score(self, states: Sequence[State], budget_bytes: int) -> tuple[float, ...]:
        """Return what better states have less of: bytes above the budget, time, bytes that leave, rows."""
        result = self.simulate_together(states)
        configurations = [configuration for state in states for configuration in state]
        moved_bytes = sum(configuration.moved_bytes for configuration in configurations)
        rows = sum(len(configuration.actions) for configuration in configurations)
        return (max(result.peak_bytes - budget_bytes, 0), round(result.step_s, 9), moved_bytes, rows)


def _list_modes(rank: RankModel, known: dict[LayerModel, tuple[Mode, ...]]) -> Mapping[str, tuple[Mode, ...]]:
    """Return what each kind of layer of a rank may choose from.

    Raises:
        ConfigError: Two kinds have one name.
    """
    models: dict[str, LayerModel] = {}
    for chunk in rank.chunks:
        for layer in chunk.layers:
            model = models.setdefault(layer.model.kind, layer.model)
            if model is not layer.model and model != layer.model:
                raise ConfigError(
                    f"pipeline rank {rank.rank} has two kinds of layer {model.kind!r} that differ: layer {layer.number} is "
                    "unlike one before it. Give each kind a name of its own."
                )
    for model in models.values():
        if model not in known:
            known[model] = list_modes(model, min_offloaded_bytes=rank.min_offloaded_bytes)
    return {kind: known[model] for kind, model in models.items()}


def _get_urgency(found: Found, budget_bytes: int) -> tuple[float, float]:
    """Return what is larger for a rank that needs to be bettered more: bytes above the budget, then time."""
    return max(found.verdict.peak_bytes - budget_bytes, 0), found.verdict.step_s


def _make_judge(rank: RankModel) -> Judge:
    def judge(plan: OffloadPlan) -> Verdict:
        result = simulate_rank(rank, plan)
        return Verdict(step_s=result.step_s, peak_bytes=result.peak_bytes)

    return judge


def _strip_place(rank: RankModel) -> RankModel:
    """Return `rank` without what only says where it is: ranks that are equal then have the same best plan."""
    chunks = tuple(_renumber(chunk) for chunk in rank.chunks)
    return dataclasses.replace(rank, rank=0, chunks=chunks)


def _renumber(chunk: ChunkModel) -> ChunkModel:
    layers = tuple(dataclasses.replace(layer, number=place) for place, layer in enumerate(chunk.layers))
    return dataclasses.replace(chunk, layers=layers)
