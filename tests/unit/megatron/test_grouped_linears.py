"""Tests that grouped linears of experts save few tensors, and never more bytes than without offload."""

import types

import pytest

from fgoffload.integrations.megatron.adapter.sites import add_own_sites, choose_saved_inputs
from fgoffload.integrations.megatron.patching.patches import Patches


class Linear:
    """A Transformer Engine linear, reduced to the attribute under test."""

    def __init__(self, *, save_original_input=False):
        self.save_original_input = save_original_input


def build_experts(*, fp8=None, offload_expert_fc1=False):
    """Return experts as Megatron builds them: its own offload makes the first linear save its original input."""
    return types.SimpleNamespace(
        config=types.SimpleNamespace(fp8=fp8, fp4=None),
        offload_expert_fc1=offload_expert_fc1,
        linear_fc1=Linear(save_original_input=offload_expert_fc1),
        linear_fc2=Linear(),
    )


def get_choices(experts):
    return experts.linear_fc1.save_original_input, experts.linear_fc2.save_original_input


@pytest.mark.parametrize(
    ("options", "offloaded", "expected"),
    [
        # In bf16 both linears save their original input while any expert tensor is offloaded.
        ({"offload_expert_fc1": True}, ["core_attn", "expert_fc1"], (True, True)),
        ({}, ["core_attn", "moe_act"], (True, True)),
        ({}, ["expert_fc2"], (True, True)),
        ({}, ["core_attn", "router"], (False, False)),
        # Quantized linears save the quantized input.
        ({"fp8": "hybrid", "offload_expert_fc1": True}, ["expert_fc1", "expert_fc2"], (False, False)),
        ({"fp8": "hybrid", "offload_expert_fc1": True}, [], (False, False)),
    ],
)
def test_bf16_experts_save_original_inputs_while_expert_tensors_are_offloaded(options, offloaded, expected):
    experts = build_experts(**options)
    before = get_choices(experts)
    with Patches() as patches:
        choose_saved_inputs(patches, experts, offloaded)
        assert get_choices(experts) == expected
    assert get_choices(experts) == (before if "fp8" not in options else (False, False))


def test_recomputed_quantized_experts_keep_saving_their_original_input():
    experts = build_experts(fp8="hybrid")
    experts.linear_fc2.save_original_input = True
    with Patches() as patches:
        choose_saved_inputs(patches, experts, ["expert_fc1"])
        assert experts.linear_fc2.save_original_input is True


def test_adding_the_sites_of_a_layer_chooses_the_saved_inputs():
    experts = build_experts(offload_expert_fc1=True)
    layer = types.SimpleNamespace(mlp=types.SimpleNamespace(experts=experts))
    with Patches() as patches:
        add_own_sites(patches, lambda: None, layer, ["expert_fc1"])
        assert get_choices(experts) == (True, True)
