"""The link between a Megatron-Core training and an engine: where forward is, what the plan says, and what a step did."""

import dataclasses
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from fgoffload.config import OffloadConfig
from fgoffload.engine import Lane, OffloadEngine, Region, StepStats, is_inert
from fgoffload.errors import IntegrationError, PlanError
from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.units import format_bytes

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _TagReport:
    """What one tag came to in the first step; whole numbers, since ranks agree on them by a maximum."""

    sites: int = 0
    planned: int = 0
    fused: int = 0
    saved_tensors: int = 0
    moved_bytes: int = 0


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
        self._undo = undo
        self._plan = None if config.offload_plan is None else _load_plan(config.offload_plan)
        self._actions: dict[Site, Action] = {}
        self._fused_tags: set[str] = set()
        self._lane: Lane | None = None
        self._chunk = 0
        self._layer = 0
        self._microbatches_begun: dict[int, int] = {}
        self._open: list[tuple[str, Region]] = []
        self._is_first_step_over = False

    def remove(self) -> None:
        """Put Megatron's own symbols back and give back all memory but what a graph still wants. A second call does no harm."""
        self._undo()
        self._open.clear()
        self._lane = None
        self.engine.close()

    # Where forward is.

    def begin_microbatch(self, chunk: int) -> None:
        """A forward of model chunk `chunk` begins. Without grad mode there is nothing to begin."""
        if not torch.is_grad_enabled():
            return
        microbatch = self._microbatches_begun.get(chunk, 0)
        self._microbatches_begun[chunk] = microbatch + 1
        self._chunk = chunk
        self._lane = Lane(chunk=chunk, microbatch=microbatch)
        self._open.clear()  # regions that nobody ended

    def abandon_microbatch(self) -> None:
        """Forward raised: hold nothing of it. A recompute that raises in backward, or stops early, has nothing here."""
        if not is_inert():
            self._lane = None
            self._open.clear()

    def enter_layer(self, layer: int) -> Lane:
        """Forward reaches the layer with number `layer`, from 0 over the whole model."""
        if self._lane is None:
            self.begin_microbatch(self._chunk)
        self._layer = layer
        return self._lane or Lane(chunk=self._chunk, microbatch=0)

    def register_layers(self, chunk: int, layers: Iterable[tuple[int, Iterable[str], Iterable[str]]]) -> None:
        """Learn the sites of a block of layers and choose an action for each.

        Args:
            chunk: The virtual pipeline stage that the block belongs to.
            layers: In the order of forward: number, tags that have a site there, selected tags that are fused into another.
        """
        sites = []
        for number, tags, fused in layers:
            sites += [Site(chunk=chunk, layer=number, tag=tag) for tag in tags]
            self._fused_tags.update(fused)
        if self._plan is not None:
            self._actions.update((site, self._plan.get_action(site)) for site in sites)
        else:
            self._actions.update(OffloadPlan.from_fraction(sites, self.config.activation_offload_fraction).actions)
        offloaded = sum(self._actions[site] is Action.OFFLOAD for site in sites)
        logger.info("chunk %d: %d of %d sites are offloaded", chunk, offloaded, len(sites))

    # Regions.

    def find_region(self, tag: str) -> Region | None:
        """Return a region for the site of `tag` where forward is now, or None where its tensors stay.

        For sites of your own: the tag must be registered and selected.
        """
        # Inert first: a recompute in backward comes here too, when forward is somewhere else.
        if tag not in self.config.offload_modules or self._lane is None or is_inert():
            return None
        site = Site(chunk=self._chunk, layer=self._layer, tag=tag)
        if site not in self._actions:
            self._actions[site] = self._get_action_of_unlisted(site)
        return self.engine.find_region(site, self._lane) if self._actions[site] is Action.OFFLOAD else None

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
                region.end()
                return

    # Steps.

    def finish_step(self) -> None:
        """A step is over: keep its numbers, and after the first say which tags came to nothing.

        Raises:
            IntegrationError: A selected tag saved nothing on any rank.
            PlanError: The plan names a site that no rank has.
        """
        self._microbatches_begun.clear()
        self._open.clear()
        self._lane = None
        self.last_step = self.engine.finish_step()
        logger.debug(
            "step: %s to the host, %s back", format_bytes(self.last_step.d2h_bytes), format_bytes(self.last_step.h2d_bytes)
        )
        if not self._is_first_step_over:
            self._is_first_step_over = True
            self._check_plan()
            self._check_tags(self.last_step)

    def _check_plan(self) -> None:
        planned = sorted(self._plan.actions) if self._plan is not None else []
        # A plan is for all ranks, and each has the sites of its own layers: only together can they tell what none has.
        for site, (has_site,) in zip(planned, _agree([(int(site in self._actions),) for site in planned]), strict=True):
            if not has_site:
                raise PlanError(
                    f"The plan names {site} in chunk {site.chunk}, and no rank has such a site. Plan for this model."
                )

    def _check_tags(self, step: StepStats) -> None:
        rows = _agree([dataclasses.astuple(self._report(tag, step)) for tag in self.config.offload_modules])
        for tag, report in zip(self.config.offload_modules, (_TagReport(*row) for row in rows), strict=True):
            if not report.sites and report.fused:
                logger.warning(
                    "--offload-modules %s moved nothing: the module is fused into the linear after it, which saves its input. "
                    "Select the linear's tag for these bytes.",
                    tag,
                )
            elif not report.sites:
                raise IntegrationError(
                    f"--offload-modules {tag!r} has no site in this model on any rank, so it does nothing. Leave it out, or "
                    "choose a layer implementation that has the module."
                )
            elif report.planned and not report.saved_tensors:
                raise IntegrationError(
                    f"--offload-modules {tag!r} saved nothing in the first step on any rank, so it does nothing. Full "
                    "recompute, or recompute of the module, takes its tensors first: leave the tag out, or recompute less."
                )
            elif report.planned and not report.moved_bytes:
                stats = step.tags.get(tag)
                logger.warning(
                    "--offload-modules %s moved nothing in the first step. What stayed, and why: %s",
                    tag,
                    ", ".join(f"{format_bytes(n)} {why}" for why, n in stats.kept_bytes.items())
                    if stats
                    else "another rank knows",
                )

    def _report(self, tag: str, step: StepStats) -> _TagReport:
        actions = [action for site, action in self._actions.items() if site.tag == tag]
        stats = step.tags.get(tag)
        return _TagReport(
            sites=len(actions),
            planned=actions.count(Action.OFFLOAD),
            fused=int(tag in self._fused_tags),
            saved_tensors=stats.saved_tensors if stats else 0,
            moved_bytes=stats.d2h_bytes + stats.shared_bytes if stats else 0,
        )


def _agree(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the greatest of every rank's numbers: one rank that raised alone would leave the others waiting for it."""
    if not rows or not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return rows
    numbers = torch.tensor(rows, dtype=torch.int64)
    if torch.distributed.get_backend() == "nccl":
        numbers = numbers.to(torch.device("cuda", torch.cuda.current_device()))
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX)
    return [tuple(row) for row in numbers.tolist()]


def _load_plan(path: Path) -> OffloadPlan:
    plan = OffloadPlan.load(path)
    for site, action in plan.actions.items():
        if action is Action.RECOMPUTE:
            raise PlanError(
                f"--offload-plan {path} recomputes {site}; this version can keep and offload only. Use Megatron's recompute "
                "flags."
            )
    return plan
