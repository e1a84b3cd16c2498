"""Tests regions together with other torch features: results are correct, and unsupported tensors are not offloaded."""

import pytest
import torch
from support.sites import DelayedCpuDevice, Sites, check_same_bits, get_gradients, make_engine
from support.tensors import assert_same_bits, leaf

from fgoffload import Site, StateError, TransferPolicy
from fgoffload.engine import CpuDevice, Lane

pytestmark = pytest.mark.quick

NBYTES = 64 * 64 * 4


def sine_in_a_region(sites: Sites, x: torch.Tensor) -> torch.Tensor:
    with sites.watched():
        return sites(torch.sin, x * 2)


def test_torch_func_grad_around_regions_works_and_offloads_nothing():
    engine = make_engine()
    found = torch.func.grad(lambda v: sine_in_a_region(Sites(engine), v).sum())(torch.ones(64, 64))
    assert torch.equal(found, torch.func.grad(lambda v: sine_in_a_region(Sites(None), v).sum())(torch.ones(64, 64)))
    assert engine.finish_step().tags == {}


def test_regions_do_nothing_if_hooks_are_forbidden():
    engine = make_engine()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        check_same_bits(lambda sites: sine_in_a_region(sites, x), [x := leaf(64, 64)], engine)
    assert engine.finish_step().tags == {}


@pytest.mark.parametrize("make_device", [CpuDevice, DelayedCpuDevice])
def test_host_memory_ignores_the_default_device(make_device):
    engine = make_engine(make_device())
    x, w = leaf(64, 64), leaf(64, 64, seed=1)
    expected = get_gradients(lambda sites: sine_in_a_region(sites, x @ w), [x, w], Sites(None))
    x.grad = w.grad = None
    seed = torch.randn(64, 64, generator=torch.Generator().manual_seed(7), dtype=torch.float64).float()
    with torch.device("meta"):
        output = sine_in_a_region(Sites(engine), x @ w)
        assert output.grad_fn._saved_self.device.type == "cpu"
        output.backward(seed)
    assert_same_bits(expected, [x.grad, w.grad])
    assert engine.finish_step().d2h_bytes == NBYTES


def test_chunks_with_their_own_version_counters_are_not_restored_from_each_others_bytes():
    x, w = leaf(64, 16), leaf(16, 64, seed=1)

    def forward(sites: Sites) -> torch.Tensor:
        a, b, c, d = (x @ w).unsafe_chunk(4, dim=1)  # like the gates of an LSTM cell, each changed in place
        a, c, d = sites(lambda a, c, d: (a.sigmoid_(), c.sigmoid_(), d.sigmoid_()), a, c, d, output=lambda results: results[0])
        b = sites(torch.tanh_, b)  # its old bytes were offloaded with the others
        return a * c + b * d

    check_same_bits(forward, [x, w]).close()


def test_forwards_sharing_one_leaf_put_no_hooks_on_it_and_reload_nothing_twice():
    engine, prompt = make_engine(policy=TransferPolicy(window_bytes=0, prefetch_bytes=1 << 30)), leaf(64, 64)
    outputs = []
    for microbatch in range(4):
        sites = Sites(engine, microbatch=microbatch, has_end_marks=True)
        h = sites(lambda h: h.exp(), prompt)
        outputs.append(sites(lambda h: h.sin(), sites(lambda h: h.tanh(), h)).sum())
    assert not prompt._backward_hooks
    for output in reversed(outputs):
        output.backward()
    stats = engine.finish_step()
    assert stats.h2d_bytes <= stats.d2h_bytes


def test_graph_capture_is_refused():
    class CapturingDevice(CpuDevice):
        def is_capturing(self) -> bool:
            return True

    engine = make_engine(CapturingDevice())
    with pytest.raises(StateError, match="CUDA graph is being captured"):
        engine.find_region(Site(chunk=0, layer=0, tag="core_attn"), Lane(chunk=0, microbatch=0))
    with pytest.raises(StateError, match="CUDA graph is being captured"):
        engine.watch(Lane(chunk=0, microbatch=0))
