"""Megatron's own flags for recompute and offload, and the plans equivalent to them.

Flags apply to all layers, and the offload fraction applies to all sites of a chunk, so flags can express only a few plans.
`list_baselines` returns common settings to compare plans with. `nearest_flags.py` searches for the best flags within a budget.

    >>> flags = MegatronFlags(offload_modules=("expert_fc1",), recompute=SelectiveRecompute(modules=("layernorm", "moe_act")))
    >>> " ".join(flags.list_arguments())[:71]
    '--fine-grained-activation-offloading --offload-modules expert_fc1 --rec'
"""

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence

from fgoffload.errors import ConfigError
from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.planner.ranks.output_copies import copy_outputs
from fgoffload.planner.ranks.rank_model import ChunkModel, NumberedLayer, RankModel, Turn
from fgoffload.tags import RECOMPUTE_MODULES, RECOMPUTE_UNITS, default_tags

LAYER = "layer"
LAYER_INPUT = "layer_input"
"""The unit of full recompute, and the only tag whose tensors a fully recomputed layer saves."""


class FullMethod(enum.Enum):
    """Values of `--recompute-method`, which selects the layers to recompute."""

    UNIFORM = "uniform"  # every layer separately: --recompute-num-layers 1
    BLOCK = "block"  # the first --recompute-num-layers layers of each model chunk


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveRecompute:
    """`--recompute-granularity selective`: modules that are recomputed in every layer that has them."""

    modules: tuple[str, ...]  # `--recompute-modules`

    def __post_init__(self) -> None:
        for module in self.modules:
            if module not in RECOMPUTE_MODULES:
                known = " ".join(sorted(RECOMPUTE_MODULES))
                raise ConfigError(f"--recompute-modules {module!r} is not supported. Choose from: {known}.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FullRecompute:
    """`--recompute-granularity full`: whole layers are recomputed."""

    method: FullMethod  # `--recompute-method`
    layers: int = 1  # `--recompute-num-layers`: layers of each chunk with `block`, always 1 with `uniform`


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFlags:
    """A combination of Megatron's flags for recompute and offload."""

    offload_modules: tuple[str, ...] = ()  # `--offload-modules`
    activation_offload_fraction: float = 1.0
    """`--activation-offload-fraction`: fraction of each chunk's sites to offload, starting with the first."""
    recompute: SelectiveRecompute | FullRecompute | None = None
    """`--recompute-granularity` and the flags that go with it; None for no recompute."""

    def list_arguments(self) -> tuple[str, ...]:
        """Return the command-line arguments."""
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
        """Return the plan that is equivalent to these flags on `ranks`.

        Tags and modules that a layer lacks have no effect there, and neither do tags covered by a recomputed module.
        """
        actions: dict[Site, Action] = {}
        for rank in ranks:
            for number, chunk in enumerate(rank.chunks):
                actions.update(self._list_chunk(number, chunk))
        return OffloadPlan(actions=actions)

    def adapt(self, ranks: Sequence[RankModel]) -> tuple[RankModel, ...]:
        """Return `ranks` adapted to a run with these flags. A run without offload does not use this package."""
        has_engine = bool(self.offload_modules)
        if isinstance(self.recompute, SelectiveRecompute):
            ranks = [copy_outputs(rank) for rank in ranks]
        return tuple(dataclasses.replace(rank, has_engine=has_engine, turn=Turn.CANCEL) for rank in ranks)

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
        if isinstance(self.recompute, FullRecompute):
            is_in_block = self.recompute.method is FullMethod.UNIFORM or place < self.recompute.layers
            if is_in_block and layer.model.find_unit(LAYER) is not None:
                yield LAYER
        elif self.recompute is not None:
            chosen = [unit for unit in RECOMPUTE_UNITS if unit.recompute_module in self.recompute.modules]
            covered = {name for unit in chosen for name in unit.covers if name != unit.name}
            yield from (unit.name for unit in chosen if layer.model.find_unit(unit.name) and unit.name not in covered)

    def _list_tags(self, layer: NumberedLayer, units: Sequence[str]) -> Iterator[str]:
        covered = {name for unit in RECOMPUTE_UNITS if unit.name in units for name in unit.covers}
        saved = layer.model.offloadable_tags
        for tag in default_tags().names:
            if tag in self.offload_modules and tag in saved and tag not in covered and (tag != LAYER_INPUT or LAYER in units):
                yield tag


FULL_RECOMPUTE = MegatronFlags(recompute=FullRecompute(method=FullMethod.UNIFORM))

MEGATRON_BASELINES = ("full recompute", "selective recompute")  # baselines that run without this package

_ALL_TAGS = tuple(tag for tag in default_tags().names if tag != LAYER_INPUT)
_ATTENTION = ("core_attn",)


def list_baselines(ranks: Sequence[RankModel]) -> dict[str, MegatronFlags]:
    """Return common settings to compare plans with, keyed by name.

    - `baseline`: all saved tensors stay on the GPU.
    - `full recompute`: every layer is recomputed.
    - `selective recompute`: the modules of `choose_usual_modules` are recomputed.
    - `offload everything`: all tags are offloaded, without recompute.
    """
    return {
        "baseline": MegatronFlags(),
        "full recompute": FULL_RECOMPUTE,
        "selective recompute": MegatronFlags(recompute=SelectiveRecompute(modules=choose_usual_modules(ranks))),
        "offload everything": MegatronFlags(offload_modules=_ALL_TAGS),
    }


def list_offloading_flags(ranks: Sequence[RankModel]) -> list[MegatronFlags]:
    """Return flags that offload everything and recompute one or all of the modules from `choose_usual_modules`.

    The list is empty if the only such module is attention, which is not cheap to recompute.
    """
    usual = choose_usual_modules(ranks)
    cheap = usual if usual != _ATTENTION else ()
    sets = dict.fromkeys((cheap, *((name,) for name in cheap)))
    return [MegatronFlags(offload_modules=_ALL_TAGS, recompute=SelectiveRecompute(modules=one)) for one in sets if one]


def choose_usual_modules(ranks: Sequence[RankModel]) -> tuple[str, ...]:
    """Return the modules that users commonly pass to selective recompute, if a layer can recompute them.

    MoE models: expert activations, norms and up-projections of latent attention, which are cheap to recompute per byte saved.
    Other models: `core_attn`, Megatron's default, though recomputing it saves little memory with flash attention.
    """
    units = {unit.name for rank in ranks for chunk in rank.chunks for layer in chunk.layers for unit in layer.model.units}
    usual = ("layernorm", "mla_up_proj", "moe_act") if "moe_act" in units else _ATTENTION
    found = {unit.recompute_module for unit in RECOMPUTE_UNITS if unit.name in units}
    return tuple(module for module in usual if module in found)
