"""Connects Megatron-Core training to an engine: tracks forward, applies the plan, and reports each step."""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch

from fgoffload.config import OffloadConfig
from fgoffload.engine import CapturedRegion, KeptReason, Lane, OffloadEngine, Region, StepStats, is_inert
from fgoffload.errors import ConfigError, PlanError
from fgoffload.integrations.megatron.adapter.first_step import check_first_step
from fgoffload.integrations.megatron.adapter.measurement import ScheduleCall
from fgoffload.integrations.megatron.adapter.site_actions import RankBalance, SiteActions, list_selected_tags
from fgoffload.integrations.megatron.graphs.graphed_layers import GraphedLayers, is_capturing
from fgoffload.integrations.megatron.recompute.reruns import OpenReruns
from fgoffload.plan import MICROBATCHES, TOKENS, OffloadPlan, Site, naming_plan_file
from fgoffload.units import format_bytes
from fgoffload.watched import Watched

logger = logging.getLogger(__name__)

_Context = contextlib.AbstractContextManager[object]


class Holding:
    """Context manager that delays the offload of groups that end inside it. Layers do not nest, so they share one manager."""

    def __init__(self, submit: Callable[[], None]) -> None:
        self._submit = submit
        self.is_on = False

    def flush(self) -> None:
        """Submit the delayed groups. Later groups are not delayed."""
        self.is_on = False
        self._submit()

    def __enter__(self) -> None:
        self.is_on = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None and self.is_on:
            self.flush()
        self.is_on = False  # after an exception, the delayed groups are dropped


