"""The link between a Megatron-Core training and an engine: where forward is, what the plan says, and what a step did."""

import contextlib
import dataclasses
import enum
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from fgoffload.config import OffloadConfig
from fgoffload.engine import Group, Lane, OffloadEngine, Region, StepStats, is_inert
from fgoffload.errors import PlanError
from fgoffload.integrations.megatron.balance import choose_kept
from fgoffload.integrations.megatron.first_step import check_alike, check_plan, check_tags
from fgoffload.integrations.megatron.imports import load_module
from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.tags import RECOMPUTE_UNITS, find_recompute_unit
from fgoffload.units import format_bytes

if TYPE_CHECKING:
    from fgoffload.integrations.megatron.profiling import StepMeasurement
    from fgoffload.integrations.megatron.schedule_call import ScheduleCall

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSites:
    """What one layer of a model has."""

    number: int
    """In the whole model, from 0."""
    tags: tuple[str, ...]
    """The selected tags that have a site there, in the order of forward."""
    fused: tuple[str, ...] = ()
    """The selected tags whose module is fused into another."""
    units: tuple[str, ...] = ()
    """What can run again by itself, by the names of `fgoffload.tags.RECOMPUTE_UNITS`."""


class Watched(enum.Enum):
    """Which ops of a layer are watched, for what they save of storages that leave: see `OffloadEngine.watch`.

    Each tensor that autograd saves inside costs the host a few microseconds both ways, and a layer with experts saves over a
    hundred: a view of the tokens and a weight for each expert.
    """

    LAYER = "all of it"
    ATTENTION = "attention alone"
    NOTHING = "nothing"  # nobody but the sites themselves saves what leaves


_ALONE = frozenset({"mlp_norm", "expert_fc1", "moe_act", "expert_fc2", "moe_combine", "fused_group_mlp"})
"""Tags whose storages no op outside of their sites saves: the residual, the experts' tokens and what they compute."""

_IN_ATTENTION = frozenset({"attn_norm", "qkv_linear", "core_attn", "attn_proj"})
"""Tags whose storages ops of attention save too: the rotary embedding, for one, looks at query, key and value as one."""


