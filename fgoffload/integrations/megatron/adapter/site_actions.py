"""Chooses which tags may be offloaded, the action for each site of a rank, and which ops of each layer to watch."""

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fgoffload.config import OffloadConfig
from fgoffload.engine import Group
from fgoffload.errors import PlanError
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.tags import RECOMPUTE_UNITS, find_recompute_unit, list_read_tags
from fgoffload.units import format_bytes
from fgoffload.watched import Watched, find_watched

logger = logging.getLogger(__name__)

_NEVER_AUTO = ("fused_group_mlp", "gdp_qkv")
"""Tags that `auto` excludes, because their modules are tested only with Megatron-Core's development branch."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSites:
    """Sites and recompute units of one layer."""

    number: int
    """Number of the layer in the whole model, from 0."""
    tags: tuple[str, ...]
    """Selected tags that have a site in the layer, in forward order."""
    fused: tuple[str, ...]
    """Selected tags whose module is fused into another module."""
    units: tuple[str, ...]
    """Names of the units that can be recomputed. See `fgoffload.tags.RECOMPUTE_UNITS`."""
    shares_router_input: bool
    """Whether another module also saves the router's input."""


class SiteActions:
    """Actions for this rank's sites, from `plan` if there is one. Otherwise, a `fraction` of each chunk's sites is offloaded.

    `selected` are the tags whose tensors may be offloaded.
    """

    def __init__(self, plan: OffloadPlan | None, *, fraction: float, selected: Sequence[str]) -> None:
        self.plan = plan
        self.layers: dict[tuple[int, int], bool] = {}
        """For each registered layer, keyed by chunk and number: whether another module also saves the router's input."""
        self.fused_tags: set[str] = set()
        """Tags whose module is fused into another module, in at least one layer."""
        self._fraction = fraction
        self._selected = selected
        self.by_site: dict[Site, Action] = {}
        self._watched: dict[tuple[int, int], Watched] = {}
        """Cache of `find_watched`, by chunk and number of a layer."""
        self._offloaded: dict[tuple[int, int, str], Site | None] = {}
        """Cache of `find_offloaded`, by chunk, layer number and tag. Every call site does a lookup in forward. The keys
        are tuples, because creating and hashing a `Site` takes several times as long as a tuple."""

    @property
    def recomputes(self) -> bool:
        """Return whether the plan recomputes any unit."""
        return self.plan is not None and any(action.recomputes for action in self.plan.actions.values())

    def register_layers(self, chunk: int, layers: Sequence[LayerSites]) -> None:
        """Register the layers of a chunk, and choose an action for each site. Raise a PlanError for an unsupported action."""
        planned = [{} if self.plan is None else self.plan.list_layer(chunk, layer.number) for layer in layers]
        for layer, actions in zip(layers, planned, strict=True):
            _check_layer(layer, actions)
        sites = []
        for layer, actions in zip(layers, planned, strict=True):
            self.layers[chunk, layer.number] = layer.shares_router_input
            tags = layer.tags
            if actions.get("layer", Action.KEEP).recomputes and "layer_input" in self._selected:
                tags = ("layer_input", *tags)
            sites += [Site(chunk=chunk, layer=layer.number, tag=tag) for tag in tags]
            units = [name for name, action in actions.items() if action.recomputes and name not in tags]
            self.by_site.update({Site(chunk=chunk, layer=layer.number, tag=name): actions[name] for name in units})
            self.fused_tags.update(layer.fused)
        if self.plan is not None:
            self.set((site, self.plan.get_action(site)) for site in sites)
        else:
            self.set(OffloadPlan.from_fraction(sites, self._fraction).actions.items())
        offloaded = sum(self.by_site[site].offloads for site in sites)
        logger.info("chunk %d: %d of %d sites are offloaded", chunk, offloaded, len(sites))

    def use_plan(self, plan: OffloadPlan) -> None:
        """Apply `plan` from the next microbatch on. The caller must turn on recompute for the plan's units."""
        self.plan = plan
        sites = [site for site in self.by_site if site.tag in self._selected and site.tag != "layer_input"]
        self.by_site = dict.fromkeys(sites, Action.KEEP)
        self.set((site, action) for site, action in plan.actions.items() if (site.chunk, site.layer) in self.layers)

    def set(self, actions: Iterable[tuple[Site, Action]]) -> None:
        """Set the actions of the given sites."""
        self.by_site.update(actions)
        self._watched.clear()
        self._offloaded.clear()

    def find_offloaded(self, chunk: int, layer: int, tag: str) -> Site | None:
        """Return the site of `tag` in a layer if it is offloaded, or None if its tensors stay on the GPU.

        An unregistered site, such as a user's own site or one in a layer outside the blocks, is registered first.
        """
        key = (chunk, layer, tag)
        if key not in self._offloaded:
            site = Site(chunk=chunk, layer=layer, tag=tag)
            if site not in self.by_site:
                default = Action.OFFLOAD if self._fraction > 0 else Action.KEEP
                self.set([(site, default if self.plan is None else self.plan.get_action(site))])
            self._offloaded[key] = site if self.by_site[site].offloads else None
        return self._offloaded[key]

    def find_watched(self, chunk: int, layer: int) -> Watched:
        """Return which ops of a layer to watch: all ops if the layer is not registered."""
        key = (chunk, layer)
        if key not in self.layers:
            return Watched.LAYER
        if key not in self._watched:
            is_shared = self.layers[key] or "router" in list_read_tags(self.list_recomputed(chunk, layer))
            self._watched[key] = find_watched(self.list_offloaded(chunk, layer), shares_router_input=is_shared)
        return self._watched[key]

    def list_offloaded(self, chunk: int, layer: int) -> tuple[str, ...]:
        """Return the offloaded tags of a registered layer."""
        return tuple(site.tag for site in self._list_layer(chunk, layer) if self.by_site[site].offloads)

    def list_recomputed(self, chunk: int, layer: int) -> tuple[str, ...]:
        """Return the recomputed units of a registered layer."""
        return tuple(site.tag for site in self._list_layer(chunk, layer) if self.by_site[site].recomputes)

    def list_tags(self, chunk: int, layer: int) -> tuple[str, ...]:
        """Return all tags and units of a registered layer that have an action."""
        return tuple(site.tag for site in self._list_layer(chunk, layer))

    def _list_layer(self, chunk: int, layer: int) -> Iterator[Site]:
        return (site for site in self.by_site if site.chunk == chunk and site.layer == layer)


