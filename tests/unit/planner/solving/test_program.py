"""The mixed-integer program of a rank: against all counts tried one by one, and each rule by hand."""

import dataclasses
import itertools
import random

import pytest
from support.toy_ranks import make_toy_layer, make_toy_rank

from fgoffload import Action, OffloadPlan, TransferPolicy
from fgoffload.planner.ranks.schedule import PassKind, Pipeline
from fgoffload.planner.simulation.simulator import simulate_rank
from fgoffload.planner.solving.choices import Choice, Configuration, Mode, list_configurations, list_modes
from fgoffload.planner.solving.frontier import LayerPoint, LayerPoints, Place, find_efficient, measure_layer
from fgoffload.planner.solving.moments import list_moments
from fgoffload.planner.solving.placement import list_slots, make_plan
from fgoffload.planner.solving.program import solve_program
from fgoffload.units import GIB, MIB

SAVED_BYTES = 21
"""Of a toy layer, in its five tensors."""


def make_point(
    *, kept_bytes, moved_bytes=0, recompute_s=0.0, inner_s=0.0, last_s=0.0, d2h_s=0.0, inner_extra=0, last_extra=0, scale=GIB
):
    """Return a way to treat a layer with these costs, in units of `scale`: what differs by MiB is alike to the program."""
    actions = (("core_attn", Action.OFFLOAD),) if moved_bytes else ()
    choice = Choice(
        actions=(*actions, (f"way of {kept_bytes} {moved_bytes} {inner_s} {last_s}", Action.RECOMPUTE)),
        kept_bytes=(kept_bytes - SAVED_BYTES) * scale,
        moved_bytes=moved_bytes * scale,
        recompute_s=recompute_s,
    )
    return LayerPoint(
        configuration=Configuration(mode=Mode(base=choice, parts=()), chosen=()),
        kept_bytes=kept_bytes * scale,
        inner=Place(added_s=inner_s, d2h_s=d2h_s, extra_bytes=inner_extra * scale),
        last=Place(added_s=last_s, d2h_s=d2h_s, extra_bytes=last_extra * scale),
    )


def make_rank(*, scale=GIB, layers=3, **options):
    """Return a rank of one chunk with 2 microbatches in flight and 3 in a step."""
    layer = make_toy_layer(sizes=tuple(size * scale for size in (1, 8, 6, 4, 2)))
    return make_toy_rank(layers=[[layer] * layers], pipeline=Pipeline(stages=2, microbatches=3), **options)


def pick(points):
    """Return `points` as a program takes them, all of them everywhere."""
    return {
        kind: LayerPoints(
            every=tuple(of_kind),
            inner=tuple(of_kind),
            last=tuple(of_kind),
            last_unwatched=tuple(of_kind),
            # Bytes beside what is kept in steps of eight times that, 1 GiB, and waits in steps of 16 times, 4 ms.
            resolution_s=0.25e-3,
            resolution_bytes=GIB // 8,
        )
        for kind, of_kind in points.items()
    }


