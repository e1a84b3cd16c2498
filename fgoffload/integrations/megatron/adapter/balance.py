"""`--delta-offload-bytes-across-pp-ranks`: each pipeline rank offloads that many bytes per step less than the previous one.

With 1F1B, earlier ranks have more microbatches in flight, so they need the memory more than later ones. The first step
offloads every site and counts its bytes. From the second step on, the last sites of the rank's forward stay on the GPU, the
same in all microbatches, until their bytes make up the difference. Megatron's own engine instead keeps the first layers of the
first microbatches; see docs/reference/megatron_engine.md.
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
    """Chooses the sites that stay on the GPU, so that each rank offloads `delta_bytes` a step less than the one before."""

    def __init__(self, actions: SiteActions, *, delta_bytes: int) -> None:
        self._actions = actions
        self._delta_bytes = delta_bytes
        self._groups: list[tuple[Site, Group]] = []
        """Groups of the first step, whose offloaded bytes are counted."""
        self._site_bytes: dict[Site, float] = {}
        """Offloaded bytes of each site per microbatch of the first step, in the order of forward."""
        self._microbatches = 0
        """Microbatches per step of the current balance; 0 in the first step."""

    def note(self, site: Site, group: Group) -> None:
        """Record that one forward of `site` saves to `group`."""
        if self._delta_bytes and not self._microbatches:
            self._groups.append((site, group))

    def finish_step(self, microbatches: int) -> None:
        """Balance the next steps after a step of so many `microbatches`."""
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
    """Return the sites to keep on the GPU so that a step offloads `less_bytes` fewer, rounded up to whole sites.

    `moved_bytes` are those of each site in a step of all microbatches, in the order of forward.
    """
    kept = []
    for site in reversed(tuple(moved_bytes)):
        if less_bytes <= 0:
            break
        # A site that moved nothing is kept too. It shares storages with an earlier site, and would offload them in its place.
        kept.append(site)
        less_bytes -= moved_bytes[site]
    return kept
