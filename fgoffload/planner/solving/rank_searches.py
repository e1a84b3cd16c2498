"""The searches of all pipeline ranks: alike ranks once, each by itself, and then all together."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fgoffload.errors import ConfigError
from fgoffload.plan import OffloadPlan
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import ChunkModel, RankModel
from fgoffload.planner.simulation.simulation_result import Detail, StepResult
from fgoffload.planner.simulation.simulator import simulate, simulate_rank
from fgoffload.planner.solving.choices import Mode, list_modes
from fgoffload.planner.solving.flag_search import FlagSearch, NearestFlags, find_nearest, simulate_flags
from fgoffload.planner.solving.frontier import LayerPoints, measure_layer
from fgoffload.planner.solving.megatron_flags import MegatronFlags, baselines, list_offloading_flags
from fgoffload.planner.solving.moments import shorten, shorten_together
from fgoffload.planner.solving.placement import LayerSlot, State, list_slots, make_plan, read_plan
from fgoffload.planner.solving.program import count_step_s, load_solver
from fgoffload.planner.solving.search import Found, RankSearch, count_layer_passes, count_plans
from fgoffload.planner.solving.search_limits import SearchLimits
from fgoffload.planner.solving.verdict import Judge, Knowledge, Verdict, make_key
from fgoffload.planner.worker_processes import map_in_processes

Made = TypeVar("Made")

_CHAINS = 2
"""Runs of ranks that follow each other, and that processes may search at once. As many on any number of cores, so that a plan
is the same; no more, since what the program of a rank is off tells the next one of its chain."""

_MORE_ALONE = 2
"""Times that the limits of layers' passes are as high where there is one search: the time of the others is not needed."""

_PASSES = ("layer_passes", "ladder_passes", "walk_passes", "settling_passes", "trimming_passes")
"""The limits that all ranks share."""

_BASELINES_NICENESS = 10
"""Of copies that simulate baselines meanwhile: they take what the search leaves of the cores."""

_MANY_WALKED = 800
"""Simulations of random walks on one rank: so many find what rules of thumb lead to, and near what full
recompute takes none of those are tried."""

_FAR, _FAR_OF_FEW_WALKED = 0.01, 0.025
"""Of its program's bound: a plan that takes longer than it by more is bettered by walks. Plans of six layers were 1.2 to 1.9%
above it where walks made them 1.6 to 4.5% faster. With the few simulations that 27 layers have, plans 11 and 12% above it got 7
and 10% faster, and two that were 2% above it stayed as they were."""

_MOST_CORRECTIONS = 6
"""Times that ranks get a smaller budget since they took more beside their neighbours than alone. One or two are usual."""


