"""What ways to treat a layer cost, by short simulations, with waits worked out by hand."""

import dataclasses
from pathlib import Path

import pytest
from support.deepseek_ranks import make_layer, make_ranks
from support.toy_ranks import make_toy_layer, make_toy_rank

from fgoffload import Action, TransferPolicy
from fgoffload.integrations.megatron.model_shapes import read_model_file
from fgoffload.planner import build_ranks, get_hardware
from fgoffload.planner.ranks.layer_model import LayerModel, SavedTensor, Segment
from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.planner.simulation.simulator import simulate_rank
from fgoffload.planner.solving import frontier
from fgoffload.planner.solving.choices import list_configurations, list_modes
from fgoffload.planner.solving.frontier import list_candidates, measure_layer, pick_best
from fgoffload.units import GIB, MIB
from fgoffload.watched import find_watched

ARGUMENTS = Path(__file__).parents[4] / "arguments"


def measure(layer, **options):
    """Return what each way costs, by its actions."""
    link = LinkModel(d2h_bytes_per_s=1.0, h2d_bytes_per_s=1.0, duplex_bytes_per_s=1.0)
    rank = make_toy_rank(layers=[[layer]], link=link, policy=TransferPolicy(window_bytes=100, prefetch_bytes=100), **options)
    points = measure_layer(rank, layer, list_modes(layer, min_offloaded_numel=rank.min_offloaded_numel))
    return {tuple(f"{tag} {action.value}" for tag, action in point.configuration.actions): point for point in points.every}


def test_the_first_copy_back_is_waited_for_and_the_next_ones_hide():
    # Attention's 9 bytes take 9 s each way. Alone in a chunk, backward asks for them when it comes to them, and waits 9 s. Of
    # two layers the second one's copy is called back as soon as backward has come to the first: beside the 8 s of attention's
    # backward and the 12 s of what follows, so that it adds nothing.
    point = measure(make_toy_layer(sizes=(1, 9, 6, 4, 2)))[("core_attn offload",)]
    assert point.last.added_s == pytest.approx(9.0)
    assert point.inner.added_s == pytest.approx(0.0, abs=1e-9)
    assert point.first_wait_s == pytest.approx(9.0)
    assert point.kept_bytes == 22 - 9


def test_recompute_adds_its_seconds_in_every_place_and_is_not_waited_for():
    point = measure(make_toy_layer())[("moe_act recompute",)]
    assert (point.inner.added_s, point.last.added_s) == (pytest.approx(1.0), pytest.approx(1.0))
    assert point.first_wait_s == 0.0
    assert point.kept_bytes == 21 - 2


def test_what_keeps_all_adds_nothing_and_is_first():
    layer = make_toy_layer(extra_bytes=3)
    points = measure(layer)
    assert next(iter(points)) == ()
    nothing = points[()]
    assert (nothing.inner.added_s, nothing.last.added_s, nothing.kept_bytes) == (0.0, 0.0, 21)
    # Two microbatches in flight keep all they have when backward begins, which takes 3 bytes beside that.
    assert (nothing.inner.extra_bytes, nothing.last.extra_bytes) == (3, 3)


def test_what_is_made_again_is_beside_what_is_kept():
    point = measure(make_toy_layer())[("layer recompute",)]
    # 20 of 21 bytes are made again for one microbatch, while the inputs of two are kept.
    assert (point.kept_bytes, point.last.extra_bytes) == (1, 20)


