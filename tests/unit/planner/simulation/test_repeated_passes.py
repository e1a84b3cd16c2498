"""Passes that begin alike: the first is run, and what is counted for the others is what they would have come to."""

import dataclasses
import itertools
import unittest.mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.rank_models import make_chunk, make_layer, make_link, make_rank, offload

from fgoffload.planner.ranks.layer_model import HostWait, Segment
from fgoffload.planner.ranks.rank_model import HostPace, Turn
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation import chunk_compiler
from fgoffload.planner.simulation.rank_run import RankRun
from fgoffload.planner.simulation.simulator import Detail, simulate

LAYER = make_layer({"core_attn": 50, "expert_fc1": 70}, forward_s=10.0, backward_s=20.0)


def make_ranks(pipeline, *, layer=LAYER, first_layer=None, more_s=(), **fields):
    """Return a pipeline of two layers a chunk, in the first `first_layer`; rank r takes `more_s[r]` longer forwards."""
    ranks = []
    for rank in range(pipeline.stages):
        first = (Segment(name="more", forward_s=more_s[rank] if more_s else 0.0, backward_s=0.0),)
        numbers = [2 * (chunk * pipeline.stages + rank) for chunk in range(pipeline.chunks)]
        kinds = [first_layer or layer, *[layer] * (pipeline.chunks - 1)]
        chunks = [make_chunk(kind, kind, first_number=number, first=first) for kind, number in zip(kinds, numbers, strict=True)]
        ranks.append(make_rank(*chunks, rank=rank, pipeline=pipeline, **fields))
    return ranks


def make_plan(pipeline, tag="expert_fc1", *, step=1):
    """Return the plan that offloads a tag of every layer, or of the first of each two."""
    size = 2 * pipeline.stages
    plans = [offload(tag, range(chunk * size, (chunk + 1) * size, step), chunk=chunk) for chunk in range(pipeline.chunks)]
    return dataclasses.replace(plans[0], actions={site: one for plan in plans for site, one in plan.actions.items()})


@pytest.fixture
def count_run(monkeypatch):
    """Return a function that simulates, and returns the result and how many passes were run step by step."""
    run_pass, count = RankRun.run_pass, []

    def counted(self, one, *, ready_s):
        count.append(one)
        return run_pass(self, one, ready_s=ready_s)

    def simulate_counted(ranks, plan):
        count.clear()
        return simulate(ranks, plan), len(count)

    monkeypatch.setattr(RankRun, "run_pass", counted)
    return simulate_counted


def list_numbers(result):
    """Return the numbers of a rank's result, those that are sums of seconds to be compared but for rounding."""
    fields = dataclasses.asdict(dataclasses.replace(result, timeline=None))
    waits, tags, label = fields.pop("waits"), fields.pop("tags"), fields.pop("peak_at")
    rows = [[one[name] for name in one if name not in ("kind", "tag", "action")] for one in tags]
    del fields["timeline"], fields["peaks"]
    return (
        label,
        [(one["kind"], one["tag"], one["action"]) for one in tags],
        [*fields.values(), *waits.values(), *itertools.chain.from_iterable(rows)],
    )


def check_pass_by_pass(ranks, plan):
    """Check that a step is what it is where every pass is run step by step, as for a timeline."""
    found, expected = simulate(ranks, plan), simulate(ranks, plan, detail=Detail.TIMELINE)
    for one, other in zip(found.ranks, expected.ranks, strict=True):
        label, movers, numbers = list_numbers(one)
        assert (label, movers, pytest.approx(numbers, rel=1e-9, abs=1e-9)) == list_numbers(other)


def test_of_passes_that_find_an_idle_link_each_beginning_is_run_once(count_run):
    pipeline = Pipeline(stages=3, chunks=2, microbatches=12)
    ranks = make_ranks(pipeline, more_s=(0.0, 0.7, 0.1), link=make_link(d2h=50.0, h2d=50.0, duplex=40.0))
    plan = make_plan(pipeline, step=2)
    _, run = count_run(ranks, plan)
    assert sum(len(rank.passes) for rank in ranks) == 144
    # Forward and backward through each chunk of each rank, and a few that begin otherwise: in the middle and at the ends.
    assert 12 <= run < 40
    check_pass_by_pass(ranks, plan)


