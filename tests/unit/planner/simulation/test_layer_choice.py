"""Tests the effect of a plan on one layer: rejected actions, and tensors kept, offloaded or recomputed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layer_models import PLAIN, TENSORS, UNITS, WITH_HOLD_WAIT

from fgoffload import Action, PlanError
from fgoffload.planner.simulation.choice_rules import check_choice
from fgoffload.planner.simulation.layer_choice import resolve_layer

K, R, O, B = Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD, Action.RECOMPUTE_AND_OFFLOAD  # noqa: E741 - as in plan tables


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ({"moe": R, "router": O}, "recomputes 'moe' and offloads 'router'.*saves nothing to offload"),
        ({"core_attn": B}, "recomputes 'core_attn' and offloads 'core_attn'"),
        ({"layer": R, "moe": R}, "recomputes 'layer' and 'moe'.*'moe' is part of 'layer'"),
        ({"layer": B}, "offloads 'layer' in a layer of kind 'moe', which saves no offloadable tensor under that tag"),
        ({"layer_input": O}, "offloads 'layer_input'.*does not recompute 'layer'"),
        ({"attn_proj": O}, "offloads 'attn_proj' and keeps 'core_attn'.*Offload 'core_attn' too"),
        ({"mlp": R}, "recomputes 'mlp'.*Supported units: layer, attn_norm"),
    ],
    ids=str,
)
def test_unsupported_actions_are_rejected_by_name(actions, message):
    with pytest.raises(PlanError, match=message):
        resolve_layer(PLAIN, actions, min_offloaded_numel=0)


@st.composite
def choices(draw):
    """Return valid actions of a layer, drawn from all sites and units."""
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
def test_every_tensor_is_kept_offloaded_or_recomputed(actions, min_offloaded_numel):
    resolved = resolve_layer(WITH_HOLD_WAIT, actions, min_offloaded_numel=min_offloaded_numel)
    names = [one.tensor.name for one in (*resolved.kept, *resolved.offloaded)]
    recomputed = [one.tensor.name for recompute in resolved.recomputes for one in recompute.tensors]
    remade = [name for name in recomputed if not name.startswith("extra")]
    assert sorted((*names, *remade, "rotary")) == sorted(tensor.name for tensor in TENSORS)
    assert sum(group.size_bytes for group in resolved.groups) == resolved.moved_bytes
    assert all(one.tensor.size_bytes >= min_offloaded_numel for one in resolved.offloaded)
    for one in resolved.offloaded:
        assert one.takes
        assert min(take.before for take in one.takes) >= one.freed_after
        assert resolved.groups[one.offloaded_by].ends_after >= one.saved_after