@pytest.mark.parametrize(("layers", "simulations"), [(1, 2), (2, 2), (3, 2), (4, 3), (12, 3)])
def test_no_chunk_is_simulated_twice(monkeypatch, layers, simulations):
    simulated = []

    def count(rank, plan):
        simulated.append((len(rank.chunks[0].layers), plan))
        return simulate_rank(rank, plan)

    monkeypatch.setattr(frontier, "simulate_rank", count)
    layer = make_toy_layer()
    rank = make_toy_rank(layers=[[layer] * layers])
    points = measure_layer(rank, layer, list_modes(layer, min_offloaded_numel=rank.min_offloaded_numel))
    assert len(simulated) == simulations * len(points.every)


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_of_a_kind_that_is_last_wherever_it_is_no_other_place_is_measured(monkeypatch, layers):
    layer = make_toy_layer()
    rank = make_toy_rank(layers=[[layer] * layers])
    modes = list_modes(layer, min_offloaded_numel=rank.min_offloaded_numel)
    anywhere = measure_layer(rank, layer, modes)
    simulated = []

    def count(rank, plan):
        simulated.append(len(rank.chunks[0].layers))
        return simulate_rank(rank, plan)

    monkeypatch.setattr(frontier, "simulate_rank", count)
    last = measure_layer(rank, layer, modes, is_inner=False)
    assert simulated == [1] * len(anywhere.every)

    def list_last(points):
        return [(one.configuration, one.kept_bytes, one.last) for one in points]

    for name in ("every", "last", "last_unwatched"):
        assert list_last(getattr(last, name)) == list_last(getattr(anywhere, name))
    assert anywhere.inner
    assert last.inner == ()


def test_in_a_long_chunk_a_window_hides_a_burst_and_not_what_goes_on():
    # A layer sends 9 bytes while its forward takes 5 s, at a byte a second: 4 s of copies are left over in each. A window of
    # 30 bytes holds what two layers send, and the backward that follows drains it. Of eight layers the second half waits.
    layer = make_toy_layer(sizes=(1, 9, 6, 4, 2), forward_s=(2.0, 1.0, 1.0, 1.0))
    link = LinkModel(d2h_bytes_per_s=1.0, h2d_bytes_per_s=1.0, duplex_bytes_per_s=1.0)
    added_s = {}
    for layers in (2, 8):
        rank = make_toy_rank(layers=[[layer] * layers], link=link, policy=TransferPolicy(window_bytes=30, prefetch_bytes=30))
        points = measure_layer(rank, layer, list_modes(layer, min_offloaded_numel=1))
        wanted = (("core_attn", Action.OFFLOAD),)
        added_s[layers] = next(one.inner.added_s for one in points.every if one.configuration.actions == wanted)
    assert added_s[2] == pytest.approx(0.0, abs=1e-9)
    assert 3.0 < added_s[8] <= 4.0


def test_candidates_are_not_worse_in_bytes_kept_bytes_moved_and_recompute_than_any_way():
    layer = make_toy_layer()
    modes = list_modes(layer, min_offloaded_numel=1)
    candidates = [(one.kept_bytes, one.moved_bytes, one.recompute_s) for one in list_candidates(layer, modes, longest=2)]
    for way in list_configurations(modes):
        costs = (way.kept_bytes, way.moved_bytes, way.recompute_s)
        assert any(all(a <= b for a, b in zip(candidate, costs, strict=True)) for candidate in candidates)
    # Whole layers that run again dominate what moves and keeps as much, and nothing is listed twice.
    assert len(set(candidates)) == len(candidates)


def test_candidates_of_a_late_host_are_not_worse_with_what_their_groups_cost_it():
    layer = make_toy_layer()
    modes = list_modes(layer, min_offloaded_numel=1)

    def list_costs(ways):
        return {(one.kept_bytes, one.moved_bytes, one.recompute_s + 5 * one.groups) for one in ways}

    late, in_time = (list_costs(list_candidates(layer, modes, longest=2, group_s=group_s)) for group_s in (5.0, 0.0))
    for costs in list_costs(list_configurations(modes)):
        assert any(all(a <= b for a, b in zip(candidate, costs, strict=True)) for candidate in late)
    assert late != in_time


def test_what_groups_cost_a_late_host_is_in_what_a_layer_costs():
    layer = make_toy_layer()
    link = LinkModel(d2h_bytes_per_s=1e6, h2d_bytes_per_s=1e6, duplex_bytes_per_s=1e6)
    rank = make_toy_rank(layers=[[layer] * 2], link=link)
    modes = list_modes(layer, min_offloaded_numel=1)
    for point in measure_layer(dataclasses.replace(rank, late_group_s=0.25), layer, modes).every:
        expected_s = point.configuration.recompute_s + 0.25 * point.configuration.groups
        assert point.inner.added_s == pytest.approx(expected_s, abs=1e-3)