def test_of_passes_that_find_as_much_under_way_each_beginning_is_run_once(count_run):
    pipeline = Pipeline(stages=2, chunks=2, microbatches=24)
    # A microbatch moves 140 bytes in 60 s of compute: at 2.5 bytes a second the link is hardly ever idle.
    link = make_link(d2h=2.5, h2d=2.5, duplex=2.5)
    ranks, plan = make_ranks(pipeline, more_s=(0.0, 0.7), link=link), make_plan(pipeline)
    _, run = count_run(ranks, plan)
    assert sum(len(rank.passes) for rank in ranks) == 192
    assert 8 <= run < 64
    check_pass_by_pass(ranks, plan)


def test_passes_that_find_copies_as_far_as_no_other_pass_are_run(count_run):
    pipeline = Pipeline(stages=2, chunks=2, microbatches=8)
    # At a byte a second what waits for the link gets more and more, so that no pass is as another one was.
    ranks, plan = make_ranks(pipeline, more_s=(0.0, 0.7), link=make_link(d2h=1.0, h2d=1.0, duplex=1.0)), make_plan(pipeline)
    _, run = count_run(ranks, plan)
    assert 40 < run <= sum(len(rank.passes) for rank in ranks) == 64
    check_pass_by_pass(ranks, plan)


@pytest.mark.parametrize("budget_bytes", [100, 290])
def test_what_the_host_budget_has_no_room_for_is_not_taken_for_what_had_room(budget_bytes):
    pipeline = Pipeline(stages=3, microbatches=12)
    link = make_link(d2h=50.0, h2d=50.0, duplex=40.0)
    ranks = make_ranks(pipeline, more_s=(0.0, 0.7, 0.1), link=link, host_budget_bytes=budget_bytes)
    assert simulate(ranks, make_plan(pipeline)).ranks[0].kept_bytes > 0
    check_pass_by_pass(ranks, make_plan(pipeline))


def test_as_many_bytes_in_a_full_host_budget_are_not_taken_for_the_same_ones():
    # Rounds that are alike in all bytes and counts, and then are not: other microbatches have room the next time.
    pipeline = Pipeline(stages=2, chunks=2, microbatches=160)
    ranks = make_ranks(
        pipeline,
        layer=make_layer({"core_attn": 50, "expert_fc1": 120}, forward_s=10.0, backward_s=20.0),
        more_s=(0.0, 0.0),
        link=make_link(d2h=20.0, h2d=20.0, duplex=16.0, compute_slowdown=0.25),
        window_bytes=200,
        prefetch_bytes=0,
        host_budget_bytes=500,
    )
    assert simulate(ranks, make_plan(pipeline, step=2)).ranks[0].kept_bytes > 0
    check_pass_by_pass(ranks, make_plan(pipeline, step=2))


def test_where_nothing_leaves_each_pass_is_run(count_run):
    pipeline = Pipeline(stages=3, chunks=2, microbatches=12)
    ranks = make_ranks(pipeline, more_s=(0.0, 0.7, 0.1))
    plan = dataclasses.replace(make_plan(pipeline), actions={})
    assert count_run(ranks, plan)[1] == 144


def test_passes_of_chunks_and_ranks_that_do_the_same_are_run_once_for_all(count_run):
    # Of two stages alike as many are run as of five, which take no longer than one.
    counts = []
    for stages in (1, 2, 5):
        pipeline = Pipeline(stages=stages, chunks=2 if stages > 1 else 1, microbatches=20)
        ranks = make_ranks(pipeline, link=make_link(d2h=50.0, h2d=50.0, duplex=40.0))
        counts.append(count_run(ranks, make_plan(pipeline, step=2))[1])
        # The layers of a peak are those of its own rank.
        check_pass_by_pass(ranks, make_plan(pipeline, step=2))
    assert 2 <= max(counts) < 8