class RankSearches:
    """The searches of all ranks.

    Args:
        ranks: The pipeline, by number.
        limits: How long to look, over all ranks.
        deadline_s: When to stop, by `time.monotonic`.
    """

    def __init__(
        self, ranks: Sequence[RankModel], *, limits: SearchLimits, deadline_s: float, loss_window_bytes: int | None = None
    ) -> None:
        self.ranks = tuple(ranks)
        self._limits = limits
        self._deadline_s = deadline_s
        self._loss_window_bytes = loss_window_bytes
        self._waiting: dict[int, RankSearches] = {}
        self._together = 0
        self._alone = 0
        """Simulations of single ranks that no search has run."""
        self._founds: dict[int, Found] = {}
        self._results: dict[object, StepResult] = {}
        shorts = [shorten(rank) for rank in self.ranks]
        self._short_ranks = shorten_together(self.ranks, shorts)
        self._short_results: dict[object, StepResult] = {}
        self._left_passes = 0
        self._least: tuple[State, ...] | None = None
        self._baselines: dict[str, tuple[State, ...]] = {}
        self._seeds: list[tuple[State, ...]] | None = None
        self._nearest: dict[int, NearestFlags | None] = {}
        self._flags: dict[int, MegatronFlags | None] = {}
        self._modes: dict[LayerModel, tuple[Mode, ...]] = {}
        self._points: dict[object, LayerPoints] = {}
        firsts: dict[RankModel, int] = {}
        # By place, that of the first rank which is alike. Such a rank is hashed once: that takes milliseconds.
        places = [firsts.setdefault(_strip_place(short), place) for place, short in enumerate(shorts)]
        modes = {place: _list_modes(self.ranks[place], self._modes) for place in firsts.values()}
        tried = _list_tried({place: (shorts[place], modes[place]) for place in firsts.values()}, limits)
        searches = {
            place: RankSearch(
                shorts[place],
                modes[place],
                points=functools.partial(self._measure_layers, self.ranks[place]),
                judge=_make_judge(shorts[place], Detail.TOTALS, loss_window_bytes),
                # Programs get a price from small differences, and of equal choices of a program its last digits decide.
                judge_digits=_make_judge(shorts[place], Detail.DIGITS, loss_window_bytes),
                judge_peaks=_make_judge(shorts[place], Detail.PEAKS, loss_window_bytes),
                tries_all=place in tried,
                limits=limits,
                deadline_s=deadline_s,
            )
            for place in firsts.values()
        }
        self.of_ranks = [searches[place] for place in places]
        """By place in `ranks`. Ranks that are alike share theirs."""
        self._apart = list(searches.values())
        if len(self._apart) == 1:
            self._limits = _raise_limits(limits)

    @property
    def simulations(self) -> int:
        """Return how many simulations of single ranks were run; one of all together counts as many as there are."""
        waiting = sum(search.simulations for search in self._waiting.values())
        return sum(search.simulations for search in self._apart) + self._together * len(self.ranks) + self._alone + waiting

    def list_slots(self, place: int) -> tuple[LayerSlot, ...]:
        """Return the layers of the rank at `place`."""
        return list_slots(self.ranks[place])

    def make_plan(self, states: Sequence[State]) -> OffloadPlan:
        """Return the plan of all ranks."""
        plan = make_plan((list_slots(rank), state) for rank, state in zip(self.ranks, states, strict=True))
        return dataclasses.replace(plan, loss_window_bytes=self._loss_window_bytes)

    def simulate_plan(self, plan: OffloadPlan) -> StepResult:
        """Return what the simulator says of all ranks under `plan`."""
        self._together += 1
        return simulate(self.ranks, plan)

    def simulate_together(self, states: Sequence[State]) -> StepResult:
        """Return what the simulator says of all ranks; the same states are asked about once."""
        key = _make_key(states)
        if key not in self._results:
            self._together += 1
            self._results[key] = simulate(self.ranks, self.make_plan(states))
        return self._results[key]

    def simulate_short(self, states: Sequence[State]) -> StepResult:
        """Return what the simulator says of all ranks in a step of fewer microbatches: what to correct, and no prediction."""
        key = _make_key(states)
        if key not in self._short_results:
            self._together += 1
            self._short_results[key] = simulate(self._short_ranks, self.make_plan(states))
        return self._short_results[key]

    def list_baselines(self) -> dict[str, tuple[State, ...]]:
        """Return the states of what people compare with, by name."""
        if not self._baselines:
            self._baselines = {name: self._read_plan(plan) for name, plan in baselines(self.ranks).items()}
        return self._baselines

    def simulate_baselines(self) -> dict[str, StepResult]:
        """Return what those that people compare with come to, by name: Megatron's own recompute without this package."""
        results = {name: self.simulate_together(states) for name, states in self.list_baselines().items()}
        # The other one, selective recompute, leaves token dispatchers alone.
        name = "full recompute"
        self._together += 1
        alone = [dataclasses.replace(rank, has_engine=False) for rank in self.ranks]
        results[name] = simulate(alone, self.make_plan(self.list_baselines()[name]))
        return results

    def list_usual(self, budget_bytes: int) -> list[tuple[State, ...]]:
        """Return the states that users would choose: the baselines, and the flags that come nearest to the budget."""
        usual = list(self.list_baselines().values())
        flags = self._find_flags(budget_bytes)
        if flags is not None:
            usual.append(self._read_plan(flags.make_plan(self.ranks)))
        return usual

    def _list_seeds(self, budget_bytes: int) -> list[tuple[State, ...]]:
        """Return more states to begin with: everything leaves but what is cheap to run again, all of it or one thing alone.

        Near what offloading everything takes, moves of a few layers each come to none of these. Where selective recompute keeps
        to the budget on each rank alone they are far away, and there are none.
        """
        usual = self.list_baselines()["selective recompute"]
        if all(search.judge(state).peak_bytes <= budget_bytes for search, state in zip(self.of_ranks, usual, strict=True)):
            return []
        if self._seeds is None:
            plans = [flags.make_plan(self.ranks) for flags in list_offloading_flags(self.ranks)]
            self._seeds = list({_make_key(states): states for states in map(self._read_plan, plans)}.values())
        return self._seeds

    def find_nearest(self, budget_bytes: int) -> NearestFlags | None:
        """Return the flags that come nearest to the budget, or None where none keep to it; looked for once."""
        if budget_bytes not in self._nearest:
            flags = self._find_flags(budget_bytes)
            self._learn_nearest(budget_bytes, flags, None if flags is None else simulate_flags(self.ranks, flags))
        return self._nearest[budget_bytes]

    def _find_flags(self, budget_bytes: int) -> MegatronFlags | None:
        """Return what `find_nearest` does, if a step of all microbatches keeps to the budget as well."""
        if budget_bytes and budget_bytes not in self._flags:
            get_ready = functools.partial(self.prepare, budget_bytes)
            _, self._flags[budget_bytes] = _find_flags_beside(get_ready, self.ranks, budget_bytes)
        return self._flags.get(budget_bytes)

    def learn_flags(self, budget_bytes: int, flags: MegatronFlags | None) -> None:
        """Take note of what a search for flags has found for a budget."""
        self._flags[budget_bytes] = flags

    def _learn_nearest(self, budget_bytes: int, flags: MegatronFlags | None, result: StepResult | None) -> None:
        """Take note of what the flags for a budget come to, and look for others where that is too much."""
        nearest = None
        if flags is not None and result is not None:
            nearest = NearestFlags(flags=flags, result=result)
            if result.peak_bytes > budget_bytes:
                nearest = find_nearest(self.ranks, budget_bytes=budget_bytes)
        self._nearest[budget_bytes] = nearest
        if nearest is not None and nearest.flags.offload_modules:
            # Without them it is the result of Megatron's own recompute, where this package does not run.
            key = _make_key(self._read_plan(nearest.flags.make_plan(self.ranks)))
            self._results.setdefault(key, nearest.result)

    def prepare(self, budget_bytes: int) -> None:
        """Import and measure what programs need, where there are any, so that no copy of this process has to."""
        if any(search.needs_programs(budget_bytes) for search in self._apart):
            load_solver()
        for search in self._apart:
            search.prepare(budget_bytes)

    def find_states(self, budget_bytes: int, *, starts: Sequence[State] = ()) -> tuple[State, ...]:
        """Return the fastest states found within the budget; where none fit, those with the least bytes above it.

        Args:
            budget_bytes: Of each device.
            starts: Of all ranks, from a smaller budget. The result is never slower.
        """
        self._founds = {}
        if math.prod(search.plans for search in self.of_ranks) <= self._limits.exhaustive_plans:
            return self._try_all(budget_bytes)
        begins = [*self.list_usual(budget_bytes), *([tuple(starts)] if starts else [])]
        self._left_passes = self._limits.layer_passes
        found = self._find_together(budget_bytes, [*begins, *self._list_seeds(budget_bytes)])
        # By construction no slower than what users would choose, nor than what the search began with.
        return min([found, *begins], key=lambda states: self._score(states, budget_bytes))

    def _find_together(self, budget_bytes: int, begins: Sequence[Sequence[State]]) -> tuple[State, ...]:
        """Return the best states found from `begins`, with what the baselines come to simulated beside it."""
        plans = {_make_key(states): self.make_plan(states) for states in self.list_baselines().values()}
        unknown = [key for key in plans if key not in self._results]
        # The longest first, where much leaves.
        unknown.sort(key=lambda key: -sum(action.offloads for action in plans[key].actions.values()))
        work: list[Callable[[], Any]] = [lambda: self._correct(self._find_apart(budget_bytes, begins), budget_bytes)]
        flags = self._find_flags(budget_bytes)
        is_open = flags is not None and budget_bytes not in self._nearest
        work += [functools.partial(simulate_flags, self.ranks, flags)] if flags is not None and is_open else []
        work += [functools.partial(simulate, self.ranks, plans[key]) for key in unknown]
        found: tuple[State, ...]
        found, *results = map_in_processes(_call, work, niceness=_BASELINES_NICENESS)
        if is_open:
            self._learn_nearest(budget_bytes, flags, results.pop(0))
        self._results |= dict(zip(unknown, results, strict=True))
        self._together += len(unknown)
        return found

    def find_least_states(self) -> tuple[State, ...]:
        """Return the states with the least peaks found."""
        if self._least is None:
            self._least = self.find_states(0)
        return self._least

    def list_offloading(self, budget_bytes: int, *, shorter_than_s: float) -> list[tuple[State, ...]]:
        """Return the states in which all that can leave leaves, but for what is cheap to run again, of all ranks alike.

        Args:
            budget_bytes: Of each device.
            shorter_than_s: Seconds. What takes as long on a rank that never waits for its neighbours is left out.
        """
        return [states for states in self._list_offloading(budget_bytes) if self._count_longest_s(states) < shorter_than_s]

    def _list_offloading(self, budget_bytes: int) -> list[tuple[State, ...]]:
        return [self.list_baselines()["offload everything"], *self._list_seeds(budget_bytes)]

    def _count_longest_s(self, states: Sequence[State]) -> float:
        """Return the seconds of a whole step of the rank that takes longest by itself."""
        numbers = {id(search): number for number, search in enumerate(self._apart)}
        pairs = zip(self.of_ranks, states, strict=True)
        added = [(numbers[id(search)], search.count_added_s(search.judge(state))) for search, state in pairs]
        return max(self._count_whole_s(number, added_s) for number, added_s in added)

    def gains_by_waiting(self, states: Sequence[State], budget_bytes: int) -> bool:
        """Return whether `find_waiting_states` may find something, by what it would begin with.

        Args:
            states: The best that are known, of all ranks.
            budget_bytes: Of each device.
        """
        seeds = self._list_offloading(budget_bytes)
        for place, rank in enumerate(self.ranks):
            if rank.turning_chunk is None:
                continue
            search, own = self.of_ranks[place], states[place]
            judge = _make_judge(search.rank, Detail.TOTALS, 0)
            best = search.judge(own)
            for state in dict.fromkeys((own, *(seed[place] for seed in seeds))):
                waiting = judge(make_plan([(search.slots, state)]))
                self._alone += 1
                if waiting.peak_bytes >= search.judge(state).peak_bytes:
                    continue  # nothing is on its way there, or memory is highest elsewhere
                is_faster = waiting.peak_bytes <= budget_bytes and waiting.step_s < best.step_s
                is_lower = best.peak_bytes > budget_bytes and waiting.peak_bytes < best.peak_bytes
                if is_faster or is_lower:
                    return True
        return False

    def find_waiting_states(self, states: Sequence[State], budget_bytes: int) -> tuple[State, ...]:
        """Return states for a step in which nothing may be on its way when a loss begins.

        Those of ranks with a loss are searched for again: with less there at that moment there is room for more at others.

        Args:
            states: To begin with, of all ranks.
            budget_bytes: Of each device.
        """
        found = list(states)
        for place, rank in enumerate(self.ranks):
            if rank.turning_chunk is not None:
                if place not in self._waiting:
                    self._waiting[place] = self._make_waiting(rank)
                own = self._waiting[place]
                own.learn_flags(budget_bytes, None)
                (found[place],) = own.find_states(budget_bytes, starts=[states[place]])
        return tuple(found)

    def _make_waiting(self, rank: RankModel) -> "RankSearches":
        """Return the search of one rank where nothing may be on its way, which takes its part of what all may take.

        One stage alone looks twice as long as the first time: a plan for Llama-3 8B at 63.33 GiB is 4% faster by it.
        """
        limits = self._limits
        if len(self.ranks) > 1:
            limits = dataclasses.replace(limits, **{name: getattr(limits, name) // len(self._apart) for name in _PASSES})
        alone = [dataclasses.replace(rank, rank=0)]
        return RankSearches(alone, limits=limits, deadline_s=self._deadline_s, loss_window_bytes=0)

    def find_bound(self) -> tuple[float | None, float | None]:
        """Return the longest bound of a rank, and how much longer than its own a rank takes, where that is most."""
        bounds = []
        for number, found in self._founds.items():
            if found.program is not None:
                short = self._apart[number].rank
                whole = self.ranks[self.of_ranks.index(self._apart[number])]
                # Of the shortened step, and then for as many microbatches as the whole one has.
                added_s = found.program.bound_s * len(whole.passes) / len(short.passes)
                bounds.append((count_step_s(whole) + added_s, found.gap))
        if not bounds:
            return None, None
        return max(bound for bound, _ in bounds), max(max(gap for _, gap in bounds), 0.0)

    def _read_plan(self, plan: OffloadPlan) -> tuple[State, ...]:
        return tuple(
            read_plan(plan, list_slots(rank), search.modes, min_offloaded_numel=rank.min_offloaded_numel)
            for rank, search in zip(self.ranks, self.of_ranks, strict=True)
        )

    def _measure_layers(self, rank: RankModel) -> dict[str, LayerPoints]:
        """Return what each kind of layer of `rank` costs; ranks with the same link and rules share what was measured."""
        models = {layer.model.kind: layer.model for chunk in rank.chunks for layer in chunk.layers}
        longest = max((len(chunk.layers) for chunk in rank.chunks), default=0)
        rules = (rank.link, rank.late_group_s, rank.policy, rank.min_offloaded_numel, rank.host_budget_bytes is None, longest)
        for model in models.values():
            if (model, rules) not in self._points:
                self._points[model, rules] = measure_layer(rank, model, self._modes[model])
        return {kind: self._points[model, rules] for kind, model in models.items()}

    def _find_apart(self, budget_bytes: int, starts: Sequence[Sequence[State]]) -> tuple[State, ...]:
        """Return the best state of each rank by itself: first what programs say, and then more, where the step is longest."""
        founds = self._find_starts(budget_bytes, starts)
        left, left_passes = self._limits.simulations, self._limits.ladder_passes
        for number in sorted(founds, key=lambda one: self._get_urgency(one, founds[one], budget_bytes), reverse=True):
            search, before = self._apart[number], self._apart[number].simulations
            others, usual, walked = self._list_neighbours(number, founds), self._get_usual(search), self._count_walked(search)
            walk = functools.partial(search.walk, usual=list(usual.values()), simulations=walked)
            far = _FAR if walked >= _MANY_WALKED else _FAR_OF_FEW_WALKED
            is_first = walked >= _MANY_WALKED and search.is_near_full(usual["full recompute"], budget_bytes)
            most = 0 if is_first else left_passes // max(search.layer_passes, 1)
            found = search.widen_found(founds[number], budget_bytes, starts=others, simulations=most)
            left_passes -= (search.simulations - before) * search.layer_passes
            found = walk(found, budget_bytes) if is_first else found
            before = search.simulations
            found = self._improve(search, found, budget_bytes, left)
            left -= search.simulations - before
            # Behind the moves walks make no plan slower. Before them, few walks led moves elsewhere, and some ended worse.
            founds[number] = walk(found, budget_bytes) if not is_first and found.is_far(budget_bytes, gap=far) else found
        # The host does less where that costs next to nothing.
        self._refine(founds, budget_bytes, RankSearch.settle_found, passes=self._limits.settling_passes)
        # With many layers moves end before each row of the plan was tried without.
        self._refine(founds, budget_bytes, RankSearch.trim_found, passes=self._limits.trimming_passes)
        self._founds = founds
        by_search = {id(search): founds[number].state for number, search in enumerate(self._apart)}
        return tuple(by_search[id(search)] for search in self.of_ranks)

    def _find_starts(self, budget_bytes: int, starts: Sequence[Sequence[State]]) -> dict[int, Found]:
        """Return what each rank begins with, by number of its search."""
        self.prepare(budget_bytes)
        length = -(-len(self._apart) // _CHAINS)
        chains = [range(first, min(first + length, len(self._apart))) for first in range(0, len(self._apart), length)]
        founds: dict[int, Found] = {}
        for chain in map_in_processes(functools.partial(self._find_chain, budget_bytes, starts), chains):
            for number, (found, knowledge) in chain.items():
                self._apart[number].learn(knowledge)
                founds[number] = found
        return founds

    def _find_chain(
        self, budget_bytes: int, starts: Sequence[Sequence[State]], numbers: Iterable[int]
    ) -> dict[int, tuple[Found, Knowledge]]:
        """Return what some ranks begin with that follow each other, and all that was found out about them."""
        founds: dict[int, Found] = {}
        off_bytes = 0
        for number in numbers:
            search = self._apart[number]
            own = [states[self.of_ranks.index(search)] for states in starts]
            own += self._list_neighbours(number, founds)
            found = founds[number] = search.find_start(budget_bytes, starts=own, off_bytes=off_bytes)
            # Neighbours in the pipeline are off by much the same.
            off_bytes = found.off_bytes or off_bytes
        return {number: (found, self._apart[number].knowledge) for number, found in founds.items()}

    def _list_neighbours(self, number: int, founds: Mapping[int, Found]) -> list[State]:
        """Return what the ranks before and behind do, as far as they were searched and have the same layers."""
        kinds = _list_kinds(self._apart[number])
        return [
            founds[other].state
            for other in (number - 1, number + 1)
            if other in founds and _list_kinds(self._apart[other]) == kinds
        ]

    def _count_walked(self, search: RankSearch) -> int:
        """Return the simulations for random walks on a rank: each search has as many passes for them."""
        own_passes = self._limits.walk_passes // len(self._apart)
        return min(self._limits.walk_simulations, own_passes // max(search.layer_passes, 1))

    def _get_usual(self, search: RankSearch) -> dict[str, State]:
        """Return the baselines of the rank of a search, by name."""
        place = self.of_ranks.index(search)
        return {name: states[place] for name, states in self.list_baselines().items()}

    def _improve(self, search: RankSearch, found: Found, budget_bytes: int, simulations: int) -> Found:
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
            search, before = self._apart[number], self._apart[number].simulations
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
        short = self._apart[number].rank
        whole = self.ranks[self.of_ranks.index(self._apart[number])]
        return count_step_s(whole) + added_s * len(whole.passes) / max(len(short.passes), 1)

    def _correct(self, states: tuple[State, ...], budget_bytes: int) -> tuple[State, ...]:
        """Return states that fit together: neighbours change when a rank's copies run, and so its peak."""
        budgets = [budget_bytes] * len(self.ranks)
        # What a rank has no room for alone it has none for beside others. A budget of 0 asks for the least peaks.
        fits_alone = all(found.verdict.peak_bytes <= budget_bytes for found in self._founds.values())
        for _ in range(_MOST_CORRECTIONS if fits_alone else 0):
            result = self.simulate_short(states)
            if result.peak_bytes <= budget_bytes:
                result = self.simulate_together(states)
            above = {one.rank: one.peak_bytes - budget_bytes for one in result.ranks if one.peak_bytes > budget_bytes}
            if not above:
                break
            changed = list(states)
            for place, above_bytes in above.items():
                search = self.of_ranks[place]
                alone_bytes = search.judge(states[place]).peak_bytes
                budgets[place] = max(min(budgets[place], alone_bytes) - above_bytes, 1)
                found = search.find_start(budgets[place], starts=[states[place]])
                most = self._limits.simulations // len(above)
                changed[place] = self._improve(search, found, budgets[place], most).state
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


def begin_searches(ranks: Sequence[RankModel], *, budget_bytes: int, limits: SearchLimits, deadline_s: float) -> RankSearches:
    """Return the searches of all ranks, ready for a budget; another process looks for the nearest flags meanwhile.

    Args:
        ranks: The pipeline, by number.
        budget_bytes: Of each device, more than what is always there.
        limits: How long to look, over all ranks.
        deadline_s: When to stop, by `time.monotonic`.

    Raises:
        ConfigError: As `RankSearches`.
    """

    def get_ready() -> RankSearches:
        searches = RankSearches(ranks, limits=limits, deadline_s=deadline_s)
        searches.prepare(budget_bytes)
        return searches

    searches, flags = _find_flags_beside(get_ready, ranks, budget_bytes)
    searches.learn_flags(budget_bytes, flags)
    return searches


def _find_flags_beside(
    get_ready: Callable[[], Made], ranks: Sequence[RankModel], budget_bytes: int
) -> tuple[Made, MegatronFlags | None]:
    """Return what `get_ready` makes in this process, and the flags that another one looks for meanwhile."""
    work: list[Callable[[], Any]] = [get_ready, lambda: FlagSearch(ranks, budget_bytes).find()]
    made, flags = map_in_processes(_call, work)
    return made, flags


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
    return dataclasses.replace(limits, **{name: _MORE_ALONE * getattr(limits, name) for name in _PASSES})


def _list_kinds(search: RankSearch) -> list[tuple[int, LayerModel]]:
    return [(slot.chunk, slot.layer) for slot in search.slots]


def _call(work: Callable[[], Any]) -> Any:
    return work()


def _make_key(states: Sequence[State]) -> object:
    return tuple(map(make_key, states))


def _make_judge(rank: RankModel, detail: Detail, loss_window_bytes: int | None) -> Judge:
    def judge(plan: OffloadPlan) -> Verdict:
        result = simulate_rank(rank, dataclasses.replace(plan, loss_window_bytes=loss_window_bytes), detail=detail)
        return Verdict(step_s=result.step_s, peak_bytes=result.peak_bytes, peaks=result.peaks)

    return judge


def _strip_place(rank: RankModel) -> RankModel:
    """Return `rank` without what only says where it is: ranks that are equal then have the same best plan."""
    chunks = tuple(_renumber(chunk) for chunk in rank.chunks)
    return dataclasses.replace(rank, rank=0, chunks=chunks)


def _renumber(chunk: ChunkModel) -> ChunkModel:
    layers = tuple(dataclasses.replace(layer, number=place) for place, layer in enumerate(chunk.layers))
    return dataclasses.replace(chunk, layers=layers)
