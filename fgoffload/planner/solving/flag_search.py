"""Looks for the fastest of Megatron's own flags within a memory budget, for people to compare a plan with.

All sets of tags beside all recomputes are thousands. Each recompute is simulated alone, and from the fastest on with each tag
alone, as long as it is faster than the fastest setting that keeps to the budget. What a set of tags comes to is estimated from
the largest part of it that was simulated beside the same recompute, and from what each of the others adds alone; copies of
several tags share a link, so that time is rather estimated too low. Whatever is estimated to keep to the budget and to be
faster than the fastest so far is simulated, the fastest first; and the best of each recompute with one tag more.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fgoffload.planner.ranks.rank_model import ChunkModel, RankModel
from fgoffload.planner.simulation.simulation_result import StepResult
from fgoffload.planner.simulation.simulator import simulate, simulate_rank
from fgoffload.planner.solving.megatron_flags import (
    FULL_RECOMPUTE,
    LAYER,
    FullMethod,
    FullRecompute,
    MegatronFlags,
    SelectiveRecompute,
    choose_usual_modules,
)
from fgoffload.planner.solving.moments import shorten, shorten_together
from fgoffload.planner.worker_processes import map_in_processes
from fgoffload.tags import RECOMPUTE_UNITS, default_tags

Recompute = SelectiveRecompute | FullRecompute | None

_MOST_SIMULATIONS = 150
"""Of settings with tags; one that keeps to the budget on the first rank counts as if it were simulated on all."""

_MOST_SETS = 4
"""Of them, of sets of tags for each recompute, before the next one has its turn."""

_WIDTH = 2
"""Settings that are simulated at a time, since two processes do."""

_SLACK = 1.005
"""Estimated above a budget by less than this is simulated too: estimates are sums of differences."""

_CLOSE = 1.05
"""Times as long as the best: what is slower gets no tag more."""

_MOST_CHECKS = 6
"""Simulations of all ranks: each that shows a rank above the budget lowers the budget for the next."""

_MOST_COMPARED = 2
"""Settings of different recompute that are simulated on all ranks together."""

_MOST_BLOCKS = 8
"""Numbers of layers of `--recompute-method block` that are tried."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NearestFlags:
    """Flags that keep to a budget, and what they come to."""

    flags: MegatronFlags
    """The flags."""
    result: StepResult
    """What the simulator says of them."""


def find_nearest_flags(
    ranks: Sequence[RankModel], *, budget_bytes: int, host_budget_bytes: int | None = None
) -> MegatronFlags | None:
    """Return the fastest of Megatron's own flags found that keep to the budget, or None where none were found.

    Args:
        ranks: The pipeline, by number.
        budget_bytes: Device bytes of each rank.
        host_budget_bytes: Host bytes of each rank. None leaves what the ranks say.
    """
    nearest = find_nearest(ranks, budget_bytes=budget_bytes, host_budget_bytes=host_budget_bytes)
    return None if nearest is None else nearest.flags


def find_nearest(ranks: Sequence[RankModel], *, budget_bytes: int, host_budget_bytes: int | None = None) -> NearestFlags | None:
    """Return what `find_nearest_flags` does, and what it comes to.

    They are looked for on the fullest ranks, and checked on all.

    Args:
        ranks: The pipeline, by number.
        budget_bytes: Device bytes of each rank.
        host_budget_bytes: Host bytes of each rank. None leaves what the ranks say.
    """
    if host_budget_bytes is not None:
        ranks = [dataclasses.replace(rank, host_budget_bytes=host_budget_bytes) for rank in ranks]
    search = FlagSearch(ranks, budget_bytes)
    while (flags := search.find()) is not None:
        result = simulate_flags(ranks, flags)
        if result.peak_bytes <= budget_bytes:
            return NearestFlags(flags=flags, result=result)
        search.exclude(flags, result)
    return None


def simulate_flags(ranks: Sequence[RankModel], flags: MegatronFlags) -> StepResult:
    """Return what a step of all ranks comes to with `flags`."""
    return simulate(flags.adapt(ranks), flags.make_plan(ranks))


