"""The searches of pipeline ranks by themselves: alike ranks once, with what programs say first and then what else is tried."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from fgoffload.errors import ConfigError
from fgoffload.plan import OffloadPlan
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import ChunkModel, RankModel
from fgoffload.planner.simulation.simulation_result import Detail
from fgoffload.planner.simulation.simulator import simulate_rank
from fgoffload.planner.solving.choices import Mode, list_modes
from fgoffload.planner.solving.chunk_totals import count_step_s
from fgoffload.planner.solving.frontier import LayerPoints, measure_layer
from fgoffload.planner.solving.moments import shorten
from fgoffload.planner.solving.placement import State, list_slots
from fgoffload.planner.solving.program import load_solver
from fgoffload.planner.solving.search import Found, RankSearch, count_layer_passes, count_plans
from fgoffload.planner.solving.search_limits import SearchLimits
from fgoffload.planner.solving.verdict import Judge, Knowledge, Verdict
from fgoffload.planner.worker_processes import map_in_processes

_CHAINS = 2
"""Runs of ranks that follow each other, and that processes may search at once. As many on any number of cores, so that a plan
is the same; no more, since what the program of a rank is off tells the next one of its chain."""

_MORE_ALONE = 2
"""Times that the limits of layers' passes are as high where there is one search: the time of the others is not needed."""

PASSES = ("layer_passes", "ladder_passes", "walk_passes", "settling_passes", "trimming_passes")
"""The limits that all ranks share."""

_MANY_WALKED = 800
"""Simulations of random walks on one rank: so many find what rules of thumb lead to, and near what full
recompute takes none of those are tried."""

_FAR, _FAR_OF_FEW_WALKED = 0.005, 0.025
"""Of its program's bound: a plan that takes longer than it by more is bettered by walks. Plans of six layers were 1.2 to 1.9%
above it where walks made them 1.6 to 4.5% faster, and one 0.7% above it 2.5%; two that were 0.2 and 0.3% above it got 0.1%
faster, by a search three times as long. With the few simulations that 27 layers have, plans 11 and 12% above it got 7 and 10%
faster, and two that were 2% above it stayed as they were."""


