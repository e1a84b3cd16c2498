"""Tests that conditions that could make results wrong raise an error or are handled."""

import pytest
import torch
from support.clocks import ClockedCpuDevice
from support.sites import DelayedCpuDevice, Sites, check_same_bits, make_engine

from fgoffload import StateError
from fgoffload.engine import Lane
from fgoffload.plan import Site

pytestmark = pytest.mark.quick


def leaf(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_ending_a_region_twice_is_refused():
    engine = make_engine()
    region = engine.find_region(Site(chunk=0, layer=0, tag="core_attn"), Lane(chunk=0, microbatch=0))
    region.end(None)
    with pytest.raises(StateError, match=r"layers\.0\.core_attn mb=0 was ended twice"):
        region.end(None)


class DoubleSavedTensor(torch.autograd.Function):
    """Changes its saved tensor in place in backward, as fused losses do."""

    @staticmethod
    def forward(ctx, tensor):
        ctx.save_for_backward(tensor)
        return tensor * tensor

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        saved.mul_(2)
        return saved * gradient


@pytest.mark.parametrize("make_device", [lambda: None, DelayedCpuDevice], ids=["cpu", "delayed"])
def test_a_backward_that_changes_a_tensor_saved_by_another_op_raises_as_in_torch(make_device):
    for engine in (None, make_engine(make_device())):
        x = leaf(64, 64)
        output = Sites(engine)(lambda h: h.cos() + DoubleSavedTensor.apply(h), x * 2)
        with pytest.raises(
            RuntimeError, match="changed in place during backward" if engine else "modified by an inplace operation"
        ):
            output.sum().backward()


def test_a_second_backward_after_the_first_changed_a_saved_tensor_raises_as_in_torch():
    for engine in (None, make_engine()):
        x = leaf(64, 64)
        sites = Sites(engine)
        output = sites(DoubleSavedTensor.apply, sites(lambda h: h.sin(), x * 2)).sum()
        output.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="changed in place" if engine else "modified by an inplace operation"):
            output.backward()


def test_a_storage_resized_and_refilled_between_two_saves_is_offloaded_again():
    x = leaf(64, 64)

    def forward(sites: Sites) -> torch.Tensor:
        h = x * 2
        first = sites(lambda h: h.sin(), h)
        storage, nbytes, address = h.untyped_storage(), h.untyped_storage().nbytes(), h.data_ptr()
        refill = h.detach() + 1
        others = []
        while storage.data_ptr() in (0, address):  # the same address again would hide the change
            storage.resize_(0)
            others.append(torch.empty(64, 64))
            storage.resize_(nbytes)
        h.data.copy_(refill)
        second = sites(lambda h: h.cos(), h)
        del first, others  # no backward uses the first save
        return second

    check_same_bits(forward, [x]).close()


def test_a_storage_changed_in_place_between_two_saves_is_offloaded_again():
    x = leaf(64, 64)

    def forward(sites: Sites) -> torch.Tensor:
        h = x * 2
        first = sites(lambda h: h.sin(), h)
        with torch.no_grad():
            h.add_(1)
        second = sites(lambda h: h.cos(), h)
        del first  # no backward uses the first save
        return second

    check_same_bits(forward, [x]).close()


def test_backward_uses_data_assigned_to_a_parameter_after_forward_as_torch_does():
    gradients = []
    for engine in (None, make_engine()):
        x, w = leaf(8, 8), torch.nn.Parameter(torch.eye(8))
        output = Sites(engine)(lambda h, w=w: h @ w, x * 2)
        w.data = torch.eye(8) * 5
        output.sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert gradients[0][0, 0] == 10


def test_a_reload_buffer_is_allocated_on_the_stream_that_saved_the_tensor():
    device = ClockedCpuDevice()
    engine = make_engine(device)
    sites = Sites(engine)
    with device.on("side"):
        output = sites(torch.sin, leaf(64, 64) * 2)
    engine.approach_backward(sites.lane, sites.lane.groups[-1])
    assert output.requires_grad
    assert device.allocations[-1].stream == "side"
