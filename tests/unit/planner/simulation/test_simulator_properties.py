"""What must hold for any ranks and plans: random layers, links, policies and schedules."""

import dataclasses
import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layer_models import PLAIN, STRETCHES, TENSORS, UNITS
from support.rank_models import STATIC_BYTES, make_chunk, make_link, make_rank

from fgoffload import Action, OffloadPlan, PlanError, Site
from fgoffload.planner.ranks.layer_model import HostWait, LayerModel, Segment
from fgoffload.planner.ranks.rank_model import HostPace
from fgoffload.planner.ranks.schedule import PassKind, Pipeline
from fgoffload.planner.simulation.choice_rules import check_choice
from fgoffload.planner.simulation.layer_choice import resolve_layer
from fgoffload.planner.simulation.simulation_result import LaneName
from fgoffload.planner.simulation.simulator import Detail, simulate, simulate_rank

K, R, O, B = Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD, Action.RECOMPUTE_AND_OFFLOAD  # noqa: E741 - as in tables of plans
NOTHING = OffloadPlan(actions={})

NAMES = sorted({tag for tensor in TENSORS for tag in tensor.tags} | {unit.name for unit in UNITS})
ANY_ACTION = (K, K, O, O, R, B)


def make_layer(random):
    """Return a layer with experts with any times and extra bytes, and any wait of its host."""
    wait = random.choice((None, *HostWait))
    segments = tuple(
        Segment(
            name=name,
            forward_s=float(random.randrange(9)),
            backward_s=float(random.randrange(9)),
            forward_extra_bytes=random.choice((0, 0, 70)),
            backward_extra_bytes=random.choice((0, 0, 90)),
            host_wait=wait if name == "dispatch" else None,
        )
        for name in STRETCHES
    )
    return LayerModel(kind="any", segments=segments, tensors=TENSORS, units=UNITS)


def choose(random, actions):
    """Return what a layer can do, of `actions`."""
    chosen = {}
    for name in random.sample(NAMES, len(NAMES)):
        attempt = chosen | {name: random.choice(actions)}
        try:
            check_choice(PLAIN, attempt)
        except PlanError:
            continue
        chosen = attempt
    return chosen


@st.composite
def pipelines(draw):
    """Return a pipeline of up to 3 stages."""
    stages = draw(st.integers(1, 3))
    chunks = draw(st.sampled_from((1, 2))) if stages > 1 else 1
    return Pipeline(stages=stages, chunks=chunks, microbatches=stages * draw(st.integers(1, 3)))


links = st.builds(
    make_link,
    d2h=st.sampled_from((20.0, 60.0, 500.0)),
    h2d=st.sampled_from((20.0, 60.0, 500.0)),
    duplex=st.sampled_from((15.0, 50.0, 800.0)),
    copy_latency_s=st.sampled_from((0.0, 0.5)),
    compute_slowdown=st.sampled_from((0.0, 0.25)),
)
policies = st.fixed_dictionaries(
    {
        "window_bytes": st.sampled_from((0, 400, 1000, 10**6)),
        "prefetch_bytes": st.sampled_from((0, 400, 1000, 10**6)),
        "host_budget_bytes": st.sampled_from((None, 700, 3000)),
        "min_offloaded_numel": st.sampled_from((0, 31)),
        "host_pace": st.sampled_from(HostPace),
        "late_group_s": st.sampled_from((0.0, 1.5)),
    }
)


