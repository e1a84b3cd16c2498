"""The link between a Megatron-Core training and an engine: where forward is, what the plan says, and what a step did."""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable

import torch

from fgoffload.config import OffloadConfig
from fgoffload.engine import CapturedRegion, KeptReason, Lane, OffloadEngine, Region, StepStats, is_inert
from fgoffload.errors import ConfigError, PlanError
from fgoffload.integrations.megatron.adapter.balance import RankBalance
from fgoffload.integrations.megatron.adapter.first_step import check_first_step
from fgoffload.integrations.megatron.adapter.measurement import Measurement
from fgoffload.integrations.megatron.adapter.schedule_call import ScheduleCall
from fgoffload.integrations.megatron.adapter.site_actions import SiteActions, list_selected_tags
from fgoffload.integrations.megatron.graphs.graphed_layers import GraphedLayers, is_capturing
from fgoffload.integrations.megatron.host_waits.holding import Holding
from fgoffload.integrations.megatron.recompute.detached_outputs import OpenReruns
from fgoffload.plan import MICROBATCHES, TOKENS, OffloadPlan, Site, naming_plan_file
from fgoffload.units import format_bytes
from fgoffload.watched import Watched

logger = logging.getLogger(__name__)


class MegatronOffload:
    """Fine-grained activation offload, applied to the Megatron-Core of this process.

    Made by `fgoffload.integrations.megatron.apply`. It holds the engine; nothing else in the process does.
    """

    def __init__(self, config: OffloadConfig, engine: OffloadEngine, *, undo: Callable[[], None]) -> None:
        self.config = config
        self.engine = engine
        self.last_step: StepStats | None = None
        """The numbers of the last whole step on this rank; None before the first."""
        self.measurement: Measurement | None = None
        """Measures steps, in which nothing leaves; None where nothing is to be measured."""
        self._undo = undo
        plan = None if config.offload_plan is None else OffloadPlan.load(config.offload_plan)
        self.selected = list_selected_tags(config, plan)
        """The tags whose tensors may leave: those that users named, or those of the plan."""
        self.actions = SiteActions(plan, fraction=config.activation_offload_fraction, selected=self.selected)
        """What is done about each site."""
        self.graphs = GraphedLayers(engine, self.actions)
        """Those of layers."""
        self.open_reruns = OpenReruns()
        """What runs again and forward uses just now."""
        self.has_waiting_layers = False
        """Whether a layer of this rank lets the host wait in each of its forwards, as token dispatchers do."""
        self._blocks: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._lane: Lane | None = None
        self._lane_blocks: weakref.WeakSet[torch.nn.Module] | None = None
        """Those that forward has reached in the lane; None where a model began it, and begins the next one too."""
        self._chunk = 0
        self._layer = -1
        self._microbatches_begun: dict[int, int] = {}
        self._open: list[tuple[str, Region | CapturedRegion]] = []
        self._holding = Holding(self._submit_held)
        self._call: ScheduleCall | None = None
        """Of the step that a schedule is in."""
        self._ending_block: weakref.ref[torch.nn.Module] | None = None
        """Of the model that forward is in: the block behind which only the loss comes; None where other stages follow."""
        self._is_first_step_over = False
        self._balance = RankBalance(self.actions, delta_bytes=config.delta_offload_bytes_across_pp_ranks)
        self._most_warned_of = 0
        """Microbatches of a step, more than the plan was made for."""

    def __repr__(self) -> str:
        """Return the tags, and what the last step moved."""
        step = (
            "no step yet" if self.last_step is None else f"{format_bytes(self.last_step.d2h_bytes)} offloaded in the last step"
        )
        return f"<MegatronOffload (tags: {' '.join(sorted(self.selected)) or 'none'}), {step}>"

    def remove(self) -> None:
        """Put Megatron's own symbols back and give back all memory but what a graph still wants. A second call does nothing."""
        try:
            if self.measurement is not None:
                # First, since what it wrapped is wrapped around what is undone next.
                self.measurement.close()
            self._undo()
        finally:
            self._open.clear()
            self._lane = None
            self.graphs.close()
            self.engine.close()

    @property
    def is_idle(self) -> bool:
        """Whether nothing can leave and nobody looks, as with a plan that only runs modules again: nothing is to be followed.

        Asked in each forward of each layer. What follows one for the engine costs the host as much as a small kernel's launch,
        and a host that is late pays for it in the step.
        """
        return not self.selected and not self.engine.observers

    def keep_recomputed(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never move the storages of `tensors`, which are emptied and filled again: see `OffloadEngine.keep`."""
        if not self.is_idle:
            self.engine.keep(tensors, reason=KeptReason.RECOMPUTED)

    # Where forward is.

    def begin_microbatch(self, chunk: int, *, most_in_flight: int | None = None) -> None:
        """A forward of model chunk `chunk` begins. Without grad mode it has no microbatch.

        Args:
            chunk: The virtual pipeline stage.
            most_in_flight: How many groups of each tag may be on their way to the host before compute waits; None for any.

        Raises:
            ConfigError: That number is below 0.
        """
        if most_in_flight is not None and most_in_flight < 0:
            raise ConfigError(
                f"fine_grained_offloading_max_inflight_offloads {most_in_flight} is below 0. Give 0 or more, or leave it out."
            )
        self.engine.submission.most_in_flight = most_in_flight
        self._chunk = chunk
        if torch.is_grad_enabled():
            self._begin_lane()
            self._lane_blocks = None

    def enter_block(self, block: torch.nn.Module, chunk: int) -> None:
        """Forward reaches `block`, of model chunk `chunk`.

        Not every model says that a forward of it begins: BERT and T5 do not. A block that forward reaches again does.
        """
        if is_inert():
            return
        if self._lane is None or (self._lane_blocks is not None and block in self._lane_blocks):
            self._chunk = chunk
            self._begin_lane()
        if self._lane_blocks is not None:
            self._lane_blocks.add(block)

    def _begin_lane(self) -> Lane:
        microbatch = self._microbatches_begun.get(self._chunk, 0)
        if torch.is_grad_enabled():  # an evaluation is no part of a step
            self._microbatches_begun[self._chunk] = microbatch + 1
        self._layer = -1
        self._lane_blocks = weakref.WeakSet()
        self._lane = lane = Lane(chunk=self._chunk, microbatch=microbatch)
        self._open.clear()  # regions that nobody ended
        self.engine.begin_forward(lane)
        return lane

    def count_microbatches(self) -> dict[int, int]:
        """Return how many microbatches of the step have begun, by model chunk."""
        return dict(self._microbatches_begun)

    def leave_out_microbatches(self, before: dict[int, int]) -> None:
        """Take those that have begun since they were counted for no part of the step."""
        self._microbatches_begun = dict(before)

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
        watched = self._find_watched()
        if watched is Watched.FOLLOWED:
            return self.engine.follow(lane)
        if watched is Watched.LAYER or (watched is Watched.ATTENTION and not has_parts):
            return self.engine.watch(lane)
        self.engine.announce_backward(lane, hidden)
        return contextlib.nullcontext()

    def watch_attention(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for the attention of the layer that forward is in, where that has to be watched alone."""
        if self._lane is None or self._find_watched() is not Watched.ATTENTION or self._is_recording:
            return contextlib.nullcontext()
        return self.engine.watch(self._lane)

    def leave_attention(self, hidden: torch.Tensor) -> None:
        """Forward has left the attention of the layer that it is in, which returned `hidden`."""
        if self._lane is not None and not self._find_watched().covers_layer and not self._is_recording:
            # Behind attention nothing is watched, so that backward says by this mark that it has come to it.
            self.engine.announce_backward(self._lane, hidden)

    @property
    def _is_recording(self) -> bool:
        return self.measurement is not None and self.measurement.is_recording

    def _find_watched(self) -> Watched:
        """Return what has to be watched of the layer that forward is in."""
        # Who observes wants to know of every save where it was.
        return Watched.LAYER if self.engine.observers else self.actions.find_watched(self._chunk, self._layer)

    def note_ending_block(self, block: torch.nn.Module | None) -> None:
        """Forward is in a model that `block` ends, but for the loss; None where other stages follow."""
        self._ending_block = None if block is None else weakref.ref(block)

    def leave_block(self, block: torch.nn.Module) -> None:
        """Forward has left `block`. Where it ends the model, in one of Megatron's schedules, backward comes next."""
        ends_model = self._ending_block is not None and self._ending_block() is block
        if ends_model and self._call is not None and self._lane is not None:
            plan = self.actions.plan
            self.engine.expect_backward(self._lane, window_bytes=None if plan is None else plan.loss_window_bytes)

    def watch(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for a piece of forward outside of any layer's: see `OffloadEngine.watch`."""
        return contextlib.nullcontext() if self._lane is None else self.engine.watch(self._lane)

    def is_known(self, block: torch.nn.Module) -> bool:
        """Return whether the layers of `block` have been registered."""
        return block in self._blocks

    def remember(self, blocks: Iterable[torch.nn.Module]) -> None:
        """Take note that the layers of `blocks` have been registered, and prepared."""
        self._blocks.update(blocks)

    def pass_layer(self, layer: int) -> None:
        """Forward has come to the layer with number `layer` in a way that saves nothing of it."""
        self._layer = layer

    def list_sited(self, chunk: int, layer: int) -> tuple[str, ...]:
        """Return the tags of a registered layer that need a site: those whose tensors leave, or may when they are measured."""
        actions = self.actions
        return actions.list_offloaded(chunk, layer) if self.measurement is None else actions.list_tags(chunk, layer)

    def list_sites(self) -> list[Site]:
        """Return the sites of this rank, in order."""
        return sorted(self.actions.by_site)

    # Regions.

    def find_region(self, tag: str) -> Region | CapturedRegion | None:
        """Return a region for the site of `tag` where forward is now, or None where its tensors stay.

        For sites of your own: the tag must be registered and selected.
        """
        # Inert first: a recompute in backward comes here too, when forward is somewhere else.
        if tag not in self.selected or is_inert():
            return None
        if is_capturing():
            return self.graphs.find_region(tag)
        if self._lane is None:
            return None
        if self.measurement is not None and self.measurement.is_recording:
            return self.measurement.find_region(Site(chunk=self._chunk, layer=self._layer, tag=tag), self._lane)
        site = self.actions.find_offloaded(self._chunk, self._layer, tag)
        if site is None:
            return None
        # Not `OffloadEngine.find_region`, which would ask once more whether it is inert.
        region = Region(self.engine, self._lane, self.engine.open_group(site, self._lane))
        self._balance.note(site, region.group)
        return region

    def open_region(self, tag: str) -> Region | CapturedRegion | None:
        """Return a region as `find_region` does, to be ended by `end_region` with the same tag."""
        region = self.find_region(tag)
        if region is not None:
            self._open.append((tag, region))
        return region

    def end_region(self, tag: str, *, may_wait: bool = False) -> None:
        """End the region of `tag` that was opened last, if one is open: see `end`."""
        for index in range(len(self._open) - 1, -1, -1):
            if self._open[index][0] == tag:
                _, region = self._open.pop(index)
                self.end(region, may_wait=may_wait)
                return

    def end(self, region: Region | CapturedRegion, *, may_wait: bool = False) -> None:
        """End `region`: what it saved leaves now, or at the next flush where groups are held.

        Args:
            region: That has saved all.
            may_wait: Behind the graph of a layer, wait until the next graph is launched, whatever the flag says.
        """
        is_delayed = self.graphs.is_replaying and (may_wait or self.config.delay_offload_until_cuda_graph)
        region.end(is_held=self._holding.is_on or is_delayed)

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the groups that end are held until `flush`.

        Their copies would be ahead of something that the host waits for.
        """
        return self._holding

    def flush(self) -> None:
        """The host has waited: submit what was held, and hold no more."""
        self._holding.flush()

    def flush_delayed(self) -> None:
        """A graph has been launched, or a forward is over: submit what has waited for that."""
        if not (self.is_idle or self._holding.is_on):  # else the host waits for something else first
            self._submit_held()

    def _submit_held(self) -> None:
        with contextlib.nullcontext() if self.measurement is None else self.measurement.apart():
            self.engine.flush()

    # Steps.

    def begin_step(self, call: ScheduleCall) -> None:
        """A schedule begins a step.

        Raises:
            PlanError: No plan fits the budget, or the plan was made for smaller or fewer microbatches.
        """
        self._call = call
        if self.actions.plan is not None:
            self._check_step(self.actions.plan, call)
        if self.measurement is not None:
            self.measurement.begin_step(call)

    def _check_step(self, plan: OffloadPlan, call: ScheduleCall) -> None:
        with naming_plan_file(self.config.offload_plan):
            plan.check_made_for({TOKENS: call.tokens})
        try:
            with naming_plan_file(self.config.offload_plan):
                plan.check_made_for({MICROBATCHES: call.microbatches})
        except PlanError as error:
            if not self._is_first_step_over:
                raise
            # A batch that grows in the middle of a run: the step may fit, and to end the run here would lose it for certain.
            if call.microbatches > self._most_warned_of:
                logger.warning("%s The training goes on, and may exceed the memory budget.", error)
            self._most_warned_of = max(call.microbatches, self._most_warned_of)

    def use_plan(self, plan: OffloadPlan) -> None:
        """Do as `plan` says from the next microbatch on. What runs again is switched by whoever planned."""
        self.actions.use_plan(plan)

    def finish_open_step(self) -> None:
        """Finish the step that is under way, if one is: if a forward has begun since the last one.

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
            check_first_step(self.selected, self.actions, self.last_step, plan_file=self.config.offload_plan)
        self._balance.finish_step(microbatches)
