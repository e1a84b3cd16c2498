"""Tests the checks across ranks in the first step."""

import contextlib
import types

import pytest

from fgoffload import Action, IntegrationError, OffloadPlan, PlanError, Site
from fgoffload.integrations.megatron.adapter import first_step
from fgoffload.integrations.megatron.adapter.first_step import check_same_plan, check_tag_effects

PLAN, OTHER = (
    OffloadPlan(actions={Site(chunk=0, layer=1, tag="core_attn"): action}) for action in (Action.OFFLOAD, Action.RECOMPUTE)
)
OURS = (("core_attn",), PLAN)


def check(monkeypatch, ours, theirs):
    """Run the check on one of two ranks with a faked exchange."""
    sent = []
    monkeypatch.setattr(first_step, "gather", lambda own: sent.append(own) or [own])
    check_same_plan(*theirs)
    monkeypatch.setattr(first_step, "gather", lambda own: [own, *sent])
    check_same_plan(*ours)


@pytest.mark.parametrize("both", [OURS, (("core_attn",), None), (("moe_act", "core_attn"), PLAN)])
def test_ranks_with_the_same_tags_and_plan_continue(both, monkeypatch):
    check(monkeypatch, both, both)


@pytest.mark.parametrize(
    "theirs", [(("moe_act",), PLAN), (("core_attn",), OTHER), (("core_attn",), None), (("core_attn", "moe_act"), PLAN)]
)
def test_different_tags_or_plans_stop_all_ranks(theirs, monkeypatch):
    for pair in ((OURS, theirs), (theirs, OURS)):
        with pytest.raises(PlanError, match="The ranks have different tags or plans"):
            check(monkeypatch, *pair)


@pytest.mark.parametrize("saves_elsewhere", [False, True])
def test_a_tag_that_saves_nothing_on_any_rank_is_rejected(saves_elsewhere, monkeypatch):
    actions = {Site(chunk=0, layer=0, tag="core_attn"): Action.OFFLOAD}
    monkeypatch.setattr(first_step, "gather", lambda own: [own, [(*one[:3], saves_elsewhere, False) for one in own]])
    raises = pytest.raises(IntegrationError, match="'core_attn' has no effect: its modules saved no tensors in the first step")
    with contextlib.nullcontext() if saves_elsewhere else raises:
        check_tag_effects(("core_attn",), actions, (), types.SimpleNamespace(tags={}))
