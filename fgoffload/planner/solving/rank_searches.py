"""The search of all pipeline ranks: each by itself first, and then all together."""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fgoffload.plan import OffloadPlan
from fgoffload.planner.ranks.output_copies import copy_outputs
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.simulation.simulation_result import Detail, StepResult
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.flag_search import FlagSearch, NearestFlags, find_nearest, simulate_flags
from fgoffload.planner.solving.megatron_flags import MEGATRONS_OWN, MegatronFlags, baselines, list_offloading_flags
from fgoffload.planner.solving.moments import shorten_together
from fgoffload.planner.solving.placement import LayerSlot, State, keep_all, list_slots, make_plan, read_plan
from fgoffload.planner.solving.search import RankSearch
from fgoffload.planner.solving.search_limits import SearchLimits
from fgoffload.planner.solving.single_ranks import PASSES, SingleRanks, make_judge
from fgoffload.planner.solving.verdict import make_key
from fgoffload.planner.worker_processes import map_in_processes

Made = TypeVar("Made")

_BASELINES_NICENESS = 10
"""Of copies that simulate baselines meanwhile: they take what the search leaves of the cores."""

_SHORTENED = 0.01
"""Of a step: what a rank alone takes is known of a shortened step, and may be off by so much for the whole one."""

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
        self._results: dict[object, StepResult] = {}
        self._short_results: dict[object, StepResult] = {}
        self._least: tuple[State, ...] | None = None
        self._baselines: dict[str, tuple[State, ...]] = {}
        self._without_effect: set[str] = set()
        """Baselines that do nothing on these ranks."""
        self._baseline_results: dict[str, StepResult] = {}
        self._seeds: list[tuple[State, ...]] | None = None
        self._nearest: dict[int, NearestFlags | None] = {}
        self._flags: dict[int, MegatronFlags | None] = {}
        self._singles = SingleRanks(self.ranks, limits=limits, deadline_s=deadline_s, loss_window_bytes=loss_window_bytes)
        self._short_ranks = shorten_together(self.ranks, self._singles.shorts)

    @property
    def of_ranks(self) -> Sequence[RankSearch]:
        """Return the search of each rank, by place in `ranks`. Ranks that are alike share theirs."""
        return self._singles.of_ranks

    @property
    def simulations(self) -> int:
        """Return how many simulations of single ranks were run; one of all together counts as many as there are."""
        waiting = sum(search.simulations for search in self._waiting.values())
        return self._singles.simulations + self._together * len(self.ranks) + self._alone + waiting

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

    def simulate_beside(self, work: Callable[[], Made], plans: Sequence[OffloadPlan]) -> tuple[Made, list[StepResult]]:
        """Return what `work` makes in this process, and what the simulator says of plans, in others meanwhile."""
        self._together += len(plans)
        simulated: list[Callable[[], Any]] = [functools.partial(simulate, self.ranks, plan) for plan in plans]
        made, *results = map_in_processes(_call, [work, *simulated])
        return made, results

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
            plans = baselines(self.ranks)
            self._baselines = {name: self._read_plan(plan) for name, plan in plans.items()}
            self._without_effect = {name for name in MEGATRONS_OWN if not plans[name].actions}
        return self._baselines

    def simulate_baselines(self) -> dict[str, StepResult]:
        """Return what those that people compare with come to, by name: Megatron's own recompute without this package.

        Recompute that runs nothing again is left out, as that of whole layers beside CUDA graphs.
        """
        for name in self.list_baselines():
            if name not in self._baseline_results:
                self._together += 1
                self._learn_baseline(name, self._simulate_baseline(name))
        names = [name for name in self.list_baselines() if name not in self._without_effect]
        return {name: self._baseline_results[name] for name in names}

    def _simulate_baseline(self, name: str) -> StepResult:
        states = self.list_baselines()[name]
        if name in MEGATRONS_OWN:
            alone = [copy_outputs(dataclasses.replace(rank, has_engine=False)) for rank in self.ranks]
            return simulate(alone, self.make_plan(states))
        return self._results.get(_make_key(states)) or simulate(self.ranks, self.make_plan(states))

    def _learn_baseline(self, name: str, result: StepResult) -> None:
        """Take note of what a baseline comes to: a plan of this package comes to the same, unless it is Megatron's own."""
        self._baseline_results[name] = result
        if name not in MEGATRONS_OWN:
            self._results.setdefault(_make_key(self.list_baselines()[name]), result)

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
        self._singles.prepare(budget_bytes)

    def find_states(self, budget_bytes: int, *, starts: Sequence[State] = ()) -> tuple[State, ...]:
        """Return the fastest states found within the budget; where none fit, those with the least bytes above it.

        Args:
            budget_bytes: Of each device.
            starts: Of all ranks, from a smaller budget. The result is never slower.
        """
        self._singles.begin()
        if math.prod(search.plans for search in self.of_ranks) <= self._singles.limits.exhaustive_plans:
            return self._try_all(budget_bytes)
        begins = [*self.list_usual(budget_bytes), *([tuple(starts)] if starts else [])]
        found = self._find_together(budget_bytes, [*begins, *self._list_seeds(budget_bytes)])
        # By construction no slower than what users would choose, nor than what the search began with. No step is shorter than
        # that of a rank alone, so that most of them need not be simulated.
        result = self.simulate_together(found)
        longest_s = result.step_s * (1 + _SHORTENED) if result.peak_bytes <= budget_bytes else math.inf
        others = [states for states in begins if self._singles.count_longest_s(states) < longest_s]
        return min([found, *others], key=lambda states: self._score(states, budget_bytes))

    def _find_together(self, budget_bytes: int, begins: Sequence[Sequence[State]]) -> tuple[State, ...]:
        """Return the best states found from `begins`, with what the baselines come to simulated beside it."""
        unknown = [name for name in self.list_baselines() if name not in self._baseline_results]
        # The longest first, where much leaves.
        unknown.sort(key=lambda name: name != "offload everything")
        work: list[Callable[[], Any]] = [lambda: self._correct(self._find_apart(budget_bytes, begins), budget_bytes)]
        flags = self._find_flags(budget_bytes)
        is_open = flags is not None and budget_bytes not in self._nearest
        work += [functools.partial(simulate_flags, self.ranks, flags)] if flags is not None and is_open else []
        work += [functools.partial(self._simulate_baseline, name) for name in unknown]
        found: tuple[State, ...]
        found, *results = map_in_processes(_call, work, niceness=_BASELINES_NICENESS)
        if is_open:
            self._learn_nearest(budget_bytes, flags, results.pop(0))
        for name, result in zip(unknown, results, strict=True):
            self._learn_baseline(name, result)
        self._together += len(unknown)
        return found

    def find_least_states(self) -> tuple[State, ...]:
        """Return the states with the least peaks found, the same whatever was searched for before."""
        if self._least is None:
            # Searches go on from what those for other budgets have learned. So one that has learned nothing: an error names
            # the least budget, and a search for that one has to come to it again.
            search = RankSearches(
                self.ranks, limits=self._limits, deadline_s=self._deadline_s, loss_window_bytes=self._loss_window_bytes
            )
            self._least = search.find_states(0)
            self._alone += search.simulations
        return self._least

    def list_offloading(self, budget_bytes: int, *, shorter_than_s: float) -> list[tuple[State, ...]]:
        """Return the states in which all that can leave leaves, but for what is cheap to run again, of all ranks alike.

        Args:
            budget_bytes: Of each device.
            shorter_than_s: Seconds. What takes as long on a rank that never waits for its neighbours is left out.
        """
        return [
            states for states in self._list_offloading(budget_bytes) if self._singles.count_longest_s(states) < shorter_than_s
        ]

    def _list_offloading(self, budget_bytes: int) -> list[tuple[State, ...]]:
        return [self.list_baselines()["offload everything"], *self._list_seeds(budget_bytes)]

    def list_leaving_first(self, states: Sequence[State], budget_bytes: int) -> list[tuple[State, ...]]:
        """Return `states`, but that on a rank with a loss everything leaves of the first layers, and the last ones stay.

        As many stay as have room where nothing is on its way when a loss begins. Nothing runs again there, and that rank waits
        less for its neighbours than one that is as fast alone and runs much again.

        Args:
            states: The best that are known, of all ranks.
            budget_bytes: Of each device.
        """
        found = []
        for place, rank in enumerate(self.ranks):
            if rank.turning_chunk is None:
                continue
            search = self.of_ranks[place]
            judge = make_judge(search.rank, Detail.TOTALS, 0)
            leaving, kept = self.list_baselines()["offload everything"][place], keep_all(search.slots, search.modes)
            mixed = [leaving[: len(kept) - count] + kept[len(kept) - count :] for count in range(len(kept) + 1)]
            # The more stay, the more bytes: the first that has no room, less one.
            self._alone += len(mixed).bit_length()
            count = bisect.bisect_right(
                mixed,
                budget_bytes,
                key=lambda state: judge(make_plan([(search.slots, state)])).peak_bytes,
            )
            if count:
                found.append((*states[:place], mixed[count - 1], *states[place + 1 :]))
        return found

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
            judge = make_judge(search.rank, Detail.TOTALS, 0)
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
        limits = self._singles.limits
        if len(self.ranks) > 1:
            limits = dataclasses.replace(
                limits, **{name: getattr(limits, name) // len(self._singles.distinct) for name in PASSES}
            )
        alone = [dataclasses.replace(rank, rank=0)]
        return RankSearches(alone, limits=limits, deadline_s=self._deadline_s, loss_window_bytes=0)

    def find_bound(self) -> tuple[float | None, float | None]:
        """Return the longest bound of a rank, and how much longer than its own a rank takes, where that is most."""
        return self._singles.find_bound()

    def _read_plan(self, plan: OffloadPlan) -> tuple[State, ...]:
        return tuple(
            read_plan(plan, list_slots(rank), search.modes, min_offloaded_numel=rank.min_offloaded_numel)
            for rank, search in zip(self.ranks, self.of_ranks, strict=True)
        )

    def _find_apart(self, budget_bytes: int, starts: Sequence[Sequence[State]]) -> tuple[State, ...]:
        """Return the best state of each rank by itself."""
        return self._singles.find_states(budget_bytes, starts, self.list_baselines())

    def _correct(self, states: tuple[State, ...], budget_bytes: int) -> tuple[State, ...]:
        """Return states that fit together: neighbours change when a rank's copies run, and so its peak."""
        budgets = [budget_bytes] * len(self.ranks)
        # What a rank has no room for alone it has none for beside others. A budget of 0 asks for the least peaks.
        fits_alone = all(found.verdict.peak_bytes <= budget_bytes for found in self._singles.founds.values())
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
                most = self._singles.limits.simulations // len(above)
                changed[place] = self._singles.improve(search, found, budgets[place], most).state
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


def _call(work: Callable[[], Any]) -> Any:
    return work()


def _make_key(states: Sequence[State]) -> object:
    return tuple(map(make_key, states))