def _check_layer(layer: LayerSites, planned: Mapping[str, Action]) -> None:
    for name, action in planned.items():
        if not action.recomputes:
            continue
        unit = find_recompute_unit(name)
        if unit is None or name not in layer.units:
            possible = ", ".join(unit.name for unit in RECOMPUTE_UNITS if unit.name in layer.units)
            raise PlanError(
                f"The plan recomputes layers.{layer.number}.{name}, but this layer's implementation, quantization or "
                f"parallel sizes do not allow that. The layer can recompute: {possible}. Choose one of these units, "
                f"or remove {name} from the plan."
            )
        for tag in unit.covers:
            if planned.get(tag, Action.KEEP).offloads:
                raise PlanError(
                    f"The plan recomputes layers.{layer.number}.{name} and offloads layers.{layer.number}.{tag}, but the "
                    f"recompute already drops the tensors of {tag}. Remove one of the two actions from the plan."
                )
        for other in (*unit.covers, *unit.excludes):
            if other != name and planned.get(other, Action.KEEP).recomputes:
                raise PlanError(
                    f"The plan recomputes layers.{layer.number}.{name} and layers.{layer.number}.{other}, which overlap. "
                    "Remove one of them from the plan."
                )


class RankBalance:
    """Makes each pipeline rank offload `--delta-offload-bytes-across-pp-ranks` fewer bytes per step than the previous rank.

    With 1F1B, earlier ranks have more microbatches in flight, so they need more memory. The first step offloads every site and
    counts its bytes. From the second step on, each rank keeps enough of its last sites on the GPU to make up the difference.
    The kept sites are the same in all microbatches. Megatron's own engine keeps the first layers of the first microbatches
    instead; see docs/reference/megatron_engine.md.
    """

    def __init__(self, actions: SiteActions, *, delta_bytes: int) -> None:
        self._actions = actions
        self._delta_bytes = delta_bytes
        self._groups: list[tuple[Site, Group]] = []
        """Sites and groups of the first step. Their offloaded bytes are counted at the end of the step."""
        self._site_bytes: dict[Site, float] = {}
        """Offloaded bytes of each site per microbatch in the first step, in forward order."""
        self._microbatches = 0
        """Number of microbatches per step when the kept sites were last chosen; 0 during the first step."""

    def record(self, site: Site, group: Group) -> None:
        """Record the group that holds the saves of one forward of `site`."""
        if self._delta_bytes and not self._microbatches:
            self._groups.append((site, group))

    def finish_step(self, microbatches: int) -> None:
        """Choose the sites that stay on the GPU after this step, which had `microbatches` microbatches."""
        if not self._delta_bytes:
            return
        for site, group in self._groups:
            self._site_bytes[site] = self._site_bytes.get(site, 0) + group.moved_bytes / microbatches
        self._groups.clear()
        if microbatches == self._microbatches:
            return
        self._microbatches = microbatches
        rank = int(load_module("megatron.core.parallel_state").get_pipeline_model_parallel_rank())
        moved_bytes = {site: round(size * microbatches) for site, size in self._site_bytes.items()}
        kept, less_bytes = [], rank * self._delta_bytes
        for site in reversed(tuple(moved_bytes)):
            if less_bytes <= 0:
                break
            # Also keep sites that offloaded nothing: they would offload storages that they share with an earlier kept site.
            kept.append(site)
            less_bytes -= moved_bytes[site]
        self._actions.set((dict.fromkeys(moved_bytes, Action.OFFLOAD) | dict.fromkeys(kept, Action.KEEP)).items())
        logger.info(
            "pipeline rank %d offloads %s less per step: %d of %d sites stay on the GPU",
            rank,
            format_bytes(sum(moved_bytes[site] for site in kept)),
            len(kept),
            len(moved_bytes),
        )


def list_selected_tags(config: OffloadConfig, plan: OffloadPlan | None) -> tuple[str, ...]:
    """Return the tags whose tensors may be offloaded: the plan's tags, or the config's tags if there is no plan.

    A plan overrides the config's tags, because a flag file may also serve runs without a plan. `auto` selects all tested tags.
    """
    if plan is None and config.is_auto:
        return tuple(tag.name for tag in config.tags if tag.name not in _NEVER_AUTO)
    if plan is None:
        return config.offload_modules
    planned = plan.offloaded_tags
    config.tags.check(planned, flag="--offload-plan")
    return planned
