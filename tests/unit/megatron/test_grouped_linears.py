"""What the experts' grouped linears save: as few tensors as possible, and never more bytes than without offload."""

import types

import pytest

from fgoffload.integrations.megatron.grouped_linears import choose_saved_inputs
from fgoffload.integrations.megatron.patches import Patches
from fgoffload.integrations.megatron.sites import add_own_sites


class Linear:
    """Of Transformer Engine, as far as it matters here."""

    def __init__(self, *, save_original_input=False):
        self.save_original_input = save_original_input


def build_experts(*, fp8=None, offload_expert_fc1=False):
    """Return experts as Megatron builds them: for its own engine it lets the first linear save its whole input."""
    return types.SimpleNamespace(
        config=types.SimpleNamespace(fp8=fp8, fp4=None),
        offload_expert_fc1=offload_expert_fc1,
        linear_fc1=Linear(save_original_input=offload_expert_fc1),
        linear_fc2=Linear(),
    )


def get_choices(experts):
    return experts.linear_fc1.save_original_input, experts.linear_fc2.save_original_input


@pytest.mark.parametrize("tag", ["expert_fc1", "moe_act", "expert_fc2"])
def test_in_bf16_both_linears_save_one_tensor_while_something_of_the_experts_leaves(tag):
    experts = build_experts(offload_expert_fc1=tag == "expert_fc1")
    before = get_choices(experts)
    with Patches() as patches:
        choose_saved_inputs(patches, experts, ["core_attn", tag])
        assert get_choices(experts) == (True, True)
    assert get_choices(experts) == before


def test_experts_of_which_nothing_leaves_stay_as_they_are():
    experts = build_experts()
    with Patches() as patches:
        choose_saved_inputs(patches, experts, ["core_attn", "router"])
        assert get_choices(experts) == (False, False)


@pytest.mark.parametrize("offloaded", [["expert_fc1", "expert_fc2"], []], ids=["leaving", "staying"])
def test_quantized_linears_save_what_they_quantized_whatever_megatron_asks(offloaded):
    experts = build_experts(fp8="hybrid", offload_expert_fc1=True)
    with Patches() as patches:
        choose_saved_inputs(patches, experts, offloaded)
        assert get_choices(experts) == (False, False)
    assert get_choices(experts) == (False, False)


def test_a_recompute_of_quantized_experts_keeps_the_whole_input_that_it_asked_for():
    experts = build_experts(fp8="hybrid")
    experts.linear_fc2.save_original_input = True
    with Patches() as patches:
        choose_saved_inputs(patches, experts, ["expert_fc1"])
        assert experts.linear_fc2.save_original_input is True


def test_the_sites_of_a_layer_choose_it():
    experts = build_experts(offload_expert_fc1=True)
    layer = types.SimpleNamespace(mlp=types.SimpleNamespace(experts=experts))
    with Patches() as patches:
        add_own_sites(patches, lambda: None, layer, ["expert_fc1"])
        assert get_choices(experts) == (True, True)
