"""How late a host is by steps that were compared: what was simulated with a slowdown is found again."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest
from support.toy_ranks import make_toy_layer, make_toy_rank

from fgoffload import Action, OffloadPlan, Site
from fgoffload.planner.host_slowdown import MOST_SLOWDOWN, fit_slowdown, slow_down
from fgoffload.planner.ranks.rank_model import LinkModel, Turn
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.timing.compared_step import ComparedStep

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


def simulate_s(ranks, plan):
    return simulate([dataclasses.replace(rank, turn=Turn.CALL_BACK) for rank in ranks], plan).step_s


def compare(plan, slowdown, *, ranks=RANKS, keeping_s=None):
    """Return what is compared where compute is that much slower beside copies, and another part of the host is late too."""
    keeping_s = simulate_s(ranks, NOTHING) if keeping_s is None else keeping_s
    step_s = simulate_s(slow_down(ranks, slowdown), plan) - simulate_s(ranks, NOTHING) + keeping_s
    return ComparedStep.from_plan(plan, step_s=step_s, keeping_step_s=keeping_s)


@hypothesis.given(st.floats(0.02, 0.23), st.floats(100.0, 1000.0))
@hypothesis.settings(deadline=None, max_examples=30)
def test_a_slowdown_is_found_again_however_long_the_steps_that_keep_all_took(slowdown, keeping_s):
    steps = [compare(plan, slowdown, keeping_s=keeping_s) for plan in (OFFLOADS, MIXED)]
    assert fit_slowdown(RANKS, steps) == pytest.approx(slowdown, abs=4e-3)


def test_a_host_in_time_leaves_what_the_link_has_and_a_hopeless_one_the_most():
    quick = dataclasses.replace(compare(OFFLOADS, 0.1), step_s=simulate_s(RANKS, NOTHING))
    assert fit_slowdown(RANKS, [quick]) == 0.01
    slow = dataclasses.replace(quick, step_s=100 * quick.step_s)
    assert fit_slowdown(RANKS, [slow]) == MOST_SLOWDOWN