class FlagSearch:
    """The search for flags, on the fullest ranks.

    Args:
        ranks: The pipeline, by number.
        budget_bytes: Device bytes of each rank.
    """

    def __init__(self, ranks: Sequence[RankModel], budget_bytes: int) -> None:
        shorts = [shorten(rank) for rank in ranks]
        self._short = shorten_together(ranks, shorts)
        self._ranks = [shorts[place] for place in _pick_fullest(ranks)]
        self._budget_bytes = self._whole_budget_bytes = budget_bytes
        self._results: dict[tuple[int, MegatronFlags], tuple[int, float]] = {}
        self._checks = 0

    def find(self) -> MegatronFlags | None:
        """Return the fastest flags found that keep to the budget on all ranks, in a step of few microbatches, or None."""
        while self._checks < _MOST_CHECKS:
            self._checks += 1
            self.run()
            found = self.list_best()[:_MOST_COMPARED]
            if not found:
                return None
            # Which ranks are slow a fullest rank does not know.
            results = map_in_processes(functools.partial(simulate_flags, self._short), found)
            flags, result = min(
                zip(found, results, strict=True),
                key=lambda pair: (pair[1].peak_bytes > self._whole_budget_bytes, pair[1].step_s),
            )
            if result.peak_bytes <= self._whole_budget_bytes:
                return flags
            self.exclude(flags, result)
        return None

    def run(self) -> None:
        """Simulate whatever flags may be best."""
        starts = [MegatronFlags(recompute=one) for one in self._list_recomputes()]
        self._simulate_all(starts)
        most = self._count() + _MOST_SIMULATIONS
        for start in sorted(starts, key=self._get_step_s):
            # What is slower by itself than something that fits is slower with tags too.
            if self._get_step_s(start) >= self._find_least_s() or self._count() >= most:
                return
            self._try_tags(start, most=min(most, self._count() + _MOST_SETS))

    def _try_tags(self, start: MegatronFlags, *, most: int) -> None:
        """Simulate sets of tags beside a recompute, with each tag alone first, until nothing may be better."""
        tags = _list_tags(self._ranks, start)
        alone = {tag: _add_tags(start, [tag]) for tag in tags}
        most += len(alone)
        self._simulate_all(alone.values())
        sets = itertools.chain.from_iterable(itertools.combinations(tags, count) for count in range(2, len(tags) + 1))
        candidates = [_add_tags(start, names) for names in sets]
        while self._count() < most:
            # What is estimated a bit slower than the best is tried until one fits: one tag more can make it faster.
            has_fitting = any(flags.recompute == start.recompute for flags in self.list_best())
            longest_s = self._find_least_s() * (1 if has_fitting else _CLOSE)
            promising = self._list_promising(start, alone, candidates, longest_s)[:_WIDTH]
            if not promising:
                break
            self._simulate_all(promising)
        self._add_to_best(start, tags)

    def _add_to_best(self, start: MegatronFlags, tags: Sequence[str]) -> None:
        """Simulate the best set of tags beside a recompute with one more, as long as that is better.

        A tag more can save time: layers of which more leaves are watched, and what comes back is called back earlier.
        """
        best = next((flags for flags in self.list_best() if flags.recompute == start.recompute), None)
        while best is not None and self._get_step_s(best) <= self._find_least_s() * _CLOSE:
            longer = [_add_tags(best, [tag]) for tag in tags if tag not in best.offload_modules]
            self._simulate_all(longer)
            better = self._pick([best, *longer])
            best = better if better is not best else None

    def find_best(self) -> MegatronFlags | None:
        """Return the best flags that were simulated and keep to the budget, or None."""
        best = self._pick(dict.fromkeys(flags for _, flags in self._results))
        return None if best is None or self._score(best)[0] else best

    def list_best(self) -> list[MegatronFlags]:
        """Return the best flags of each recompute that were simulated and keep to the budget, the best first."""
        alike: dict[Recompute, list[MegatronFlags]] = {}
        for flags in dict.fromkeys(flags for _, flags in self._results):
            alike.setdefault(flags.recompute, []).append(flags)
        best = (self._pick(settings) for settings in alike.values())
        return sorted((flags for flags in best if flags is not None and not self._score(flags)[0]), key=self._score)

    def exclude(self, flags: MegatronFlags, result: StepResult) -> None:
        """Take note that `flags` come to `result`, which is too much on its worst rank, beside its neighbours.

        That rank is looked at from now on. Where it takes more than alone, settings have to leave so much room.
        """
        worst = result.worst_rank
        if all(one.rank != worst.rank for one in self._ranks):
            self._ranks.append(next(shorten(rank) for rank in self._short if rank.rank == worst.rank))
        more_bytes = worst.peak_bytes - max(self._simulate(one, flags)[0] for one in self._ranks)
        self._budget_bytes = min(self._budget_bytes, self._whole_budget_bytes - more_bytes)

    def _pick(self, settings: Iterable[MegatronFlags]) -> MegatronFlags | None:
        """Return the best of `settings`, the first of those that are as good, or None where there are none.

        What is no better than another one on the first rank alone is not simulated on the others.
        """
        best: tuple[tuple[float, ...], int, MegatronFlags] | None = None
        numbered = [(self._score(flags, self._ranks[:1]), number, flags) for number, flags in enumerate(settings)]
        for least, number, flags in sorted(numbered, key=lambda one: one[:2]):
            if best is not None and least > best[0]:
                break
            one = (self._score(flags), number, flags)
            best = one if best is None or one[:2] < best[:2] else best
        return None if best is None else best[2]

    def _score(self, flags: MegatronFlags, ranks: Sequence[RankModel] | None = None) -> tuple[float, ...]:
        """Return what better flags have less of, on some ranks or on all: bytes above the budget, time, words."""
        above_bytes, step_s = 0, 0.0
        for rank in self._ranks if ranks is None else ranks:
            peak_bytes, rank_s = self._simulate(rank, flags)
            above_bytes, step_s = max(above_bytes, peak_bytes - self._budget_bytes), max(step_s, rank_s)
            if above_bytes:
                break
        return (above_bytes, round(step_s, 9), len(flags.list_arguments()))

    def _simulate(self, rank: RankModel, flags: MegatronFlags) -> tuple[int, float]:
        """Return peak and step of a rank, alone."""
        key = (rank.rank, flags)
        if key not in self._results:
            self._results[key] = _simulate_rank(rank, flags)
        return self._results[key]

    def _simulate_all(self, settings: Iterable[MegatronFlags]) -> None:
        """Simulate on the first rank what scores need, side by side."""
        first = self._ranks[0]
        missing = [flags for flags in dict.fromkeys(settings) if (first.rank, flags) not in self._results]
        found = map_in_processes(functools.partial(_simulate_rank, first), missing)
        self._results |= {(first.rank, flags): result for flags, result in zip(missing, found, strict=True)}

    def _count(self) -> int:
        """Return what the settings so far count: those that keep to the budget on the first rank once for each rank."""
        first = self._ranks[0].rank
        fitting = [peak_bytes <= self._budget_bytes for (rank, _), (peak_bytes, _) in self._results.items() if rank == first]
        return len(fitting) + (len(self._ranks) - 1) * sum(fitting)

    def _get_step_s(self, flags: MegatronFlags) -> float:
        return self._simulate(self._ranks[0], flags)[1]

    def _find_least_s(self) -> float:
        """Return the time of the best so far on the rank that each score begins with."""
        best = self.find_best()
        return math.inf if best is None else self._get_step_s(best)

    def _list_promising(
        self, start: MegatronFlags, alone: Mapping[str, MegatronFlags], candidates: Sequence[MegatronFlags], longest_s: float
    ) -> list[MegatronFlags]:
        """Return those of `candidates` that are estimated to fit and to take less than `longest_s`, the fastest first.

        Args:
            start: Their recompute, without tags.
            alone: The same with each tag.
            candidates: With sets of tags.
            longest_s: On the first rank.
        """
        first = self._ranks[0]
        free_bytes, free_s = self._simulate(first, start)
        added = {}
        for tag, flags in alone.items():
            peak_bytes, step_s = self._simulate(first, flags)
            added[tag] = (free_bytes - peak_bytes, max(step_s - free_s, 0.0))
        known = [(frozenset[str](), free_bytes, free_s)]
        for flags in candidates:
            if (first.rank, flags) in self._results:
                known.append((frozenset(flags.offload_modules), *self._simulate(first, flags)))
        promising = []
        for flags in candidates:
            if (first.rank, flags) in self._results:
                continue
            names = frozenset(flags.offload_modules)
            inside, peak_bytes, step_s = max((one for one in known if one[0] <= names), key=lambda one: len(one[0]))
            # What a tag needs beside it was added with it.
            more = [added[tag] for tag in names - inside if tag in added]
            peak_bytes -= sum(freed_bytes for freed_bytes, _ in more)
            step_s += sum(seconds for _, seconds in more)
            if peak_bytes <= self._budget_bytes * _SLACK and step_s < longest_s:
                promising.append((step_s, len(names), flags.offload_modules, flags))
        # Of settings that are estimated alike those with the fewest tags: they leave the link the most time.
        return [flags for *_, flags in sorted(promising, key=lambda one: one[:3])]

    def _list_recomputes(self) -> list[Recompute]:
        layers = [layer.model for chunk in _list_chunks(self._ranks) for layer in chunk.layers]
        units = {unit.name for layer in layers for unit in layer.units}
        modules = dict.fromkeys(
            unit.recompute_module for unit in RECOMPUTE_UNITS if unit.name in units and unit.recompute_module
        )
        chain = sorted(modules, key=lambda module: self._score(_recompute_only(module))[1])
        selective = [SelectiveRecompute(modules=tuple(chain[:count])) for count in range(1, len(chain) + 1)]
        selective += [SelectiveRecompute(modules=(module,)) for module in chain]
        most_layers = max((len(chunk.layers) for chunk in _list_chunks(self._ranks)), default=0)
        blocks = [FullRecompute(method=FullMethod.BLOCK, layers=count) for count in _pick_counts(most_layers)]
        full = [FullRecompute(method=FullMethod.UNIFORM), *blocks] if LAYER in units else []
        usual = choose_usual_modules(self._ranks)
        return list(dict.fromkeys([None, *([SelectiveRecompute(modules=usual)] if usual else []), *selective, *full]))


