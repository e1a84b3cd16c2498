"""Looks for the fastest that Megatron-Core's own flags reach within memory budgets. Numbers in, settings out: others measure.

All sets of modules with all recomputes and fractions are thousands. What is tried instead, until nothing is left that could be
faster, or as many settings were tried as may be:

1. Each module alone, with the ones that it needs, and each set of recompute modules alone.
2. All sets of modules that freed something, beside each recompute, and fractions of them, are estimated: the largest measured
   set in them, and the sum of what that lacks. Of each budget those are measured that are estimated to fit, the fastest first,
   as long as the estimate is below the fastest that was measured within the budget.

What can be missed is a set that frees more than its parts do. Time is rather estimated too low, since copies of several modules
share a link, and a low estimate excludes nothing.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fgoffload.benchmark.settings import FULL, Setting, System
from fgoffload.tags import default_tags

FRACTIONS = (0.25, 0.5, 0.75)
"""Beside 1, where Megatron's engine has a fraction."""

WIDTH = 2
"""Settings of each budget that are measured at a time: a process starts for each round, and that takes longer than they do."""

_SLACK = 1.01
"""Estimated above a budget by less than this is tried too: estimates are sums of differences."""

_LEAST_PART = 0.002
"""Of the peak of nothing. A module that frees less frees nothing that repeats, and its time for a byte is noise."""


class Sample(NamedTuple):
    """What a setting takes."""

    ratio: float
    """Step time over `nothing` of the same process."""
    peak_bytes: int
    """Of the fullest rank."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """What there is to choose from."""

    modules: tuple[str, ...]
    """That the flag of Megatron-Core's engine accepts."""
    recomputes: tuple[tuple[str, ...], ...]
    """Sets of recompute modules, or `full` alone, which is tried without offload alone."""
    has_fraction: bool
    """Whether the engine takes `--activation-offload-fraction`."""

    def count(self) -> int:
        """Return how many settings there are: any modules that have what they need, each recompute, each of the fractions."""
        sets = (set(itertools.compress(self.modules, chosen)) for chosen in _list_subsets(self.modules))
        possible = sum(all(set(_close(module, self.modules)) <= one for module in one) for one in sets if one)
        fractions = 1 + (len(FRACTIONS) if self.has_fraction else 0)
        beside = 1 + sum(one != (FULL,) for one in self.recomputes)
        return possible * beside * fractions + len(self.recomputes)


class Measured(NamedTuple):
    """What came of measuring some settings, with `nothing` among them."""

    samples: Mapping[Setting, Sample]
    """Of those that ran."""
    failures: Mapping[Setting, str]
    """Why the others did not."""


Measure = Callable[[Sequence[Setting]], Measured]
"""Measures settings, with few steps."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found."""

    budgets_bytes: tuple[int, ...]
    """That it was for."""
    samples: Mapping[Setting, Sample]
    """Of all settings that were tried and ran, `nothing` left out, in the order in which they did."""
    failures: Mapping[Setting, str]
    """Of those that did not run."""
    possible: int
    """Settings that there are."""
    rounds: int
    """In which they were measured."""
    is_exhausted: bool
    """Whether it ended because nothing was left to try: not because of its limit, nor since `nothing` did not run."""

    @property
    def tried(self) -> int:
        """How many settings were tried."""
        return len(self.samples) + len(self.failures)

    def list_fastest(self, budget_bytes: int, *, count: int = 1) -> list[Setting]:
        """Return the fastest settings within a budget, as measured with few steps, the fastest first."""
        fitting = [setting for setting, sample in self.samples.items() if sample.peak_bytes <= budget_bytes]
        return sorted(fitting, key=lambda setting: self.samples[setting].ratio)[:count]


def search(space: SearchSpace, budgets_bytes: Sequence[int], *, nothing: Setting, limit: int, measure: Measure) -> SearchResult:
    """Return the settings of Megatron-Core's flags that were tried, and what they took.

    Args:
        space: What there is to choose from.
        budgets_bytes: Device bytes.
        nothing: The setting that all are compared with; `measure` has it among what it returns.
        limit: Settings that are tried at most.
        measure: Called once a round.
    """
    one = _Search(space, tuple(budgets_bytes), nothing, limit, measure)
    one.run()
    return SearchResult(
        budgets_bytes=one.budgets_bytes,
        samples={setting: sample for setting, sample in one.samples.items() if setting != nothing},
        failures=one.failures,
        possible=space.count(),
        rounds=one.rounds,
        is_exhausted=one.is_exhausted,
    )


