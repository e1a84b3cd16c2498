"""What a plan makes of one layer, against lists written down by hand."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layer_models import HOLDING, PERMUTATION, PLAIN, SAVED_BYTES, STRETCHES, TENSORS, UNITS, save

from fgoffload import Action, PlanError
from fgoffload.planner.ranks.layer_model import LayerModel, SavedTensor, Segment, UnitModel
from fgoffload.planner.simulation.choice_rules import check_choice
from fgoffload.planner.simulation.layer_choice import Take, resolve_layer

K, R, O, B = Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD, Action.RECOMPUTE_AND_OFFLOAD  # noqa: E741 - as in tables of plans

DISPATCH = STRETCHES.index("dispatch")
FC1, ACT, FC2, COMBINE = (STRETCHES.index(name) for name in ("expert_fc1", "moe_act", "expert_fc2", "moe_combine"))


def resolve(layer=PLAIN, *, min_offloaded_numel=0, staying_tags=frozenset(), **actions):
    return resolve_layer(layer, actions, min_offloaded_numel=min_offloaded_numel, staying_tags=staying_tags)


def get_group(resolved, tag):
    return next(group for group in resolved.groups if group.tag == tag)


def get_leaving(resolved, name):
    return next(one for one in resolved.leaving if one.tensor.name == name)


def list_names(tensors):
    return [tensor.name for tensor in tensors]


def test_a_layer_that_nothing_is_asked_of_keeps_all_that_it_saves():
    resolved = resolve(core_attn=K, layer=PLAIN)
    assert resolved.kept_bytes == SAVED_BYTES == 2495
    assert (resolved.moved_bytes, resolved.recompute_s) == (0, 0)
    assert (resolved.groups, resolved.leaving, resolved.reruns) == ((), (), ())
    assert list_names(resolved.shared) == ["rotary"]


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


def test_a_site_that_stays_asks_for_what_it_shares_with_one_that_left():
    output = get_leaving(resolve(core_attn=O), "attention output")
    assert output.takes == (Take(before=3, unit=None, group=None), Take(before=2, unit=None, group=0))
    assert output.returns_for == 0


@pytest.mark.parametrize(
    ("tag", "end"),
    [
        *(("attn_norm", 3), ("qkv_linear", 1), ("core_attn", 2), ("mlp_norm", COMBINE), ("router", 5)),
        *(("shared_expert", 7), ("expert_fc1", FC1), ("moe_act", FC2), ("expert_fc2", FC2), ("moe_combine", COMBINE)),
    ],
)
def test_groups_end_where_megatron_ends_them(tag, end):
    assert get_group(resolve(**{tag: O}), tag).ends_after == end


def test_dense_groups_end_behind_the_second_linear():
    tags = ("mlp_fc1", "mlp_act", "mlp_fc2")
    layer = LayerModel(
        kind="dense",
        segments=tuple(Segment(name=tag, forward_s=1, backward_s=2) for tag in (*tags, "rest")),
        tensors=tuple(save(tag, tag, size_bytes=10) for tag in tags),
    )
    resolved = resolve(layer, **dict.fromkeys(tags, O))
    assert [group.ends_after for group in resolved.groups] == [2, 2, 2]
    assert [group.opened_before_end for group in resolved.groups] == [3, 3, 3]


def test_groups_are_in_the_order_in_which_forward_reaches_their_sites():
    resolved = resolve(mlp_norm=O, attn_norm=O, qkv_linear=O, moe_act=O, expert_fc2=O)
    assert [group.tag for group in resolved.groups] == ["attn_norm", "qkv_linear", "mlp_norm", "moe_act", "expert_fc2"]
    # The norm before attention ends behind the projection, after the second group began; the one before the MLP ends last.
    assert [group.opened_before_end for group in resolved.groups] == [2, 2, 5, 5, 5]


def test_only_groups_that_end_before_the_wait_are_held_over_it():
    resolved = resolve(HOLDING, attn_norm=O, core_attn=O, mlp_norm=O, router=O, expert_fc1=O)
    held = {group.tag: group.held_over for group in resolved.groups}
    assert held == {"attn_norm": DISPATCH, "core_attn": DISPATCH, "mlp_norm": None, "router": DISPATCH, "expert_fc1": None}
    assert {group.held_over for group in resolve(PLAIN, core_attn=O, router=O).groups} == {None}


def test_what_is_below_the_least_size_stays_and_backward_comes_to_its_site_all_the_same():
    resolved = resolve(core_attn=O, moe_combine=O, min_offloaded_numel=31)
    assert resolved.moved_bytes == 300 + 130
    assert get_group(resolved, "moe_combine").size_bytes == 0
    assert get_group(resolved, "moe_combine").asked_before == COMBINE
    assert resolve(moe_combine=O, min_offloaded_numel=30).moved_bytes == 30


def test_the_least_size_is_one_of_elements():
    log_sum_exp = SavedTensor(name="log-sum-exp", tags=("core_attn",), size_bytes=400, element_bytes=4)
    layer = dataclasses.replace(PLAIN, tensors=(*PLAIN.tensors, log_sum_exp))
    with_it, without = (resolve(layer, core_attn=O, min_offloaded_numel=least).moved_bytes for least in (100, 101))
    assert with_it - without == 400


def test_what_all_layers_share_never_leaves():
    resolved = resolve_layer(PLAIN, {"layer": R, "layer_input": O}, min_offloaded_numel=0)
    assert list_names(one.tensor for one in resolved.leaving) == ["layer input"]
    assert list_names(resolved.shared) == ["rotary"]


def test_what_something_else_holds_stays():
    assert resolve(attn_norm=O).moved_bytes == 100
    resolved = resolve(attn_norm=O, staying_tags=frozenset({"layer_input"}))
    assert (resolved.moved_bytes, resolved.kept_bytes) == (0, SAVED_BYTES)


def test_a_unit_drops_its_tensors_and_makes_them_again_right_before_backward_asks():
    resolved = resolve(moe_act=R)
    assert resolved.kept_bytes == 2495 - 350
    (rerun,) = resolved.reruns
    assert (rerun.unit, rerun.before, rerun.segments) == ("moe_act", FC2, (ACT,))
    # There when the activation has run again, and gone when the linear behind it has had its backward.
    (made,) = rerun.made
    assert (made.tensor.name, made.saved_after, made.freed_after) == ("activated", ACT, FC2)
    assert resolved.recompute_s == 1 + 0.25


PERMUTING = dataclasses.replace(PLAIN, units=(*UNITS, PERMUTATION))


def test_what_forward_holds_of_what_runs_again_is_there_to_the_end_of_the_layer():
    resolved = resolve(PERMUTING, dispatch=R)
    assert resolved.kept_bytes == 2495 - 400
    assert resolved.recompute_s == 0.75
    before, after = resolve(PERMUTING).saved_bytes, resolved.saved_bytes
    # Saved or not, it is there behind the first linear; and it is gone with what the layer returns.
    assert after[FC1] == before[FC1] == 400
    assert (before[COMBINE], after[COMBINE]) == (30, 30 - 400)
    assert {place for place in before if before[place] != after[place]} == {COMBINE}
    assert sum(after.values()) == resolved.kept_bytes
    (made,) = resolved.reruns[0].made
    assert (made.tensor.name, made.saved_after, made.freed_after) == ("permuted tokens", DISPATCH, FC1)


def test_a_permutation_asks_for_what_the_router_saved():
    leaving = get_leaving(resolve(PERMUTING, dispatch=R, router=O, shared_expert=O), "normed residual")
    assert [(take.before, take.unit) for take in leaving.takes] == [(FC1, "dispatch"), (7, None), (5, None)]
    assert len(get_leaving(resolve(PERMUTING, router=O, shared_expert=O), "normed residual").takes) == 2


def test_what_a_unit_has_beside_is_there_until_the_backward_of_its_last_stretch():
    (rerun,) = resolve(mlp_norm=R).reruns
    assert [(made.tensor.size_bytes, made.saved_after, made.freed_after) for made in rerun.made] == [(150, 4, 5), (9, 4, 4)]


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


def test_a_layer_that_runs_again_keeps_its_input_which_may_leave_as_a_row_of_its_own():
    kept = resolve_layer(PLAIN, {"layer": R}, min_offloaded_numel=0)
    assert (kept.kept_bytes, kept.recompute_s) == (100, 12)
    assert sum(made.tensor.size_bytes for made in kept.reruns[0].made) == 2495 - 100
    left = resolve_layer(PLAIN, {"layer": R, "layer_input": O}, min_offloaded_numel=0)
    assert (left.kept_bytes, left.moved_bytes) == (0, 100)
    (group,) = left.groups
    assert (group.ends_after, group.asked_before) == (COMBINE, COMBINE)
    assert get_leaving(left, "layer input").takes[0] == Take(before=COMBINE, unit="layer", group=0)


def test_a_unit_keeps_its_input_instead_of_what_it_drops():
    resolved = resolve(moe=R)
    assert resolved.kept_bytes == 100 + 110 + 300 + 130 + 5 + 140 + 150
    kept = {one.tensor.name: (one.saved_after, one.freed_after) for one in resolved.kept}
    assert kept["normed residual"] == (5, 5)
    made = [one.tensor.name for rerun in resolved.reruns for one in rerun.made]
    assert "normed residual" not in made


def test_a_unit_that_makes_the_input_of_another_runs_before_it():
    resolved = resolve(moe=R, mlp_norm=R)
    # Nobody saves the norm's output then, and the experts ask for it when the layer's backward begins.
    assert resolved.kept_bytes == 100 + 110 + 300 + 130 + 5 + 140
    assert [(rerun.unit, rerun.before) for rerun in resolved.reruns] == [("mlp_norm", COMBINE), ("moe", COMBINE)]
    made = [one.tensor.name for rerun in resolved.reruns for one in rerun.made]
    assert made.count("normed residual") == 1


def test_a_tag_that_no_unit_covers_may_leave_beside_it():
    resolved = resolve(core_attn=R, attn_proj=O)
    assert list_names(one.tensor for one in resolved.leaving) == ["attention output"]
    # Attention makes its output anew where it runs again, so only the projection asks for the one that left.
    assert get_leaving(resolved, "attention output").takes == (Take(before=3, unit=None, group=0),)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ({"moe": R, "router": O}, "recomputes 'moe' and offloads 'router'.*saves nothing that could leave"),
        ({"core_attn": B}, "recomputes 'core_attn' and offloads 'core_attn'"),
        ({"moe_act": R, "expert_fc2": O}, "recomputes 'moe_act' and offloads 'expert_fc2'"),
        ({"layer": R, "moe": R}, "recomputes 'layer' and 'moe'.*'moe' is a part of 'layer'"),
        ({"layer": R, "attn_norm": R}, "recomputes 'layer' and 'attn_norm'"),
        ({"layer": B}, "offloads 'layer' in a layer of kind 'moe', where no such tag saves anything"),
        ({"layer_input": O}, "offloads 'layer_input'.*does not recompute 'layer'"),
        ({"attn_proj": O}, "offloads 'attn_proj' and keeps 'core_attn'.*Offload 'core_attn' too"),
        ({"mlp_act": O}, "offloads 'mlp_act'.*It has: layer_input, attn_norm, qkv_linear"),
        ({"mlp": R}, "recomputes 'mlp'.*can run again: layer, attn_norm"),
        ({"expert_fc1": R}, "recomputes 'expert_fc1'.*can run again"),
        ({"qkv": O}, "offloads 'qkv'"),
    ],
    ids=str,
)
def test_what_a_layer_cannot_do_is_refused_with_the_pair(actions, message):
    with pytest.raises(PlanError, match=message):
        resolve_layer(PLAIN, actions, min_offloaded_numel=0)


def test_a_unit_and_one_that_reads_what_it_makes_are_refused_as_what_they_are():
    first = UnitModel(name="expert_fc1", segments=("expert_fc1", "moe_act"), drops=("gate and up",), before="expert_fc2")
    layer = dataclasses.replace(PERMUTING, units=(*PERMUTING.units, first))
    with pytest.raises(PlanError, match=r"'dispatch' and 'expert_fc1'.*cannot both run again"):
        resolve(layer, dispatch=R, expert_fc1=R)
    with pytest.raises(PlanError, match=r"recomputes 'dispatch' and offloads 'expert_fc1'.*saves nothing that could leave"):
        resolve(layer, dispatch=R, expert_fc1=O)


def test_what_excludes_each_other_is_refused():
    layer = dataclasses.replace(PLAIN, tensors=(*TENSORS, save("fused", "fused_group_mlp", size_bytes=50)))
    with pytest.raises(PlanError, match=r"'fused_group_mlp' and 'expert_fc1'.*cannot have both"):
        resolve(layer, fused_group_mlp=O, expert_fc1=O)


def test_the_same_choice_is_the_same_object():
    assert resolve(core_attn=O, router=K) is resolve(router=K, core_attn=O) is resolve(core_attn=O)
    assert resolve(core_attn=O) is not resolve(HOLDING, core_attn=O)


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
