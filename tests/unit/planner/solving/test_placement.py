"""Which layers make the choices that a program counted."""

import pytest
from support.toy_ranks import make_toy_layer, make_toy_rank

from fgoffload import Action, Site
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.solving.choices import list_configurations, list_modes
from fgoffload.planner.solving.placement import (
    Order,
    Row,
    drop_row,
    free_most,
    keep_all,
    list_rows,
    list_slots,
    make_plan,
    place_counts,
)
from fgoffload.planner.solving.program import ChunkCounts, ProgramResult

MODES = {"toy": list_modes(make_toy_layer(), min_offloaded_numel=1)}


def find(**actions):
    wanted = tuple(sorted(actions.items()))
    return next(one for one in list_configurations(MODES["toy"]) if one.actions == wanted)


KEPT, ATTENTION, BOTH = find(), find(core_attn=Action.OFFLOAD), find(core_attn=Action.OFFLOAD, expert_fc1=Action.OFFLOAD)


def place(order, *, layers, inner, last):
    slots = list_slots(make_toy_rank(layers=[[make_toy_layer()] * layers]))
    counts = ChunkCounts(last=last, inner={"toy": inner})
    return place_counts(ProgramResult(chunks=(counts,), added_s=0.0, bound_s=0.0, peak_bytes=0), slots, order)


def test_first_layers_keep_least_and_the_last_one_does_what_is_its_own():
    state = place(Order.FIRST, layers=4, inner=((KEPT, 1), (BOTH, 1), (ATTENTION, 1)), last=ATTENTION)
    assert state == (BOTH, ATTENTION, KEPT, ATTENTION)


def test_even_layers_lie_apart():
    state = place(Order.EVEN, layers=6, inner=((KEPT, 3), (BOTH, 2)), last=KEPT)
    # Multiples of the golden ratio order five places as 0, 2, 4, 1, 3: the two that keep least get the first two of them.
    assert state == (BOTH, KEPT, BOTH, KEPT, KEPT, KEPT)


@pytest.mark.parametrize("order", Order)
def test_each_chunk_has_a_last_layer(order):
    pipeline = Pipeline(stages=2, chunks=2, microbatches=2)
    slots = list_slots(make_toy_rank(layers=[[make_toy_layer()] * 2, [make_toy_layer()]], pipeline=pipeline))
    chunks = (ChunkCounts(last=KEPT, inner={"toy": ((BOTH, 1),)}), ChunkCounts(last=ATTENTION, inner={}))
    assert place_counts(ProgramResult(chunks=chunks, added_s=0.0, bound_s=0.0, peak_bytes=0), slots, order) == (
        BOTH,
        KEPT,
        ATTENTION,
    )


def test_a_plan_has_the_rows_of_what_is_not_kept():
    slots = list_slots(make_toy_rank(layers=[[make_toy_layer()] * 2], first_number=5))
    assert make_plan([(slots, (KEPT, BOTH))]).actions == {
        Site(chunk=0, layer=6, tag="core_attn"): Action.OFFLOAD,
        Site(chunk=0, layer=6, tag="expert_fc1"): Action.OFFLOAD,
    }


def test_to_keep_all_and_to_free_most_are_the_ends():
    slots = list_slots(make_toy_rank(layers=[[make_toy_layer()] * 2]))
    assert [one.kept_bytes for one in keep_all(slots, MODES)] == [0, 0]
    assert keep_all(slots, MODES) == (KEPT, KEPT)
    # Of 21 bytes nothing is left where the layer runs again and its input leaves, and where all tensors but the input do 1 is.
    assert [one.kept_bytes for one in free_most(slots, MODES)] == [-21, -21]


def test_a_row_is_dropped_in_all_layers_of_its_kind_and_the_rest_stays():
    slots = list_slots(make_toy_rank(layers=[[make_toy_layer()] * 3]))
    rows = list_rows((KEPT, BOTH, ATTENTION), slots)
    assert rows == [Row(kind="toy", tag=tag, action=Action.OFFLOAD) for tag in ("core_attn", "expert_fc1")]
    assert drop_row((KEPT, BOTH, ATTENTION), slots, MODES, rows[1], min_offloaded_numel=1) == (KEPT, ATTENTION, ATTENTION)
    other = Row(kind="other", tag="core_attn", action=Action.OFFLOAD)
    assert drop_row((KEPT, BOTH, ATTENTION), slots, MODES, other, min_offloaded_numel=1) == (KEPT, BOTH, ATTENTION)
