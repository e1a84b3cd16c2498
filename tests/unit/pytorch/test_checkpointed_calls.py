"""Tests layers that checkpoint their own `__call__`, as in transformers before 5.23: their inputs are offloaded."""

import copy
import functools
import pickle

import pytest
import torch
from support.models import ALL, LAYERS, ROW_BYTES, Block, Net, check_equal, get_gradients, make_inputs
from torch.utils.checkpoint import checkpoint

import fgoffload


class Layer(Block):
    """Checkpoints its forward and its hooks."""

    gradient_checkpointing = True

    def __call__(self, *args, **kwargs):
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(functools.partial(super().__call__, **kwargs), *args)
        return super().__call__(*args, **kwargs)


def make_model(*, use_reentrant: bool) -> Net:
    torch.manual_seed(0)
    model = Net()
    for index in range(LAYERS):
        model.layers[index] = Layer()
        model.layers[index]._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=use_reentrant)
    return model


def run(model):
    return get_gradients(model, lambda: model(make_inputs().requires_grad_()))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layer_inputs_are_offloaded_and_gradients_are_bitwise_identical(use_reentrant):
    model = make_model(use_reentrant=use_reentrant)
    expected = run(model)
    with fgoffload.offload(model, "layers.*", ALL) as handle:
        check_equal(expected, run(model))
        tag = handle.stats().tags["layers"]
        assert tag.d2h_bytes == LAYERS * ROW_BYTES
        assert tag.groups == LAYERS


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"])
def test_a_copied_model_has_the_original_checkpointing_function(make_copy):
    model = make_model(use_reentrant=False)
    before = model.layers[0]._gradient_checkpointing_func
    with fgoffload.offload(model, "layers.*", ALL):
        assert model.layers[0]._gradient_checkpointing_func is not before
        copied = make_copy(model)
        assert isinstance(copied.layers[0]._gradient_checkpointing_func, functools.partial)
        check_equal(run(model), run(copied))
    assert model.layers[0]._gradient_checkpointing_func is before
    assert "forward" not in vars(model.layers[0])
