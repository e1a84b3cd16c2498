"""What a plan makes of one layer, against lists written down by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layer_models import HOLDING, PLAIN, STRETCHES, TENSORS, UNITS

from fgoffload import Action, PlanError
from fgoffload.planner.simulation.choice_rules import check_choice
from fgoffload.planner.simulation.layer_choice import Take, resolve_layer

K, R, O, B = Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD, Action.RECOMPUTE_AND_OFFLOAD  # noqa: E741 - as in tables of plans

FC1, ACT, FC2, COMBINE = (STRETCHES.index(name) for name in ("expert_fc1", "moe_act", "expert_fc2", "moe_combine"))


def resolve(layer=PLAIN, *, min_offloaded_numel=0, staying_tags=frozenset(), **actions):
    return resolve_layer(layer, actions, min_offloaded_numel=min_offloaded_numel, staying_tags=staying_tags)


def get_group(resolved, tag):
    return next(group for group in resolved.groups if group.tag == tag)


def get_leaving(resolved, name):
    return next(one for one in resolved.leaving if one.tensor.name == name)


def list_names(tensors):
    return [tensor.name for tensor in tensors]


def test_what_is_saved_is_there_from_its_first_tag_to_the_end_of_that_tags_backward():
    kept = {one.tensor.name: (one.saved_after, one.freed_after) for one in resolve().kept}
    assert kept["attention output"] == (2, 2)
    assert kept["layer input"] == (0, 0)
    # Its tags are the other way round, and the router comes first in these layers.
    assert kept["normed residual"] == (5, 5)


def test_a_tensor_of_two_offloaded_tags_leaves_once_with_the_first_and_returns_for_the_last():
    resolved = resolve(core_attn=O, attn_proj=O)
    assert resolved.moved_bytes == 300 + 130 + 5
    assert resolved.kept_bytes == 2495 - 435
    assert get_group(resolved, "core_attn").size_bytes == 435
    assert get_group(resolved, "attn_proj").size_bytes == 0
    output = get_leaving(resolved, "attention output")
    assert (output.leaves_with, output.returns_for) == (0, 1)
    assert output.takes == (Take(before=3, unit=None, group=1), Take(before=2, unit=None, group=0))
    assert get_group(resolved, "attn_proj").asked_before == 3
    assert get_group(resolved, "core_attn").asked_before == 2


def test_what_is_below_the_least_size_stays_and_backward_comes_to_its_site_all_the_same():
    resolved = resolve(core_attn=O, moe_combine=O, min_offloaded_numel=31)
    assert resolved.moved_bytes == 300 + 130
    assert get_group(resolved, "moe_combine").size_bytes == 0
    assert get_group(resolved, "moe_combine").asked_before == COMBINE
    assert resolve(moe_combine=O, min_offloaded_numel=30).moved_bytes == 30


def test_a_unit_drops_its_tensors_and_makes_them_again_right_before_backward_asks():
    resolved = resolve(moe_act=R)
    assert resolved.kept_bytes == 2495 - 350
    (rerun,) = resolved.reruns
    assert (rerun.unit, rerun.before, rerun.segments) == ("moe_act", FC2, (ACT,))
    # There when the activation has run again, and gone when the linear behind it has had its backward.
    (made,) = rerun.made
    assert (made.tensor.name, made.saved_after, made.freed_after) == ("activated", ACT, FC2)
    assert resolved.recompute_s == 1 + 0.25


@pytest.mark.parametrize(
    ("unit", "name", "before"), [("attn_norm", "layer input", 1), ("mlp_norm", "residual", 7), ("moe_act", "gate and up", FC2)]
)
def test_the_input_of_what_runs_again_may_leave_and_is_back_for_it(unit, name, before):
    resolved = resolve(**{unit: B})
    leaving = get_leaving(resolved, name)
    assert leaving.takes[0] == Take(before=before, unit=unit, group=0)
    assert leaving.freed_after == STRETCHES.index(unit)
    assert resolved.groups[0].asked_before == before
    assert resolved.kept_bytes == resolve(**{unit: R}).kept_bytes - leaving.tensor.size_bytes


def test_a_unit_keeps_its_input_instead_of_what_it_drops():
    resolved = resolve(moe=R)
    assert resolved.kept_bytes == 100 + 110 + 300 + 130 + 5 + 140 + 150
    kept = {one.tensor.name: (one.saved_after, one.freed_after) for one in resolved.kept}
    assert kept["normed residual"] == (5, 5)
    made = [one.tensor.name for rerun in resolved.reruns for one in rerun.made]
    assert "normed residual" not in made


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ({"moe": R, "router": O}, "recomputes 'moe' and offloads 'router'.*saves nothing that could leave"),
        ({"core_attn": B}, "recomputes 'core_attn' and offloads 'core_attn'"),
        ({"layer": R, "moe": R}, "recomputes 'layer' and 'moe'.*'moe' is a part of 'layer'"),
        ({"layer": B}, "offloads 'layer' in a layer of kind 'moe', where no such tag saves anything"),
        ({"layer_input": O}, "offloads 'layer_input'.*does not recompute 'layer'"),
        ({"attn_proj": O}, "offloads 'attn_proj' and keeps 'core_attn'.*Offload 'core_attn' too"),
        ({"mlp": R}, "recomputes 'mlp'.*can run again: layer, attn_norm"),
    ],
    ids=str,
)
def test_what_a_layer_cannot_do_is_refused_with_the_pair(actions, message):
    with pytest.raises(PlanError, match=message):
        resolve_layer(PLAIN, actions, min_offloaded_numel=0)


@st.composite
def choices(draw):
    """Return what a layer can do, drawn from all sites and units."""
    names = sorted({tag for tensor in TENSORS for tag in tensor.tags} | {unit.name for unit in UNITS})
    chosen = {}
    for name in draw(st.permutations(names)):
        attempt = chosen | {name: draw(st.sampled_from((K, K, R, O, B)))}
        try:
            check_choice(PLAIN, attempt)
        except PlanError:
            continue
        chosen = attempt
    return chosen


@settings(deadline=None, max_examples=100)
@given(choices(), st.sampled_from((0, 31, 145)))
def test_every_byte_is_kept_or_moved_or_made_again(actions, min_offloaded_numel):
    resolved = resolve_layer(HOLDING, actions, min_offloaded_numel=min_offloaded_numel)
    names = [one.tensor.name for one in (*resolved.kept, *resolved.leaving)]
    made = [one.tensor.name for rerun in resolved.reruns for one in rerun.made if not one.tensor.name.startswith("beside")]
    assert sorted((*names, *made, "rotary")) == sorted(list_names(TENSORS))
    assert sum(group.size_bytes for group in resolved.groups) == resolved.moved_bytes
    assert all(one.tensor.size_bytes >= min_offloaded_numel for one in resolved.leaving)
    for one in resolved.leaving:
        assert one.takes
        assert min(take.before for take in one.takes) >= one.freed_after
        assert resolved.groups[one.leaves_with].ends_after >= one.saved_after
