"""`--delta-offload-bytes-across-pp-ranks`: each pipeline rank offloads so many bytes of a step less than the one before it.

Earlier ranks have more microbatches in flight under 1F1B, so they need the memory and later ones do not. What a site moves is
known when the first step is over, in which every site moves; from the second step on the rank's last sites of forward stay, in
all microbatches alike, as many as have the bytes that the rank offloads less. Megatron's own engine keeps the first layers of
the first microbatches instead; see docs/reference/megatron_engine.md.
"""

import logging
from collections.abc import Mapping

from fgoffload.engine import Group
from fgoffload.integrations.megatron.adapter.site_actions import SiteActions
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.plan import Action, Site
from fgoffload.units import format_bytes

logger = logging.getLogger(__name__)


class RankBalance:
    """Keeps on this pipeline rank the sites that it is to offload less than the first rank.

    Args:
        actions: What is done about each site of the rank.
        delta_bytes: Of a step, from one rank to the next; 0 where all ranks offload alike.
    """

    def __init__(self, actions: SiteActions, *, delta_bytes: int) -> None:
        self._actions = actions
        self._delta_bytes = delta_bytes
        self._groups: list[tuple[Site, Group]] = []
        """Of the first step, where what each site moved has to be known."""
        self._site_bytes: dict[Site, float] = {}
        """What each site moved in a microbatch of the first step, in the order of forward."""
        self._microbatches = 0
        """Of the steps that are balanced now; 0 in the first step."""

    def note(self, site: Site, group: Group) -> None:
        """A run of `site` saves to `group`."""
        if self._delta_bytes and not self._microbatches:
            self._groups.append((site, group))

    def finish_step(self, microbatches: int) -> None:
        """A step is over: balance the ones that follow, in steps of so many microbatches."""
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
        kept = choose_kept(moved_bytes, less_bytes=rank * self._delta_bytes)
        self._actions.set((dict.fromkeys(moved_bytes, Action.OFFLOAD) | dict.fromkeys(kept, Action.KEEP)).items())
        logger.info(
            "pipeline rank %d offloads %s a step less: %d of %d sites stay on the GPU",
            rank,
            format_bytes(sum(moved_bytes[site] for site in kept)),
            len(kept),
            len(moved_bytes),
        )


def choose_kept(moved_bytes: Mapping[Site, int], *, less_bytes: int) -> list[Site]:
    """Return the sites that stay so that `less_bytes` fewer leave in a step: whole sites, so by less than one site more.

    Args:
        moved_bytes: What each site moved in a step, all microbatches, in the order of forward.
        less_bytes: Bytes. Where all sites together have fewer, all stay.
    """
    kept = []
    for site in reversed(tuple(moved_bytes)):
        if less_bytes <= 0:
            break
        # One that moved nothing stays too: it saves what a site before it moved, and would move that in its place.
        kept.append(site)
        less_bytes -= moved_bytes[site]
    return kept