def read(result):
    """Return the GiB that the layers keep less than all, the inner ones first and then the last one."""
    chunk = result.chunks[0]
    inner = [one.kept_bytes // GIB for one, count in chunk.inner.get("toy", ()) for _ in range(count)]
    return sorted(inner), chunk.last.kept_bytes // GIB


def list_freed(result):
    """Return the same in no particular order."""
    inner, last = read(result)
    return sorted([*inner, last])


def test_what_fits_is_kept():
    points = {"toy": [make_point(kept_bytes=21), make_point(kept_bytes=5, inner_s=1.0, last_s=1.0)]}
    result = solve_program(make_rank(), pick(points), budget_bytes=2 * 3 * 21 * GIB)
    assert read(result) == ([0, 0], 0)
    assert (result.added_s, result.peak_bytes) == (0.0, 126 * GIB)


def test_a_little_less_costs_the_layer_that_is_cheapest():
    # An inner layer adds 1 s for each of 3 microbatches, the last one 2 s.
    points = {"toy": [make_point(kept_bytes=21), make_point(kept_bytes=20, inner_s=1.0, last_s=2.0)]}
    result = solve_program(make_rank(), pick(points), budget_bytes=2 * 3 * 21 * GIB - MIB, gap=0.0)
    assert read(result) == ([-1, 0], 0)
    assert result.added_s == pytest.approx(3.0)
    assert result.bound_s == pytest.approx(3.0)


@pytest.mark.parametrize("scale", [1, 1024, GIB])
def test_layers_of_a_few_bytes_are_counted_as_well_as_those_of_gibibytes(scale):
    points = {"toy": [make_point(kept_bytes=21, scale=scale), make_point(kept_bytes=20, inner_s=1.0, last_s=2.0, scale=scale)]}
    result = solve_program(make_rank(scale=scale), pick(points), budget_bytes=2 * (3 * 21 - 1) * scale, gap=0.0)
    assert (result.added_s, result.peak_bytes) == (pytest.approx(3.0), 124 * scale)


def test_nothing_fits_below_what_the_cheapest_ways_keep():
    points = {"toy": [make_point(kept_bytes=21), make_point(kept_bytes=20, inner_s=1.0, last_s=2.0)]}
    assert solve_program(make_rank(), pick(points), budget_bytes=2 * 3 * 20 * GIB - MIB) is None
    least = solve_program(make_rank(), pick(points), budget_bytes=None)
    assert (read(least), least.peak_bytes) == (([-1, -1], -1), 120 * GIB)


def test_a_host_budget_is_for_all_microbatches_in_flight():
    # To leave is free. With two in flight 10 bytes of host hold 5 bytes of a microbatch: one layer, and no second.
    points = {
        "toy": [
            make_point(kept_bytes=21),
            make_point(kept_bytes=16, moved_bytes=5),
            make_point(kept_bytes=10, inner_s=9.0, last_s=9.0),
        ]
    }
    rank = make_rank(host_budget_bytes=10 * GIB)
    result = solve_program(rank, pick(points), budget_bytes=2 * (3 * 21 - 5) * GIB, gap=0.0)
    assert (list_freed(result), result.added_s) == ([-5, 0, 0], pytest.approx(0.0, abs=1e-9))
    result = solve_program(rank, pick(points), budget_bytes=2 * (3 * 21 - 6) * GIB, gap=0.0)
    assert (list_freed(result), result.added_s) == ([-11, 0, 0], pytest.approx(27.0))


def test_the_first_copy_back_is_waited_for_where_the_last_layer_moves_nothing():
    # Inner layers move for nothing among others, but the first copy back of a pass takes 2 s unless the last layer moves too,
    # which adds 1 s to it.
    points = {"toy": [make_point(kept_bytes=21), make_point(kept_bytes=11, moved_bytes=10, inner_s=0.0, last_s=2.0)]}
    last = make_point(kept_bytes=20, moved_bytes=1, inner_s=9.0, last_s=1.0)
    budget_bytes = 2 * (21 + 11 + 11) * GIB
    assert solve_program(make_rank(), pick(points), budget_bytes=budget_bytes, gap=0.0).added_s == pytest.approx(3 * 2.0)
    points["toy"].append(last)
    result = solve_program(make_rank(), pick(points), budget_bytes=budget_bytes, gap=0.0)
    assert (read(result), result.added_s) == (([-10, -10], -1), pytest.approx(3 * 1.0))


def test_a_price_on_bytes_that_leave_counts_for_each_microbatch():
    # Of two ways to free 10 GiB the one that moves them is free and the other takes 1 s: 1.5 s for the copies turn that round.
    points = {
        "toy": [
            make_point(kept_bytes=21),
            make_point(kept_bytes=11, moved_bytes=10),
            make_point(kept_bytes=11, inner_s=1.0, last_s=1.0),
        ]
    }
    budget_bytes = 2 * 3 * 11 * GIB
    free = solve_program(make_rank(), pick(points), budget_bytes=budget_bytes, gap=0.0)
    assert free.added_s == pytest.approx(0.0, abs=1e-9)
    priced = solve_program(make_rank(), pick(points), budget_bytes=budget_bytes, moved_s_per_byte=0.15 / GIB, gap=0.0)
    assert priced.added_s == pytest.approx(3 * 3 * 1.0)


@pytest.mark.parametrize(
    ("layers", "waited_s", "recompute_s", "late_s"),
    [
        # Forward of a layer takes 10 s and its copies 12; a window of 8 bytes at a byte a second is 8 s more.
        (3, 0.0, 0.0, 0.0),
        (4, 0.0, 0.0, 0.0),
        (6, 0.0, 0.0, 4.0),
        # What layers are known to wait for themselves is not counted twice, and what they run again in backward is no wait.
        (6, 1.0, 0.0, 0.0),
        (6, 0.0, 5.0, 4.0),
    ],
)
def test_what_all_layers_together_move_beyond_what_the_link_takes_is_waited_for(layers, waited_s, recompute_s, late_s):
    inner_s = waited_s + recompute_s
    moving = make_point(kept_bytes=9, moved_bytes=12, recompute_s=recompute_s, inner_s=inner_s, last_s=inner_s, d2h_s=12.0)
    result = solve_program(
        make_rank(layers=layers),
        pick({"toy": [make_point(kept_bytes=21), moving]}),
        budget_bytes=2 * layers * 9 * GIB,
        gap=0.0,
    )
    assert result.added_s == pytest.approx(3 * (layers * inner_s + late_s))


@pytest.mark.parametrize("layers", [24, 48])
def test_of_a_long_chunk_whose_copies_are_late_the_program_says_what_the_simulator_does(layers):
    # Copies of a layer take 11 s beside 10 s of its forward. It takes 16 layers to fill the window, and more than those whose
    # short simulation says what a layer costs.
    layer = make_toy_layer(sizes=(0, 11, 0, 0, 0))
    rank = make_toy_rank(
        layers=[[layer] * layers],
        pipeline=Pipeline(microbatches=4),
        policy=TransferPolicy(window_bytes=16, prefetch_bytes=22),
    )
    modes = list_modes(layer, min_offloaded_numel=1)
    points = {"toy": measure_layer(rank, layer, modes)}
    moved = next(one for one in list_configurations(modes) if one.actions == (("core_attn", Action.OFFLOAD),))
    state = (moved,) * layers
    slots = list_slots(rank)
    kept_s = simulate_rank(rank, OffloadPlan(actions={})).step_s
    added_s = simulate_rank(rank, make_plan([(slots, state)])).step_s - kept_s
    same = tuple(point for point in points["toy"].every if point.configuration.actions == moved.actions)
    moving = {"toy": dataclasses.replace(points["toy"], inner=same, last=same)}
    result = solve_program(rank, moving, budget_bytes=2**40, gap=0.0)
    assert added_s > 0
    assert result.added_s == pytest.approx(added_s, rel=0.1)


def test_what_is_back_from_recompute_counts_once_and_less_what_the_last_layer_has_freed():
    # Each layer that runs again has 4 units back while backward is in it, the last one with everything of two microbatches
    # there, an inner one when the 21 that the last layer kept are gone.
    points = {
        "toy": [
            make_point(kept_bytes=21),
            make_point(kept_bytes=11, inner_s=1.0, last_s=1.0, inner_extra=4, last_extra=4),
        ]
    }
    rank = make_rank()
    peak_units = {budget: solve_program(rank, pick(points), budget_bytes=budget * GIB, gap=0.0) for budget in (106, 90, 70)}
    # One or two inner layers: 126 - 20 and 126 - 40, and 4 beside that are hidden by the 21.
    assert [round(result.peak_bytes / GIB) for result in peak_units.values()] == [106, 86, 70]
    assert read(peak_units[70]) == ([-10, -10], -10)
    assert solve_program(rank, pick(points), budget_bytes=69 * GIB) is None


def count_peak(rank, inner, last):
    """Return the most at any moment where the layers do that, by the rules that the program's page states."""
    kept = last.kept_bytes + sum(one.kept_bytes for one in inner)
    extra = max([last.last.extra_bytes, *(one.inner.extra_bytes - last.kept_bytes for one in inner)])
    return max(
        rank.static_bytes
        + moment.in_flight[0] * kept
        + (extra if moment.gap.after is not None and moment.gap.after[0] is PassKind.BACKWARD else 0)
        for moment in list_moments(rank.passes, chunks=1)
    )


def brute_force(rank, points, budget_bytes):
    """Return the least added time of all counts, by the rules that the program's page states."""
    inner_layers = len(rank.chunks[0].layers) - 1
    best = None
    for last in points:
        for inner in itertools.combinations_with_replacement(points, inner_layers):
            moving = [one for one in inner if one.configuration.moved_bytes]
            first = 0.0
            if moving and not last.configuration.moved_bytes:
                # The program shares the wait among the inner layers: it does not know which of them comes first.
                first = max(max(one.last.added_s - one.inner.added_s, 0.0) for one in moving)
            added = 3 * (last.last.added_s + sum(one.inner.added_s for one in inner) + first)
            if count_peak(rank, inner, last) <= budget_bytes and (best is None or added < best):
                best = added
    return best


@pytest.mark.parametrize("seed", range(12))
def test_it_finds_the_best_of_all_counts(seed):
    draw = random.Random(seed)
    points = [make_point(kept_bytes=21)]
    for _ in range(6):
        moved = draw.choice((0, draw.randint(1, 6)))
        inner_s = 0.002 * draw.randint(1, 9)
        points.append(
            make_point(
                kept_bytes=draw.randint(2, 20),
                moved_bytes=moved,
                inner_s=inner_s,
                # In steps of 4 ms, to which the program rounds waits.
                last_s=inner_s + 0.004 * draw.randint(0, 5),
                inner_extra=draw.randint(0, 30),
                last_extra=draw.randint(0, 10),
            )
        )
    rank = make_rank(static_bytes=5 * GIB)
    least = solve_program(rank, pick({"toy": points}), budget_bytes=None).peak_bytes
    for part in (0.0, 0.3, 0.7):
        budget_bytes = round(least + part * (131 * GIB - least)) + 1
        result = solve_program(rank, pick({"toy": points}), budget_bytes=budget_bytes, gap=0.0)
        assert result.added_s == pytest.approx(brute_force(rank, points, budget_bytes), abs=2e-6)
        assert result.peak_bytes <= budget_bytes + 1000
        # What its choices come to, however much more than that the budget has room for.
        by_configuration = {one.configuration: one for one in points}
        (chunk,) = result.chunks
        inner = [by_configuration[one] for one, count in chunk.inner["toy"] for _ in range(count)]
        assert result.peak_bytes == pytest.approx(count_peak(rank, inner, by_configuration[chunk.last]), abs=1000)


def test_rows_that_another_row_is_at_most_as_large_as_are_left_out():
    assert find_efficient([(2, 2), (1, 3), (2, 3), (1, 3), (3, 1), (3, 2)]) == [0, 1, 4]
