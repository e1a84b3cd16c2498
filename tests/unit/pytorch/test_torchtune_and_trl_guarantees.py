"""Tests the guarantees of offload in torchtune and TRL. Those of verl are in `test_fsdp_switch.py`, on two ranks.

They use contexts around a forward, like `fgoffload.saved_tensors`. Where they allow a tolerance, these tests compare bits.
"""

import contextlib

import pytest
import torch
from support.models import ALL, check_equal, copy_gradients, make_inputs, make_net
from support.sites import DelayedCpuDevice
from torch import nn
from torch.utils.checkpoint import checkpoint

import fgoffload
from fgoffload import TransferConfig
from fgoffload.engine import ActivationLedger, CpuDevice

ROWS, WIDTH = 10, 100


def make_block(config=ALL, *, device=None):
    return fgoffload.saved_tensors(config, group_bytes=1, device=device or DelayedCpuDevice())


def compute(model, inputs, block=None, *, is_backward_inside=False):
    """Return the loss and all gradients, with the same dropout in each call."""
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    with block or contextlib.nullcontext():
        loss = model(inputs).sum()
        if is_backward_inside:
            loss.backward()
    if not is_backward_inside:
        loss.backward()
    return [loss.detach(), *copy_gradients(model)]


def make_stack():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU())


def make_rows():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("is_backward_inside", [False, True])
def test_gradients_are_bitwise_identical_with_backward_inside_or_after_the_block(is_backward_inside):
    model = make_stack()
    block = make_block()
    check_equal(compute(model, make_rows()), compute(model, make_rows(), block, is_backward_inside=is_backward_inside))
    # The linears' inputs and the output of ReLU. A backward inside the block starts before the last group is offloaded.
    assert block.stats().d2h_bytes == (3 + (not is_backward_inside)) * ROWS * WIDTH * 4


class ReturnViewOfSaved(torch.autograd.Function):
    """Its gradient is a view of its saved tensor."""

    @staticmethod
    def forward(ctx, given):
        ctx.save_for_backward(given.t())
        return given.sum()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0].t()


class SaveOtherTensor(torch.autograd.Function):
    """Its backward unpacks another tensor of the same size, and returns the gradient unchanged."""

    @staticmethod
    def forward(ctx, given):
        ctx.save_for_backward(torch.full_like(given, 5))
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert torch.all(ctx.saved_tensors[0] == 5)
        return gradient


def test_a_gradient_that_views_a_reloaded_tensor_is_not_overwritten_by_later_reloads():
    block = make_block(TransferConfig(min_offloaded_bytes=0, window_bytes=0, prefetch_bytes=1))
    ones = torch.ones(ROWS, WIDTH, requires_grad=True)
    with block:
        hidden = ones
        for _ in range(3):
            hidden = SaveOtherTensor.apply(hidden)
        output = ReturnViewOfSaved.apply(hidden)
    del hidden
    output.backward()
    assert torch.equal(ones.grad, torch.ones(ROWS, WIDTH))
    assert block.stats().d2h_bytes == 4 * ROWS * WIDTH * 4


def test_no_op_saved_tensor_hooks_disable_offload():
    model, block = make_stack(), make_block()
    expected = compute(model, make_rows())

    def return_unchanged(tensor):
        return tensor

    with block:
        for hooks in (None, torch.autograd.graph.saved_tensors_hooks(return_unchanged, return_unchanged)):
            check_equal(expected, compute(model, make_rows(), hooks, is_backward_inside=True))
            assert (block.stats().d2h_bytes == 0) is (hooks is not None)


def test_parameters_and_their_views_are_never_passed_to_the_keep_filter():
    model, inspected = make_stack(), []
    block = make_block(TransferConfig(min_offloaded_bytes=0, keep=lambda tensor: inspected.append(tensor.untyped_storage())))
    compute(model, make_rows(), block)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert inspected
    assert not parameters & {storage.data_ptr() for storage in inspected}


def test_memory_between_forward_and_backward_falls_by_all_saved_bytes():
    net, resident = make_net(), []
    for config in (TransferConfig(min_offloaded_bytes=1 << 30), ALL):
        block, ledger = make_block(config, device=CpuDevice()), ActivationLedger(parameters=net.parameters())
        with ledger.watch(), block.get_engine().observe(ledger), block:
            loss = net(make_inputs())
        resident.append(ledger.samples[-1].resident_bytes)
        loss.backward()
        offloaded_bytes = block.stats().d2h_bytes
    assert resident == [offloaded_bytes, 0]


@pytest.mark.parametrize("is_backward_inside", [False, True])
def test_non_reentrant_checkpointed_layers_are_bitwise_identical(is_backward_inside):
    net, block = make_net(), make_block()

    def run(inputs):
        for layer in net.layers:
            inputs = checkpoint(layer, inputs, use_reentrant=False)
        return inputs

    model = nn.Module()
    model.net, model.forward = net, run
    expected = compute(model, make_inputs())
    check_equal(expected, compute(model, make_inputs(), block, is_backward_inside=is_backward_inside))
    assert block.stats().d2h_bytes == (len(net.layers) - is_backward_inside) * make_inputs().nbytes
