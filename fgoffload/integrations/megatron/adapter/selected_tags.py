"""Which tags may leave at all: those that users named, all that `auto` chooses among, or those of a plan."""

import logging

from fgoffload.config import OffloadConfig
from fgoffload.plan import OffloadPlan

logger = logging.getLogger(__name__)

_NEVER_AUTO = ("fused_group_mlp", "gdp_qkv")
"""Modules of which no run compared the bits."""


def list_selected_tags(config: OffloadConfig, plan: OffloadPlan | None) -> tuple[str, ...]:
    """Return the tags whose tensors may leave: of the plan where there is one, else those that users named.

    A plan decides for all: files of flags name others, for trainings without a plan. `auto` names all that may have a site of
    their own in any layer.

    Raises:
        ConfigError: The plan offloads an unknown tag, or one without what it requires.
    """
    if plan is not None:
        return _list_planned_tags(config, plan)
    if not config.is_auto:
        return config.offload_modules
    return tuple(tag.name for tag in config.tags if tag.name not in _NEVER_AUTO)


def _list_planned_tags(config: OffloadConfig, plan: OffloadPlan) -> tuple[str, ...]:
    planned = plan.offloaded_tags
    config.tags.check(planned, flag="--offload-plan")
    others = [tag for tag in config.offload_modules if tag not in planned]
    if others:
        logger.info("--offload-plan %s decides what leaves: nothing of %s does", config.offload_plan, " ".join(others))
    return planned