def test_a_large_layer_has_some_hundred_candidates_and_fewer_for_each_place():
    layer = make_layer("moe")
    modes = list_modes(layer, min_offloaded_numel=2 * MIB)
    points = measure_layer(make_ranks()[0], layer, modes)
    assert len(list_candidates(layer, modes, longest=2)) <= 320
    assert len(list_candidates(layer, modes, longest=8)) <= 200
    assert 10 < len(points.last) < len(points.every)
    assert 10 < len(points.inner) < len(points.every)
    assert points.inner[0] is points.last[0] is points.every[0] is points.last_unwatched[0]
    assert any(is_watched(one.configuration) for one in points.last)
    assert not any(is_watched(one.configuration) for one in points.last_unwatched)
    # Some that watched ones are better than.
    assert len(points.last_unwatched) > 10
    assert set(points.last_unwatched) - set(points.last)


def is_watched(configuration):
    leaving = [tag for tag, action in configuration.actions if action.offloads]
    return find_watched(leaving, shares_router_input=False).covers_layer


def test_of_ways_that_are_alike_the_one_that_takes_the_host_less_is_a_candidate():
    # The router's input and the residual are as large, and hide as well behind other layers.
    sizes = {"mlp_norm": 4, "router": 4}
    segments = [Segment(name=name, forward_s=1.0, backward_s=2.0) for name in sizes]
    tensors = [SavedTensor(name=name, tags=(name,), size_bytes=size) for name, size in sizes.items()]
    layer = LayerModel(kind="toy", segments=tuple(segments), tensors=tuple(tensors))
    modes = list_modes(layer, min_offloaded_numel=1)
    leaving = [tuple(tag for tag, _ in one.actions) for one in list_candidates(layer, modes, longest=4)]
    assert sorted(leaving) == [(), ("mlp_norm",), ("mlp_norm", "router")]
    # In a chunk of few layers both kinds are measured.
    leaving = [tuple(tag for tag, _ in one.actions) for one in list_candidates(layer, modes, longest=3)]
    assert sorted(leaving) == [(), ("mlp_norm",), ("mlp_norm", "router"), ("router",)]


def test_where_a_layer_is_a_chunk_watching_it_hides_the_first_copy_back():
    ranks = build_ranks(*read_model_file(ARGUMENTS / "mixtral_8x7b.sh"), get_hardware("h100"))
    assert {len(chunk.layers) for chunk in ranks[0].chunks} == {1}
    layer = ranks[0].chunks[0].layers[0].model
    points = measure_layer(ranks[0], layer, list_modes(layer, min_offloaded_numel=ranks[0].min_offloaded_numel)).last
    # Of those that free half of the layer.
    added_s = {True: [], False: []}
    for point in points:
        if 2 * point.kept_bytes <= layer.saved_bytes:
            added_s[is_watched(point.configuration)].append(point.last.added_s)
    assert 2 * min(added_s[True]) < min(added_s[False])


def test_with_a_host_budget_bytes_that_leave_are_bytes_to_save():
    layer = make_toy_layer(sizes=tuple(size * GIB for size in (1, 8, 6, 4, 2)))
    link = LinkModel(d2h_bytes_per_s=1e15, h2d_bytes_per_s=1e15, duplex_bytes_per_s=1e15)
    rank = make_toy_rank(layers=[[layer]], link=link, policy=TransferPolicy(window_bytes=9 * GIB, prefetch_bytes=9 * GIB))
    points = measure_layer(rank, layer, list_modes(layer, min_offloaded_numel=1))
    free = {one.configuration.actions for one in pick_best(layer, points.every, saves_host=False).last}
    counted = {one.configuration.actions for one in pick_best(layer, points.every, saves_host=True).last}
    # The link is infinitely fast. What keeps more and moves less has a use where the host is full, and none where it is not.
    assert free < counted
    assert any(Action.RECOMPUTE in dict(actions).values() for actions in counted - free)
