"""Checks after the first step that each selected tag offloaded something, and that each planned site exists on some rank.

All ranks exchange their results before any rank raises an error. If only one rank raised, the others would hang.
"""

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from fgoffload.engine import StepStats
from fgoffload.errors import IntegrationError, PlanError
from fgoffload.integrations.collectives import gather
from fgoffload.integrations.megatron.adapter.site_actions import SiteActions
from fgoffload.plan import Action, OffloadPlan, Site, naming_plan_file
from fgoffload.units import format_bytes

logger = logging.getLogger(__name__)


def check_first_step(selected: Sequence[str], actions: SiteActions, step: StepStats, *, plan_file: Path | None) -> None:
    """Check on all ranks that each selected tag had an effect in the first step, and that each planned site exists.

    Raises:
        IntegrationError: A selected tag has no site or fused module on any rank, or no rank saved a tensor in its sites.
        PlanError: The plan contains a site that no rank has, or the ranks have different plans.
    """
    check_same_plan(selected, actions.plan)
    if actions.plan is not None:
        with naming_plan_file(plan_file):
            check_plan(actions.plan, actions.by_site, actions.layers)
    check_tag_effects(selected, actions.by_site, actions.fused_tags, step)


def check_same_plan(selected: Sequence[str], plan: OffloadPlan | None) -> None:
    """Check that all ranks have the same tags and plan."""
    digest = hashlib.sha256("\n".join((*selected, "" if plan is None else plan.to_json())).encode()).hexdigest()
    if len(set(gather(digest))) > 1:
        raise PlanError("The ranks have different tags or plans. Pass the same --offload-modules and plan file to all ranks.")


def check_plan(plan: OffloadPlan, actions: Mapping[Site, Action], layers: Collection[tuple[int, int]]) -> None:
    """Check that each planned site exists on some rank."""
    planned = sorted(plan.actions)
    # For KEEP, the layer must exist, but not the site: tags that the plan never offloads have no registered sites.
    own = [site in actions or (plan.get_action(site) is Action.KEEP and (site.chunk, site.layer) in layers) for site in planned]
    # A plan covers all ranks, but each rank has only the sites of its own layers.
    for site, *exists in zip(planned, *gather(own), strict=True):
        if not any(exists):
            raise PlanError(
                f"The plan contains {site} in chunk {site.chunk}, but no rank has this site. Make a new plan for this model."
            )


def check_tag_effects(selected: Sequence[str], actions: Mapping[Site, Action], fused: Collection[str], step: StepStats) -> None:
    """Check that each selected tag has a site on some rank, and that a tensor was saved there if the site is offloaded."""
    reports = gather([_report(tag, actions, fused, step) for tag in selected])
    for tag, *same in zip(selected, *reports, strict=True):
        has_sites, is_offloaded, is_fused, has_saved, has_moved = map(any, zip(*same, strict=True))
        if not has_sites and is_fused:
            logger.warning(
                "--offload-modules %s offloaded nothing: the module is fused into the next linear, which saves the module's "
                "input. Select the linear's tag instead.",
                tag,
            )
        elif not has_sites:
            raise IntegrationError(
                f"--offload-modules {tag!r} has no site in this model on any rank, so it has no effect. Remove the "
                "tag, or choose a layer implementation that contains its module."
            )
        elif is_offloaded and not has_saved:
            raise IntegrationError(
                f"--offload-modules {tag!r} has no effect: its modules saved no tensors in the first step on any rank. "
                "Recompute drops them, and a module with frozen parameters saves none. Remove the tag, or recompute less."
            )
        elif is_offloaded and not has_moved:
            stats = step.tags.get(tag)
            reasons = () if stats is None else (f"{format_bytes(n)} ({why})" for why, n in stats.kept_bytes.items())
            kept = ", ".join(reasons) or "see the logs of the other ranks"
            logger.warning("--offload-modules %s offloaded nothing in the first step. Kept on the GPU: %s", tag, kept)


def _report(tag: str, actions: Mapping[Site, Action], fused: Collection[str], step: StepStats) -> tuple[bool, ...]:
    """Return whether `tag` has on this rank: a site, an offloaded site, a fused module, a saved tensor, any offloaded bytes."""
    own = [action for site, action in actions.items() if site.tag == tag]
    stats = step.tags.get(tag)
    has_saved = stats is not None and stats.saved_tensors > 0
    has_moved = stats is not None and stats.d2h_bytes + stats.shared_bytes > 0
    return bool(own), any(action.offloads for action in own), tag in fused, has_saved, has_moved