class SingleRanks:
    """The searches of ranks that never wait for their neighbours, each in a step of few microbatches.

    Args:
        ranks: The pipeline, by number.
        limits: How long to look, over all ranks.
        deadline_s: When to stop, by `time.monotonic`.
        loss_window_bytes: What may be on its way when a loss begins; None for what the policy lets.

    Raises:
        ConfigError: Two kinds of layers have one name.
    """

    def __init__(
        self, ranks: Sequence[RankModel], *, limits: SearchLimits, deadline_s: float, loss_window_bytes: int | None
    ) -> None:
        self.ranks = tuple(ranks)
        self.shorts = [shorten(rank) for rank in self.ranks]
        """The same in steps of fewer microbatches, which are searched."""
        self.limits = limits
        """Those that were given, or more where there is one search alone."""
        self.founds: dict[int, Found] = {}
        """What was found last, by number of its search."""
        self._left_passes = 0
        self._modes: dict[LayerModel, tuple[Mode, ...]] = {}
        self._points: dict[object, LayerPoints] = {}
        self._inner = _list_inner(self.ranks)
        firsts: dict[RankModel, int] = {}
        # By place, that of the first rank which is alike. Such a rank is hashed once: that takes milliseconds.
        places = [firsts.setdefault(_strip_place(short), place) for place, short in enumerate(self.shorts)]
        modes = {place: _list_modes(self.ranks[place], self._modes) for place in firsts.values()}
        tried = _list_tried({place: (self.shorts[place], modes[place]) for place in firsts.values()}, limits)
        searches = {
            place: RankSearch(
                self.shorts[place],
                modes[place],
                points=functools.partial(self._measure_layers, self.ranks[place]),
                judge=make_judge(self.shorts[place], Detail.TOTALS, loss_window_bytes),
                # Programs get a price from small differences, and of equal choices of a program its last digits decide.
                judge_digits=make_judge(self.shorts[place], Detail.TOTALS, loss_window_bytes),
                judge_peaks=make_judge(self.shorts[place], Detail.PEAKS, loss_window_bytes),
                tries_all=place in tried,
                limits=limits,
                deadline_s=deadline_s,
            )
            for place in firsts.values()
        }
        self.of_ranks = [searches[place] for place in places]
        """By place in `ranks`. Ranks that are alike share theirs."""
        self.distinct = list(searches.values())
        if len(self.distinct) == 1:
            self.limits = _raise_limits(limits)

    @property
    def simulations(self) -> int:
        """Return how many simulations the searches have run."""
        return sum(search.simulations for search in self.distinct)

    def prepare(self, budget_bytes: int) -> None:
        """Import and measure what programs need, where there are any, so that no copy of this process has to."""
        if any(search.needs_programs(budget_bytes) for search in self.distinct):
            load_solver()
        for search in self.distinct:
            search.prepare(budget_bytes)

    def begin(self) -> None:
        """Forget what was found last, and have all passes of a search again."""
        self.founds = {}
        self._left_passes = self.limits.layer_passes

    def find_states(
        self, budget_bytes: int, starts: Sequence[Sequence[State]], usual: Mapping[str, Sequence[State]]
    ) -> tuple[State, ...]:
        """Return the best state of each rank: first what programs say, and then more, where the step is longest.

        Args:
            budget_bytes: Of each device.
            starts: Of all ranks, to begin with.
            usual: The baselines of all ranks, by name.
        """
        founds = self._find_starts(budget_bytes, starts)
        left, left_passes = self.limits.simulations, self.limits.ladder_passes
        for number in sorted(founds, key=lambda one: self._get_urgency(one, founds[one], budget_bytes), reverse=True):
            search, before = self.distinct[number], self.distinct[number].simulations
            others, walked = self._list_neighbours(number, founds), self._count_walked(search)
            own_usual = {name: states[self.of_ranks.index(search)] for name, states in usual.items()}
            walk = functools.partial(search.walk, usual=list(own_usual.values()), simulations=walked)
            far = _FAR if walked >= _MANY_WALKED else _FAR_OF_FEW_WALKED
            is_first = walked >= _MANY_WALKED and search.is_near_full(own_usual["full recompute"], budget_bytes)
            most = 0 if is_first else left_passes // max(search.layer_passes, 1)
            found = search.widen_found(founds[number], budget_bytes, starts=others, simulations=most)
            left_passes -= (search.simulations - before) * search.layer_passes
            found = walk(found, budget_bytes) if is_first else found
            before = search.simulations
            found = self.improve(search, found, budget_bytes, left)
            left -= search.simulations - before
            # Behind the moves walks make no plan slower. Before them, few walks led moves elsewhere, and some ended worse.
            founds[number] = walk(found, budget_bytes) if not is_first and found.is_far(budget_bytes, gap=far) else found
        # The host does less where that costs next to nothing.
        self._refine(founds, budget_bytes, RankSearch.settle_found, passes=self.limits.settling_passes)
        # With many layers moves end before each row of the plan was tried without.
        self._refine(founds, budget_bytes, RankSearch.trim_found, passes=self.limits.trimming_passes)
        self.founds = founds
        by_search = {id(search): founds[number].state for number, search in enumerate(self.distinct)}
        return tuple(by_search[id(search)] for search in self.of_ranks)

    def count_longest_s(self, states: Sequence[State]) -> float:
        """Return the seconds of a whole step of the rank that takes longest by itself."""
        numbers = {id(search): number for number, search in enumerate(self.distinct)}
        pairs = zip(self.of_ranks, states, strict=True)
        added = [(numbers[id(search)], search.count_added_s(search.judge(state))) for search, state in pairs]
        return max(self._count_whole_s(number, added_s) for number, added_s in added)

    def find_bound(self) -> tuple[float | None, float | None]:
        """Return the longest bound of a rank, and how much longer than its own a rank takes, where that is most."""
        bounds = []
        for number, found in self.founds.items():
            if found.program is not None:
                short = self.distinct[number].rank
                whole = self.ranks[self.of_ranks.index(self.distinct[number])]
                # Of the shortened step, and then for as many microbatches as the whole one has.
                added_s = found.program.bound_s * len(whole.passes) / len(short.passes)
                bounds.append((count_step_s(whole) + added_s, found.gap))
        if not bounds:
            return None, None
        return max(bound for bound, _ in bounds), max(max(gap for _, gap in bounds), 0.0)

    def _find_starts(self, budget_bytes: int, starts: Sequence[Sequence[State]]) -> dict[int, Found]:
        """Return what each rank begins with, by number of its search."""
        self.prepare(budget_bytes)
        length = -(-len(self.distinct) // _CHAINS)
        chains = [range(first, min(first + length, len(self.distinct))) for first in range(0, len(self.distinct), length)]
        founds: dict[int, Found] = {}
        for chain in map_in_processes(functools.partial(self._find_chain, budget_bytes, starts), chains):
            for number, (found, knowledge) in chain.items():
                self.distinct[number].learn(knowledge)
                founds[number] = found
        return founds

    def _find_chain(
        self, budget_bytes: int, starts: Sequence[Sequence[State]], numbers: Iterable[int]
    ) -> dict[int, tuple[Found, Knowledge]]:
        """Return what some ranks begin with that follow each other, and all that was found out about them."""
        founds: dict[int, Found] = {}
        off_bytes = 0
        for number in numbers:
            search = self.distinct[number]
            own = [states[self.of_ranks.index(search)] for states in starts]
            own += self._list_neighbours(number, founds)
            found = founds[number] = search.find_start(budget_bytes, starts=own, off_bytes=off_bytes)
            # Neighbours in the pipeline are off by much the same.
            off_bytes = found.off_bytes or off_bytes
        return {number: (found, self.distinct[number].knowledge) for number, found in founds.items()}

    def _list_neighbours(self, number: int, founds: Mapping[int, Found]) -> list[State]:
        """Return what the ranks before and behind do, as far as they were searched and have the same layers."""
        kinds = _list_kinds(self.distinct[number])
        return [
            founds[other].state
            for other in (number - 1, number + 1)
            if other in founds and _list_kinds(self.distinct[other]) == kinds
        ]

    def _count_walked(self, search: RankSearch) -> int:
        """Return the simulations for random walks on a rank: each search has as many passes for them."""
        own_passes = self.limits.walk_passes // len(self.distinct)
        return min(self.limits.walk_simulations, own_passes // max(search.layer_passes, 1))

    def improve(self, search: RankSearch, found: Found, budget_bytes: int, simulations: int) -> Found:
        """Return what moves make of `found`, as long as there are passes left for all ranks."""
        before = search.simulations
        most = min(simulations, max(self._left_passes, 0) // max(search.layer_passes, 1))
        found = search.improve_found(found, budget_bytes, simulations=most)
        self._left_passes -= (search.simulations - before) * search.layer_passes
        return found

    def _refine(self, founds: dict[int, Found], budget_bytes: int, refine: Callable[..., Found], *, passes: int) -> None:
        """Put in the place of each of `founds` what a method of its search makes of it.

        Args:
            founds: By number of the search.
            budget_bytes: Of the device.
            refine: `RankSearch.settle_found`, or another that takes the same.
            passes: Forwards and backwards of single layers that may be simulated, over all ranks.
        """
        for number, found in founds.items():
            search, before = self.distinct[number], self.distinct[number].simulations
            most = max(passes, 0) // max(search.layer_passes, 1)
            founds[number] = refine(search, found, budget_bytes, simulations=most)
            passes -= (search.simulations - before) * search.layer_passes

    def _get_urgency(self, number: int, found: Found, budget_bytes: int) -> tuple[float, float]:
        """Return what is larger for a rank that needs to be bettered more: bytes above the budget, then time."""
        return max(found.verdict.peak_bytes - budget_bytes, 0), self._count_step_s(number, found)

    def _count_step_s(self, number: int, found: Found) -> float:
        return self._count_whole_s(number, found.verdict.step_s - found.kept_s)

    def _count_whole_s(self, number: int, added_s: float) -> float:
        """Return the seconds of a whole step, where a shortened one is longer by `added_s` than one that keeps all."""
        short = self.distinct[number].rank
        whole = self.ranks[self.of_ranks.index(self.distinct[number])]
        return count_step_s(whole) + added_s * len(whole.passes) / max(len(short.passes), 1)

    def _measure_layers(self, rank: RankModel) -> dict[str, LayerPoints]:
        """Return what each kind of layer of `rank` costs; ranks with the same link and rules share what was measured."""
        models = {layer.model.kind: layer.model for chunk in rank.chunks for layer in chunk.layers}
        longest = max((len(chunk.layers) for chunk in rank.chunks), default=0)
        rules = (rank.link, rank.late_group_s, rank.policy, rank.min_offloaded_numel, rank.host_budget_bytes is None, longest)
        for model in models.values():
            if (model, rules) not in self._points:
                is_inner = model in self._inner
                self._points[model, rules] = measure_layer(rank, model, self._modes[model], is_inner=is_inner)
        return {kind: self._points[model, rules] for kind, model in models.items()}


def make_judge(rank: RankModel, detail: Detail, loss_window_bytes: int | None) -> Judge:
    """Return what simulates `rank` under a plan, with `loss_window_bytes` on its way at most when a loss begins."""

    def judge(plan: OffloadPlan) -> Verdict:
        result = simulate_rank(rank, dataclasses.replace(plan, loss_window_bytes=loss_window_bytes), detail=detail)
        return Verdict(step_s=result.step_s, peak_bytes=result.peak_bytes, peaks=result.peaks)

    return judge


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
            known[model] = list_modes(model, min_offloaded_numel=rank.min_offloaded_numel)
    return {kind: known[model] for kind, model in models.items()}


def _list_inner(ranks: Iterable[RankModel]) -> frozenset[LayerModel]:
    """Return the kinds of layers of which one is before another layer in any chunk."""
    return frozenset(layer.model for rank in ranks for chunk in rank.chunks for layer in chunk.layers[:-1])


def _list_tried(searched: Mapping[int, tuple[RankModel, Mapping[str, Sequence[Mode]]]], limits: SearchLimits) -> frozenset[int]:
    """Return the places of ranks of which all plans are simulated: where they are few, and not too much over all ranks.

    Args:
        searched: By place, a rank and what each kind of its layers may choose from.
        limits: What is few, and what is too much.
    """
    plans = {place: count_plans(list_slots(rank), modes) for place, (rank, modes) in searched.items()}
    few = frozenset(place for place, count in plans.items() if count <= limits.exhaustive_plans)
    passes = sum(plans[place] * count_layer_passes(searched[place][0]) for place in few)
    return few if passes <= limits.exhaustive_passes else frozenset()


def _raise_limits(limits: SearchLimits) -> SearchLimits:
    return dataclasses.replace(limits, **{name: _MORE_ALONE * getattr(limits, name) for name in PASSES})


def _list_kinds(search: RankSearch) -> list[tuple[int, LayerModel]]:
    return [(slot.chunk, slot.layer) for slot in search.slots]


def _strip_place(rank: RankModel) -> RankModel:
    """Return `rank` without what only says where it is: ranks that are equal then have the same best plan."""
    chunks = tuple(_renumber(chunk) for chunk in rank.chunks)
    return dataclasses.replace(rank, rank=0, chunks=chunks)


def _renumber(chunk: ChunkModel) -> ChunkModel:
    layers = tuple(dataclasses.replace(layer, number=place) for place, layer in enumerate(chunk.layers))
    return dataclasses.replace(chunk, layers=layers)