def test_what_another_rank_counts_first_has_the_place_that_it_has_alone():
    # Backward comes to the second kind first. Its first one is run, where the forward before it was run on another rank.
    pair = [make_layer({tag: 50}, forward_s=3.0, backward_s=5.0) for tag in ("core_attn", "expert_fc1")]
    pipeline = Pipeline(stages=2, microbatches=40)
    ranks = [
        make_rank(make_chunk(*pair, first_number=2 * rank), rank=rank, pipeline=pipeline, window_bytes=0, prefetch_bytes=0)
        for rank in range(2)
    ]
    actions = {**offload("core_attn", (0, 2)).actions, **offload("expert_fc1", (1, 3)).actions}
    plan = dataclasses.replace(make_plan(pipeline), actions=actions)
    assert [tag.tag for tag in simulate(ranks, plan).ranks[1].tags] == ["core_attn", "expert_fc1"]
    check_pass_by_pass(ranks, plan)


@pytest.mark.parametrize(
    "fields",
    [
        {"link": make_link(d2h=8.0, h2d=8.0, duplex=8.0)},
        {"window_bytes": 0},
        {"late_group_s": 3.0},
        {"host_pace": HostPace.STEP_AHEAD},
        # As if each rank turned: of a pipeline's only the last one does.
        {"turn": Turn.PLAN, "turning_chunk": 0},
    ],
)
def test_ranks_with_other_rules_do_not_share_what_passes_come_to(fields):
    pipeline = Pipeline(stages=4, microbatches=24)
    usual = {"link": make_link(d2h=6.0, h2d=6.0, duplex=6.0), "window_bytes": 100, "prefetch_bytes": 100}
    usual |= {"turning_chunk": fields.get("turning_chunk")}
    ranks, others = make_ranks(pipeline, **usual), make_ranks(pipeline, **usual | fields)
    mixed = [one if rank % 2 else other for rank, (one, other) in enumerate(zip(ranks, others, strict=True))]
    check_pass_by_pass(mixed, make_plan(pipeline))


def test_rounds_go_on_while_the_host_gets_further_ahead(monkeypatch):
    # 0.4 s in each round, in all else alike. After 160 of them it sees copies too late, and memory is higher from then on.
    monkeypatch.setattr(chunk_compiler, "HOST_LAYER_S", 9.95)
    pipeline = Pipeline(microbatches=200)
    layer = make_layer({"core_attn": 50, "expert_fc1": 70}, forward_s=10.0, backward_s=0.05)
    ranks = make_ranks(
        pipeline,
        layer=layer,
        link=make_link(d2h=20.0, h2d=2000.0, duplex=20.0),
        host_pace=HostPace.LAYER_AHEAD,
        window_bytes=10**6,
        prefetch_bytes=0,
    )
    assert simulate(ranks, make_plan(pipeline)).ranks[0].peak_at == "F163 layers.1.expert_fc1"
    check_pass_by_pass(ranks, make_plan(pipeline))


