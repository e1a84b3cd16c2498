"""The order in which small changes to a plan are tried."""

import math

from hypothesis import given
from hypothesis import strategies as st
from support.toy_ranks import make_toy_layer, make_toy_rank

from fgoffload import Action
from fgoffload.planner.solving.choices import list_configurations, list_modes
from fgoffload.planner.solving.moves import Change, order_moves, spread
from fgoffload.planner.solving.placement import keep_all, list_slots

LAYERS = 6


def make_changes(times, *, peak_bytes=-10):
    """Return slots, what they keep, and by tag one change for each layer that lets it leave in so many seconds."""
    layer = make_toy_layer()
    slots = list_slots(make_toy_rank(layers=[[layer] * LAYERS]))
    modes = {"toy": list_modes(layer, min_offloaded_numel=1)}
    found = {one.actions: one for one in list_configurations(modes["toy"])}
    moves = [
        (
            Change(
                place=place,
                part=None,
                configuration=found[((tag, Action.OFFLOAD),)],
                peak_bytes=peak_bytes,
                step_s=step_s,
            ),
        )
        for tag, step_s in times.items()
        for place in range(LAYERS)
    ]
    return keep_all(slots, modes), slots, moves


def write(moves):
    """Return tags and layers."""
    return [(one.configuration.actions[0][0], one.place) for (one,) in moves]


def test_a_change_is_tried_in_two_layers_before_another_one_has_its_turn():
    state, slots, moves = make_changes({"core_attn": 2.0, "moe_act": 1.0})
    found = write(order_moves(state, slots, moves, above_bytes=5, doubt_bytes=0.0))
    assert found == [
        *(("moe_act", 0), ("moe_act", 4), ("core_attn", 0), ("core_attn", 4)),
        *(("moe_act", 1), ("moe_act", 2), ("core_attn", 1), ("core_attn", 2)),
        *(("moe_act", 3), ("moe_act", 5), ("core_attn", 3), ("core_attn", 5)),
    ]


def test_above_the_budget_what_frees_too_little_is_tried_in_doubt_alone_and_last():
    state, slots, moves = make_changes({"core_attn": 2.0})
    assert order_moves(state, slots, moves, above_bytes=11, doubt_bytes=100.0) == []
    assert len(order_moves(state, slots, moves, above_bytes=11, doubt_bytes=math.inf)) == LAYERS


def test_within_the_budget_what_takes_time_or_too_many_bytes_is_tried_in_doubt_alone():
    state, slots, slower = make_changes({"core_attn": 2.0})
    assert order_moves(state, slots, slower, above_bytes=-5, doubt_bytes=100.0) == []
    assert len(order_moves(state, slots, slower, above_bytes=-5, doubt_bytes=math.inf)) == LAYERS
    state, slots, larger = make_changes({"core_attn": -2.0}, peak_bytes=10)
    assert order_moves(state, slots, larger, above_bytes=-5, doubt_bytes=4.0) == []
    assert len(order_moves(state, slots, larger, above_bytes=-5, doubt_bytes=5.0)) == LAYERS


@given(st.lists(st.integers(), max_size=40))
def test_spread_numbers_are_all_there(numbers):
    assert sorted(spread(numbers)) == sorted(numbers)
    assert spread(numbers)[:1] == numbers[:1]


def test_spread_numbers_begin_far_from_each_other():
    assert spread(range(8)) == [0, 4, 2, 6, 1, 5, 3, 7]