@st.composite
def trainings(draw, *, actions=ANY_ACTION):
    """Return the ranks of a training and a plan for it."""
    pipeline, link, fields = draw(pipelines()), draw(links), draw(policies)
    # Layers are many numbers each: drawn one by one they would take longer than the simulations.
    random = Random(draw(st.integers(0, 2**32)))
    kinds = [(make_layer(random), choose(random, actions)) for _ in range(2)]
    plan, chunks, first_number = {}, [[] for _ in range(pipeline.stages)], 0
    for stage in range(pipeline.stages * pipeline.chunks):
        chosen = random.choices(kinds, k=random.randrange(1, 3))
        for number, (_, wanted) in enumerate(chosen, start=first_number):
            plan |= {Site(chunk=stage // pipeline.stages, layer=number, tag=tag): action for tag, action in wanted.items()}
        first = (Segment(name="embedding", forward_s=1.0, backward_s=1.0),) if stage == 0 else ()
        layers = [layer for layer, _ in chosen]
        chunks[stage % pipeline.stages].append(make_chunk(*layers, first_number=first_number, first=first, saved_bytes=3))
        first_number += len(chosen)
    ranks = [make_rank(*own, rank=rank, pipeline=pipeline, link=link, **fields) for rank, own in enumerate(chunks)]
    return ranks, OffloadPlan(actions=plan)


def count_planned(rank, plan):
    """Return the bytes that `plan` lets leave on a rank in a step, from the layers alone."""
    planned = 0
    for number, chunk in enumerate(rank.chunks):
        microbatches = sum(one.kind is PassKind.FORWARD and one.chunk == number for one in rank.passes)
        for place, layer in enumerate(chunk.layers):
            held = {"layer_input"} if place == 0 and not chunk.first else set()
            resolved = resolve_layer(
                layer.model,
                plan.list_layer(number, layer.number),
                min_offloaded_numel=rank.min_offloaded_numel,
                staying_tags=held,
            )
            planned += resolved.moved_bytes * microbatches
    return planned


def replace_all(ranks, **fields):
    """Return `ranks` with other fields of their link, policy or their own."""
    changed = []
    for rank in ranks:
        for name, value in fields.items():
            owner = next((part for part in ("link", "policy") if hasattr(getattr(rank, part), name)), None)
            if owner is None:
                rank = dataclasses.replace(rank, **{name: value})
            else:
                rank = dataclasses.replace(rank, **{owner: dataclasses.replace(getattr(rank, owner), **{name: value})})
        changed.append(rank)
    return changed


@settings(deadline=None, max_examples=60)
@given(trainings())
def test_what_leaves_comes_back_or_is_called_back_and_is_what_the_plan_says(training):
    ranks, plan = training
    for rank, result in zip(ranks, simulate(ranks, plan).ranks, strict=True):
        assert result.d2h_bytes + result.kept_bytes == count_planned(rank, plan)
        assert result.d2h_bytes == sum(tag.d2h_bytes for tag in result.tags)
        assert result.end_bytes == STATIC_BYTES
        if rank.host_budget_bytes is None:
            assert result.kept_bytes == 0
        else:
            assert result.host_peak_bytes <= rank.host_budget_bytes
        assert result.h2d_bytes == result.d2h_bytes - result.recalled_bytes


@settings(deadline=None, max_examples=60)
@given(trainings())
def test_a_timeline_says_the_same_as_the_totals(training):
    ranks, plan = training
    totals, timed = simulate(ranks, plan), simulate(ranks, plan, detail=Detail.TIMELINE)
    for rank, one, other in zip(ranks, totals.ranks, timed.ranks, strict=True):
        assert one.peak_bytes == other.peak_bytes
        assert one.peak_at == other.peak_at
        for name in ("step_s", "compute_s", "slowed_s", "recompute_s", "d2h_s", "h2d_s"):
            assert getattr(one, name) == pytest.approx(getattr(other, name))
        memory = [sample.device_bytes for sample in other.timeline.memory]
        assert min(memory, default=STATIC_BYTES) >= STATIC_BYTES
        assert max(memory, default=STATIC_BYTES) == other.peak_bytes
        assert not memory or memory[-1] == STATIC_BYTES
        hosts = [sample.host_bytes for sample in other.timeline.memory]
        assert (max(hosts, default=0), hosts[-1:] or [0]) == (other.host_peak_bytes, [0])
        check_lanes(other, rank)


def check_lanes(result, rank):
    """Check that each lane does one thing at a time, and what is busy and waits is the whole time."""
    for lane, busy_s in ((LaneName.COMPUTE, None), (LaneName.D2H, result.d2h_s), (LaneName.H2D, result.h2d_s)):
        spans = sorted((span.start_s, span.end_s) for span in result.timeline.spans if span.lane is lane)
        for (_, end_s), (start_s, _) in itertools.pairwise(spans):
            assert start_s >= end_s - 1e-9
        if busy_s is not None:
            assert sum(end_s - start_s for start_s, end_s in spans) == pytest.approx(busy_s)
    waits = result.waits
    busy_s = result.compute_s + waits.copies_s + waits.late_s + waits.neighbours_s
    assert busy_s == pytest.approx(result.step_s - rank.step_end_s)
    for tag in result.tags:
        assert -1e-9 <= tag.exposed_s <= tag.d2h_s + tag.h2d_s + 1e-9
    # What compute waits for is a copy, but for where it waits for both at once: that has no such place.
    assert sum(tag.exposed_s for tag in result.tags) <= waits.copies_s + 1e-9


@settings(deadline=None, max_examples=40)
@given(trainings())
def test_nothing_that_leaves_makes_a_rank_of_its_own_faster_than_nothing_leaving(training):
    ranks, plan = training
    kept = OffloadPlan(
        actions={site: R if action.recomputes else K for site, action in plan.actions.items()},
    )
    for rank in ranks:
        with_copies, without = simulate_rank(rank, plan), simulate_rank(rank, kept)
        assert with_copies.step_s >= without.step_s - 1e-9
        assert without.step_s == pytest.approx(simulate_rank(rank, NOTHING).step_s + without.recompute_s)


def double(link):
    """Return `link` with twice its rates."""
    return dataclasses.replace(
        link,
        d2h_bytes_per_s=2 * link.d2h_bytes_per_s,
        h2d_bytes_per_s=2 * link.h2d_bytes_per_s,
        duplex_bytes_per_s=2 * link.duplex_bytes_per_s,
    )


@settings(deadline=None, max_examples=60)
@given(trainings())
def test_a_faster_link_is_never_slower_unless_something_is_called_back(training):
    ranks, plan = training
    for rank in ranks:
        slow, fast = simulate_rank(rank, plan), simulate_rank(dataclasses.replace(rank, link=double(rank.link)), plan)
        if not slow.recalled_bytes and not fast.recalled_bytes:
            assert fast.step_s <= slow.step_s + 1e-9


@settings(deadline=None, max_examples=60)
@given(trainings(), st.integers(0, 1000), st.integers(0, 1000))
def test_a_larger_window_and_prefetch_are_never_slower_where_both_ways_move_as_much_as_one(training, window, prefetch):
    ranks, plan = training
    link = ranks[0].link
    duplex = max(link.duplex_bytes_per_s, link.d2h_bytes_per_s / 2, link.h2d_bytes_per_s / 2)
    for rank in replace_all(ranks, duplex_bytes_per_s=duplex):
        policy = dataclasses.replace(
            rank.policy,
            window_bytes=rank.policy.window_bytes + window,
            prefetch_bytes=rank.policy.prefetch_bytes + prefetch,
        )
        small, large = simulate_rank(rank, plan), simulate_rank(dataclasses.replace(rank, policy=policy), plan)
        assert large.step_s <= small.step_s + 1e-9


@settings(deadline=None, max_examples=60)
@given(trainings())
def test_both_ways_at_once_are_never_faster_than_ways_that_do_not_share(training):
    ranks, plan = training
    for rank, apart in zip(ranks, replace_all(ranks, duplex_bytes_per_s=1e9), strict=True):
        shared, alone = simulate_rank(rank, plan), simulate_rank(apart, plan)
        assert shared.d2h_s + shared.h2d_s >= alone.d2h_s + alone.h2d_s - 1e-9 or shared.recalled_bytes != alone.recalled_bytes


@settings(deadline=None, max_examples=30)
@given(trainings(actions=(K,)))
def test_a_plan_that_does_nothing_is_the_baseline_exactly(training):
    ranks, plan = training
    assert simulate(ranks, plan) == simulate(ranks, NOTHING)
    for rank, result in zip(ranks, simulate(ranks, NOTHING).ranks, strict=True):
        forward_s = sum(count_compute(rank, number, "forward_s") for number in range(len(rank.chunks)))
        backward_s = sum(count_compute(rank, number, "backward_s") for number in range(len(rank.chunks)))
        assert result.compute_s == pytest.approx(forward_s + backward_s)
        assert result.waits.copies_s == 0


def count_compute(rank, number, name):
    """Return the seconds of all forwards or backwards of a chunk in a step."""
    chunk = rank.chunks[number]
    segments = [*chunk.first, *chunk.last, *(segment for layer in chunk.layers for segment in layer.model.segments)]
    microbatches = sum(one.kind is PassKind.FORWARD and one.chunk == number for one in rank.passes)
    return microbatches * sum(getattr(segment, name) for segment in segments)
