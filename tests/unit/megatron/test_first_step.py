"""What ranks agree on after the first step."""

import pytest

from fgoffload import Action, OffloadPlan, PlanError, Site
from fgoffload.integrations.megatron import first_step
from fgoffload.integrations.megatron.first_step import check_alike

SITE = Site(chunk=0, layer=1, tag="core_attn")
PLAN, OTHER = (OffloadPlan(actions={SITE: action}) for action in (Action.OFFLOAD, Action.RECOMPUTE))


@pytest.fixture
def rows_of_ranks(monkeypatch):
    """The rows that other ranks come with; ours is compared with them as the reduction over processes does."""
    others = []

    def agree(rows):
        return [tuple(map(max, zip(*column, strict=True))) for column in zip(rows, *others, strict=True)]

    monkeypatch.setattr(first_step, "agree", agree)
    return others


def find_rows(selected, plan, monkeypatch):
    rows = []
    with monkeypatch.context() as patch:
        patch.setattr(first_step, "agree", lambda own: rows.extend(own) or own)
        check_alike(selected, plan)
    return rows


@pytest.mark.parametrize(
    ("selected", "plan"), [(("core_attn",), None), (("core_attn",), PLAN), (("moe_act", "core_attn"), PLAN)]
)
def test_ranks_with_the_same_tags_and_plan_go_on(selected, plan, rows_of_ranks, monkeypatch):
    rows_of_ranks.append(find_rows(selected, plan, monkeypatch))
    check_alike(selected, plan)


@pytest.mark.parametrize(
    ("selected", "plan"),
    [(("moe_act",), PLAN), (("core_attn",), OTHER), (("core_attn",), None), (("core_attn", "moe_act"), PLAN)],
)
def test_a_rank_with_other_tags_or_another_plan_stops_all_ranks(selected, plan, rows_of_ranks, monkeypatch):
    rows_of_ranks.append(find_rows(selected, plan, monkeypatch))
    with pytest.raises(PlanError, match="The ranks were given different tags or plans"):
        check_alike(("core_attn",), PLAN)
    rows_of_ranks[:] = [find_rows(("core_attn",), PLAN, monkeypatch)]
    with pytest.raises(PlanError, match="The ranks were given different tags or plans"):
        check_alike(selected, plan)
