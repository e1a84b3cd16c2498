"""What a layer may choose from: each effect once, its bytes by hand, and parts that add up."""

import doctest
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.deepseek_ranks import make_layer
from support.toy_ranks import make_toy_layer

from fgoffload import Action, PlanError
from fgoffload.planner.ranks.layer_model import LayerModel, SavedTensor, Segment
from fgoffload.planner.simulation.layer_choice import resolve_layer
from fgoffload.planner.solving import choices
from fgoffload.planner.solving.choices import count_configurations, list_configurations, list_modes, measure_actions
from fgoffload.units import MIB

KEEP, RECOMPUTE, OFFLOAD, BOTH = Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD, Action.RECOMPUTE_AND_OFFLOAD


def find_choice(modes, **actions):
    """Return the choice of a part, in any mode, that does exactly `actions`."""
    wanted = tuple(sorted(actions.items()))
    return next(one for mode in modes for part in (*mode.parts, (mode.base,)) for one in part if one.actions == wanted)


def test_a_toy_layer_has_26_ways():
    """Attention and the first linear keep or leave, 2 each; the activation and what follows it have 6, the whole layer 2."""
    modes = list_modes(make_toy_layer(), min_offloaded_numel=1)
    assert [mode.base.actions for mode in modes] == [(), (("layer", RECOMPUTE),)]
    assert [[len(part) for part in mode.parts] for mode in modes] == [[2, 2, 6], [2]]
    assert count_configurations(modes) == 2 * 2 * 6 + 2


def test_the_first_ways_of_the_first_mode_keep_everything():
    mode = list_modes(make_toy_layer(), min_offloaded_numel=1)[0]
    assert [part[0].actions for part in mode.parts] == [(), (), ()]


@pytest.mark.parametrize(
    ("actions", "kept", "moved", "groups", "recompute_s", "returned"),
    [
        ({"core_attn": OFFLOAD}, -8, 8, 1, 0.0, 0),
        ({"moe_act": RECOMPUTE}, -2, 0, 0, 1.0, 2),
        ({"moe_act": BOTH}, -6, 4, 1, 1.0, 2),
        ({"moe_act": OFFLOAD, "expert_fc2": OFFLOAD}, -6, 6, 2, 0.0, 0),
        ({"layer": RECOMPUTE}, -20, 0, 0, 10.0, 20),
    ],
)
def test_a_choice_has_the_bytes_and_seconds_of_its_tensors_and_units(actions, kept, moved, groups, recompute_s, returned):
    """Of a layer that saves 1 + 8 + 6 + 4 + 2 bytes and whose forward takes 4 + 3 + 1 + 2 seconds."""
    choice = find_choice(list_modes(make_toy_layer(), min_offloaded_numel=1), **actions)
    assert (choice.kept_bytes, choice.moved_bytes, choice.groups) == (kept, moved, groups)
    assert (choice.recompute_s, choice.returned_bytes) == (recompute_s, returned)


def test_under_recompute_of_the_layer_its_input_may_leave_and_nothing_else():
    mode = list_modes(make_toy_layer(), min_offloaded_numel=1)[1]
    assert [[choice.actions for choice in part] for part in mode.parts] == [[(), (("layer_input", OFFLOAD),)]]
    assert mode.parts[0][1].kept_bytes == -1


def test_a_site_below_the_least_that_moves_has_nothing_to_choose():
    # Of 8, 6, 4 and 2 bytes, and an input of 1, those of 4 and 2 and the input cannot leave: only the activation runs again.
    modes = list_modes(make_toy_layer(), min_offloaded_numel=5)
    assert [[len(part) for part in mode.parts] for mode in modes] == [[2, 2, 2], []]


def test_tags_that_save_one_storage_are_one_part():
    tensors = (
        SavedTensor(name="query, key and value", tags=("core_attn",), size_bytes=3),
        SavedTensor(name="attention output", tags=("core_attn", "attn_proj"), size_bytes=2),
    )
    segments = tuple(Segment(name=name, forward_s=1.0, backward_s=2.0) for name in ("core_attn", "attn_proj"))
    modes = list_modes(LayerModel(kind="attention", segments=segments, tensors=tensors), min_offloaded_numel=1)
    # The projection needs attention to leave too, and frees nothing more then; but what both save comes back for it.
    assert [[dict(choice.actions) for choice in part] for part in modes[0].parts] == [
        [{}, {"core_attn": OFFLOAD}, {"core_attn": OFFLOAD, "attn_proj": OFFLOAD}]
    ]
    assert [choice.moved_bytes for choice in modes[0].parts[0]] == [0, 5, 5]


def list_allowed(layer):
    """Yield every set of actions that the layer can follow."""
    names = [*dict.fromkeys(tag for tensor in layer.tensors for tag in tensor.tags), *(unit.name for unit in layer.units)]
    names = list(dict.fromkeys(names))
    for chosen in itertools.product(Action, repeat=len(names)):
        actions = dict(zip(names, chosen, strict=True))
        try:
            resolve_layer(layer, actions, min_offloaded_numel=1)
        except PlanError:
            continue
        yield actions


def describe(layer, actions):
    resolved = resolve_layer(layer, actions, min_offloaded_numel=1)
    return (
        frozenset(one.tensor.name for one in resolved.leaving),
        frozenset(rerun.unit for rerun in resolved.reruns),
        resolved.kept_bytes,
    )


def test_whatever_a_layer_can_follow_has_the_effect_of_exactly_one_way():
    layer = make_toy_layer()
    ways = [describe(layer, dict(way.actions)) for way in list_configurations(list_modes(layer, min_offloaded_numel=1))]
    assert len(ways) == len(set(ways))
    assert set(ways) == {describe(layer, actions) for actions in list_allowed(layer)}


@pytest.mark.parametrize("kind", ["dense", "moe"])
@given(st.data())
@settings(deadline=None, max_examples=40)
def test_parts_add_up_to_the_whole_layer(kind, data):
    layer = make_layer(kind)
    modes = list_modes(layer, min_offloaded_numel=2 * MIB)
    mode = data.draw(st.sampled_from(modes))
    way = choices.Configuration(mode=mode, chosen=tuple(data.draw(st.sampled_from(part)) for part in mode.parts))
    whole = measure_actions(layer, dict(way.actions), min_offloaded_numel=2 * MIB)
    assert (way.kept_bytes, way.moved_bytes) == (whole.kept_bytes, whole.moved_bytes)
    assert way.recompute_s == pytest.approx(whole.recompute_s)
    assert way.returned_bytes == whole.returned_bytes


def test_the_example_runs():
    assert doctest.testmod(choices).failed == 0