def _list_chunks(ranks: Sequence[RankModel]) -> Iterator[ChunkModel]:
    return itertools.chain.from_iterable(rank.chunks for rank in ranks)


def _list_tags(ranks: Sequence[RankModel], flags: MegatronFlags) -> list[str]:
    """Return the tags that `flags` may have beside their own, that Megatron knows, and that save anything here."""
    least_numel = min(rank.min_offloaded_numel for rank in ranks)
    saving = {
        tag
        for chunk in _list_chunks(ranks)
        for layer in chunk.layers
        for tensor in layer.model.tensors
        if not tensor.is_below(least_numel)
        for tag in tensor.tags
    }
    modules = flags.recompute.modules if isinstance(flags.recompute, SelectiveRecompute) else ()
    return [
        tag.name
        for tag in default_tags()
        if tag.is_in_megatron
        and tag.name in saving
        and tag.name not in flags.offload_modules
        and not set(tag.excluded_by) & set(modules)
        and not tag.requires
    ]


def _add_tags(flags: MegatronFlags, tags: Iterable[str]) -> MegatronFlags:
    """Return `flags` with `tags`, and with those that need them: they save the same storage, which both have to let go."""
    names = {*flags.offload_modules, *tags}
    names |= {tag.name for tag in default_tags() if tag.is_in_megatron and set(tag.requires) & names}
    return dataclasses.replace(flags, offload_modules=tuple(name for name in default_tags().names if name in names))


def _simulate_rank(rank: RankModel, flags: MegatronFlags) -> tuple[int, float]:
    """Return peak and step of a rank, alone."""
    result = simulate_rank(flags.adapt([rank])[0], flags.make_plan([rank]))
    return result.peak_bytes, result.step_s


def _pick_fullest(ranks: Sequence[RankModel]) -> list[int]:
    """Return the number of the rank with the highest peak where all is kept, and where layers run again, if that is another."""
    plans = [flags.make_plan(ranks) for flags in (MegatronFlags(), FULL_RECOMPUTE)]
    results = [max(simulate(ranks, plan).ranks, key=lambda result: result.peak_bytes) for plan in plans]
    return list(dict.fromkeys(result.rank for result in results))


def _recompute_only(module: str) -> MegatronFlags:
    return MegatronFlags(recompute=SelectiveRecompute(modules=(module,)))


def _pick_counts(most: int) -> list[int]:
    """Return numbers from 1 to below `most`, all or evenly spread."""
    count = min(_MOST_BLOCKS, most - 1)
    return sorted({round((place + 1) * (most - 1) / count) for place in range(count)}) if count > 0 else []