def test_programs_are_alike_where_all_but_the_numbers_of_layers_is():
    pipeline = Pipeline(stages=2, chunks=2, microbatches=4)
    ranks, plan = make_ranks(pipeline), make_plan(pipeline)

    def compile_all(ranks, plan):
        actions = {(site.chunk, site.layer): {site.tag: action} for site, action in plan.actions.items()}
        return [program for rank in ranks for program in chunk_compiler.compile_rank(rank, actions)]

    first, *others = compile_all(ranks, plan)
    assert all(one.content == first.content for one in others)
    assert first.list_labels()[-1] == "reload of layers.1.expert_fc1"
    labels = [one.find_label("reload of layers.1.expert_fc1", first) for one in others]
    assert labels == [f"reload of layers.{layer}.expert_fc1" for layer in (5, 3, 7)]
    assert others[0].find_label("start of the pass", first) == "start of the pass"
    fewer = compile_all(ranks, make_plan(pipeline, step=2))
    longer = compile_all(make_ranks(pipeline, more_s=(0.7, 0.7)), plan)
    larger = compile_all(make_ranks(pipeline, layer=make_layer({"core_attn": 50, "expert_fc1": 80})), plan)
    without = compile_all([dataclasses.replace(rank, has_engine=False) for rank in ranks], plan)
    assert len({first.content, *(one.content for row in (fewer, longer, larger) for one in row)}) == 4
    # A token dispatcher that holds what a recompute began with is one of a layer by its number.
    assert len({one.content for one in without}) == 4


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(((2, 1, 24), (3, 1, 12), (2, 2, 16), (3, 2, 9), (2, 3, 8))),
    st.sampled_from(("core_attn", "expert_fc1")),
    st.sampled_from((2.0, 6.0, 20.0, 60.0)),
    st.sampled_from((0, 60, 100, 10**6)),
    st.sampled_from((0, 60, 150, 10**6)),
    st.sampled_from((0.0, 0.25)),
    st.sampled_from((0.0, 0.5)),
    st.sampled_from((None, 150, 500)),
    st.lists(st.sampled_from((0.0, 0.01, 0.3, 1.0, 5.0)), min_size=3, max_size=3),
    st.sampled_from((1, 2)),
    st.sampled_from(HostPace),
    st.sampled_from((None, "core_attn", "expert_fc1")),
    st.sampled_from((0, 1)),
    st.sampled_from((0.0, 1.0, 11.0, 12.0)),
    st.sampled_from((0.0, 0.7)),
)
# A copy that was through before a wait for a neighbour is no part of what is counted again for such waits.
@example((2, 2, 16), "expert_fc1", 6.0, 100, 0, 0.0, 0.0, 500, [0.0] * 3, 1, HostPace.BESIDE, None, 0, 0.0, 0.0)
# What the host sees of copies that end while it waits for a neighbour depends on how far ahead it is.
@example(
    (2, 2, 16), "core_attn", 4.0, 60, 10**6, 0.25, 0.5, 500, [1.0, 12.0, 12.0], 1, HostPace.LAYER_AHEAD, None, 0, 11.0, 0.0
)
# The host is further ahead in each pass, and so later to see that a copy is through.
@example((2, 1, 24), "core_attn", 6.0, 100, 0, 0.0, 0.0, None, [0.0] * 3, 2, HostPace.LAYER_AHEAD, None, 0, 12.0, 0.0)
# Waits come closer to their last value in each round: one that is nearly there would be missed as often as rounds are left out.
@example((2, 1, 24), "expert_fc1", 20.0, 100, 0, 0.25, 0.0, None, [0.0, 5.0, 0.0], 1, HostPace.BESIDE, None, 0, 0.0, 0.0)
def test_steps_are_the_same_as_pass_by_pass(
    shape,
    tag,
    rate,
    window,
    prefetch,
    slowdown,
    latency_s,
    budget_bytes,
    more_s,
    step,
    pace,
    wait,
    first_waiting,
    host_s,
    late_group_s,
):
    stages, chunks, microbatches = shape
    pipeline = Pipeline(stages=stages, chunks=chunks, microbatches=microbatches)
    layer = LAYER
    if wait is not None:
        waits = {wait: HostWait.KERNEL}
        layer = make_layer({"core_attn": 50, "expert_fc1": 70}, forward_s=10.0, backward_s=20.0, host_waits=waits)
    ranks = make_ranks(
        pipeline,
        layer=layer,
        first_layer=LAYER if first_waiting else layer,
        more_s=more_s,
        link=make_link(d2h=rate, h2d=rate, duplex=0.8 * rate, compute_slowdown=slowdown, copy_latency_s=latency_s),
        window_bytes=window,
        prefetch_bytes=prefetch,
        host_budget_bytes=budget_bytes,
        host_pace=pace,
        late_group_s=late_group_s,
    )
    with unittest.mock.patch.object(chunk_compiler, "HOST_LAYER_S", host_s):
        check_pass_by_pass(ranks, make_plan(pipeline, tag, step=step))