class _Search:
    def __init__(
        self, space: SearchSpace, budgets_bytes: tuple[int, ...], nothing: Setting, limit: int, measure: Measure
    ) -> None:
        self._space = space
        self._nothing = nothing
        self._limit = limit
        self._measure = measure
        self._parts = tuple(dict.fromkeys(_close(module, space.modules) for module in space.modules))
        self.budgets_bytes = budgets_bytes
        self.samples: dict[Setting, Sample] = {}
        self.failures: dict[Setting, str] = {}
        self.rounds = 0
        self.is_exhausted = True

    def run(self) -> None:
        """Measure parts, and then what is made of them."""
        parts = [_offload(modules) for modules in self._parts]
        self._try([*parts, *(_recompute(modules) for modules in self._space.recomputes)])
        if self._nothing not in self.samples:
            # Nothing to compare with, and so nothing that could promise anything.
            self.is_exhausted = False
            return
        candidates = self._list_candidates()
        while batch := self._choose(candidates):
            self._try(batch)

    def _try(self, settings: Sequence[Setting]) -> None:
        left = self._limit - len(self.failures) - sum(setting != self._nothing for setting in self.samples)
        if len(settings) > left:
            self.is_exhausted = False
        if not (chosen := settings[: max(0, left)]):
            return
        found = self._measure(chosen)
        self.rounds += 1
        self.samples |= found.samples
        self.failures |= {setting: reason for setting, reason in found.failures.items() if setting != self._nothing}
        # Whatever is not spoken of is not asked for again.
        silent = (one for one in chosen if one not in self.samples and one not in self.failures)
        self.failures |= dict.fromkeys(silent, "not measured")

    def _choose(self, candidates: Sequence[Setting]) -> list[Setting]:
        """Return what is measured next, or nothing where no estimate promises anything or no more may be tried."""
        batch: dict[Setting, None] = {}
        left = {one: self._estimate(one) for one in candidates if one not in self.samples and one not in self.failures}
        for budget_bytes in self.budgets_bytes:
            found = [sample.ratio for sample in self.samples.values() if sample.peak_bytes <= budget_bytes]
            fastest = min(found, default=None)
            fitting = {one: sample for one, sample in left.items() if sample.peak_bytes <= _SLACK * budget_bytes}
            if fastest is not None:
                fitting = {one: sample for one, sample in fitting.items() if sample.ratio < fastest}
            elif not fitting and left:
                # Nothing is expected to fit: what keeps least may all the same.
                least = min(left, key=lambda one: left[one].peak_bytes)
                fitting = {least: left[least]}
            batch |= dict.fromkeys(sorted(fitting, key=lambda one: fitting[one])[:WIDTH])
        if len(self.failures) + sum(setting != self._nothing for setting in self.samples) >= self._limit:
            self.is_exhausted = self.is_exhausted and not batch
            return []
        return list(batch)

    def _list_candidates(self) -> list[Setting]:
        """Return what may be measured: all sets of useful parts, beside each recompute that ran, and fractions of them."""
        beside = [(), *(one for one in self._space.recomputes if one != (FULL,) and _recompute(one) in self.samples)]
        fractions = (1.0, *FRACTIONS) if self._space.has_fraction else (1.0,)
        return [
            _offload(modules, recompute, fraction)
            for recompute in beside
            for modules in self._list_sets(recompute)
            for fraction in fractions
        ]

    def _list_sets(self, recompute: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Return the sets of modules that may leave beside `recompute`."""
        least_bytes = _LEAST_PART * self.samples[self._nothing].peak_bytes
        known = [part for part in self._parts if _offload(part) in self.samples]
        useful = [part for part in known if self._count_freed(part) > least_bytes and not _is_excluded(part, recompute)]
        unions = (set().union(*itertools.compress(useful, chosen)) for chosen in _list_subsets(useful))
        return list(dict.fromkeys(tuple(one for one in self._space.modules if one in union) for union in unions if union))

    def _estimate(self, setting: Setting) -> Sample:
        """Return what a setting would take: the largest measured set in it, and the parts that this lacks, one by one."""
        start = self.samples[_recompute(setting.recompute) if setting.recompute else self._nothing]
        modules, covered, whole = set(setting.modules), set[str](), start
        for other, sample in self.samples.items():
            is_like = other.system is System.MEGATRON and other.recompute == setting.recompute and other.fraction == 1
            if is_like and set(other.modules) <= modules and len(other.modules) > len(covered):
                covered, whole = set(other.modules), sample
        ratio, peak_bytes = whole
        # A module that another one needs is in both parts, and counts once.
        for part in self._parts:
            if set(part) <= modules and _offload(part) in self.samples:
                there = tuple(one for one in part if one in covered)
                ratio += self._count_added(part) - self._count_added(there)
                peak_bytes -= self._count_freed(part) - self._count_freed(there)
                covered |= set(part)
        return Sample(
            start.ratio + setting.fraction * (ratio - start.ratio),
            round(start.peak_bytes + setting.fraction * (peak_bytes - start.peak_bytes)),
        )

    def _count_freed(self, part: tuple[str, ...]) -> int:
        """Return the bytes that `part` frees alone; none where it was not measured."""
        nothing = self.samples[self._nothing]
        return nothing.peak_bytes - self.samples.get(_offload(part), nothing).peak_bytes

    def _count_added(self, part: tuple[str, ...]) -> float:
        """Return what `part` alone adds to the ratio; faster than nothing is noise."""
        nothing = self.samples[self._nothing]
        return max(0.0, self.samples.get(_offload(part), nothing).ratio - nothing.ratio)


def _list_subsets(names: Sequence[object]) -> Iterator[tuple[bool, ...]]:
    return itertools.product((False, True), repeat=len(names))


def _close(module: str, modules: Sequence[str]) -> tuple[str, ...]:
    """Return a module with those that it needs, in the order of `modules`."""
    needed = {module, *(default_tags().get(module).requires if module in default_tags() else ())}
    return tuple(one for one in modules if one in needed)


def _is_excluded(part: Sequence[str], recompute: Sequence[str]) -> bool:
    """Return whether a module of `part` saves nothing that could leave where `recompute` runs again."""
    tags = default_tags()
    return any(set(tags.get(module).excluded_by) & set(recompute) for module in part if module in tags)


def _offload(modules: tuple[str, ...], recompute: tuple[str, ...] = (), fraction: float = 1.0) -> Setting:
    return Setting(system=System.MEGATRON, modules=modules, recompute=recompute, fraction=fraction)


def _recompute(modules: tuple[str, ...]) -> Setting:
    return Setting(system=System.RECOMPUTE, recompute=modules)