class MegatronOffload:
    """Fine-grained activation offload for the Megatron-Core models of this process.

    Created by `fgoffload.integrations.megatron.apply`. It owns the engine.
    """

    def __init__(self, config: OffloadConfig, engine: OffloadEngine, *, undo: Callable[[], None]) -> None:
        self.config = config
        self.engine = engine
        self.last_step: StepStats | None = None
        """Statistics of the last complete step on this rank; None until a Megatron schedule or `finish_step` ends a step."""
        self.measurement: Any = None
        """`StepMeasurement` for `--offload-modules auto` or for a profile; None if no step is measured."""
        self._undo = undo
        plan = None if config.offload_plan is None else OffloadPlan.load(config.offload_plan)
        self.selected = list_selected_tags(config, plan)
        """Tags whose tensors may be offloaded. See `list_selected_tags`."""
        self.actions = SiteActions(plan, fraction=config.activation_offload_fraction, selected=self.selected)
        self.graphs = GraphedLayers(engine, self.actions)
        self.open_reruns = OpenReruns()
        self.has_waiting_layers = False
        """Whether a layer of this rank synchronizes on token counts in each forward."""
        self.blocks: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """Blocks whose layers are registered and prepared."""
        self._lane: Lane | None = None
        self._lane_blocks: weakref.WeakSet[torch.nn.Module] | None = None
        """Blocks that the current lane's forward has reached; None if `begin_microbatch` began the lane."""
        self.chunk = 0
        """Model chunk of the current forward."""
        self.layer = -1
        """Last layer that forward has reached, numbered from 0 in the whole model; -1 before the first."""
        self.microbatches_begun: dict[int, int] = {}
        """Number of the step's microbatches that have begun, by model chunk."""
        self._open: dict[str, Region | CapturedRegion] = {}
        """Regions from `open_region` that have not ended, by tag."""
        self.holding = Holding(self._submit_held)
        """Delays the copies of ended groups until the host no longer waits for the device."""
        self._call: ScheduleCall | None = None
        self.ending_block: weakref.ref[torch.nn.Module] | None = None
        """Last block before the loss in the current model; None if other pipeline stages follow."""
        self._is_first_step_over = False
        self._balance = RankBalance(self.actions, delta_bytes=config.delta_offload_bytes_across_pp_ranks)
        self._max_warned_microbatches = 0
        """Largest number of microbatches per step in any warning so far."""

    def __repr__(self) -> str:
        hint = ": without Megatron's schedules, call finish_step() after backward" if self.microbatches_begun else ""
        last = self.last_step
        step = f"no finished step{hint}" if last is None else f"{format_bytes(last.d2h_bytes)} offloaded in the last step"
        return f"<MegatronOffload (tags: {' '.join(sorted(self.selected)) or 'none'}), {step}>"

    def remove(self) -> None:
        """Restore Megatron's symbols, and free all memory that no autograd graph needs. A second call does nothing."""
        try:
            if self.measurement is not None:
                self.measurement.close()  # first, because these wrappers enclose those that `_undo` removes
            self._undo()
        finally:
            self._open.clear()
            self._lane = None
            self.graphs.close()
            self.engine.close()

    @property
    def is_idle(self) -> bool:
        """Whether nothing can be offloaded or observed, for example because the plan only recomputes.

        Then forward is not tracked. Tracking costs the host about as much as one small kernel launch per layer.
        """
        return not self.selected and not self.engine.observers

    def keep_recomputed(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never offload the storages of `tensors`, because a recompute empties and refills them. See `OffloadEngine.keep`."""
        if not self.is_idle:
            self.engine.keep(tensors, reason=KeptReason.RECOMPUTED)

    # Progress of forward.

    def begin_microbatch(self, chunk: int, *, most_in_flight: int | None = None) -> None:
        """Begin a forward of model chunk `chunk`. An evaluation without grad mode is not counted as a microbatch.

        At most `most_in_flight` groups of each tag may be in flight to the host before compute waits.
        """
        if most_in_flight is not None and most_in_flight < 0:
            raise ConfigError(
                f"fine_grained_offloading_max_inflight_offloads {most_in_flight} is negative. Set it to 0 or more, or omit it."
            )
        self.engine.execution.most_in_flight = most_in_flight
        self.chunk = chunk
        if torch.is_grad_enabled():
            self._begin_lane()
            self._lane_blocks = None

    def enter_block(self, block: torch.nn.Module, chunk: int) -> None:
        """Record that forward has reached `block` of model chunk `chunk`.

        We do not wrap the forward of some models, such as BERT and T5. Their next forward begins when a block is reached again.
        """
        if is_inert():
            return
        if self._lane is None or (self._lane_blocks is not None and block in self._lane_blocks):
            self.chunk = chunk
            self._begin_lane()
        if self._lane_blocks is not None:
            self._lane_blocks.add(block)

    def _begin_lane(self) -> Lane:
        microbatch = self.microbatches_begun.get(self.chunk, 0)
        if torch.is_grad_enabled():  # an evaluation does not belong to a step
            self.microbatches_begun[self.chunk] = microbatch + 1
        self.layer = -1
        self._lane_blocks = weakref.WeakSet()
        self._lane = lane = Lane(chunk=self.chunk, microbatch=microbatch)
        self._open.clear()  # drops regions that were never ended
        self.engine.begin_forward(lane)
        return lane

    def abandon_microbatch(self) -> None:
        """Drop the state of a forward that raised an error. Forwards that are recomputed in backward keep no state here."""
        if not is_inert():
            self._lane = None
            self._open.clear()

    def enter_layer(self, layer: int) -> Lane:
        """Record that forward has reached layer `layer`, numbered from 0 in the whole model. Return its lane."""
        lane = self._lane or self._begin_lane()
        self.layer = layer
        return lane

    def watch_model(self, model: torch.nn.Module, chunk: int) -> _Context:
        """Return a context manager in which the measurement, if any, observes the forward of chunk `chunk`."""
        if self.measurement is None or is_inert():
            return contextlib.nullcontext()
        context: _Context = self.measurement.watch_model(model, chunk)
        return context

    def watch_layer(self, lane: Lane, hidden: torch.Tensor, *, has_parts: bool) -> _Context:
        """Return the context manager for the current layer's forward. It records or watches the layer's saves as needed.

        If `has_parts`, `watch_attention` is also called for this layer, and can watch its attention alone.
        """
        if self.measurement is not None and self.measurement.is_recording:
            context: _Context = self.measurement.find_layer(lane, self.chunk, self.layer, hidden)
            return context
        # Free offloaded tensors of earlier layers here, because the next group may not end before backward.
        self.engine.poll()
        watched = self._find_watched()
        if watched is Watched.FOLLOWED:
            return self.engine.follow(lane)
        if watched is Watched.LAYER or (watched is Watched.ATTENTION and not has_parts):
            return self.engine.watch(lane)
        self.engine.announce_backward(lane, hidden)
        return contextlib.nullcontext()

    def watch_attention(self) -> _Context:
        """Return a context manager for the current layer's attention. It watches saves only for `Watched.ATTENTION`."""
        if self._lane is None or self._find_watched() is not Watched.ATTENTION or self._is_recording:
            return contextlib.nullcontext()
        return self.engine.watch(self._lane)

    def leave_attention(self, hidden: torch.Tensor) -> None:
        """Record that forward has left the attention of the current layer, which returned `hidden`."""
        if self._lane is not None and not self._find_watched().covers_layer and not self._is_recording:
            # Ops after attention are not watched, so a mark on attention's output shows when backward reaches the layer.
            self.engine.announce_backward(self._lane, hidden)

    @property
    def _is_recording(self) -> bool:
        return self.measurement is not None and self.measurement.is_recording

    def _find_watched(self) -> Watched:
        # Observers need every save of the layer, with its `Place`.
        return Watched.LAYER if self.engine.observers else self.actions.find_watched(self.chunk, self.layer)

    def leave_block(self, block: torch.nn.Module) -> None:
        """Record that forward has left `block`. After the model's last block in a Megatron schedule, expect backward next."""
        ends_model = self.ending_block is not None and self.ending_block() is block
        if ends_model and self._call is not None and self._lane is not None:
            plan = self.actions.plan
            self.engine.expect_backward(self._lane, window_bytes=None if plan is None else plan.loss_window_bytes)

    def watch(self) -> _Context:
        """Return a context manager for forward code outside the layers. See `OffloadEngine.watch`."""
        return contextlib.nullcontext() if self._lane is None else self.engine.watch(self._lane)

    def list_sites(self) -> list[Site]:
        """Return the sites of this rank in sorted order."""
        return sorted(self.actions.by_site)

    # Regions.

    def find_region(self, tag: str) -> Region | CapturedRegion | None:
        """Return a region for the site of `tag` in the current layer, or None if its tensors stay on the GPU.

        To use a site of your own, register and select its tag first.
        """
        # Checked first, because a recompute in backward also calls this method.
        if tag not in self.selected or is_inert():
            return None
        if is_capturing():
            return None if self.graphs.find_region is None else self.graphs.find_region(tag)
        if self._lane is None:
            return None
        if self.measurement is not None and self.measurement.is_recording:
            found: Region | None = self.measurement.find_region(Site(chunk=self.chunk, layer=self.layer, tag=tag), self._lane)
            return found
        site = self.actions.find_offloaded(self.chunk, self.layer, tag)
        if site is None:
            return None
        # Not `OffloadEngine.find_region`, which would call `is_inert` again.
        region = Region(self.engine, self._lane, self.engine.open_group(site, self._lane))
        self._balance.record(site, region.group)
        return region

    def open_region(self, tag: str) -> Region | CapturedRegion | None:
        """Open a region as `find_region` does, for callers that end the region by its tag. See `end_region`."""
        region = self.find_region(tag)
        if region is not None:
            self._open[tag] = region
        return region

    def end_region(self, tag: str, *, may_wait: bool = False) -> None:
        """End the open region of `tag`, if there is one. See `end`."""
        region = self._open.pop(tag, None)
        if region is not None:
            self.end(region, may_wait=may_wait)

    def end(self, region: Region | CapturedRegion, *, may_wait: bool = False) -> None:
        """End `region`. Its saves are offloaded now, or at the next flush if groups are delayed.

        If `may_wait`, an offload after a layer's CUDA graph is delayed until the next graph launch, even if
        `delay_offload_until_cuda_graph` is off.
        """
        is_delayed = self.graphs.is_replaying and (may_wait or self.config.delay_offload_until_cuda_graph)
        region.end(is_held=self.holding.is_on or is_delayed)

    def flush_delayed(self) -> None:
        """Submit the delayed groups. Called after a CUDA graph launch and at the end of a forward."""
        if not (self.is_idle or self.holding.is_on):  # `holding` submits them later
            self._submit_held()

    def _submit_held(self) -> None:
        with contextlib.nullcontext() if self.measurement is None else self.measurement.apart():
            self.engine.flush()

    # Steps.

    def begin_step(self, call: ScheduleCall) -> None:
        """Begin a step. Called at the start of each Megatron schedule.

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
            # The batch may grow during a run. The larger step may still fit into memory, so this is only a warning.
            if call.microbatches > self._max_warned_microbatches:
                logger.warning("%s The run continues, but may exceed the memory budget.", error)
            self._max_warned_microbatches = max(call.microbatches, self._max_warned_microbatches)

    def finish_open_step(self) -> None:
        """Finish the current step if a forward has begun since the last step ended. See `finish_step`.

        Since 0.18, Megatron also calls this after an evaluation and around the capture of CUDA graphs.
        """
        if self.microbatches_begun:
            self.finish_step()

    def finish_step(self) -> None:
        """Finish a step and store its statistics. After the first step, check that each selected tag had an effect.

        Raises:
            IntegrationError: A selected tag has no site or fused module on any rank, or no rank saved a tensor in its sites.
            PlanError: The plan contains a site that no rank has, or the ranks have different plans.
        """
        microbatches = max(self.microbatches_begun.values(), default=0)
        self._call = None
        self.microbatches_begun.clear()
        self._open.clear()
        self._lane = None
        self.last_step = self.engine.finish_step()
        logger.debug(
            "step: %s offloaded, %s reloaded", format_bytes(self.last_step.d2h_bytes), format_bytes(self.last_step.h2d_bytes)
        )
        if self.measurement is not None:
            # A plan that was made from measurements contains only sites that exist, so no check is needed.
            self.measurement.finish_step()
            return
        if not self._is_first_step_over:
            self._is_first_step_over = True
            check_first_step(self.selected, self.actions, self.last_step, plan_file=self.config.offload_plan)
        self._balance.finish_step(microbatches)
