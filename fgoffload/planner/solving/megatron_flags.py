"""Megatron's own settings of recompute and offload, and the plan that each comes to.

Flags choose for all layers alike, and a fraction for all sites of a chunk: they can say a small part of what a plan can.
`baselines` has the settings that people compare with, and `find_nearest_flags` looks for the best within a budget.

    >>> flags = MegatronFlags(offload_modules=("expert_fc1",), recompute=SelectiveRecompute(modules=("layernorm", "moe_act")))
    >>> " ".join(flags.list_arguments())[:71]
    '--fine-grained-activation-offloading --offload-modules expert_fc1 --rec'
"""

import dataclasses
import enum
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fgoffload.errors import ConfigError
from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.planner.ranks.rank_model import ChunkModel, NumberedLayer, RankModel
from fgoffload.planner.simulation.simulation_result import StepResult
from fgoffload.planner.simulation.simulator import simulate, simulate_rank
from fgoffload.planner.solving.moments import shorten, shorten_together
from fgoffload.planner.worker_processes import map_in_processes
from fgoffload.tags import RECOMPUTE_UNITS, default_tags

LAYER = "layer"
LAYER_INPUT = "layer_input"
"""The unit of full recompute, and the tag that has a site in layers where it is on."""


class FullMethod(enum.Enum):
    """Which layers full recompute takes: `--recompute-method`."""

    UNIFORM = "uniform"  # all layers, here one by one: with --recompute-num-layers 1
    BLOCK = "block"  # the first ones of each model chunk, as many as --recompute-num-layers says


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveRecompute:
    """`--recompute-granularity selective`: modules that run again in every layer that has them."""

    modules: tuple[str, ...]
    """`--recompute-modules`."""

    def __post_init__(self) -> None:
        """Refuse modules that no unit stands for.

        Raises:
            ConfigError: With the module and those that there are.
        """
        known = sorted({unit.recompute_module for unit in RECOMPUTE_UNITS if unit.recompute_module})
        for module in self.modules:
            if module not in known:
                raise ConfigError(f"--recompute-modules {module!r} is not known here. Give some of: {' '.join(known)}.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FullRecompute:
    """`--recompute-granularity full`: whole layers run again."""

    method: FullMethod
    """Which."""
    layers: int = 1
    """`--recompute-num-layers`: with `block` how many of each chunk, with `uniform` always 1 here."""

    def __post_init__(self) -> None:
        """Refuse numbers of layers that cannot be.

        Raises:
            ConfigError: With the value and the fix.
        """
        if self.layers < 1 or (self.method is FullMethod.UNIFORM and self.layers != 1):
            raise ConfigError(f"--recompute-num-layers {self.layers} with {self.method.value}. Give 1, or more with block.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFlags:
    """What Megatron's command line says of recompute and offload."""

    offload_modules: tuple[str, ...] = ()
    """`--offload-modules`."""
    activation_offload_fraction: float = 1.0
    """`--activation-offload-fraction`: of the sites of each chunk, the first ones of forward."""
    recompute: SelectiveRecompute | FullRecompute | None = None
    """`--recompute-granularity` and what belongs to it, or None for none."""

    def list_arguments(self) -> tuple[str, ...]:
        """Return the words of the command line."""
        words: list[str] = []
        if self.offload_modules:
            words += ["--fine-grained-activation-offloading", "--offload-modules", *self.offload_modules]
            if self.activation_offload_fraction != 1:
                words += ["--activation-offload-fraction", f"{self.activation_offload_fraction:g}"]
        if isinstance(self.recompute, SelectiveRecompute):
            words += ["--recompute-granularity", "selective", "--recompute-modules", *self.recompute.modules]
        elif self.recompute is not None:
            words += ["--recompute-granularity", "full", "--recompute-method", self.recompute.method.value]
            words += ["--recompute-num-layers", str(self.recompute.layers)]
        return tuple(words)

    def make_plan(self, ranks: Sequence[RankModel]) -> OffloadPlan:
        """Return what these flags come to on `ranks`, site by site.

        Tags and modules that a layer lacks do nothing there. Tags that a module covers save nothing, and stay.
        """
        actions: dict[Site, Action] = {}
        for rank in ranks:
            for number, chunk in enumerate(rank.chunks):
                actions.update(self._list_chunk(number, chunk))
        return OffloadPlan(actions=actions)

    def adapt(self, ranks: Sequence[RankModel]) -> tuple[RankModel, ...]:
        """Return `ranks` as they run with these flags: this package is there where something is offloaded, and only there."""
        return tuple(dataclasses.replace(rank, has_engine=bool(self.offload_modules)) for rank in ranks)

    def _list_chunk(self, chunk_number: int, chunk: ChunkModel) -> Mapping[Site, Action]:
        sites: list[Site] = []
        units: list[Site] = []
        for place, layer in enumerate(chunk.layers):
            names = tuple(self._list_units(layer, place))
            units += [Site(chunk=chunk_number, layer=layer.number, tag=name) for name in names]
            sites += [Site(chunk=chunk_number, layer=layer.number, tag=tag) for tag in self._list_tags(layer, names)]
        actions = dict(OffloadPlan.from_fraction(sites, self.activation_offload_fraction).actions)
        for site in units:
            is_offloaded = actions.get(site, Action.KEEP).offloads
            actions[site] = Action.RECOMPUTE_AND_OFFLOAD if is_offloaded else Action.RECOMPUTE
        return {site: action for site, action in actions.items() if action is not Action.KEEP}

    def _list_units(self, layer: NumberedLayer, place: int) -> Iterator[str]:
        """Yield the units that run again in a layer, the `place`-th of its chunk."""
        if isinstance(self.recompute, FullRecompute):
            is_in_block = self.recompute.method is FullMethod.UNIFORM or place < self.recompute.layers
            if is_in_block and layer.model.find_unit(LAYER) is not None:
                yield LAYER
        elif self.recompute is not None:
            chosen = [unit for unit in RECOMPUTE_UNITS if unit.recompute_module in self.recompute.modules]
            covered = {name for unit in chosen for name in unit.covers if name != unit.name}
            yield from (unit.name for unit in chosen if layer.model.find_unit(unit.name) and unit.name not in covered)

    def _list_tags(self, layer: NumberedLayer, units: Sequence[str]) -> Iterator[str]:
        """Yield the selected tags that have a site in a layer where `units` run again, in the order of forward."""
        covered = {name for unit in RECOMPUTE_UNITS if unit.name in units for name in unit.covers}
        for tag in default_tags().names:
            is_saved = any(tag in tensor.tags for tensor in layer.model.tensors)
            if tag in self.offload_modules and is_saved and tag not in covered and (tag != LAYER_INPUT or LAYER in units):
                yield tag


_RECOMPUTE_ALL = MegatronFlags(recompute=FullRecompute(method=FullMethod.UNIFORM))


def baselines(ranks: Sequence[RankModel]) -> dict[str, OffloadPlan]:
    """Return the plans that people compare with, by name.

    - `nothing`: all is kept.
    - `full recompute`: every layer runs again.
    - `selective recompute`: `choose_usual_modules`.
    - `offload everything`: whatever a tag saves, and nothing runs again.
    """
    everything = tuple(tag for tag in default_tags().names if tag != LAYER_INPUT)
    settings = {
        "nothing": MegatronFlags(),
        "full recompute": _RECOMPUTE_ALL,
        "selective recompute": MegatronFlags(recompute=SelectiveRecompute(modules=choose_usual_modules(ranks))),
        "offload everything": MegatronFlags(offload_modules=everything),
    }
    return {name: flags.make_plan(ranks) for name, flags in settings.items()}


def choose_usual_modules(ranks: Sequence[RankModel]) -> tuple[str, ...]:
    """Return the modules that selective recompute usually runs again.

    With experts: their activation, the norms, and the up-projections of latent attention where it is. Those are cheap for what
    they save. Without: `core_attn`, Megatron's default, though with flash attention its recompute spares little.
    """
    units = {unit.name for rank in ranks for chunk in rank.chunks for layer in chunk.layers for unit in layer.model.units}
    if "moe_act" not in units:
        return ("core_attn",)
    return ("layernorm", "mla_up_proj", "moe_act") if "mla_up_proj" in units else ("layernorm", "moe_act")


_MOST_SIMULATIONS = 40
"""Of single ranks, before no other recompute is looked at with tags."""

_MOST_CHECKS = 6
"""Simulations of all ranks: each that shows a rank above the budget lowers the budget for the next."""

_MOST_BLOCKS = 8
"""Numbers of layers of `--recompute-method block` that are tried."""


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NearestFlags:
    """Flags that keep to a budget, and what they come to."""

    flags: MegatronFlags
    """The flags."""
    result: StepResult
    """What the simulator says of them."""


def find_nearest(ranks: Sequence[RankModel], *, budget_bytes: int, host_budget_bytes: int | None = None) -> NearestFlags | None:
    """Return what `find_nearest_flags` does, and what it comes to.

    They are looked for on the fullest ranks, and checked on all. First what recompute alone comes to; then, beside what does
    not fit, the tags that Megatron knows too: one after the other until it does, and all of them, less those that it fits
    without.

    Args:
        ranks: The pipeline, by number.
        budget_bytes: Device bytes of each rank.
        host_budget_bytes: Host bytes of each rank. None leaves what the ranks say.
    """
    if host_budget_bytes is not None:
        ranks = [dataclasses.replace(rank, host_budget_bytes=host_budget_bytes) for rank in ranks]
    search = _FlagSearch(_pick_fullest(ranks), budget_bytes)
    short = shorten_together(ranks)
    for _ in range(_MOST_CHECKS):
        search.try_all()
        flags = search.find_best()
        if flags is None:
            return None
        plan = flags.make_plan(ranks)
        result = simulate(flags.adapt(short), plan)
        if result.peak_bytes <= budget_bytes:
            result = simulate(flags.adapt(ranks), plan)
        if result.peak_bytes <= budget_bytes:
            return NearestFlags(flags=flags, result=result)
        worst = result.worst_rank
        search.exclude(flags, ranks[worst.rank], worst.peak_bytes)
    return None


class _FlagSearch:
    """The search for flags on the fullest ranks."""

    def __init__(self, ranks: Sequence[RankModel], budget_bytes: int) -> None:
        self._ranks = list(ranks)
        self._budget_bytes = self._whole_budget_bytes = budget_bytes
        self._results: dict[tuple[int, MegatronFlags], tuple[int, float]] = {}

    def try_all(self) -> None:
        """Simulate whatever flags may be best."""
        starts = [MegatronFlags(recompute=one) for one in self._list_recomputes()]
        most = len(self._results) + _MOST_SIMULATIONS
        self._simulate_all(starts)
        # Copies take time or none: what is slower by itself than something that fits is slower with tags too.
        for flags in sorted(starts, key=self._get_step_s):
            best = self.find_best()
            if best is not None and self._get_step_s(best) <= self._get_step_s(flags):
                return
            if len(self._results) >= most:
                return
            everything = self._add_tags(flags, self._list_tags(flags))
            if self.score(flags)[0] and not self.score(everything)[0]:
                self._drop_tags(everything)
                self._add_one_by_one(flags)

    def find_best(self) -> MegatronFlags | None:
        """Return the best flags that were simulated and keep to the budget, or None."""
        best = min(dict.fromkeys(flags for _, flags in self._results), key=self.score, default=None)
        return None if best is None or self.score(best)[0] else best

    def exclude(self, flags: MegatronFlags, rank: RankModel, peak_bytes: int) -> None:
        """Take note that `rank` has a peak of `peak_bytes` with `flags`, beside its neighbours: too much.

        It is looked at from now on. Where it takes more than alone, settings have to leave so much room.
        """
        if all(one.rank != rank.rank for one in self._ranks):
            self._ranks.append(shorten(rank))
        more_bytes = peak_bytes - max(self._simulate(one, flags)[0] for one in self._ranks)
        self._budget_bytes = min(self._budget_bytes, self._whole_budget_bytes - more_bytes)

    def score(self, flags: MegatronFlags) -> tuple[float, ...]:
        """Return what better flags have less of: bytes above the budget, time, words."""
        above_bytes, step_s = 0, 0.0
        for rank in self._ranks:
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
        """Simulate the rank that each score begins with, side by side."""
        rank = self._ranks[0]
        missing = [flags for flags in dict.fromkeys(settings) if (rank.rank, flags) not in self._results]
        found = map_in_processes(functools.partial(_simulate_rank, rank), missing)
        self._results |= {(rank.rank, flags): result for flags, result in zip(missing, found, strict=True)}

    def _get_step_s(self, flags: MegatronFlags) -> float:
        return self.score(flags)[1]

    def _drop_tags(self, flags: MegatronFlags) -> None:
        """Score `flags`, which fit, without the tags that they fit without, those first that cost most."""
        fewer = [_drop_tag(flags, tag) for tag in flags.offload_modules]
        self._simulate_all(fewer)
        for one in sorted(fewer, key=self._get_step_s):
            others = tuple(tag for tag in flags.offload_modules if tag in one.offload_modules)
            shorter = dataclasses.replace(flags, offload_modules=others)
            if self.score(shorter) < self.score(flags):
                flags = shorter

    def _add_one_by_one(self, flags: MegatronFlags) -> None:
        """Score `flags` with the tags that it needs to fit, those first that free most for their time."""
        free_bytes, free_s = self._simulate(self._ranks[0], flags)
        longer = [self._add_tags(flags, [tag]) for tag in self._list_tags(flags)]
        self._simulate_all(longer)

        def get_rate(one: MegatronFlags) -> float:
            peak_bytes, step_s = self._simulate(self._ranks[0], one)
            return (step_s - free_s) / max(free_bytes - peak_bytes, 1)

        for one in sorted(longer, key=get_rate):
            flags = self._add_tags(flags, one.offload_modules)
            if not self.score(flags)[0]:
                self._drop_tags(flags)
                return

    def _list_recomputes(self) -> list[SelectiveRecompute | FullRecompute | None]:
        layers = [layer.model for chunk in self._list_chunks() for layer in chunk.layers]
        units = {unit.name for layer in layers for unit in layer.units}
        modules = dict.fromkeys(
            unit.recompute_module for unit in RECOMPUTE_UNITS if unit.name in units and unit.recompute_module
        )
        chain = sorted(modules, key=lambda module: self.score(_recompute_only(module))[1])
        selective = [SelectiveRecompute(modules=tuple(chain[:count])) for count in range(1, len(chain) + 1)]
        selective += [SelectiveRecompute(modules=(module,)) for module in chain]
        most_layers = max((len(chunk.layers) for chunk in self._list_chunks()), default=0)
        blocks = [FullRecompute(method=FullMethod.BLOCK, layers=count) for count in _pick_counts(most_layers)]
        full = [FullRecompute(method=FullMethod.UNIFORM), *blocks] if LAYER in units else []
        usual = SelectiveRecompute(modules=choose_usual_modules(self._ranks))
        return list(dict.fromkeys([None, usual, *selective, *full]))

    def _list_chunks(self) -> list[ChunkModel]:
        return [chunk for rank in self._ranks for chunk in rank.chunks]

    def _list_tags(self, flags: MegatronFlags) -> list[str]:
        """Return the tags that `flags` may have beside their own, that Megatron knows, and that save anything here."""
        least_numel = min(rank.min_offloaded_numel for rank in self._ranks)
        saving = {
            tag
            for chunk in self._list_chunks()
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

    @staticmethod
    def _add_tags(flags: MegatronFlags, tags: Iterable[str]) -> MegatronFlags:
        """Return `flags` with `tags`, and with those that need them: they save the same storage, which both have to let go."""
        names = {*flags.offload_modules, *tags}
        names |= {tag.name for tag in default_tags() if tag.is_in_megatron and set(tag.requires) & names}
        return dataclasses.replace(flags, offload_modules=tuple(name for name in default_tags().names if name in names))


def _simulate_rank(rank: RankModel, flags: MegatronFlags) -> tuple[int, float]:
    """Return peak and step of a rank, alone."""
    result = simulate_rank(flags.adapt([rank])[0], flags.make_plan([rank]))
    return result.peak_bytes, result.step_s


def _pick_fullest(ranks: Sequence[RankModel]) -> list[RankModel]:
    """Return the rank with the highest peak where all is kept, and where layers run again, if that is another; shortened."""
    plans = [flags.make_plan(ranks) for flags in (MegatronFlags(), _RECOMPUTE_ALL)]
    results = [max(simulate(ranks, plan).ranks, key=lambda result: result.peak_bytes) for plan in plans]
    return [shorten(ranks[place]) for place in dict.fromkeys(result.rank for result in results)]


def _drop_tag(flags: MegatronFlags, tag: str) -> MegatronFlags:
    """Return `flags` without `tag`, and without those that need it."""
    gone = {tag, *(other.name for other in default_tags() if tag in other.requires)}
    return dataclasses.replace(flags, offload_modules=tuple(name for name in flags.offload_modules if name not in gone))


def _recompute_only(module: str) -> MegatronFlags:
    return MegatronFlags(recompute=SelectiveRecompute(modules=(module,)))


def _pick_counts(most: int) -> list[int]:
    """Return numbers from 1 to below `most`, all or evenly spread."""
    count = min(_MOST_BLOCKS, most - 1)
    return sorted({round((place + 1) * (most - 1) / count) for place in range(count)}) if count > 0 else []