class MegatronOffload:
    """Fine-grained activation offload, applied to the Megatron-Core of this process.

    Made by `fgoffload.integrations.megatron.apply`. It holds the engine; nothing else in the process does.

    Args:
        config: What users chose.
        engine: Moves the tensors.
        undo: Puts Megatron's own symbols back.
    """

    def __init__(self, config: OffloadConfig, engine: OffloadEngine, *, undo: Callable[[], None]) -> None:
        self.config = config
        self.engine = engine
        self.last_step: StepStats | None = None
        """The numbers of the last whole step on this rank; None before the first."""
        self.measurement: StepMeasurement | None = None
        """Measures steps, in which nothing leaves; None where nothing is to be measured."""
        self._undo = undo
        self._plan = None if config.offload_plan is None else OffloadPlan.load(config.offload_plan)
        self.selected = tuple(dict.fromkeys((*_list_named_tags(config), *_list_offloaded_tags(self._plan))))
        """The tags whose tensors may leave: those that users named, and those of the plan."""
        self._actions: dict[Site, Action] = {}
        self._blocks: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._layers: set[tuple[int, int]] = set()
        """The chunk and number of each layer of this rank."""
        self._watched: dict[tuple[int, int], Watched] = {}
        """By chunk and number of a layer, as the actions say."""
        self._fused_tags: set[str] = set()
        self._lane: Lane | None = None
        self._chunk = 0
        self._layer = -1
        self._microbatches_begun: dict[int, int] = {}
        self._open: list[tuple[str, Region]] = []
        self._is_holding = False
        self._call: ScheduleCall | None = None
        """Of the step that a schedule is in."""
        self._ending_block: weakref.ref[torch.nn.Module] | None = None
        """Of the model that forward is in: the block behind which only the loss comes; None where other stages follow."""
        self._is_first_step_over = False
        self._first_groups: list[tuple[Site, Group]] = []
        """Of the first step, where what each site moved has to be known."""
        self._site_bytes: dict[Site, float] = {}
        """What each site moved in a microbatch of the first step, in the order of forward."""
        self._balanced_microbatches = 0
        _check_named_tags(config, self._plan)

    def remove(self) -> None:
        """Put Megatron's own symbols back and give back all memory but what a graph still wants. A second call does no harm."""
        try:
            if self.measurement is not None:
                # First, since what it wrapped is wrapped around what is undone next.
                self.measurement.close()
            self._undo()
        finally:
            self._open.clear()
            self._lane = None
            self.engine.close()

    # Where forward is.

    def begin_microbatch(self, chunk: int) -> None:
        """A forward of model chunk `chunk` begins. Without grad mode it has no microbatch."""
        self._chunk = chunk
        if torch.is_grad_enabled():
            self._begin_lane()

    def _begin_lane(self) -> Lane:
        microbatch = self._microbatches_begun.get(self._chunk, 0)
        self._microbatches_begun[self._chunk] = microbatch + 1
        self._layer = -1
        self._lane = lane = Lane(chunk=self._chunk, microbatch=microbatch)
        self._open.clear()  # regions that nobody ended
        return lane

    def abandon_microbatch(self) -> None:
        """Forward raised: hold nothing of it. A recompute that raises in backward, or stops early, has nothing here."""
        if not is_inert():
            self._lane = None
            self._open.clear()

    def enter_layer(self, layer: int) -> Lane:
        """Forward reaches the layer with number `layer`, from 0 over the whole model."""
        lane = self._lane or self._begin_lane()
        self._layer = layer
        return lane

    @property
    def chunk(self) -> int:
        """The model chunk that forward is in."""
        return self._chunk

    @property
    def last_layer(self) -> int:
        """The layer that forward reached last, from 0 over the whole model; -1 before the first."""
        return self._layer

    def watch_model(self, model: torch.nn.Module, chunk: int) -> contextlib.AbstractContextManager[object]:
        """Return a context for the forward of `model`, which is chunk `chunk`."""
        if self.measurement is None or is_inert():
            return contextlib.nullcontext()
        return self.measurement.watch_model(model, chunk)

    def watch_layer(self, lane: Lane, hidden: torch.Tensor, *, has_parts: bool) -> contextlib.AbstractContextManager[object]:
        """Return a context for the forward of the layer that was entered last.

        Args:
            lane: As `enter_layer` returned it.
            hidden: The input of the layer.
            has_parts: Whether `watch_attention` is called in it, for the part that may have to be watched alone.
        """
        if self.measurement is not None and self.measurement.is_recording:
            recorded = self.measurement.find_layer(lane, self._chunk, self._layer, hidden)
            if recorded is not None:
                return recorded
        # What left of the layers before is let go of here, and not only where the next group ends, perhaps in backward.
        self.engine.poll()
        watched = self._find_watched(self._chunk, self._layer)
        if watched is Watched.LAYER or (watched is Watched.ATTENTION and not has_parts):
            return self.engine.watch(lane)
        self.engine.announce_backward(lane, hidden)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def watch_attention(self) -> Iterator[Callable[[torch.Tensor], None]]:
        """Watch the attention of the layer that forward is in, where that has to be, and yield what to call with its output."""
        lane, watched = self._lane, self._find_watched(self._chunk, self._layer)
        if lane is None or watched is Watched.LAYER or (self.measurement is not None and self.measurement.is_recording):
            yield lambda hidden: None
            return
        with self.engine.watch(lane) if watched is Watched.ATTENTION else contextlib.nullcontext():
            # Behind attention nothing is watched, so that backward says by this mark that it has come to it.
            yield lambda hidden: self.engine.announce_backward(lane, hidden)

    def _find_watched(self, chunk: int, layer: int) -> "Watched":
        """Return what of a layer has to be watched: all, where it has not been registered and nobody knows."""
        # Who observes wants to know of every save where it was.
        if (chunk, layer) not in self._layers or self.engine.observers:
            return Watched.LAYER
        found = self._watched.get((chunk, layer))
        if found is None:
            tags = {site.tag for site in self._list_layer(chunk, layer) if self._actions[site].offloads}
            found = Watched.LAYER if tags - _ALONE - _IN_ATTENTION else Watched.ATTENTION if tags - _ALONE else Watched.NOTHING
            self._watched[chunk, layer] = found
        return found

    def note_ending_block(self, block: torch.nn.Module | None) -> None:
        """Forward is in a model that `block` ends, but for the loss; None where other stages follow."""
        self._ending_block = None if block is None else weakref.ref(block)

    def leave_block(self, block: torch.nn.Module) -> None:
        """Forward has left `block`. Where it ends the model, in one of Megatron's schedules, backward comes next."""
        ends_model = self._ending_block is not None and self._ending_block() is block
        if ends_model and self._call is not None and self._lane is not None:
            self.engine.expect_backward(self._lane)

    def watch(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for a piece of forward outside of any layer's: see `OffloadEngine.watch`."""
        return contextlib.nullcontext() if self._lane is None else self.engine.watch(self._lane)

    def is_known(self, block: torch.nn.Module) -> bool:
        """Return whether the layers of `block` have been registered."""
        return block in self._blocks

    def remember(self, blocks: Iterable[torch.nn.Module]) -> None:
        """Take note that the layers of `blocks` have been registered, and prepared."""
        self._blocks.update(blocks)

    @property
    def recomputes(self) -> bool:
        """Return whether the plan runs anything again."""
        return self._plan is not None and any(action.recomputes for action in self._plan.actions.values())

    def pass_layer(self, layer: int) -> None:
        """Forward has come to the layer with number `layer` in a way that saves nothing of it."""
        self._layer = layer

    def register_layers(self, chunk: int, layers: Sequence[LayerSites]) -> None:
        """Learn what the layers of a model chunk have, and choose an action for each site.

        Args:
            chunk: The virtual pipeline stage.
            layers: All of the chunk, in the order of forward.

        Raises:
            PlanError: The plan asks of a layer what it cannot do.
        """
        planned = {} if self._plan is None else {layer.number: self._plan.list_layer(chunk, layer.number) for layer in layers}
        for layer in layers:
            _check_layer(layer, planned.get(layer.number, {}))
        sites = []
        for layer in layers:
            actions = planned.get(layer.number, {})
            self._layers.add((chunk, layer.number))
            tags = layer.tags
            if actions.get("layer", Action.KEEP).recomputes and "layer_input" in self.selected:
                tags = ("layer_input", *tags)
            sites += [Site(chunk=chunk, layer=layer.number, tag=tag) for tag in tags]
            units = [name for name, action in actions.items() if action.recomputes and name not in tags]
            self._actions.update({Site(chunk=chunk, layer=layer.number, tag=name): actions[name] for name in units})
            self._fused_tags.update(layer.fused)
        if self._plan is not None:
            self._actions.update((site, self._plan.get_action(site)) for site in sites)
        else:
            self._actions.update(OffloadPlan.from_fraction(sites, self.config.activation_offload_fraction).actions)
        self._watched.clear()
        offloaded = sum(self._actions[site].offloads for site in sites)
        logger.info("chunk %d: %d of %d sites are offloaded", chunk, offloaded, len(sites))

    def list_offloaded(self, chunk: int, layer: int) -> tuple[str, ...]:
        """Return the tags of a registered layer whose tensors leave."""
        return tuple(site.tag for site in self._list_layer(chunk, layer) if self._actions[site].offloads)

    def list_sited(self, chunk: int, layer: int) -> tuple[str, ...]:
        """Return the tags of a registered layer that need a site: those whose tensors leave, or may when they are measured."""
        if self.measurement is None:
            return self.list_offloaded(chunk, layer)
        return tuple(site.tag for site in self._list_layer(chunk, layer))

    def list_recomputed(self, chunk: int, layer: int) -> tuple[str, ...]:
        """Return the units of a registered layer that run again in backward."""
        return tuple(site.tag for site in self._list_layer(chunk, layer) if self._actions[site].recomputes)

    def list_sites(self) -> list[Site]:
        """Return the sites of this rank, in order."""
        return sorted(self._actions)

    def _list_layer(self, chunk: int, layer: int) -> Iterator[Site]:
        return (site for site in self._actions if site.chunk == chunk and site.layer == layer)

    # Regions.

    def find_region(self, tag: str) -> Region | None:
        """Return a region for the site of `tag` where forward is now, or None where its tensors stay.

        For sites of your own: the tag must be registered and selected.
        """
        # Inert first: a recompute in backward comes here too, when forward is somewhere else.
        if tag not in self.selected or self._lane is None or is_inert():
            return None
        site = Site(chunk=self._chunk, layer=self._layer, tag=tag)
        if self.measurement is not None and self.measurement.is_recording:
            return self.measurement.find_region(site, self._lane)
        if site not in self._actions:
            self._actions[site] = self._get_action_of_unlisted(site)
            self._watched.clear()
        if not self._actions[site].offloads:
            return None
        region = self.engine.find_region(site, self._lane)
        if region is not None and self.config.delta_offload_bytes_across_pp_ranks and not self._is_first_step_over:
            self._first_groups.append((site, region.group))
        return region

    def _get_action_of_unlisted(self, site: Site) -> Action:
        """Return the action for a site that no block listed: one of the user's own, or of a layer outside of the blocks."""
        if self._plan is not None:
            return self._plan.get_action(site)
        return Action.OFFLOAD if self.config.activation_offload_fraction > 0 else Action.KEEP

    def open_region(self, tag: str) -> Region | None:
        """Return a region as `find_region` does, to be ended by `end_region` with the same tag."""
        region = self.find_region(tag)
        if region is not None:
            self._open.append((tag, region))
        return region

    def end_region(self, tag: str) -> None:
        """End the region of `tag` that was opened last, if one is open."""
        for index in range(len(self._open) - 1, -1, -1):
            if self._open[index][0] == tag:
                _, region = self._open.pop(index)
                self.end(region)
                return

    def end(self, region: Region) -> None:
        """End `region`: what it saved leaves now, or at the next flush where groups are held."""
        region.end(is_held=self._is_holding)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the groups that end inside until `flush`: their copies would be ahead of something that the host waits for."""
        self._is_holding = True
        try:
            yield
        except BaseException:
            self._is_holding = False
            raise
        self.flush()

    def flush(self) -> None:
        """The host has waited: submit what was held, and hold no more."""
        self._is_holding = False
        self.engine.flush()

    # Steps.

    def begin_step(self, call: "ScheduleCall") -> None:
        """A schedule begins a step.

        Raises:
            PlanError: No plan fits the budget.
        """
        self._call = call
        if self.measurement is not None:
            self.measurement.begin_step(call)

    def use_plan(self, plan: OffloadPlan) -> None:
        """Do as `plan` says from the next microbatch on. What runs again is switched by whoever planned."""
        self._plan = plan
        planned = {site: action for site, action in plan.actions.items() if (site.chunk, site.layer) in self._layers}
        sites = [site for site in self._actions if site.tag in self.selected and site.tag != "layer_input"]
        self._actions = dict.fromkeys(sites, Action.KEEP) | planned
        self._watched.clear()

    def finish_open_step(self) -> None:
        """Finish the step that is under way, if one is; where Megatron's own flag is on, its schedule has done so already.

        Raises:
            IntegrationError: As `finish_step`.
            PlanError: As `finish_step`.
        """
        if self._microbatches_begun:
            self.finish_step()

    def finish_step(self) -> None:
        """A step is over: keep its numbers, and after the first say which tags came to nothing.

        Raises:
            IntegrationError: A selected tag saved nothing on any rank.
            PlanError: The plan names a site that no rank has, or the ranks have different plans.
        """
        microbatches = max(self._microbatches_begun.values(), default=0)
        self._call = None
        self._microbatches_begun.clear()
        self._open.clear()
        self._lane = None
        self.last_step = self.engine.finish_step()
        logger.debug(
            "step: %s to the host, %s back", format_bytes(self.last_step.d2h_bytes), format_bytes(self.last_step.h2d_bytes)
        )
        if self.measurement is not None:
            # A plan that was made of measurements names what was there.
            self.measurement.finish_step()
            return
        if not self._is_first_step_over:
            self._is_first_step_over = True
            check_alike(self.selected, self._plan)
            if self._plan is not None:
                check_plan(self._plan, self._actions, self._layers)
            check_tags(self.selected, self._actions, self._fused_tags, self.last_step)
        if self.config.delta_offload_bytes_across_pp_ranks:
            self._balance_ranks(microbatches)

    def _balance_ranks(self, microbatches: int) -> None:
        """Keep what this pipeline rank is to offload less than the first, in steps of so many microbatches."""
        for site, group in self._first_groups:
            self._site_bytes[site] = self._site_bytes.get(site, 0) + group.moved_bytes / microbatches
        self._first_groups.clear()
        if microbatches == self._balanced_microbatches:
            return
        self._balanced_microbatches = microbatches
        rank = int(load_module("megatron.core.parallel_state").get_pipeline_model_parallel_rank())
        moved_bytes = {site: round(size * microbatches) for site, size in self._site_bytes.items()}
        kept = choose_kept(moved_bytes, less_bytes=rank * self.config.delta_offload_bytes_across_pp_ranks)
        self._actions.update(dict.fromkeys(moved_bytes, Action.OFFLOAD))
        self._actions.update(dict.fromkeys(kept, Action.KEEP))
        self._watched.clear()
        logger.info(
            "pipeline rank %d offloads %s of a step less: %d of %d sites stay",
            rank,
            format_bytes(sum(moved_bytes[site] for site in kept)),
            len(kept),
            len(moved_bytes),
        )


def _list_named_tags(config: OffloadConfig) -> tuple[str, ...]:
    """Return the tags that users named; for `auto` all that may have a site of their own in any layer."""
    if not config.is_auto:
        return config.offload_modules
    return tuple(tag.name for tag in config.tags if tag.name not in _NEVER_AUTO)


_NEVER_AUTO = ("fused_group_mlp", "gdp_qkv")
"""Modules of which no run compared the bits."""


def _list_offloaded_tags(plan: OffloadPlan | None) -> tuple[str, ...]:
    actions = {} if plan is None else plan.actions
    return tuple(sorted({site.tag for site, action in actions.items() if action.offloads}))


def _check_named_tags(config: OffloadConfig, plan: OffloadPlan | None) -> None:
    """Refuse tags that are named beside a plan that lets none of their tensors leave, and planned tags that need others.

    Raises:
        PlanError: With the tag and the fix.
        ConfigError: The plan offloads an unknown tag, or one without what it requires.
    """
    if plan is None or config.is_auto:
        return
    planned = _list_offloaded_tags(plan)
    config.tags.check(planned, flag="--offload-plan")
    for tag in config.offload_modules:
        if tag not in planned:
            raise PlanError(
                f"--offload-modules names {tag!r}, and --offload-plan {config.offload_plan} offloads it in no layer: it would "
                "do nothing. Leave it out, or plan for it."
            )


def _check_layer(layer: LayerSites, planned: Mapping[str, Action]) -> None:
    """Refuse what a plan asks of a layer and the layer cannot do.

    Raises:
        PlanError: With the site, and what can be had instead.
    """
    for name, action in planned.items():
        if not action.recomputes:
            continue
        unit = find_recompute_unit(name)
        if unit is None or name not in layer.units:
            possible = ", ".join(unit.name for unit in RECOMPUTE_UNITS if unit.name in layer.units)
            raise PlanError(
                f"The plan recomputes layers.{layer.number}.{name}, which this layer cannot run again by itself, as it is "
                f"built and quantized. It can: {possible}."
            )
        for tag in unit.covers:
            if planned.get(tag, Action.KEEP).offloads:
                raise PlanError(
                    f"The plan recomputes layers.{layer.number}.{name} and offloads layers.{layer.number}.{tag}, which saves "
                    "nothing then. Keep one of them out of the plan."
                )
            if tag != name and planned.get(tag, Action.KEEP).recomputes:
                raise PlanError(
                    f"The plan recomputes layers.{layer.number}.{name} and layers.{layer.number}.{tag}, which is a part of it. "
                    "Keep one of them out of the plan."
                )
        for other in unit.excludes:
            if planned.get(other, Action.KEEP).recomputes:
                raise PlanError(
                    f"The plan recomputes layers.{layer.number}.{name} and layers.{layer.number}.{other}, which cannot both "
                    "run again by themselves. Keep one of them out of the plan."
                )
