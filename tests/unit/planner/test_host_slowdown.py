"""How late a host is by steps that were compared: what was simulated with a slowdown is found again."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest
from support.toy_ranks import make_toy_layer, make_toy_rank

from fgoffload import Action, ConfigError, OffloadPlan, PlanError, Site
from fgoffload.planner.host_slowdown import GROUP_S, MOST_SLOWDOWN, fit_slowdown, fit_slowdown_to_step, slow_down
from fgoffload.planner.profiled_ranks import find_host_slowdown, make_rank_models
from fgoffload.planner.ranks.rank_model import ChunkModel, HostPace, LinkModel, NumberedLayer, Turn
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.timing.compared_step import ComparedStep
from fgoffload.planner.timing.link_profile import CopyRate, LinkProfile
from fgoffload.planner.timing.profile import Profile, RankProfile

NOTHING = OffloadPlan(actions={})
LINK = LinkModel(d2h_bytes_per_s=2.0, h2d_bytes_per_s=2.0, duplex_bytes_per_s=1.5, compute_slowdown=0.01)
RANKS = (make_toy_rank(layers=[[make_toy_layer()] * 3], pipeline=Pipeline(stages=1, microbatches=4), link=LINK),)
OFFLOADS = OffloadPlan(
    actions={Site(chunk=0, layer=layer, tag=tag): Action.OFFLOAD for layer in (0, 1) for tag in ("core_attn", "expert_fc1")},
    loss_window_bytes=5,
)
MIXED = OffloadPlan(
    actions={
        Site(chunk=0, layer=0, tag="core_attn"): Action.OFFLOAD,
        Site(chunk=0, layer=1, tag="core_attn"): Action.OFFLOAD,
        Site(chunk=0, layer=2, tag="moe_act"): Action.RECOMPUTE,
    }
)
RECOMPUTES = OffloadPlan(actions={Site(chunk=0, layer=0, tag="moe_act"): Action.RECOMPUTE})


def simulate_s(ranks, plan):
    return simulate([dataclasses.replace(rank, turn=Turn.CALL_BACK) for rank in ranks], plan).step_s


def compare(plan, slowdown, *, ranks=RANKS, keeping_s=None):
    """Return what is compared where compute is that much slower beside copies, and another part of the host is late too."""
    keeping_s = simulate_s(ranks, NOTHING) if keeping_s is None else keeping_s
    step_s = simulate_s(slow_down(ranks, slowdown), plan) - simulate_s(ranks, NOTHING) + keeping_s
    return ComparedStep.from_plan(plan, step_s=step_s, keeping_step_s=keeping_s)


def test_groups_cost_a_late_host_what_its_slowdown_goes_with_and_one_in_time_nothing():
    assert [rank.late_group_s for rank in slow_down(RANKS, 0.01)] == [0.0]
    late = slow_down(RANKS, 0.11)
    assert [rank.late_group_s for rank in late] == [pytest.approx(0.1 * GROUP_S)]
    assert slow_down(late, 0.05) == late  # none gets faster
    for pace, is_late in zip(HostPace, (True, True, False, False), strict=True):  # those ahead do it meanwhile
        assert bool(slow_down([dataclasses.replace(RANKS[0], host_pace=pace)], 0.11)[0].late_group_s) is is_late
    later = dataclasses.replace(late[0], late_group_s=0.5)
    assert slow_down([later], 0.2)[0].late_group_s == 0.5


def test_what_groups_cost_is_found_again_where_copies_are_nothing_beside_it():
    link = LinkModel(d2h_bytes_per_s=2e6, h2d_bytes_per_s=2e6, duplex_bytes_per_s=1.5e6, compute_slowdown=0.01)
    layers = [[make_toy_layer(forward_s=(1e-4,) * 4)] * 3]
    ranks = (make_toy_rank(layers=layers, pipeline=Pipeline(stages=1, microbatches=4), link=link),)
    groups = 4 * len(OFFLOADS.actions)
    keeping_s = simulate_s(ranks, NOTHING)
    step = ComparedStep.from_plan(OFFLOADS, step_s=keeping_s + groups * 0.1 * GROUP_S, keeping_step_s=keeping_s)
    assert fit_slowdown(ranks, [step]) == pytest.approx(0.11, abs=4e-3)


@hypothesis.given(st.floats(0.02, 0.23), st.floats(100.0, 1000.0))
@hypothesis.settings(deadline=None, max_examples=30)
def test_a_slowdown_is_found_again_however_long_the_steps_that_keep_all_took(slowdown, keeping_s):
    steps = [compare(plan, slowdown, keeping_s=keeping_s) for plan in (OFFLOADS, MIXED)]
    assert fit_slowdown(RANKS, steps) == pytest.approx(slowdown, abs=4e-3)


def test_steps_that_say_different_things_are_met_on_average():
    steps = [compare(OFFLOADS, 0.1), compare(MIXED, 0.2)]
    found = fit_slowdown(RANKS, steps)
    assert 0.1 < found < 0.2
    simulated_s = sum(simulate_s(slow_down(RANKS, found), step.plan) for step in steps)
    assert simulated_s == pytest.approx(sum(step.step_s for step in steps), rel=1e-3)


def test_a_host_in_time_leaves_what_the_link_has_and_a_hopeless_one_the_most():
    quick = dataclasses.replace(compare(OFFLOADS, 0.1), step_s=simulate_s(RANKS, NOTHING))
    assert fit_slowdown(RANKS, [quick]) == 0.01
    slow = dataclasses.replace(quick, step_s=100 * quick.step_s)
    assert fit_slowdown(RANKS, [slow]) == MOST_SLOWDOWN


def test_a_step_that_moves_little_does_not_make_noise_a_slowdown():
    link = dataclasses.replace(LINK, d2h_bytes_per_s=400.0, h2d_bytes_per_s=400.0, duplex_bytes_per_s=300.0)
    ranks = (dataclasses.replace(RANKS[0], link=link),)
    little = compare(OFFLOADS, 0.01, ranks=ranks)
    noisy = dataclasses.replace(little, step_s=1.01 * little.step_s)
    assert fit_slowdown(ranks, [noisy]) == 0.01
    assert fit_slowdown(RANKS, [compare(OFFLOADS, 0.2), dataclasses.replace(noisy, sites=noisy.sites[:1])]) > 0.19
    assert fit_slowdown(RANKS, []) == 0.01


def test_a_plan_of_other_layers_is_refused():
    other = OffloadPlan(actions={Site(chunk=0, layer=7, tag="core_attn"): Action.OFFLOAD})
    with pytest.raises(PlanError, match=r"names layers\.7"):
        fit_slowdown(RANKS, [ComparedStep.from_plan(other, step_s=2.0, keeping_step_s=1.0)])


@hypothesis.given(st.floats(0.02, 0.23), st.sampled_from([OFFLOADS, MIXED]))
@hypothesis.settings(deadline=None, max_examples=30)
def test_a_slowdown_is_found_again_by_what_steps_under_one_plan_took(slowdown, plan):
    step_s = simulate_s(slow_down(RANKS, slowdown), plan)
    assert fit_slowdown_to_step(RANKS, plan, step_s=step_s) == pytest.approx(slowdown, abs=4e-3)


def test_by_one_plan_too_it_is_from_what_the_link_has_to_the_most():
    assert fit_slowdown_to_step(RANKS, OFFLOADS, step_s=1e-9) == 0.01
    assert fit_slowdown_to_step(RANKS, OFFLOADS, step_s=1e9) == MOST_SLOWDOWN


def test_steps_in_which_nothing_moves_say_nothing_of_copies():
    plan = OffloadPlan(actions={Site(chunk=0, layer=0, tag="moe_act"): Action.RECOMPUTE})
    assert fit_slowdown_to_step(RANKS, plan, step_s=1e9) == 0.01


def test_a_plan_comes_back_out_of_a_compared_step():
    assert ComparedStep.from_plan(OFFLOADS, step_s=2.0, keeping_step_s=1.5).plan == OFFLOADS
    assert ComparedStep.from_plan(OFFLOADS, step_s=2.0, keeping_step_s=1.5).added_s == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"plan": RECOMPUTES},
            "sites has nothing that leaves: without copies no step says how late they make it. Leave it out.",
        ),
        ({"step_s": 0.0}, "step_s 0.0 is no time of a step. Give seconds above 0."),
        ({"keeping_step_s": float("nan")}, "keeping_step_s nan is no time of a step. Give seconds above 0."),
    ],
)
def test_what_is_no_comparison_is_refused(options, message):
    options = {"plan": OFFLOADS, "step_s": 2.0, "keeping_step_s": 1.0, **options}
    with pytest.raises(ConfigError) as caught:
        ComparedStep.from_plan(options.pop("plan"), **options)
    assert str(caught.value) == message


# In a profile.


def make_profile(*steps, stages=1):
    rate = CopyRate(size_bytes=1, d2h_bytes_per_s=2e6, h2d_bytes_per_s=2e6, duplex_bytes_per_s=1.5e6)
    pipeline = Pipeline(stages=stages, microbatches=4)
    sizes = (1_000_000, 8_000_000, 6_000_000, 4_000_000, 2_000_000)
    models = [make_toy_layer(kind=f"toy (layer {number})", sizes=sizes) for number in range(3)]
    layers = [NumberedLayer(number=number, model=model) for number, model in enumerate(models)]
    ranks = tuple(
        RankProfile(
            rank=rank,
            pipeline=pipeline,
            chunks=(ChunkModel(layers=tuple(layers[rank::stages])),),
            static_bytes=0,
            step_s=1.0,
            min_offloaded_numel=1,
        )
        for rank in range(stages)
    )
    return Profile(
        device="a device",
        versions={},
        date="2026-11-25",
        link=LinkProfile(copies=(rate,), compute_slowdown=0.0),
        ranks=ranks,
        compared_steps=steps,
    )


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("microbatches", [None, 8])
def test_all_ranks_of_a_profile_are_as_late_as_its_steps_say(stages, microbatches):
    plain = make_rank_models(make_profile(stages=stages))
    steps = [compare(plan, 0.2, ranks=plain) for plan in (OFFLOADS, MIXED)]
    profile = make_profile(*steps, stages=stages)
    assert find_host_slowdown(profile) == pytest.approx(0.2, abs=4e-3)
    late = make_rank_models(profile, microbatches=microbatches)
    assert late == slow_down(
        make_rank_models(make_profile(stages=stages), microbatches=microbatches), find_host_slowdown(profile)
    )
    assert all(rank.link.compute_slowdown > 0.19 for rank in late)


def test_a_profile_without_compared_steps_says_nothing_of_its_host():
    assert find_host_slowdown(make_profile()) is None
    assert [rank.link.compute_slowdown for rank in make_rank_models(make_profile())] == [0.0]


def test_what_was_compared_is_in_the_file():
    profile = make_profile(compare(OFFLOADS, 0.2), compare(MIXED, 0.1))
    text = profile.to_json()
    assert Profile.from_json(text, source="text") == profile
    with pytest.raises(ConfigError, match=r"^text: compared_steps\[0\]\.sites\[0\]\.action is 'hide'\. Give one of: keep, "):
        Profile.from_json(text.replace('"offload"', '"hide"', 1), source="text")
