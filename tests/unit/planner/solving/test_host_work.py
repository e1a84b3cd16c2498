"""What a layer has the host do: by what leaves, what runs again, and what is watched for it."""

import dataclasses

import pytest
from support.layer_models import PERMUTATION, make_moe_layer

from fgoffload import Action
from fgoffload.planner.solving.choices import find_configuration, list_modes
from fgoffload.planner.solving.host_work import count_host_s, find_watched_ops
from fgoffload.watched import Watched

OFFLOAD, RECOMPUTE, BOTH = Action.OFFLOAD, Action.RECOMPUTE, Action.RECOMPUTE_AND_OFFLOAD
SHARING = make_moe_layer()
"""With shared experts, which get what the router gets."""

LAYER = dataclasses.replace(
    SHARING,
    tensors=tuple(
        dataclasses.replace(tensor, tags=tuple(tag for tag in tensor.tags if tag != "shared_expert"))
        for tensor in SHARING.tensors
        if tensor.tags != ("shared_expert",)
    ),
    units=(),
)
MODES = list_modes(SHARING, min_offloaded_numel=1)


def count_us(actions):
    configuration = find_configuration(SHARING, MODES, actions, min_offloaded_numel=1)
    return round(1e6 * count_host_s(LAYER, configuration))


@pytest.mark.parametrize(
    ("actions", "microseconds"),
    [
        ({}, 0),
        ({"expert_fc1": OFFLOAD}, 50),
        ({"expert_fc1": OFFLOAD, "mlp_norm": OFFLOAD}, 100),
        ({"moe_act": RECOMPUTE}, 50),
        ({"moe_act": BOTH}, 100),
        ({"core_attn": OFFLOAD}, 50 + 150),
        ({"router": OFFLOAD}, 50 + 250),
        ({"core_attn": OFFLOAD, "router": OFFLOAD}, 100 + 500),
    ],
)
def test_the_time_of_a_layer(actions, microseconds):
    assert count_us(actions) == microseconds


def test_a_permutation_that_runs_again_has_the_layer_of_a_router_that_leaves_watched():
    layer = dataclasses.replace(LAYER, units=(PERMUTATION,))
    modes = list_modes(layer, min_offloaded_numel=1)
    for actions, watched in (({}, Watched.FOLLOWED), ({"dispatch": RECOMPUTE}, Watched.LAYER)):
        configuration = find_configuration(layer, modes, {"router": OFFLOAD, **actions}, min_offloaded_numel=1)
        assert find_watched_ops(layer, configuration) is watched


def test_with_shared_experts_a_router_that_leaves_has_the_whole_layer_watched():
    configuration = find_configuration(SHARING, MODES, {"router": OFFLOAD}, min_offloaded_numel=1)
    assert find_watched_ops(LAYER, configuration) is Watched.FOLLOWED
    assert find_watched_ops(SHARING, configuration) is Watched.LAYER
