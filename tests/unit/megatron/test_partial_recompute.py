"""Tests partial recompute: only the first ops run twice, their tensors are freed, and results are bitwise identical."""

import contextlib
import copy
import types

import pytest
import torch
from support.tensors import assert_same_bits
from support.trainings import MIXED, make_trainer

from fgoffload import StateError
from fgoffload.integrations.megatron.patching.cpu_support import apply_cpu_support, needs_cpu_support
from fgoffload.integrations.megatron.patching.patches import Patches
from fgoffload.integrations.megatron.recompute.partial_recompute import (
    PartialRecompute,
    find_partial_recomputes,
    recompute_part,
)
from fgoffload.integrations.megatron.recompute.reruns import OpenReruns

pytestmark = pytest.mark.usefixtures("parallel")

NO_REGIONS = types.SimpleNamespace(find_region=lambda tag: None, keep_recomputed=list, open_reruns=OpenReruns())


class Halves(torch.nn.Module):
    """Applies dropout in both halves, as an adapter of a linear may."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.linear_fc1, self.linear_fc2 = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, hidden):
        inner = torch.nn.functional.dropout(self.linear_fc1(hidden), 0.5)
        return torch.nn.functional.dropout(self.linear_fc2(inner), 0.5)


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("is_removed", [False, True])
def test_partial_recompute_survives_copies_and_removal_bitwise(is_copied, is_removed):
    def run(*, recomputes):
        module, hidden = Halves(), torch.ones(3, 4, requires_grad=True)
        with apply_cpu_support() if needs_cpu_support() else contextlib.nullcontext(), Patches() as patches:
            if recomputes:
                recompute_part(patches, lambda: NO_REGIONS, PartialRecompute(unit="mlp_fc1", module=module, until="linear_fc2"))
            if is_copied:
                module = copy.deepcopy(module)
                module.linear_fc2.weight.data.mul_(2)
            torch.manual_seed(5)
            output = module(hidden * 1)
            if is_removed:
                patches.remove()
            output.sum().backward()
        return [output.detach(), hidden.grad, *(parameter.grad for parameter in module.parameters())]

    assert_same_bits(run(recomputes=True), run(recomputes=False))


def test_a_forward_that_does_not_call_the_submodule_raises():
    class Skips(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear_fc2 = torch.nn.Identity()

        def forward(self, hidden):
            return hidden * 2

    module = Skips()
    support = apply_cpu_support() if needs_cpu_support() else contextlib.nullcontext()
    with support, Patches() as patches:
        recompute_part(patches, lambda: NO_REGIONS, PartialRecompute(unit="mlp_fc1", module=module, until="linear_fc2"))
        with pytest.raises(StateError, match=r"recomputes 'mlp_fc1', but a forward of Skips did not call its linear_fc2"):
            module(torch.ones(2, requires_grad=True))
        assert torch.is_grad_enabled()
        with torch.no_grad():
            assert module(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("fields", "units"),
    [
        ({}, [["qkv_linear", "mlp_fc1"], ["qkv_linear"]]),
        ({"attention_output_gate": True}, [["mlp_fc1"], []]),
        ({"fp8": "hybrid"}, [[], []]),
    ],
    ids=str,
)
def test_layers_offer_partial_recomputes_only_where_one_tensor_is_passed_on(fields, units):
    # Sequential experts offer no partial recompute.
    with make_trainer(MIXED, None) as trainer:
        layers = trainer.chunks[0].decoder.layers
        for name, value in fields.items():
            setattr(layers[0].config, name, value)
        assert [list(find_partial_recomputes(layer)) for layer in layers] == units
