"""Searches for the fastest setting of Megatron's own flags within a memory budget, to compare plans with.

We try recompute settings on the rank with the highest peak, fastest first, until no other can beat the best one that fits. If a
setting exceeds the budget, we offload more tags until it fits, cheapest per freed byte first. Then we simulate all ranks.
"""

import bisect
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.simulation.simulation_result import StepResult
from fgoffload.planner.simulation.simulator import simulate, simulate_rank
from fgoffload.planner.solving.megatron_flags import (
    FULL_RECOMPUTE,
    FullMethod,
    FullRecompute,
    MegatronFlags,
    SelectiveRecompute,
    choose_usual_modules,
)
from fgoffload.planner.solving.states import shorten
from fgoffload.planner.solving.treatments import list_names
from fgoffload.tags import RECOMPUTE_UNITS, default_tags

_MOST_BLOCKS = 4  # number of values of `--recompute-num-layers` to try with `--recompute-method block`

_MOST_CHECKS = 4
"""Maximum number of settings simulated on all ranks. If one exceeds the budget, the next search uses a smaller budget."""


class NearestFlags(NamedTuple):
    """The fastest flags within a budget, and their prediction."""

    flags: MegatronFlags
    result: StepResult  # their simulated step


class FlagSearch:
    """Searches for the best flags for a pipeline, and caches simulations across budgets."""

    def __init__(self, ranks: Sequence[RankModel], kept: StepResult) -> None:
        self._ranks = ranks
        self._fullest = shorten(ranks[kept.worst_rank.rank])
        self._known: dict[MegatronFlags, tuple[int, float]] = {}

    def find(self, budget_bytes: int) -> NearestFlags | None:
        """Return the fastest flags found within the budget, with their prediction, or None if no flags fit."""
        alone_bytes = budget_bytes
        for _ in range(_MOST_CHECKS):
            flags = self._find_alone(alone_bytes)
            if flags is None:
                break
            result = simulate(flags.adapt(self._ranks), flags.make_plan(self._ranks))
            if result.peak_bytes <= budget_bytes:
                return NearestFlags(flags=flags, result=result)
            alone_bytes = self._simulate(flags)[0] - (result.peak_bytes - budget_bytes)
        full = simulate(FULL_RECOMPUTE.adapt(self._ranks), FULL_RECOMPUTE.make_plan(self._ranks))
        return NearestFlags(flags=FULL_RECOMPUTE, result=full) if full.peak_bytes <= budget_bytes else None

    def _find_alone(self, budget_bytes: int) -> MegatronFlags | None:
        best, best_s = None, math.inf
        starts = [MegatronFlags(recompute=recompute) for recompute in self._list_recomputes()]
        for start in sorted(starts, key=lambda one: self._simulate(one)[1]):
            # Offloading more tags cannot make a setting faster.
            if self._simulate(start)[1] >= best_s:
                break
            flags = self._add_tags(start, budget_bytes)
            if flags is not None and self._simulate(flags)[1] < best_s:
                best, best_s = flags, self._simulate(flags)[1]
        return best

    def _add_tags(self, start: MegatronFlags, budget_bytes: int) -> MegatronFlags | None:
        """Add as few tags to `start` as the budget requires, cheapest first. Return None if even all tags are not enough."""
        if self._simulate(start)[0] <= budget_bytes:
            return start

        ordered = sorted(_list_tags(self._fullest, start), key=self._rate_tag)

        def fits(count: int) -> bool:
            return self._simulate(_add_tags(start, ordered[:count]))[0] <= budget_bytes

        count = bisect.bisect_left(range(len(ordered)), x=True, key=fits)
        return _add_tags(start, ordered[:count]) if fits(count) else None

    def _rate_tag(self, tag: str) -> float:
        """Return the seconds that offloading only this tag costs per freed byte."""
        peak_bytes, step_s = self._simulate(_add_tags(MegatronFlags(), [tag]))
        kept_bytes, kept_s = self._simulate(MegatronFlags())
        return max(step_s - kept_s, 0.0) / max(kept_bytes - peak_bytes, 1)

    def _simulate(self, flags: MegatronFlags) -> tuple[int, float]:
        """Return the peak and the step time of the rank with the highest peak, simulated without the others."""
        if flags not in self._known:
            result = simulate_rank(flags.adapt([self._fullest])[0], flags.make_plan([self._fullest]))
            self._known[flags] = (result.peak_bytes, result.step_s)
        return self._known[flags]

    def _list_recomputes(self) -> Iterator[SelectiveRecompute | FullRecompute | None]:
        units = {unit.name for chunk in self._fullest.chunks for layer in chunk.layers for unit in layer.model.units}
        modules = list(
            dict.fromkeys(unit.recompute_module for unit in RECOMPUTE_UNITS if unit.name in units and unit.recompute_module)
        )
        modules.sort(key=lambda module: self._simulate(MegatronFlags(recompute=SelectiveRecompute(modules=(module,))))[1])
        sets = [choose_usual_modules(self._ranks), *(modules[:count] for count in range(1, len(modules) + 1))]
        sets += [[module] for module in modules]
        most = max((len(chunk.layers) for chunk in self._fullest.chunks), default=0)
        counts = {round(most * (place + 1) / (_MOST_BLOCKS + 1)) for place in range(_MOST_BLOCKS)}
        full = [FullRecompute(method=FullMethod.BLOCK, layers=count) for count in sorted(counts) if 0 < count < most]
        yield None
        yield from dict.fromkeys(SelectiveRecompute(modules=tuple(names)) for names in sets if names)
        if "layer" in units:
            yield from [FullRecompute(method=FullMethod.UNIFORM), *full]


def _list_tags(rank: RankModel, flags: MegatronFlags) -> list[str]:
    """Return Megatron's tags that are compatible with `flags` and have saved tensors on this rank."""
    saving = {name for chunk in rank.chunks for layer in chunk.layers for name in list_names(layer.model)}
    modules = set(flags.recompute.modules) if isinstance(flags.recompute, SelectiveRecompute) else set()
    return [
        tag.name
        for tag in default_tags()
        if tag.is_in_megatron and tag.name in saving and not tag.requires and not set(tag.excluded_by) & modules
    ]


def _add_tags(flags: MegatronFlags, tags: Sequence[str]) -> MegatronFlags:
    """Add `tags` and the tags that require them. A storage is freed only if all tags that share it are offloaded."""
    names = set(tags)
    names |= {tag.name for tag in default_tags() if tag.is_in_megatron and set(tag.requires) & names}
    return dataclasses.replace(flags, offload_modules=tuple(name for name in default_tags().names if name in names))
