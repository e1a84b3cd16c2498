"""Megatron's own settings of recompute and offload, and the plan that each comes to.

Flags choose for all layers alike, and a fraction for all sites of a chunk: they can say a small part of what a plan can.
`baselines` has the settings that people compare with, and `find_nearest_flags` looks for the best within a budget.

    >>> flags = MegatronFlags(offload_modules=("expert_fc1",), recompute=SelectiveRecompute(modules=("layernorm", "moe_act")))
    >>> " ".join(flags.list_arguments())[:71]
    '--fine-grained-activation-offloading --offload-modules expert_fc1 --rec'
"""

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence

from fgoffload.errors import ConfigError
from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.planner.ranks.rank_model import ChunkModel, NumberedLayer, RankModel
from fgoffload.planner.simulation.simulator import simulate, simulate_rank
from fgoffload.planner.solving.moments import shorten
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
        "full recompute": MegatronFlags(recompute=FullRecompute(method=FullMethod.UNIFORM)),
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


_MOST_STARTS = 3
"""Settings of recompute beside which tags are looked for, and results of which fractions are."""

_MOST_CHECKS = 6
"""Simulations of all ranks: each that shows a rank above the budget lowers the budget for the next."""

_FRACTIONS = (0.2, 0.4, 0.6, 0.8)
"""`--activation-offload-fraction`, beside 1. A few layers of a chunk with some tags each have few more sites than these."""

_MOST_BLOCKS = 8
"""Numbers of layers of `--recompute-method block` that are tried."""


def find_nearest_flags(
    ranks: Sequence[RankModel], *, budget_bytes: int, host_budget_bytes: int | None = None
) -> MegatronFlags | None:
    """Return the fastest flags found that keep to the budget, or None where none were found.

    They are looked for on the ranks that keep most, and checked on all. First what recompute alone comes to; then, beside the
    best of that, the tags that help most, one after the other; then fractions.

    Args:
        ranks: The pipeline, by number.
        budget_bytes: Device bytes of each rank.
        host_budget_bytes: Host bytes of each rank. None leaves what the ranks say.
    """
    if host_budget_bytes is not None:
        ranks = [dataclasses.replace(rank, host_budget_bytes=host_budget_bytes) for rank in ranks]
    search = _FlagSearch(_pick_ranks(ranks), budget_bytes)
    search.try_all()
    for _ in range(_MOST_CHECKS):
        flags = search.find_best()
        if flags is None:
            return None
        peak_bytes = simulate(ranks, flags.make_plan(ranks)).peak_bytes
        if peak_bytes <= budget_bytes:
            return flags
        search.exclude(flags, peak_bytes)
    return None


class _FlagSearch:
    """The search for flags on a few ranks."""

    def __init__(self, ranks: Sequence[RankModel], budget_bytes: int) -> None:
        self._ranks = ranks
        self._budget_bytes = self._whole_budget_bytes = budget_bytes
        self._results: dict[MegatronFlags, tuple[int, float]] = {}

    def try_all(self) -> None:
        """Simulate whatever flags may be best."""
        recomputes = sorted((MegatronFlags(recompute=one) for one in self._list_recomputes()), key=self.score)
        full = [flags for flags in recomputes if isinstance(flags.recompute, FullRecompute)]
        selective = [flags for flags in recomputes if flags not in full]
        for start in (*full[: _MOST_STARTS // 2], *selective[:_MOST_STARTS]):
            self._add_tags(start)
        for flags in sorted(self._results, key=self.score)[:_MOST_STARTS]:
            for fraction in _FRACTIONS if flags.offload_modules else ():
                self.score(dataclasses.replace(flags, activation_offload_fraction=fraction))

    def find_best(self) -> MegatronFlags | None:
        """Return the best flags that were simulated and keep to the budget, or None."""
        best = min(self._results, key=self.score, default=None)
        return None if best is None or self.score(best)[0] else best

    def exclude(self, flags: MegatronFlags, peak_bytes: int) -> None:
        """Leave out `flags`, with which another rank has a peak of `peak_bytes`, and what that rank has no room for either."""
        more_bytes = peak_bytes - self._results.pop(flags)[0]
        self._budget_bytes = min(self._budget_bytes, self._whole_budget_bytes - more_bytes)

    def score(self, flags: MegatronFlags) -> tuple[float, ...]:
        """Return what better flags have less of: bytes above the budget, time, words."""
        if flags not in self._results:
            results = [simulate_rank(rank, flags.make_plan([rank])) for rank in self._ranks]
            self._results[flags] = max(one.peak_bytes for one in results), max(one.step_s for one in results)
        peak_bytes, step_s = self._results[flags]
        return (max(peak_bytes - self._budget_bytes, 0), round(step_s, 9), len(flags.list_arguments()))

    def _add_tags(self, flags: MegatronFlags) -> None:
        """Score `flags` with the tag added that helps most, and so on until none does."""
        while True:
            longer = [_add_tag(flags, tag) for tag in self._list_tags(flags)]
            best = min(longer, key=self.score, default=flags)
            if self.score(best) >= self.score(flags):
                return
            flags = best

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
        """Return the tags that `flags` may have beside their own, and that save anything on the rank."""
        least_bytes = min(rank.min_offloaded_bytes for rank in self._ranks)
        saving = {
            tag
            for chunk in self._list_chunks()
            for layer in chunk.layers
            for tensor in layer.model.tensors
            if tensor.size_bytes >= least_bytes
            for tag in tensor.tags
        }
        modules = flags.recompute.modules if isinstance(flags.recompute, SelectiveRecompute) else ()
        found = []
        for tag in default_tags():
            is_free = tag.name in saving and tag.name not in flags.offload_modules and not set(tag.excluded_by) & set(modules)
            needs_full = tag.name == LAYER_INPUT and not isinstance(flags.recompute, FullRecompute)
            if is_free and not needs_full and not tag.requires:
                found.append(tag.name)
        return found


def _pick_ranks(ranks: Sequence[RankModel]) -> list[RankModel]:
    """Return, of the ranks that have the same kinds of layers, the one with the highest peak where all is kept, shortened."""
    found: dict[frozenset[str], tuple[int, RankModel]] = {}
    for rank, result in zip(ranks, simulate(ranks, OffloadPlan(actions={})).ranks, strict=True):
        kinds = frozenset(layer.model.kind for chunk in rank.chunks for layer in chunk.layers)
        if kinds not in found or result.peak_bytes > found[kinds][0]:
            found[kinds] = (result.peak_bytes, rank)
    return [shorten(rank) for _, rank in found.values()]


def _add_tag(flags: MegatronFlags, tag: str) -> MegatronFlags:
    """Return `flags` with `tag`, and with the tags that need it: they save the same storage, which both have to let go."""
    names = {*flags.offload_modules, tag, *(other.name for other in default_tags() if tag in other.requires)}
    return dataclasses.replace(flags, offload_modules=tuple(name for name in default_tags().names if name in names))


def _recompute_only(module: str) -> MegatronFlags:
    return MegatronFlags(recompute=SelectiveRecompute(modules=(module,)))


def _pick_counts(most: int) -> list[int]:
    """Return numbers from 1 to below `most`, all or evenly spread."""
    count = min(_MOST_BLOCKS, most - 1)
    return sorted({round((place + 1) * (most - 1) / count) for place in range(count)}) if count > 0 else []
